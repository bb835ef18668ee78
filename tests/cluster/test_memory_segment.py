"""Shared memory without a name: what is passed on is the same memory, cannot change under a reader, leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hpc_train.cluster.memory_segment import LABEL_PREFIX, Segment
from hpc_train.errors import HpcTrainError


def descriptors_of(pid: int | str, label: str) -> int:
    """How many segments with this label a process has open."""
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += os.readlink(entry).startswith(f"/memfd:{LABEL_PREFIX}{label}")
        except OSError:
            continue
    return found


def test_what_one_maps_and_writes_the_other_reads() -> None:
    segment = Segment.create("test.both", 10_000)
    other = Segment.received(os.dup(segment.descriptor))
    assert other.num_bytes == 10_000
    with segment.map(writable=True) as ours, other.map() as theirs:
        ours[9_990:] = b"0123456789"
        assert theirs[9_990:] == b"0123456789" and theirs[:4] == bytes(4)
        segment.write(5, b"abc")
        assert theirs[4:9] == b"\0abc\0"
    segment.close()
    segment.close()
    other.close()
    assert descriptors_of("self", "test.both") == 0


def test_a_sealed_segment_cannot_change_under_its_readers() -> None:
    segment = Segment.create("test.sealed", 4096)
    segment.write(0, b"tokens")
    segment.seal()
    with pytest.raises(PermissionError):
        segment.write(0, b"others")
    with pytest.raises(PermissionError):
        segment.map(writable=True)
    for size in (0, 8192):  # shorter would end a reader by SIGBUS
        with pytest.raises(PermissionError):
            os.ftruncate(segment.descriptor, size)
    with segment.map() as memory:
        segment.close()
        assert memory[:6] == b"tokens"


def test_a_segment_is_sealed_only_when_nobody_can_write_to_it_any_more() -> None:
    segment = Segment.create("test.busy", 4096)
    with segment.map(writable=True), pytest.raises(OSError, match="busy"):
        segment.seal()
    segment.seal()
    segment.close()


def test_what_is_no_segment_is_refused_and_closed() -> None:
    """A descriptor whose size can still change would let its maker end the reader."""
    before = len(os.listdir("/proc/self/fd"))
    read_end, write_end = os.pipe()
    os.close(write_end)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    for descriptor in (read_end, loose):
        with pytest.raises(ValueError, match="no shared segment"):
            Segment.received(descriptor)
    assert len(os.listdir("/proc/self/fd")) == before


def test_more_than_the_node_has_is_refused_before_any_of_it_is_taken() -> None:
    with pytest.raises(HpcTrainError, match=r"3\.0 MiB of memory for test\.much .* 2\.0 MiB are available.*--mem"):
        Segment.create("test.much", 3 << 20, lambda: 2 << 20)
    with pytest.raises(HpcTrainError, match="are available"):
        Segment.create("test.huge", 1 << 60)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can have a /dev/shm of its own")
def test_a_small_dev_shm_is_no_bound() -> None:
    """FC-86: containers have 64 MB of it as a rule; here it is 1 MiB, and full."""
    code = """
import os, sys
from hpc_train.cluster.memory_segment import Segment
with open("/dev/shm/full", "wb") as file:
    try:
        file.write(bytes(4 << 20)); file.flush()
    except OSError as problem:
        print(problem.strerror)
segment = Segment.create("test.large", 96 << 20)
segment.write((96 << 20) - 3, b"end")
with segment.map() as memory:
    print(memory[-3:], os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize, os.listdir("/dev/shm"))
"""
    mount = 'mount -t tmpfs -o size=1M none /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mounts of its own here: {done.stderr.strip()}")
    assert done.stdout.splitlines() == ["No space left on device", "b'end' 1048576 ['full']"], done.stderr


def test_nothing_is_left_when_all_who_have_it_are_killed() -> None:
    """FC-86: neither a file nor memory; the processes are ended by SIGKILL, so that none of them can clean up."""
    code = r"""
import os, sys, time
from hpc_train.cluster.memory_segment import Segment
segment = Segment.create("test.killed", 64 << 20)
memory = segment.map(writable=True)
os.fork()
os.write(1, b"%d\n" % os.getpid())
time.sleep(600)
"""
    maker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    pids = [int(maker.stdout.readline()), int(maker.stdout.readline())]
    (segment,) = {held for pid in pids for held in _shared_memory_of(pid)}
    number, name = segment
    assert name == f"/memfd:{LABEL_PREFIX}test.killed (deleted)", "it has no name in any file system"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    maker.communicate()
    # The kernel gives memory without a name back with the last process that has it open or mapped.
    deadline = time.monotonic() + 60
    while holders := [pid for pid in _all_pids() if number in dict(_shared_memory_of(pid))]:
        assert time.monotonic() < deadline, f"its memory is still taken, by {holders}"
        time.sleep(0.02)


def _all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _shared_memory_of(pid: int) -> set[tuple[int, str]]:
    """Inode and name of all shared memory that a process has open or mapped."""
    found: set[tuple[int, str]] = set()
    with suppress(OSError):
        lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        found |= {(int(fields[4]), fields[5]) for fields in lines if len(fields) == 6}
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add((entry.stat().st_ino, os.readlink(entry)))
    return {held for held in found if held[1].startswith((f"/memfd:{LABEL_PREFIX}", "/dev/shm/"))}
