"""The counter of opens tells apart processes that open one file in the same moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.open_counter import OpenCounter

OPEN_WHEN_TOLD = "import sys; sys.stdin.read(1); open(sys.argv[1]).close()"


@pytest.mark.slurm  # like what it serves: it needs the rights of root over this machine
def test_opens_of_one_file_by_many_processes_at_once_are_all_counted(tmp_path: Path) -> None:
    folder = tmp_path / "deep"
    folder.mkdir()
    (folder / "packed.tar").write_text("x")
    command = [sys.executable, "-c", OPEN_WHEN_TOLD, str(folder / "packed.tar")]
    readers = [subprocess.Popen(command, stdin=subprocess.PIPE, text=True) for _ in range(8)]
    with OpenCounter([tmp_path]) as counter:
        for reader in readers:
            assert reader.stdin is not None
            reader.stdin.write("x")
            reader.stdin.close()
        assert [reader.wait(30) for reader in readers] == [0] * 8
    assert not counter.overflowed
    assert dict(counter.counts) == {str(folder / "packed.tar"): 8}
