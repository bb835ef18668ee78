"""The memory that a rank copies its state into, taken once and mapped by the agent of its node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.folders.attempt import attempt_of
from hpc_train.checkpoint.format.placed import PlacedBox
from hpc_train.checkpoint.format.state import StatePiece
from hpc_train.checkpoint.format.torch_index import index_bytes
from hpc_train.checkpoint.saving.agent_link import AgentLink
from hpc_train.checkpoint.saving.snapshot import Snapshot, snapshot_bytes
from hpc_train.checkpoint.stores.location import Location
from hpc_train.cluster.limits import available_memory_bytes
from hpc_train.cluster.memory_segment import Segment
from hpc_train.errors import CheckpointError, HpcTrainError

_OPEN_S = 180.0
"""For an agent to map the memory and to see the store; assumed: that answers within its own patience, 120 s."""


@dataclass(frozen=True)
class AgentTarget:
    """What agents are told once: where checkpoints go, and as the configuration has them.

    note_dir: the run folder, where it has to be told of the newest step because checkpoints lie elsewhere.
    """

    root: Location
    keep: int
    bytes_per_s: float | None
    finish_s: float
    note_dir: Path | None

    def to_plain(self) -> dict[str, Any]:
        note_dir = str(self.note_dir) if self.note_dir is not None else None
        return {"root": str(self.root), "keep": self.keep, "bytes_per_s": self.bytes_per_s, "note_dir": note_dir}


def share_memory(link: AgentLink, target: AgentTarget, pieces: Sequence[StatePiece]) -> Snapshot:
    """Take the memory for a rank's pieces and have its agent map it. Collective over all ranks.

    Raises:
        HpcTrainError: on every rank: some node has not the memory, or its agent not the store. The link is closed.
    """
    world = link.world
    _check_memory(link, snapshot_bytes(pieces, world.rank))
    snapshots: list[Snapshot] = []
    try:
        link.together(lambda: snapshots.append(Snapshot(pieces, world.rank)))
        (snapshot,) = snapshots
        placed = world.control.gather([box.to_plain() for box in snapshot.placed])
        with _trial(link, target.root) as trial:
            link.together(lambda: _pass_on(link, target, snapshot, placed, trial))
    except BaseException:
        for snapshot in snapshots:
            snapshot.close()
        raise
    return snapshot


def _check_memory(link: AgentLink, num_bytes: int) -> None:
    """Refuse what the node's ranks together do not get: the kernel would end one of them instead."""
    world = link.world
    told = world.control.all_gather([world.node_rank, num_bytes])
    of_node = [count for node_rank, count in told if node_rank == world.node_rank]

    def check() -> None:
        available = available_memory_bytes()
        if available is not None and sum(of_node) > available:
            raise CheckpointError(
                f"{sum(of_node) / 2**20:.1f} MiB of memory for the copies of the {len(of_node)} ranks of "
                f"{world.node} are not to be had: {available / 2**20:.1f} MiB are available there, within the "
                "limits of the job. Give the job more memory (--mem)."
            )

    link.together(check)


@contextmanager
def _trial(link: AgentLink, root: Location) -> Iterator[str]:
    """The name of a file in the store by which agents see that they look at the same one."""
    name = f".trial.tmp-{link.session}"

    def put() -> None:
        if link.world.rank == 0:
            root.make_folder()
            (root / name).write_text("seen\n")

    try:
        link.together(put)
        yield name
    finally:
        if link.world.rank == 0:
            with suppress(CheckpointError, OSError):
                (root / name).remove()


def _pass_on(
    link: AgentLink,
    target: AgentTarget,
    snapshot: Snapshot,
    placed: Sequence[Sequence[Mapping[str, Any]]] | None,
    trial: str,
) -> None:
    """Give the agent this rank's memory, and on rank 0 torch's index of all ranks' boxes."""
    world = link.world
    segments = [snapshot.segment]
    message = {
        "say": "checkpoint.open",
        "session": link.session,
        "rank": world.rank,
        "count": world.local_world_size,
        "node_rank": world.node_rank,
        "num_nodes": world.num_nodes,
        "target": {**target.to_plain(), "attempt": attempt_of(link.agent[0])},
        "trial": trial,
        "finish_s": target.finish_s,
        "placed": [box.to_plain() for box in snapshot.placed],
        "offsets": snapshot.offsets,
    }

    def sees_nothing(seconds: float) -> HpcTrainError:
        return CheckpointError(f"{target.root} does not answer the node agent of {link.node} in {seconds:.0f} s")

    try:
        if placed is not None:
            index = index_bytes([PlacedBox.from_plain(box) for of_rank in placed for box in of_rank])
            segments.append(Segment.create("checkpoint.index", len(index)))
            segments[1].write(0, index)
        wait = link.wait("its look at the store", _OPEN_S, sees_nothing)
        descriptors = [segment.descriptor for segment in segments]
        answer, _ = link.connection.ask(message, descriptors, timeout_s=link.limits.silence_s, look=wait.look)
    finally:
        for segment in segments:
            segment.close()
    if "error" in answer:
        raise CheckpointError(f"the node agent of {link.node} does not take the state: {answer['error']}")
