from __future__ import annotations

import pytest

from hpc_train.cluster.size_words import size_words, two_sizes


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(0, "0 bytes"), (77, "77 bytes"), (10 << 20, "10.0 MiB"), ((3 << 30) // 2, "1.50 GiB"), (2**43, "8192.00 GiB")],
)
def test_a_size_has_the_unit_that_shows_it(num_bytes: int, words: str) -> None:
    assert size_words(num_bytes) == words


def test_two_sizes_that_differ_never_read_the_same() -> None:
    assert two_sizes(10 << 20, 3 << 20) == ("10.0 MiB", "3.0 MiB")
    assert two_sizes(10 << 20, (10 << 20) - 1) == ("10485760 bytes", "10485759 bytes")
