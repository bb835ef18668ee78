"""Collectives on flat buffers equal the plain sum and concatenation, at every size."""

from __future__ import annotations

import pytest
import torch

from hpc_train.comm import collectives
from hpc_train.comm.collectives import all_gather_, all_reduce_sum, reduce_scatter_sum_
from hpc_train.errors import CollectiveError, DataError
from tests.ranks import run_ranks
from tests.worlds import make_group, make_world


def _contribution(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def _reduce_then_gather(me, shard, piece_bytes):
    collectives._PIECE_BYTES = piece_bytes
    group = make_group(me)
    flat = _contribution(me.rank, shard * me.world_size)
    mine = reduce_scatter_sum_(flat, group).clone()
    all_gather_(flat, group)
    total = all_reduce_sum([float(me.rank), 1.0], group, torch.device("cpu"))
    return mine, flat, total


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("piece_bytes", [64, 2**24])
def test_reduce_scatter_and_all_gather_equal_the_sum(world_size, piece_bytes):
    shard = 48
    expected = sum(_contribution(rank, shard * world_size) for rank in range(world_size))
    results = run_ranks(_reduce_then_gather, world_size, shard, piece_bytes)
    for rank, (mine, flat, total) in enumerate(results):
        torch.testing.assert_close(mine, expected[rank * shard : (rank + 1) * shard])
        assert torch.equal(flat, torch.cat([result[0] for result in results]))
        assert total == [sum(range(world_size)), world_size]


def _disagree(me, failing):
    world = make_world(me)
    error = {"data": DataError("file a is missing"), "bug": ZeroDivisionError("oops")}.get(failing.get(me.rank))
    try:
        world.agree(error)
    except Exception as raised:
        return type(raised).__name__, str(raised), getattr(raised, "reporter", None)
    return None


def test_an_error_on_one_rank_is_raised_on_all_with_its_kind():
    answers = run_ranks(_disagree, 3, {1: "data"})
    assert [answer[0] for answer in answers] == [DataError.__name__] * 3
    assert answers[1][1] == "file a is missing"
    assert answers[0][1] == "rank 1 on n1: file a is missing"
    assert {answer[2] for answer in answers} == {1}


def test_the_lowest_failing_rank_speaks_and_others_are_counted():
    answers = run_ranks(_disagree, 3, {1: "bug", 2: "data"})
    assert [answer[0] for answer in answers] == [
        CollectiveError.__name__,
        "ZeroDivisionError",
        CollectiveError.__name__,
    ]
    assert "and on 1 more ranks" in answers[0][1]


def test_agreement_without_an_error_returns():
    assert run_ranks(_disagree, 2, {}) == [None, None]
