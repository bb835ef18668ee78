"""Files that users name: what is replaced, what is written through, and what is refused."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from hpc_train.errors import ConfigError
from hpc_train.plan.out_file import check_out, open_out, write_out


def test_a_link_stays_and_its_target_is_replaced_whole_with_its_mode(tmp_path: Path) -> None:
    target, link = tmp_path / "a.html", tmp_path / "link.html"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    with pytest.raises(RuntimeError), open_out(link, "--html") as file:
        file.write(b"half")
        raise RuntimeError
    assert target.read_text() == "old"
    write_out(link, "--html", "new")
    assert link.is_symlink() and target.read_text() == "new" and stat.S_IMODE(target.stat().st_mode) == 0o640
    dangling = tmp_path / "dangling"
    dangling.symlink_to("later")
    write_out(dangling, "--html", "made")
    assert dangling.is_symlink() and (tmp_path / "later").read_text() == "made"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.html", "dangling", "later", "link.html"]


def test_devices_and_fifos_are_written_through(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(fifo.read_text()), daemon=True)
    reader.start()
    write_out(fifo, "--out", "text")
    reader.join(10)
    assert read == ["text"] and stat.S_ISFIFO(fifo.stat().st_mode)
    null = tmp_path / "null"
    null.symlink_to("/dev/null")
    write_out(null, "--out", "text")
    assert stat.S_ISCHR(null.stat().st_mode)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_device_is_told_and_stays(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"full cannot be written: No space left.*by --out"):
        write_out(full, "--out", "text")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "plan.json", "ranks.tsv", "metrics.jsonl", "outcome.json", "failure-2.json", "owner.json",
     "attempts.jsonl", "submitted.jsonl", "submit.sh", "checkpoints/latest", "trace/attempt_0001/clock.json"],
)  # fmt: skip
def test_what_belongs_to_a_run_is_refused_through_links_too(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").touch()
    link = tmp_path / "link"
    link.symlink_to(run / name)
    for path in (run / name, link):
        with pytest.raises(ConfigError, match=f"belongs to a run, whose folder is {run}: .*--out"):
            write_out(path, "--out", "text")
    write_out(run / "trace.json.gz", "--out", "text")
    write_out(tmp_path / "plan.txt", "--out", "text")


def test_inputs_folders_and_closed_places_are_refused_before_the_work(tmp_path: Path) -> None:
    config = tmp_path / "base.yaml"
    config.touch()
    with pytest.raises(ConfigError, match="read by this command"):
        check_out(tmp_path / "." / "base.yaml", "--html", inputs=[config])
    for path, words in ((tmp_path, "Is a directory"), (tmp_path / "no/x", "No such file"), (config / "x", "Not a dir")):
        with pytest.raises(ConfigError, match=f"cannot be written: {words}"):
            check_out(path, "--html")
