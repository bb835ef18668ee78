from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hpc_train.launch.follow import FileFollower, GrowingFile, PipeCopier, rank_of_line


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        (b"2026-11-29T22:10:03.123 n2 r3 | loss 1.0\n", 3),
        (b"2026-11-29T22:10:03.123 n2 r17 | \n", 17),
        (b"2026-11-29T22:10:03.123 n2 agent | ready\n", None),
        (b"srun: error: n2: task 3: Killed\n", None),
    ],
)
def test_the_rank_of_a_line_is_read_from_its_prefix(line: bytes, rank: int | None) -> None:
    assert rank_of_line(line) == rank


def test_a_growing_file_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader = GrowingFile(path)
    assert reader.new_lines() == []
    with path.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert reader.new_lines() == [b"one\n"]
        file.write(b"o\nthree\n")
    assert reader.new_lines() == [b"two\n", b"three\n"]
    assert GrowingFile(path, from_end=True).new_lines() == []


def test_a_follower_gives_all_that_is_written_before_it_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("earlier\n")
    seen: list[bytes] = []
    follower = FileFollower(path, seen.append, from_end=True)
    for number in range(3):
        with path.open("a") as file:
            file.write(f"line {number}\n")
        time.sleep(0.05)
    follower.finish()
    assert seen == [b"line 0\n", b"line 1\n", b"line 2\n"]


def test_a_pipe_is_copied_to_all_targets_and_outlives_one_that_fails(tmp_path: Path) -> None:
    source, sink = os.pipe()
    broken_end, broken = os.pipe()
    os.close(broken_end)
    with (tmp_path / "copy").open("wb") as copy, os.fdopen(source, "rb") as pipe:
        copier = PipeCopier(pipe, [broken, copy.fileno()])
        os.write(sink, b"one\ntwo\nhalf a line")
        os.close(sink)
        copier.join(timeout=5)
    os.close(broken)
    assert (tmp_path / "copy").read_bytes() == b"one\ntwo\nhalf a line\n"
