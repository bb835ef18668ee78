"""A rank's side of the node agent's reading: asks for steps and makes tensors of what it maps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from hpc_train.cluster.agent_address import AgentConnection, AgentGone
from hpc_train.cluster.memory_segment import Segment
from hpc_train.data.batch_source import BatchSource
from hpc_train.data.loader import Batch, make_batch
from hpc_train.data.rows import Part
from hpc_train.errors import CheckpointError, ConfigError, DataError, HpcTrainError

_PAUSE_S = 0.1
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
        self, address: AgentAddress, place: ReadingPlace, spec: Mapping[str, Any], *, patience_s: float
    ) -> None:
        """Wait for the agent, and until it has opened the datasets.

        patience_s: How long the agent may take to come up.

        Raises:
            AgentGone: there is none.
            ConfigError, DataError: the datasets cannot be used.
        """
        self._connection = _connect(address, patience_s)
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
            opened, _ = self._ask(request)
        except HpcTrainError:
            self._connection.close()
            raise
        self._has_heldout, self._state = bool(opened["has_heldout"]), opened["state"]

    @property
    def has_heldout(self) -> bool:
        return self._has_heldout

    def first_state(self) -> dict[str, Any]:
        return dict(self._state)

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        answer, _ = self._ask({"say": "data.restore", "state": state})
        self._state = answer["state"]
        return [str(change) for change in answer["changes"]]

    def step(self, number: int) -> tuple[list[Batch], dict[str, Any]]:
        answer, segment = self._ask({"say": "data.step", "number": number})
        return _batches(answer, segment), answer["state"]

    def begin_evaluation(self) -> None:
        self._evaluation += 1

    def heldout_step(self, number: int) -> list[Batch] | None:
        message = {"say": "data.heldout", "evaluation": self._evaluation, "number": number}
        answer, segment = self._ask(message)
        return None if answer.get("end") else _batches(answer, segment)

    def close(self) -> None:
        self._connection.close()

    def _ask(self, message: Mapping[str, Any]) -> tuple[dict[str, Any], Segment | None]:
        """One request; an error of the agent's reading is raised here as what it is there."""
        answer, descriptors = self._connection.ask(message, timeout_s=0)
        segments = [Segment.received(descriptor) for descriptor in descriptors]
        if "error" in answer:
            raise _ERRORS.get(answer["kind"], HpcTrainError)(answer["error"])
        return answer, segments[0] if segments else None


def _connect(address: AgentAddress, patience_s: float) -> AgentConnection:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return AgentConnection.open(address.job_key, address.node)
        except AgentGone:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)


def _batches(answer: Mapping[str, Any], segment: Segment | None) -> list[Batch]:
    parts = [Part.from_json(values) for values in answer["parts"]]
    if segment is None:
        return [make_batch(part, None) for part in parts]
    memory = segment.map()
    segment.close()
    batches = []
    for part, offset in zip(parts, answer["offsets"], strict=True):
        shape = (2, len(part.sequences), part.length)
        values = np.frombuffer(memory, np.int32, 2 * shape[1] * shape[2], offset)
        batches.append(make_batch(part, values.reshape(shape)))
        del values
    memory.close()
    return batches
