"""Saves of one rank, each of which the rank or a node agent writes to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

from hpc_train.checkpoint.saving.saver import Saver
from hpc_train.checkpoint.stores.location import Place, locate
from hpc_train.config import CheckpointConfig
from tests.checkpoint import plain_state
from tests.checkpoint.plain_state import Alone
from tests.node_agents import agent_process
from tests.worlds import single_world

Save = Callable[[int], None]
Writer = Literal["rank", "agent"]


@contextmanager
def saves(writer: Writer, place: Place, folder: Path, num_elements: int) -> Iterator[Save]:
    """Saves a step with keep=2: returns when it is committed, raises where it is not. folder: the agent's own."""
    if writer == "rank":
        yield lambda step: _save_by_rank(place, step, num_elements)
        return
    state = plain_state.state(Alone(), None, num_elements)
    config = CheckpointConfig(keep=2, writer="agent")

    def save(step: int) -> None:
        for piece, wanted in zip(state, plain_state.state(Alone(), step, num_elements), strict=True):
            piece.data.copy_(wanted.data)
        assert saver.save(step, state, {"num_updates": step}, must_last=True)

    with agent_process(folder) as agent:
        address = (agent.key, agent.node)
        with closing(Saver(config, locate(place), folder, single_world(), address, lambda seconds: None)) as saver:
            yield save


def _save_by_rank(place: Place, step: int, num_elements: int) -> None:
    plain_state.save(Alone(), place, step, num_elements, keep=2)
