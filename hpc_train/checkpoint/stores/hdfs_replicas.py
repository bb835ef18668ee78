"""Whether a block that HDFS does not give has rotted, or its data nodes may come back with it.

It has rotted where the name node names as many replicas as the file is to have, and every one of them is known to be
bad. The name node's flag `corrupt` alone says less (seen with Hadoop 2.7): it stands, too, where one replica has rotted
and the data node of a sound one is dead, and where all are dead. Then fewer replicas are named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LocatedBlock:
    """A block as the name node tells it.

    num_replicas: those on data nodes that it takes for alive, without corrupt ones as long as there is another.
    is_corrupt: all of them are bad, by a client's or a data node's report. is_striped: it is cut over its data nodes by
    erasure coding, and has no replicas.
    """

    start: int
    num_bytes: int
    num_replicas: int
    is_corrupt: bool
    is_striped: bool

    def names_all(self, replication: int) -> bool:
        """Whether as many replicas are named as the file is to have, so that none is away."""
        return not self.is_striped and 1 <= replication <= self.num_replicas

    def rotted(self, by: str) -> str:
        return f"all {self.num_replicas} replicas of its block at byte {self.start} are corrupt, {by}"


def reported_rot(blocks: Sequence[LocatedBlock], replication: int) -> str | None:
    """In words the first block of a file that has rotted as the name node knows; None where it knows of none."""
    found = (block for block in blocks if block.is_corrupt and block.names_all(replication))
    return next((block.rotted("as the name node knows") for block in found), None)


def blocks_of_json(located: Mapping[str, Any], *, is_striped: bool) -> list[LocatedBlock]:
    """The blocks in WebHDFS' answer to GET_BLOCK_LOCATIONS.

    Raises: KeyError, TypeError or ValueError where it is none.
    """
    return [
        LocatedBlock(
            int(block["startOffset"]),
            int(block["block"]["numBytes"]),
            len(block["locations"]),
            block["isCorrupt"] is True,
            is_striped,
        )
        for block in located["LocatedBlocks"]["locatedBlocks"]
    ]
