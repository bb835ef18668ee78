"""Checksums of runs that are put together."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from hpc_train.checkpoint.format.crc import joined


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 70_000))
def test_the_checksum_of_both_follows_from_that_of_each(first: bytes, second: bytes, zeros: int) -> None:
    second += bytes(zeros)
    assert joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
