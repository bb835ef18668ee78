"""Whether all bytes of parts on the nodes' own disks are what their records say, each read where it lies. No torch."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from hpc_train.checkpoint.copies.local_parts import PartName, read_record
from hpc_train.checkpoint.files.boxes import BoxFiles
from hpc_train.checkpoint.files.chunk_reader import damage
from hpc_train.checkpoint.format.placed import WrittenBox
from hpc_train.checkpoint.stores.location import Location
from hpc_train.comm.world import World
from hpc_train.errors import CheckpointError

_BLOCK_BYTES = 8 << 20
"""Read at once; assumed: large enough that calls cost nothing."""


def damaged_parts(root: Location, names: Iterable[PartName], world: World) -> dict[tuple[PartName, int], str]:
    """What is wrong with parts, by their name and the node that has them; a node's ranks share the reading.

    Collective over all ranks. names: of the parts that this node reads.
    """
    found = {}
    for name in names:
        fault = _fault(root / name.folder, world.local_rank, world.local_world_size)
        if fault is not None:
            found[name.folder] = fault
    told = world.control.all_gather([world.node_rank, found])
    faults: dict[tuple[PartName, int], str] = {}
    for node, of_rank in told:
        for folder, fault in of_rank.items():
            part = PartName.of_folder(folder)
            assert part is not None
            faults.setdefault((part, node), fault)
    return faults


def _fault(part: Location, first: int, stride: int) -> str | None:
    try:
        return damage_of(part, read_record(part).written[first::stride])
    except FileNotFoundError as problem:
        return f"{part} is not whole: {problem}"
    except CheckpointError as problem:
        return str(problem)


def damage_of(part: Location, boxes: Iterable[WrittenBox]) -> str | None:
    """What is wrong with boxes of a part, all bytes of which are read; None where they have their checksums."""
    try:
        with BoxFiles(part) as files:
            for box in boxes:
                placed, crc32 = box.placed, 0
                for start in range(0, placed.num_bytes, _BLOCK_BYTES):
                    num_bytes = min(_BLOCK_BYTES, placed.num_bytes - start)
                    crc32 = zlib.crc32(files.read(placed.file, placed.start + start, num_bytes).data, crc32)
                if crc32 != box.crc32:
                    return damage(part, box.stored)
    except CheckpointError as problem:
        return str(problem)
    return None
