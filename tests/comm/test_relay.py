"""Buffers along chains of ranks: all arrive whole, in the common order, and few are held at a time."""

from __future__ import annotations

import random
import weakref

import pytest
import torch

from hpc_train.comm.relay import LEGS_AHEAD, Leg, relay
from tests.ranks import TestRank, run_ranks
from tests.worlds import make_group

CPU = torch.device("cpu")


def _journeys(seed: int, world_size: int, count: int) -> list[tuple[list[int], int]]:
    """Chains of ranks in any order, and the bytes of each."""
    chance = random.Random(seed)
    ranks = list(range(world_size))
    return [
        (chance.sample(ranks, chance.randint(1, world_size)), chance.choice([1, 7, 4096, 300_001]))
        for _ in range(count)
    ]


def _content(journey: int, num_bytes: int) -> torch.Tensor:
    return ((torch.arange(num_bytes) * 7 + journey * 13) % 251).to(torch.uint8)


def _travel(me: TestRank, seed: int, count: int) -> int:
    """Take part in all journeys; the most buffers that were alive at once here."""
    numbers, legs = [], []
    for number, (chain, num_bytes) in enumerate(_journeys(seed, me.world_size, count)):
        if me.rank in chain:
            place = chain.index(me.rank)
            source = chain[place - 1] if place else None
            legs.append(Leg(num_bytes, source, chain[place + 1] if place + 1 < len(chain) else None))
            numbers.append(number)
    taken, made, most = [], weakref.WeakSet(), 0

    def make(leg: int) -> torch.Tensor:
        nonlocal most
        buffer = _content(numbers[leg], legs[leg].num_bytes)
        made.add(buffer)
        most = max(most, len(made))
        return buffer

    def take(leg: int, buffer: torch.Tensor) -> None:
        assert torch.equal(buffer, _content(numbers[leg], legs[leg].num_bytes)), numbers[leg]
        taken.append(leg)

    relay(legs, make, take, make_group(me), CPU)
    assert taken == list(range(len(legs)))
    return most


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_gets_what_it_is_on_the_way_of(world_size: int) -> None:
    assert max(run_ranks(_travel, world_size, world_size, 80)) <= LEGS_AHEAD + 2


def test_a_rank_alone_makes_and_takes() -> None:
    taken = []
    relay(
        [Leg(3, None, None)] * 2,
        lambda leg: _content(leg, 3),
        lambda leg, buffer: taken.append((leg, buffer.tolist())),
        make_group(TestRank(0, 1, None, None)),  # type: ignore[arg-type]
        CPU,
    )
    assert taken == [(0, [0, 7, 14]), (1, [13, 20, 27])]
