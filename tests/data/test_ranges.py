"""Reading pieces of a dataset's file: right bytes, each once, little beside them, and files that change under it."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.data import index, ranges
from hpc_train.data.index import TokenFile
from hpc_train.data.ranges import RangeReader, merge_ranges
from hpc_train.errors import DataError
from tests.data.corpora import write

RANGES = st.lists(st.tuples(st.integers(0, 60_000), st.integers(0, 9_000)), max_size=30)


@given(wanted=RANGES)
def test_merged_ranges_hold_all_that_was_asked_and_no_page_more(wanted: list[tuple[int, int]]) -> None:
    runs = merge_ranges(wanted)

    def pages(some: Sequence[tuple[int, int]]) -> set[int]:
        return {
            page for first, count in some if count for page in range(first // 4096, (first + count - 1) // 4096 + 1)
        }

    assert pages([(first, count) for first, count, _ in runs]) == pages(wanted)
    assert sorted(member for _, _, members in runs for member in members) == [
        number for number, (_, count) in enumerate(wanted) if count
    ]
    for (first, count, members), (following, _, _) in zip(runs, [*runs[1:], (1 << 60, 0, [])], strict=False):
        assert first + count < following
        assert all(first <= wanted[m][0] and sum(wanted[m]) <= first + count for m in members)


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    write(tmp_path / "set", [list(range(50_000))], np.int32)
    return TokenFile.open(tmp_path / "set")


def test_the_bytes_are_those_of_the_file(tokens: TokenFile) -> None:
    reader, content = RangeReader(tokens), Path(f"{tokens.prefix}.bin").read_bytes()
    wanted = [(random.Random(n).randrange(150_000), random.Random(-n).randrange(50_000)) for n in range(20)]
    assert [bytes(data) for data in reader.read(wanted)] == [content[first : first + n] for first, n in wanted]
    assert reader.bytes_used == sum(count for _, count in wanted)
    reader.close()
    reader.close()
    assert bytes(reader.read([(4, 4)])[0]) == content[4:8]
    reader.close()


def test_each_process_that_reads_opens_the_file_for_itself(tokens: TokenFile) -> None:
    """FC-72"""
    reader = RangeReader(tokens)
    reader.read([(0, 4)])
    mine = _inode_and_descriptor(reader)
    pid = os.fork()
    if pid == 0:
        reader.read([(4, 4)])
        os._exit(0 if _inode_and_descriptor(reader)[1] != mine[1] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    reader.close()


def _inode_and_descriptor(reader: RangeReader) -> tuple[int, int]:
    return os.fstat(reader._descriptor).st_ino, reader._descriptor


def test_a_file_that_was_shortened_or_replaced_is_refused(tokens: TokenFile, tmp_path: Path) -> None:
    path = Path(f"{tokens.prefix}.bin")
    open_before = RangeReader(tokens)
    open_before.read([(0, 4)])
    os.truncate(path, 1000)
    with pytest.raises(DataError, match=r"ends at byte 1000, and had 200000 bytes when it was checked"):
        open_before.read([(996, 8)])
    with pytest.raises(DataError, match=r"had 200000 bytes when it was checked and has 1000 now"):
        RangeReader(tokens).read([(0, 4)])
    path.unlink()
    with pytest.raises(DataError, match=r"set\.bin does not exist"):
        RangeReader(tokens).read([(0, 4)])
    open_before.close()


@pytest.mark.parametrize("failures", [2, 1000])
def test_a_stale_handle_is_opened_again_by_its_path_a_few_times(
    tokens: TokenFile, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FC-74"""
    monkeypatch.setattr(index, "_STALE_PAUSE_S", 0.0)
    reader = RangeReader(tokens)
    reader.read([(0, 4)])
    opened, left = [], [failures]
    original_open, original_read = ranges.open_for_reading, os.preadv

    def read(*args: object) -> int:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, "Stale file handle", tokens.prefix)
        return original_read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(ranges, "open_for_reading", lambda path: opened.append(path) or original_open(path))
    monkeypatch.setattr(os, "preadv", read)
    if failures > 100:
        with pytest.raises(DataError, match="is a stale file handle, also after 5 tries"):
            reader.read([(0, 4)])
    else:
        assert bytes(reader.read([(4, 4)])[0]) == (1).to_bytes(4, "little")
        assert len(opened) == 2
    reader.close()


def test_rows_at_random_places_cost_little_more_of_the_disk_than_they_have(tmp_path: Path) -> None:
    """Pieces of 32 KiB from 64 MiB with cold caches; mapped, they would cost 4 to 5 times as much."""
    tokens = TokenFile.open(write(tmp_path / "large", [np.arange(16 << 20, dtype=np.int32)], np.int32))
    descriptor = os.open(f"{tokens.prefix}.bin", os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    wanted = [(row * 32_768 + 20, 32_772) for row in random.Random(3).sample(range(2000), 64)]
    before, reader = _bytes_from_storage(), RangeReader(tokens)
    reader.read(wanted)
    read = _bytes_from_storage() - before
    reader.close()
    if read == 0:
        pytest.skip("this file system does not tell what is read from storage, or keeps it in memory")
    assert read <= 1.2 * reader.bytes_used


def _bytes_from_storage() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
