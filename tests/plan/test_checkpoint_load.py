"""Plans of loads: every byte read once, everyone gets what it needs, nobody has much more to do than others."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.plan.box_table import chunks_of, num_chunks
from hpc_train.plan.checkpoint_load import LoadPlan, plan_load
from hpc_train.plan.checkpoint_readers import Places
from hpc_train.plan.checkpoint_state import NUM_ALIKE, HeldState, held_state
from hpc_train.plan.flat import Box, boxes_of_range
from hpc_train.plan.mesh import Mesh
from tests.plan.tables import places_of, table_of
from tests.train.trainers import make_config

ITEM = 4
sides = st.integers(1, 9)


@given(st.lists(sides, max_size=4), st.integers(1, 60))
def test_chunks_follow_each_other_and_are_counted_without_being_made(sizes: list[int], most: int) -> None:
    box = Box((5,) * len(sizes), tuple(sizes))
    chunks = list(chunks_of(box, most))
    assert all(chunk.num_elements <= most for chunk in chunks)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    assert np.concatenate([numbers[c.slices_within(box)].ravel() for c in chunks]).tolist() == numbers.ravel().tolist()
    padded = np.array([[*sizes, 1]])
    assert num_chunks(padded, np.array([most])).tolist() == [len(chunks)]


@st.composite
def _tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut along one dimension, and each part into flat ranges: as any mesh does."""
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = sorted({0, shape[dim], *draw(st.lists(st.integers(0, shape[dim]), max_size=3))})
    boxes = []
    for low, high in pairwise(cuts):
        sizes = tuple(high - low if axis == dim else extent for axis, extent in enumerate(shape))
        moved = tuple(low if axis == dim else 0 for axis in range(len(shape)))
        total = math.prod(sizes)
        ranges = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=3))})
        for start, stop in pairwise(ranges):
            for box in boxes_of_range(sizes, start, stop):
                boxes.append(Box(tuple(a + b for a, b in zip(box.offsets, moved, strict=True)), box.sizes))
    return boxes


@st.composite
def _loads(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[tuple[int, Box]], list[tuple[int, Box, int]], int]:
    """Shapes, stored boxes, needs with their ranks (some of them replicated), world size."""
    world_size = draw(st.integers(1, 6))
    shapes = draw(st.lists(st.lists(sides, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3))
    stored, needs = [], []
    for tensor, shape in enumerate(shapes):
        stored += [(tensor, box) for box in draw(_tilings(shape))]
        for box in draw(_tilings(shape)):
            ranks = draw(st.lists(st.integers(0, world_size - 1), min_size=1, max_size=4))
            needs += [(tensor, box, rank) for rank in ranks]
    return shapes, stored, sorted(needs, key=lambda need: need[2]), world_size


@settings(max_examples=80)
@given(_loads(), st.sampled_from([4, 24, 1 << 20]), st.booleans())
def test_playing_all_ranks_deliveries_fills_all_needs_and_reads_each_byte_once(load, chunk_bytes, on_nodes) -> None:
    shapes, stored, needs, world_size = load
    table = table_of(stored, 3)
    holder = np.array([rank for _, _, rank in needs])
    places = Places(np.arange(world_size) // 2, np.arange(world_size) % 2)
    lies_on = np.arange(len(stored)) % (int(places.node[-1]) + 1) if on_nodes else None
    plan = plan_load(
        table,
        np.full(len(stored), ITEM),
        table_of([(tensor, box) for tensor, box, _ in needs], 3),
        holder,
        places,
        chunk_bytes,
        lies_on,
    )
    if lies_on is not None:
        assert (places.node[plan.reader] == lies_on[plan.box_of_part]).all()
    assert not len(plan.gaps)
    tensors = [np.arange(math.prod(shape)).reshape(shape) for shape in shapes]
    _play(plan, world_size, stored, tensors)


def _play(plan: LoadPlan, world_size: int, stored: list[tuple[int, Box]], tensors: list[np.ndarray]) -> None:
    whole = [Box((0,) * t.ndim, t.shape) for t in tensors]
    read = [np.zeros(box.num_elements, int) for _, box in stored]
    for rank in range(world_size):
        places = []
        for chunk in plan.read_by(rank):
            row = int(plan.box_of_part[chunk.part])
            read[row][chunk.skipped : chunk.skipped + chunk.box.num_elements] += 1
            # The bytes at that place of the stored box are those of the chunk's box.
            tensor, box = stored[row]
            flat = tensors[tensor][box.slices_within(whole[tensor])].ravel()
            found = tensors[tensor][chunk.box.slices_within(whole[tensor])].ravel()
            assert flat[chunk.skipped : chunk.skipped + chunk.box.num_elements].tolist() == found.tolist()
            places.append((row, chunk.skipped))
        assert places == sorted(places)
    assert all((counts == 1).all() for counts in read)
    _play_legs(plan, world_size)


def _play_legs(plan: LoadPlan, world_size: int) -> None:
    """Each rank's deliveries one after the other, a rank that waits for another one's standing still."""
    left = {rank: plan.deliveries(rank) for rank in range(world_size)}
    sent: defaultdict[tuple[int, int], list[tuple[object, object]]] = defaultdict(list)
    filled = np.zeros(len(plan.needed), int)
    moved = True
    while moved:
        moved = False
        for rank, deliveries in left.items():
            while deliveries:
                delivery = deliveries[0]
                place = delivery.ranks.index(rank)
                if place:
                    came = sent[delivery.ranks[place - 1], rank]
                    if not came:
                        break
                    assert came.pop(0) == (delivery.chunk, delivery.box), "another box was sent than is awaited"
                if place + 1 < len(delivery.ranks):
                    sent[rank, delivery.ranks[place + 1]].append((delivery.chunk, delivery.box))
                for row in delivery.needed:
                    assert plan.holder[row] == rank
                    filled[row] += delivery.box.num_elements
                deliveries.pop(0)
                moved = True
    assert not any(left.values()), "ranks wait for each other"
    assert not any(sent.values())
    assert (filled == plan.needed.num_elements).all()


def _plan(saved: HeldState, held: HeldState, places: Places) -> LoadPlan:
    return plan_load(saved.boxes, np.full(len(saved.rank), ITEM), held.boxes, held.rank, places)


def _config(**parallel: object):
    model = {"family": "llama", "num_layers": 8, "hidden_size": 64, "num_heads": 8, "num_kv_heads": 4}
    return make_config({**model, "vocab_size": 128}, parallel)


MESHES = {"1x1x8": {"tp": 8}, "2x2x2": {"pp": 2, "tp": 2}, "8x1x1": {"pp": 8}, "1x8x1": {},
          "2x2x2 interleaved": {"pp": 2, "tp": 2, "virtual_stages": 2}}  # fmt: skip


@pytest.mark.parametrize("to", MESHES)
@pytest.mark.parametrize("of", MESHES)
def test_meshes_read_each_other_s_state_once_and_evenly(of: str, to: str) -> None:
    configs = {name: _config(**MESHES[name]) for name in (of, to)}
    meshes = {name: _mesh(configs[name]) for name in (of, to)}
    saved = held_state(configs[of], meshes[of], counted=True)
    held = held_state(configs[to], meshes[to], counted=False)
    plan = _plan(saved, held, places_of(meshes[to], 4))
    assert not len(plan.gaps)
    state_bytes = ITEM * int(saved.boxes.num_elements.sum())
    assert plan.bytes_read.sum() == state_bytes
    needed = np.bincount(held.rank, weights=held.boxes.num_elements * ITEM, minlength=8)
    assert plan.bytes_read.max() <= 1.1 * needed.max()
    for part, reader in enumerate(plan.reader):
        assert reader in held.rank[plan.pair_need[plan.pair_part == part]], "a rank reads what it does not need"
    if of == to:
        assert plan.bytes_read.max() <= needed.max()
    _play_legs(plan, 8)


@pytest.mark.parametrize("of", MESHES)
def test_boxes_that_are_alike_are_compared_once_with_the_same_plan(of: str) -> None:
    config = _config(**MESHES[of])
    saved, held = (held_state(config, _mesh(config), counted=counted) for counted in (True, False))
    item_bytes, places = np.full(len(saved.rank), ITEM), places_of(_mesh(config), 4)
    plan, every = (
        plan_load(saved.boxes, item_bytes, held.boxes, held.rank, places, num_alike=number) for number in (NUM_ALIKE, 1)
    )
    assert len(plan.gaps) == 0
    for name in ("reader", "pair_part", "pair_need"):
        assert np.array_equal(getattr(plan, name), getattr(every, name))


def _mesh(config) -> Mesh:
    return Mesh.fill(8, pp=config.parallel.pp, tp=config.parallel.tp)


def test_replicas_read_a_share_each_spread_over_nodes_and_rails() -> None:
    """dp=4 on two nodes: each byte once, each rank a quarter, whether there are many boxes or one large one."""
    rows = 1 << 12
    whole = Box((0, 0), (rows, 1024))
    needs = table_of([(0, whole)] * 4, 2)
    places = Places(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]))
    cut = [(0, Box((first, 0), (rows // 16, 1024))) for first in range(0, rows, rows // 16)]
    for stored in ([(0, whole)], cut):
        plan = plan_load(table_of(stored, 2), np.full(len(stored), 4), needs, np.arange(4), places, chunk_bytes=1 << 16)
        assert plan.bytes_read.tolist() == [rows * 1024] * 4
        assert {len(delivery.ranks) for delivery in plan.deliveries(2)} == {4}
    two = [(0, Box((0, 0), (rows // 2, 1024))), (0, Box((rows // 2, 0), (rows // 2, 1024)))]
    plan = plan_load(table_of(two, 2), np.full(2, 4), needs, np.arange(4), places, chunk_bytes=1 << 30)
    readers = np.flatnonzero(plan.bytes_read).tolist()
    assert len({places.node[rank] for rank in readers}) == 2 and len({places.rail[rank] for rank in readers}) == 2


def test_chains_enter_each_node_once() -> None:
    whole = Box((0,), (64,))
    places = Places(np.array([0, 1, 0, 1, 2, 2]), np.zeros(6, int))
    plan = plan_load(table_of([(0, whole)], 1), np.array([4]), table_of([(0, whole)] * 6, 1), np.arange(6), places)
    (delivery,) = plan.deliveries(5)
    nodes = [int(places.node[rank]) for rank in delivery.ranks]
    assert sorted(delivery.ranks) == list(range(6))
    assert sum(one != other for one, other in pairwise(nodes)) == 2


def test_gaps_and_boxes_stored_twice_are_found() -> None:
    need = table_of([(0, Box((0, 0), (4, 4))), (0, Box((4, 0), (4, 4)))], 2)
    places = Places(np.zeros(2, int), np.arange(2))
    upper, lower = (0, Box((0, 0), (4, 4))), (0, Box((4, 0), (3, 4)))
    plan = plan_load(table_of([upper, lower], 2), np.full(2, 4), need, np.arange(2), places)
    assert plan.gaps.tolist() == [1]
    plan = plan_load(table_of([upper, upper, (0, Box((4, 0), (4, 4)))], 2), np.full(3, 4), need, np.arange(2), places)
    assert plan.gaps.tolist() == [0]


def test_of_a_box_that_is_needed_in_part_all_is_read_for_its_checksum() -> None:
    places = Places(np.zeros(2, int), np.arange(2))
    needs = table_of([(0, Box((0, 0), (2, 8)))], 2)
    stored = table_of([(0, Box((0, 0), (64, 8))), (0, Box((64, 0), (64, 8)))], 2)
    plan = plan_load(stored, np.full(2, 4), needs, np.array([1]), places, chunk_bytes=32)
    assert plan.bytes_read.tolist() == [0, 64 * 8 * 4]
    assert sum(delivery.box.num_elements for delivery in plan.deliveries(1)) == 16
