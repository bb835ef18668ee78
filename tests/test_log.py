"""Lines are written whole with their origin, and the first failure of a job is on record."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from hpc_train.errors import DataError
from hpc_train.log import LineWriter, read_failure, report_failure

LINE = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} n1 r(\d+) \| (.*)$")

WRITER = """
import sys, traceback
from hpc_train.log import prefix_output
prefix_output(int(sys.argv[1]), "n1")
for i in range(100):
    print("line", i, "x" * 200)
    try:
        raise RuntimeError("boom " * 20)
    except RuntimeError:
        traceback.print_exc()
"""


def test_sixteen_writers_into_one_pipe_lose_and_mix_no_line():
    """FC-99: each line of a traceback carries rank, host and time, and none is torn."""
    read_end, write_end = os.pipe()
    ranks = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(rank)], stdout=write_end, stderr=write_end)
        for rank in range(16)
    ]
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        lines = pipe.read().splitlines()
    assert [rank.wait() for rank in ranks] == [0] * 16
    matches = [LINE.match(line) for line in lines]
    assert all(matches)
    for rank in range(16):
        mine = [match[2] for match in matches if match and match[1] == str(rank)]
        assert [line for line in mine if line.startswith("line")] == [f"line {i} {'x' * 200}" for i in range(100)]
        assert sum(line.startswith("RuntimeError: boom") for line in mine) == 100


def test_a_half_line_waits_for_its_end_and_a_carriage_return_does_not_tear_it():
    read_end, write_end = os.pipe()
    writer = LineWriter(write_end, "n1 r0")
    writer.write("10 %\r20 %\r100 %\nhalf ")
    writer.flush()
    writer.write("and half\nrest")
    writer.close()
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        assert [LINE.match(line)[2] for line in pipe.read().splitlines()] == ["100 %", "half and half", "rest"]


def test_only_the_first_failure_is_recorded_and_an_expected_one_has_no_traceback(tmp_path: Path, capsys):
    code = report_failure(DataError("no such file a.bin"), run_dir=tmp_path, rank=3, host="n2")
    try:
        raise RuntimeError("connection closed by peer")
    except RuntimeError as error:
        report_failure(error, run_dir=tmp_path, rank=0, host="n1")
    record = read_failure(tmp_path)
    assert code == 4
    assert (record["rank"], record["host"], record["exit_code"]) == (3, "n2", 4)
    assert record["message"] == "no such file a.bin"
    out = capsys.readouterr().err
    assert out.splitlines()[0] == "error (rank 3 on n2, exit code 4): no such file a.bin"
    assert out.count("Traceback") == 1
    assert "RuntimeError: connection closed by peer" in out
    assert [path.name for path in tmp_path.iterdir()] == ["failure.json"]


def test_a_failure_that_cannot_be_recorded_still_gives_its_code(tmp_path: Path, capsys):
    assert report_failure(DataError("x"), run_dir=tmp_path / "gone", rank=0, host="n1") == 4
    assert "could not be recorded" in capsys.readouterr().err


def test_a_failure_is_recorded_although_the_disk_of_the_log_is_full(tmp_path: Path, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", LineWriter(full.fileno(), "n1 r0"))
        assert report_failure(DataError("cut short"), run_dir=tmp_path, rank=0, host="n1") == 4
        assert report_failure(DataError("x"), run_dir=tmp_path / "gone", rank=0, host="n1") == 4
    assert read_failure(tmp_path)["message"] == "cut short"


def test_a_broken_record_counts_as_none(tmp_path: Path):
    (tmp_path / "failure.json").write_text("{")
    assert read_failure(tmp_path) is None
    (tmp_path / "failure.json").write_text(json.dumps([1]))
    assert read_failure(tmp_path) is None
