"""Collectives on flat buffers equal the plain sum and concatenation, at every size."""

from __future__ import annotations

import pytest
import torch

from hpc_train.comm.begin import begin_all_gather, begin_reduce_scatter, room_for_sums
from hpc_train.comm.collectives import all_gather_, all_reduce_sum
from hpc_train.comm.tokens import reduce_scatter_tokens
from hpc_train.errors import CollectiveError, DataError
from tests.ranks import run_ranks
from tests.worlds import make_group, make_world


def _contribution(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def _reduce_then_gather(me, shard):
    group = make_group(me)
    whole = _contribution(me.rank, shard * me.world_size)
    mine = reduce_scatter_tokens(whole.view(1, -1, 1), group).flatten()
    flat = torch.full_like(whole, float("nan"))
    flat.view(me.world_size, -1)[me.rank] = mine
    all_gather_(flat, group)
    total = all_reduce_sum([float(me.rank), 1.0], group, torch.device("cpu"))
    values = make_world(me).control.gather("x" * me.rank, root=me.world_size - 1)
    assert values == (["x" * rank for rank in range(me.world_size)] if me.rank == me.world_size - 1 else None)
    return mine, flat, total


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reduce_scatter_and_all_gather_equal_the_sum(world_size):
    shard = 48
    expected = sum(_contribution(rank, shard * world_size) for rank in range(world_size))
    results = run_ranks(_reduce_then_gather, world_size, shard)
    for rank, (mine, flat, total) in enumerate(results):
        torch.testing.assert_close(mine, expected[rank * shard : (rank + 1) * shard])
        assert torch.equal(flat, torch.cat([result[0] for result in results]))
        assert total == [sum(range(world_size)), world_size]


def _begin_several(me, shard, dtype, wire):
    """Three sums under way at once, awaited last first; then three gathers of them."""
    group = make_group(me)
    flats = [_contribution(3 * me.rank + index, shard * me.world_size).to(dtype) for index in range(3)]
    rooms = [room_for_sums(flat, group, wire) for flat in flats]
    under_way = [begin_reduce_scatter(flat, group, room, wire) for flat, room in zip(flats, rooms, strict=True)]
    for pending in reversed(under_way):
        pending.wait()
        pending.wait()  # a second time changes nothing
    sums = [flat.view(me.world_size, -1)[me.rank].clone() for flat in flats]
    gathers = [begin_all_gather(flat, group) for flat in flats]
    for pending in reversed(gathers):
        pending.wait()
    return sums, flats, [room is None for room in rooms]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "wire"),
    [(torch.float32, None), (torch.float64, None), (torch.float32, torch.bfloat16), (torch.float64, torch.bfloat16)],
)
def test_collectives_that_run_beside_each_other_give_the_sum_and_the_whole(world_size, dtype, wire):
    shard = 48
    results = run_ranks(_begin_several, world_size, shard, dtype, wire)
    for index in range(3):
        summands = [_contribution(3 * rank + index, shard * world_size).to(dtype) for rank in range(world_size)]
        for rank, (sums, flats, needs_no_room) in enumerate(results):
            own = slice(rank * shard, (rank + 1) * shard)
            # What travels is rounded once, and a rank's own summand never.
            others = [summand[own].to(wire or dtype).to(dtype) for r, summand in enumerate(summands) if r != rank]
            torch.testing.assert_close(sums[index], summands[rank][own] + sum(others), rtol=1e-6, atol=1e-6)
            assert torch.equal(flats[index], torch.cat([result[0][index] for result in results]))
            assert needs_no_room[index] == (world_size == 1 or wire is not None)


def test_what_travels_in_the_sums_own_type_is_not_rounded():
    (sums, _, _), _ = run_ranks(_begin_several, 2, 16, torch.float32, torch.float32)
    torch.testing.assert_close(sums[0], (_contribution(0, 32) + _contribution(3, 32))[:16], rtol=1e-6, atol=1e-6)


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
