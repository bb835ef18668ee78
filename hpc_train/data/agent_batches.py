"""A rank's side of the node agent's reading: asks for steps and makes tensors of what it maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from hpc_train.cluster.agent_address import AgentConnection
from hpc_train.cluster.agent_wait import USUAL_LIMITS, AgentLimits, AgentWait, Words
from hpc_train.cluster.memory_segment import Segment
from hpc_train.data.batch_source import Batches, BatchSource, HeldoutPart, Taken
from hpc_train.data.loader import make_batch
from hpc_train.data.pieces import PiecePart, make_piece_batch
from hpc_train.data.rows import Part
from hpc_train.errors import CheckpointError, ConfigError, DataError, HpcTrainError
from hpc_train.log import warn

P = TypeVar("P")
M = TypeVar("M")
_ERRORS: Mapping[str, type[HpcTrainError]] = {
    error.__name__: error for error in (ConfigError, DataError, CheckpointError)
}


@final
@dataclass(frozen=True)
class AgentAddress:
    """Where the agent of this node is. session: a word that all ranks of one start have, and no other start."""

    job_key: str
    node: str
    session: str


@final
@dataclass(frozen=True)
class ReadingPlace:
    """A rank as the data sees it: its place of dp on the dp axis, and who it is among the ranks of its node.

    wants_tokens: whether it has the first or the last stage of the pipeline.
    """

    dp: int
    dp_rank: int
    wants_tokens: bool
    local_rank: int
    local_world_size: int


@final
class AgentBatches(BatchSource):
    """Batches of one rank, from the node agent. Training and evaluation may ask from two threads."""

    def __init__(
        self,
        address: AgentAddress,
        place: ReadingPlace,
        spec: Mapping[str, Any],
        *,
        patience_s: float,
        limits: AgentLimits = USUAL_LIMITS,
    ) -> None:
        """Wait for the agent, and until it has opened the datasets. The first rank of a node says so if it takes long.

        patience_s: How long the agent may take to come up. limits: for all that it is asked later.

        Raises:
            AgentGone: there is none.
            ConfigError, DataError: the datasets cannot be used.
        """
        self._agent, self._limits = (address.job_key, address.node), limits
        self._tell = warn if place.local_rank == 0 else None
        words = Words(self._tell)

        def look() -> None:
            words.look(f"the node agent of {address.node} to come up")

        self._connection = AgentConnection.open_patiently(*self._agent, patience_s, look)
        self._place, self._has_pieces = place.dp_rank, spec["batches"] is not None
        self._evaluation = 0
        request = {
            "say": "data.open",
            "session": address.session,
            "spec": spec,
            "count": place.local_world_size,
            "index": place.local_rank,
            "place": place.dp_rank,
            "wants_tokens": place.wants_tokens,
        }
        try:
            opened, _ = self._ask(request, "the datasets", self._tell)
        except HpcTrainError:
            self._connection.close()
            raise
        self._has_heldout, self._state = bool(opened["has_heldout"]), opened["state"]

    @property
    def has_heldout(self) -> bool:
        return self._has_heldout

    def first_state(self) -> dict[str, Any]:
        return dict(self._state)

    @property
    def reader(self) -> str:
        return f"the node agent of {self._agent[1]}"

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        answer, _ = self._ask({"say": "data.restore", "state": state}, "the position in the data", self._tell)
        self._state = answer["state"]
        return [str(change) for change in answer["changes"]]

    def step(self, number: int) -> Taken:
        # A word about this wait is for who takes the step, and may not need it yet.
        answer, segment = self._ask({"say": "data.step", "number": number}, f"the data of step {number}", None)
        return Taken(self._batches(answer, segment), answer["state"], bytes.fromhex(answer["plan"]))

    def begin_evaluation(self) -> None:
        self._evaluation += 1

    def heldout_step(self, number: int) -> HeldoutPart | None:
        message = {"say": "data.heldout", "evaluation": self._evaluation, "number": number}
        answer, segment = self._ask(message, f"the data of held-out step {number}", self._tell)
        if answer.get("end"):
            return None
        return HeldoutPart(self._batches(answer, segment), bytes.fromhex(answer["plan"]))

    def close(self) -> None:
        self._connection.close()

    def _batches(self, answer: Mapping[str, Any], segment: Segment | None) -> Batches:
        if not self._has_pieces:
            parts = [Part.from_json(values) for values in answer["parts"]]
            shapes = [(2, len(part.sequences), part.length) for part in parts]
            return _made(make_batch, parts, shapes, answer, segment)
        pieces = [PiecePart.from_json(values) for values in answer["parts"]]
        make = partial(make_piece_batch, self._place)
        return _made(make, pieces, [(2, part.micro_batch.num_tokens) for part in pieces], answer, segment)

    def _ask(
        self, message: Mapping[str, Any], what: str, tell: Callable[[str], None] | None
    ) -> tuple[dict[str, Any], Segment | None]:
        """One request; an error of the agent's reading is raised here as what it is there.

        Raises:
            AgentGone: the agent has ended, or answers nothing.
            DataError: it answers, and still does not come to an end with its reading.
        """

        def hangs(seconds: float) -> HpcTrainError:
            return DataError(
                f"the node agent of {self._agent[1]} has not come to {what} in {seconds:.0f} s, although it lives: the "
                "files of the data do not answer there, or too slowly. Ranks wait for each other for no longer than "
                "launch.timeout_s, and for this a little less; look at the file system, or raise that"
            )

        limits = self._limits
        wait = AgentWait(self._agent, what, limits.silence_s, tell, hang_s=limits.data_s, hangs=hangs)
        answer, descriptors = self._connection.ask(message, timeout_s=limits.silence_s, look=wait.look)
        segments = [Segment.received(descriptor) for descriptor in descriptors]
        if "error" in answer:
            raise _ERRORS.get(answer["kind"], HpcTrainError)(answer["error"])
        return answer, segments[0] if segments else None


def _made(
    make: Callable[[P, NDArray[np.int32] | None], M],
    parts: Sequence[P],
    shapes: Sequence[tuple[int, ...]],
    answer: Mapping[str, Any],
    segment: Segment | None,
) -> list[M]:
    """Micro-batches of what the agent has read, which each copies; of nothing where no tokens are needed."""
    if segment is None:
        return [make(part, None) for part in parts]
    memory = segment.map()
    segment.close()
    batches = []
    for part, shape, offset in zip(parts, shapes, answer["offsets"], strict=True):
        values = np.frombuffer(memory, np.int32, math.prod(shape), offset)
        batches.append(make(part, values.reshape(shape)))
        del values
    memory.close()
    return batches
