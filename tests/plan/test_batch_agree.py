"""Digests compared by sums: equal ones are found equal, and where any differ every rank finds so."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpc_train.plan.batch_agree import digest_summands, is_same_digest

# Two for each 2 bytes of a digest of 8.
NUM_SUMMANDS = 8
digests = st.binary(min_size=8, max_size=8)


def summed(of_ranks: list[bytes]) -> list[float]:
    return [sum(column) for column in zip(*map(digest_summands, of_ranks), strict=True)]


@given(digests, st.sampled_from([1, 2, 7, 16_384]))
def test_equal_digests_are_found_equal(digest: bytes, count: int) -> None:
    sums = [count * summand for summand in digest_summands(digest)]
    assert len(sums) == NUM_SUMMANDS and is_same_digest(sums, digest, count)


@given(st.lists(digests, min_size=2, max_size=6))
def test_a_difference_is_found_by_every_rank(of_ranks: list[bytes]) -> None:
    verdicts = {is_same_digest(summed(of_ranks), digest, len(of_ranks)) for digest in of_ranks}
    assert verdicts == {len(set(of_ranks)) == 1}


def test_words_that_differ_by_as_much_up_as_down_do_not_cancel() -> None:
    low, middle, high = (bytes([value, 0, 0, 0, 0, 0, 0, 0]) for value in (1, 2, 3))
    assert not is_same_digest(summed([low, middle, high]), middle, 3)


def test_the_largest_words_of_the_largest_worlds_are_exact() -> None:
    digest, other = b"\xff" * 8, b"\xff" * 7 + b"\xfe"
    sums = [16_383 * summand for summand in digest_summands(digest)]
    assert not is_same_digest([a + b for a, b in zip(sums, digest_summands(other), strict=True)], digest, 16_384)


def test_ranks_without_a_plan_are_alike() -> None:
    assert digest_summands(b"") == [0.0] * NUM_SUMMANDS
    assert is_same_digest([0.0] * NUM_SUMMANDS, b"", 5)
