"""Benchmarks against other projects notice where their first losses differ."""

from __future__ import annotations

import pytest

from tests.bench.bench_data_parallel import mean_losses
from tests.bench.rounds import check_losses


def test_losses_of_ranks_own_sequences_are_compared_as_their_mean() -> None:
    of_ranks = [{"first_losses": {"ours": [9.0742, 9.0], "ddp": [9.0742 + sign * 0.0166, 9.0]}} for sign in (1, -1)]
    losses = mean_losses(of_ranks)
    check_losses(losses, [("ours", "ddp")])
    of_first = mean_losses(of_ranks[:1])
    with pytest.raises(AssertionError, match="losses of ours and ddp differ"):
        check_losses(of_first, [("ours", "ddp")])
