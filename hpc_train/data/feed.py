"""What the training loop takes its micro-batches from; the next step's are made ready while a step runs.

1. the loop asks for step n, which a thread began to make ready when step n - 1 was taken
2. the thread goes on with step n + 1: beside n's forwards and backwards and the synchronisation of its gradients
3. the position is that behind the last step that the loop has taken, never that of what is made ready
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal, final

from hpc_train.cluster.agent_address import AgentGone
from hpc_train.cluster.agent_wait import USUAL_LIMITS, AgentLimits, Words
from hpc_train.config import DataConfig, TrainConfig
from hpc_train.data.agent_batches import AgentAddress, AgentBatches, ReadingPlace
from hpc_train.data.batch_source import BatchSource, HeldoutPart, OwnBatches, Taken
from hpc_train.data.loader import Batch, Loader
from hpc_train.data.node_steps import spec_of
from hpc_train.errors import ConfigError, DataError
from hpc_train.log import say, warn
from hpc_train.plan.batch_pieces import PieceBatch
from hpc_train.plan.batch_setup import BatchSetup

_PATIENCE_S = 30.0
"""How long the node agent may take to come up; assumed: its step is begun right behind the ranks', which take seconds
to load torch."""
_LOOK_S = 1.0
"""Between looks whether a word about a wait is due (assumed)."""


@final
class Feed:
    """One rank's micro-batches, step by step. For one thread; it has another one that reads ahead."""

    def __init__(
        self,
        source: BatchSource,
        last_step: int,
        switch: Callable[[AgentGone], BatchSource] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """last_step: nothing is read behind it. switch: gives another source where the agent has ended.

        tell: gets a line now and then while a step is waited for long.
        """
        self._source, self._last_step, self._switch, self._tell = source, last_step, switch, tell
        self._state = source.first_state()
        self._ahead: tuple[int, Future[Taken]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")

    @property
    def has_heldout(self) -> bool:
        return self._source.has_heldout

    @property
    def has_agent(self) -> bool:
        """Whether the node agent reads for this rank."""
        return isinstance(self._source, AgentBatches)

    def leave_agent(self, why: str) -> None:
        """Read by oneself from here on, before any step. Raises DataError where data.reader=agent."""
        self._change_source(AgentGone(why))

    def micro_batches(self, number: int) -> Iterator[Batch | PieceBatch]:
        """This rank's micro-batches of the next step, which has this number; waits at the first one.

        Raises:
            DataError: a dataset cannot be read, or the node agent has ended and data.reader=agent.
        """
        yield from self._next(number).batches

    def plan_ahead(self, number: int) -> bytes:
        """The digest of a next step's batch plan; waits until it is made. Empty where there is no such step or plan.

        Ranks that compare it before they begin the step never wait in rings that others do not know of.
        """
        if number > self._last_step:
            return b""
        if self._ahead is None or self._ahead[0] != number:
            self._read_ahead(number)
        assert self._ahead is not None
        waiting = self._ahead[1]
        taken = self._result(number, waiting)
        done: Future[Taken] = Future()
        done.set_result(taken)
        self._ahead = (number, done)
        return taken.digest

    def heldout(self) -> Iterator[HeldoutPart]:
        """The held-out steps, the same at every call. Raises as `micro_batches`."""
        if not self.has_heldout:
            return
        self._source.begin_evaluation()
        number = 0
        while (part := self._heldout_step(number)) is not None:
            yield part
            number += 1

    def state(self) -> dict[str, Any]:
        """The position behind the last step that was taken, as JSON; the same on every rank."""
        return self._state

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Go on behind a saved position; before any step. Gives what changed in the blend, a sentence each.

        Raises:
            CheckpointError: the blend changed and data.allow_changed_blend is false.
        """
        assert self._ahead is None, "steps are being read already"
        try:
            changes = self._source.restore(state)
        except AgentGone as problem:
            self._change_source(problem)
            changes = self._source.restore(state)
        self._state = self._source.first_state()
        return changes

    def close(self) -> None:
        """End the thread and give back what was read ahead."""
        self._source.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _next(self, number: int) -> Taken:
        taken = self._take(number)
        self._state = taken.state
        if number < self._last_step:
            self._read_ahead(number + 1)
        return taken

    def _read_ahead(self, number: int) -> None:
        self._ahead = (number, self._thread.submit(self._source.step, number))

    def _take(self, number: int) -> Taken:
        if self._ahead is None or self._ahead[0] != number:
            self._read_ahead(number)
        assert self._ahead is not None
        waiting, self._ahead = self._ahead[1], None
        return self._result(number, waiting)

    def _result(self, number: int, waiting: Future[Taken]) -> Taken:
        """What a step that is being read gives, from another source where the agent has ended."""
        words = Words(self._tell)
        while not wait([waiting], timeout=_LOOK_S).done:
            words.look(f"the data of step {number}, which {self._source.reader} reads")
        try:
            return waiting.result()
        except AgentGone as problem:
            self._change_source(problem)
            self._source.restore(self._state)
            return self._source.step(number)

    def _heldout_step(self, number: int) -> HeldoutPart | None:
        try:
            return self._source.heldout_step(number)
        except AgentGone as problem:
            if self._ahead is not None:
                self._ahead[1].exception()  # the thread is done with the old source
                self._ahead = None
            self._change_source(problem)
            self._source.restore(self._state)
            self._source.begin_evaluation()
            for earlier in range(number):
                self._source.heldout_step(earlier)
            return self._source.heldout_step(number)

    def _change_source(self, problem: AgentGone) -> None:
        if self._switch is None:
            raise DataError(
                f"{problem}, and data.reader=agent lets nobody else read. Its log, logs/agent-*.log in the run folder, "
                "may say why; start the run again, or set data.reader=auto, with which ranks then read by themselves."
            ) from problem
        self._source.close()
        self._source = self._switch(problem)


def open_feed(
    data: DataConfig,
    train: TrainConfig,
    *,
    vocab_size: int,
    place: ReadingPlace,
    agent: AgentAddress | None,
    patience_s: float = _PATIENCE_S,
    is_first: bool = False,
    batches: BatchSetup | None = None,
    limits: AgentLimits = USUAL_LIMITS,
) -> Feed:
    """A rank's feed by the reader that data.reader names, said in a line of the log.

    agent: None where no driver started one. is_first: this rank speaks for all where they do the same. batches: plans
    steps whose sequences ranks share; None for rows of equal length. limits: for the agent's answers.

    Raises:
        ConfigError, DataError: the data cannot be used; data.reader=agent without an agent.
    """

    def own() -> BatchSource:
        return OwnBatches(Loader(data, train, vocab_size=vocab_size, dp=place.dp, batches=batches), place.dp_rank)

    def switch(problem: AgentGone) -> BatchSource:
        if place.local_rank == 0:
            warn(f"{problem}: from here on the ranks of this node read by themselves (data.reader=auto)")
        return own()

    reader: Literal["agent", "rank"] = "rank"
    why = f"data.reader={data.reader}"
    if data.reader == "agent" or (data.reader == "auto" and agent is not None):
        reader = "agent"
    elif data.reader == "auto":
        why += ", and no driver started a node agent here"
    if reader == "rank":
        if is_first:
            say(f"data: each rank reads by itself, a step ahead ({why})")
        return Feed(own(), train.steps, tell=_teller(place))
    if agent is None:
        raise ConfigError(
            "data.reader=agent, but no driver has started a node agent here. Start by `hpc-train run` or `submit`, or "
            "use data.reader=auto or rank."
        )
    spec = spec_of(data, train, vocab_size=vocab_size, dp=place.dp, batches=batches)
    try:
        source: BatchSource = AgentBatches(agent, place, spec, patience_s=patience_s, limits=limits)
    except AgentGone as problem:
        if data.reader == "agent":
            raise DataError(
                f"data.reader=agent, but {problem}. Look at logs/agent-{agent.node}.log in the run folder, or set "
                "data.reader=auto, with which ranks then read by themselves."
            ) from problem
        return Feed(switch(problem), train.steps, tell=_teller(place))
    if is_first:
        say(f"data: read once a node by its agent, ahead of the ranks (data.reader={data.reader})")
    return Feed(source, train.steps, switch if data.reader == "auto" else None, _teller(place))


def _teller(place: ReadingPlace) -> Callable[[str], None] | None:
    """What says a word for the ranks of a node, on the first of them."""
    return warn if place.local_rank == 0 else None
