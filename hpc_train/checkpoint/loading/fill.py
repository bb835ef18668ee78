"""Fill all ranks' pieces from one checkpoint: every stored byte is read once, checked, and passed on to who needs it.

A thread reads this rank's chunks ahead while those before are on their way (`comm.relay`), so memory is bounded by a
few chunks. A rank whose reading fails goes on with zeros in the place of what it cannot read: the others are waiting
for it. What they filled counts only when all ranks have met at the end and nobody has a fault to tell.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hpc_train.checkpoint.files.chunk_reader import ChunkReader, damage
from hpc_train.checkpoint.format.crc import joined
from hpc_train.checkpoint.loading.needs import Loading
from hpc_train.checkpoint.stores.caller import Bound
from hpc_train.cluster.agent_wait import AgentLimits
from hpc_train.comm.collectives import world_group
from hpc_train.comm.relay import Leg, relay
from hpc_train.comm.world import World
from hpc_train.log import warn
from hpc_train.plan.checkpoint_load import Chunk, Delivery


def fill(loading: Loading, world: World, limits: AgentLimits) -> str | None:
    """Fill this rank's pieces; what is wrong with the checkpoint, the same on every rank, or None. Collective.

    limits: how long a store is waited for in which nothing moves.

    Raises:
        CheckpointError: on every rank: the store does not give one of them what lies there.
    """
    if len(loading.plan.gaps):
        return _gap(loading)
    carrier = _Carrier(loading, world, limits)
    relay(
        carrier.legs, carrier.make, carrier.take, world_group(world.world_size, world.rank, world.backend), world.device
    )
    reader = carrier.reader
    reader.end()
    world.agree(reader.failure)
    told = world.control.all_gather([reader.problem, reader.runs])
    problems = [problem for problem, _ in told if problem is not None]
    return problems[0] if problems else _joined_damage(loading, [run for _, runs in told for run in runs])


def _gap(loading: Loading) -> str:
    row = int(loading.plan.gaps[0])
    name = loading.names[int(loading.plan.needed.tensor[row])]
    box = loading.plan.needed.box(row)
    return (
        f"{name} is stored with gaps: the elements at {list(box.offsets)} of size {list(box.sizes)} are not there once"
    )


def _joined_damage(loading: Loading, runs: Sequence[Sequence[int]]) -> str | None:
    """The first box that several ranks read and whose bytes together do not have its checksum."""
    ends: dict[int, tuple[int, int]] = {}
    for row, start, num_bytes, crc32 in sorted(map(tuple, runs)):
        end, crc = ends.get(row, (0, 0))
        assert start == end, "the parts of a box are read once each"
        ends[row] = (end + num_bytes, joined(crc, crc32, num_bytes))
    for row, (end, crc32) in sorted(ends.items()):
        stored = loading.stored(row)
        if end != stored.num_bytes or crc32 != stored.crc32:
            return damage(loading.folder_of.get(stored.file, loading.path), stored)
    return None


class _Carrier:
    """This rank's deliveries as legs of a relay."""

    def __init__(self, loading: Loading, world: World, limits: AgentLimits) -> None:
        plan = loading.plan
        self._loading, self._device = loading, world.device
        self._deliveries = plan.deliveries(world.rank)
        chunks = plan.read_by(world.rank)
        rows = [int(plan.box_of_part[chunk.part]) for chunk in chunks]
        stored = [(row, loading.stored(row), int(plan.item_bytes[row])) for row in rows]
        self._places = {(chunk.part, chunk.number): place for place, chunk in enumerate(chunks)}
        self._at_hand: tuple[int, torch.Tensor | None] = (-1, None)
        self.legs = [self._leg(delivery, world.rank) for delivery in self._deliveries]
        # As for data: this rank names the store before those give up that wait for what it reads.
        bound = Bound(limits.data_s, tell=warn if world.local_rank == 0 else None)
        self.reader = ChunkReader(loading.path, chunks, stored, loading.folder_of, bound)

    def make(self, number: int) -> torch.Tensor:
        """The bytes of a box of a chunk that this rank has read; zeros where reading has failed."""
        delivery = self._deliveries[number]
        values = self._chunk(delivery.chunk)
        if values is None:
            return torch.zeros(self.legs[number].num_bytes, dtype=torch.uint8, device=self._device)
        part = values[delivery.box.slices_within(delivery.chunk.box)].contiguous()
        return part.view(-1).view(torch.uint8).to(self._device)

    def take(self, number: int, buffer: torch.Tensor) -> None:
        """Copy a box into this rank's pieces."""
        delivery = self._deliveries[number]
        for row in delivery.needed:
            piece = self._loading.pieces[row]
            values = buffer.view(self._dtype(delivery.chunk)).view(delivery.box.sizes)
            piece.data.view(piece.box.sizes)[delivery.box.slices_within(piece.box)] = values

    def _chunk(self, chunk: Chunk) -> torch.Tensor | None:
        """A chunk as a tensor in its stored type; boxes of one chunk follow each other."""
        place = self._places[chunk.part, chunk.number]
        if self._at_hand[0] != place:
            data = self.reader.take(place)
            self._at_hand = place, None if data is None else self._typed(chunk, data)
        return self._at_hand[1]

    def _typed(self, chunk: Chunk, data: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(data).view(self._dtype(chunk)).view(chunk.box.sizes)

    def _dtype(self, chunk: Chunk) -> torch.dtype:
        return self._loading.dtype(int(self._loading.plan.parts.tensor[chunk.part]))

    def _leg(self, delivery: Delivery, rank: int) -> Leg:
        item_bytes = int(self._loading.plan.item_bytes[self._loading.plan.box_of_part[delivery.chunk.part]])
        place = delivery.ranks.index(rank)
        source = delivery.ranks[place - 1] if place else None
        target = delivery.ranks[place + 1] if place + 1 < len(delivery.ranks) else None
        return Leg(delivery.box.num_elements * item_bytes, source, target)
