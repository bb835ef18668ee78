"""Whether all ranks have the same batch plan, by numbers that travel in a sum which they make anyway.

The sum of a word and that of its square, over n ranks, are n times this rank's own only if all words are alike: the sum
of the squares of their differences from it is then zero.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpc_train.plan.batch_table import DIGEST_BYTES

_WORD_BYTES = 2
"""Derived: squares of 16 bits, of up to 2 million ranks, are exact in a double."""


def digest_summands(digest: bytes) -> list[float]:
    """What a rank adds for its plan's digest; as many zeros where there is no plan."""
    words = _words(digest)
    return [float(number) for word in words for number in (word, word * word)]


def is_same_digest(sums: Sequence[float], digest: bytes, num_ranks: int) -> bool:
    """Whether all ranks added the summands of this digest. Where two differ, every rank finds so."""
    return list(sums) == [num_ranks * summand for summand in digest_summands(digest)]


def _words(digest: bytes) -> list[int]:
    filled = digest or bytes(DIGEST_BYTES)
    assert len(filled) == DIGEST_BYTES
    return [int.from_bytes(filled[at : at + _WORD_BYTES], "little") for at in range(0, DIGEST_BYTES, _WORD_BYTES)]
