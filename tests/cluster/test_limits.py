from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hpc_train.cluster import limits
from hpc_train.cluster.limits import UNKNOWN, Unknown, parse_time_limit, require_free_bytes, require_writable
from hpc_train.errors import CheckpointError, ConfigError

MINUTE, HOUR, DAY = 60, 3600, 86400


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("90", 90 * MINUTE),
        ("90:30", 91 * MINUTE),
        ("1:30:00", 90 * MINUTE),
        ("1-2", DAY + 2 * HOUR),
        ("1-02:03", DAY + 2 * HOUR + 3 * MINUTE),
        ("1-02:03:04", DAY + 2 * HOUR + 4 * MINUTE),
        ("3-0:00", 3 * DAY),
        ("0:30", MINUTE),
        ("0", None),
        ("UNLIMITED", None),
        ("infinite", None),
        ("Partition_Limit", UNKNOWN),
        ("INVALID", UNKNOWN),
        ("Unknown", UNKNOWN),
        ("", UNKNOWN),
        ("1:2:3:4", UNKNOWN),
        ("-5", UNKNOWN),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, limit: int | Unknown | None) -> None:
    """FC-34"""
    assert parse_time_limit(text) is limit or parse_time_limit(text) == limit


def statvfs(free_bytes: int, free_files: int, files: int = 100) -> os.statvfs_result:
    return os.statvfs_result((4096, 1, 1, 1, free_bytes, files, free_files, free_files, 0, 255))


def test_too_few_free_bytes_are_refused_with_both_numbers(tmp_path: Path) -> None:
    """FC-64: 1 GB free, 3 GB needed."""
    with pytest.raises(CheckpointError, match=r"the checkpoint needs 3.00 GiB, but .* has 1.00 GiB free"):
        require_free_bytes(
            tmp_path / "not/yet/there",
            3 << 30,
            "the checkpoint",
            CheckpointError,
            statvfs=lambda path: statvfs(1 << 30, 100),
        )


def test_too_few_inodes_are_refused_while_bytes_are_free(tmp_path: Path) -> None:
    """FC-64"""

    def check(files: int) -> None:
        require_free_bytes(
            tmp_path, 1, "the run folder", ConfigError, num_files=8, statvfs=lambda _: statvfs(1 << 40, 3, files)
        )

    with pytest.raises(ConfigError, match=r"needs 8 files, but .* has 3 inodes"):
        check(100)
    check(0)  # a file system that does not count inodes


def test_small_numbers_are_told_in_bytes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x needs 5000 bytes, but .* has 0 bytes free"):
        require_free_bytes(tmp_path, 5000, "x", ConfigError, statvfs=lambda _: statvfs(0, 100))


def test_enough_room_is_accepted(tmp_path: Path) -> None:
    require_free_bytes(tmp_path / "new" / "folder", 1, "x", ConfigError, num_files=1)


@pytest.mark.parametrize(("code", "words"), [(errno.ENOSPC, "disk is full"), (errno.EDQUOT, "quota is used up")])
def test_a_trial_file_finds_a_spent_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    """FC-64"""

    def fsync(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(limits.os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=words):
        require_writable(tmp_path / "new", "the checkpoint", CheckpointError)
    assert list(tmp_path.iterdir()) == []


def test_a_trial_file_leaves_nothing(tmp_path: Path) -> None:
    require_writable(tmp_path, "the checkpoint", CheckpointError)
    assert list(tmp_path.iterdir()) == []


def test_available_memory_is_what_the_kernel_tells(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       24 kB\nMemAvailable:    12 kB\n")
    assert limits.available_memory_bytes(tmp_path) == 12 * 1024
    assert limits.available_memory_bytes(tmp_path / "none") is None
    assert (limits.available_memory_bytes() or 0) > 1 << 20


def _group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def _process(proc: Path, membership: str, mount: str) -> None:
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemAvailable:    1000000 kB\n")
    (proc / "self" / "cgroup").write_text(membership)
    (proc / "self" / "mountinfo").write_text(f"29 22 0:21 / /proc rw - proc proc rw\n{mount}\n")


def test_memory_is_available_within_the_limits_of_the_job(tmp_path: Path) -> None:
    """Control groups of version 2 as Slurm makes them: the limit is the job's, two above the task."""
    mount, job = tmp_path / "fs", tmp_path / "fs" / "system.slice" / "job_7"
    _group(
        job,
        {"memory.max": "9000", "memory.current": "8000", "memory.stat": "file 3\ninactive_file 2000\nactive_file 500"},
    )
    _group(
        job / "step_0" / "task_0", {"memory.max": "max", "memory.current": "8000", "memory.stat": "inactive_file 2000"}
    )
    place = "/system.slice/job_7/step_0/task_0"
    _process(tmp_path / "proc", f"0::{place}\n", f"30 22 0:26 / {mount} rw,nosuid - cgroup2 cgroup2 rw")
    assert limits.available_memory_bytes(tmp_path / "proc") == 9000 - (8000 - 2500)
    (job / "step_0" / "task_0" / "memory.max").write_text("6000\n")
    assert limits.available_memory_bytes(tmp_path / "proc") == 0, "the tightest one counts"
    (job / "memory.max").write_text("max\n")
    (job / "step_0" / "task_0" / "memory.max").write_text("max\n")
    assert limits.available_memory_bytes(tmp_path / "proc") == 1000000 * 1024


def test_memory_is_available_within_the_limits_of_version_1_and_of_containers(tmp_path: Path) -> None:
    mount = tmp_path / "fs"
    numbers = {"memory.usage_in_bytes": "5000", "memory.stat": "inactive_file 1\ntotal_inactive_file 1000"}
    unlimited = {"memory.limit_in_bytes": "9223372036854771712", **numbers}
    _group(mount, {"memory.limit_in_bytes": "7000", **numbers})
    _group(mount / "inside", unlimited)
    line = f"36 29 0:31 /docker/abc {mount} rw - cgroup cgroup rw,memory"
    _process(tmp_path / "proc", "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc/inside\n", line)
    assert limits.available_memory_bytes(tmp_path / "proc") == 3000
    (tmp_path / "proc" / "self" / "cgroup").write_text("4:memory:/../elsewhere\n0::/\n")
    assert limits.available_memory_bytes(tmp_path / "proc") == 3000, "a group outside of what is mounted"
