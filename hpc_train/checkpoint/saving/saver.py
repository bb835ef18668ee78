"""Who saves a run's state: the node agents beside the training, or without them the ranks themselves, which wait.

`checkpoint.writer` says who; with `auto` the agents, for as long as every node has one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from hpc_train.checkpoint.copies.local_saves import LocalCopies
from hpc_train.checkpoint.folders.attempt import attempt_of, shut_out_agents
from hpc_train.checkpoint.folders.folder import step_folder
from hpc_train.checkpoint.folders.run_location import is_elsewhere, note_saved
from hpc_train.checkpoint.format.state import StatePiece
from hpc_train.checkpoint.saving.agent_saves import AgentSaves, Saved, SaveFailed
from hpc_train.checkpoint.saving.save import save_checkpoint
from hpc_train.checkpoint.saving.save_record import SaveRecord
from hpc_train.checkpoint.saving.shared_memory import AgentTarget
from hpc_train.checkpoint.stores.bounded import bounded
from hpc_train.checkpoint.stores.caller import Bound
from hpc_train.checkpoint.stores.location import Location, locate
from hpc_train.cluster.agent_address import AgentGone
from hpc_train.cluster.agent_wait import USUAL_LIMITS, AgentLimits
from hpc_train.comm.world import World
from hpc_train.config import CheckpointConfig
from hpc_train.errors import CheckpointError, ConfigError, HangError, HpcTrainError
from hpc_train.log import say, warn

_SAME_S = 0.005
"""Of two times that are told in hundredths."""


@final
class Saver:
    """Saves of one run. Methods are collective over all ranks unless they say otherwise."""

    def __init__(
        self,
        config: CheckpointConfig,
        root: Location,
        run_dir: Path,
        world: World,
        agent: tuple[str, str] | None,
        completed: Callable[[float], str | None],
        copies: LocalCopies | None = None,
        limits: AgentLimits = USUAL_LIMITS,
    ) -> None:
        """agent: job key and node, where a driver has started one. completed: told the seconds of saves; may warn.

        copies: on the nodes' own disks, where checkpoint.local asks for them. limits: how long agents are waited for.
        """
        # A store that hangs is named by one rank a node, as agents are.
        self._limits, self._bound = limits, Bound(limits.save_s, tell=warn if world.local_rank == 0 else None)
        self._config, self._root, self._run_dir, self._world = config, root.within(self._bound), run_dir, world
        self._agent, self._completed, self._copies = agent, completed, copies
        self._agents: AgentSaves | None = None
        self._is_open = False
        self._warned_of: int | None = None
        self._failed: SaveFailed | None = None
        self._record = SaveRecord()

    def loaded(self, store_step: int | None) -> None:
        """The run goes on from a checkpoint. store_step: on rank 0, the newest in the store. Not collective."""
        self._record.found(store_step)

    def open(self, pieces: Sequence[StatePiece]) -> None:
        """Make ready now what the first save needs, for which the end of a warning may not wait.

        Raises:
            HpcTrainError: on every rank: checkpoint.writer=agent or checkpoint.local, and there is no agent; not the
                memory, or no place for local copies.
        """
        if self._is_open:
            return
        self._is_open = True
        config = self._config
        if config.writer == "agent" and self._agent is None:
            raise ConfigError(
                "checkpoint.writer=agent, but no driver has started a node agent here. Start by `hpc-train run` or "
                "`submit`, or use checkpoint.writer=auto or rank."
            )
        if self._copies is not None and self._agent is None:
            raise ConfigError(
                "checkpoint.local has no effect here: node agents make the copies, and no driver has started one. "
                "Start by `hpc-train run` or `submit`, or leave checkpoint.local out."
            )
        if config.writer == "rank" or self._agent is None:
            return
        note_dir = self._run_dir if is_elsewhere(self._root, self._run_dir) else None
        target = AgentTarget(self._root, config.keep, config.write_bytes_per_s, config.finish_s, note_dir)
        try:
            self._agents = AgentSaves(self._world, self._agent, target, pieces, self._report, self._limits)
        except HpcTrainError as problem:
            self._leave_agents(problem)
            return
        if self._copies is not None:
            self._agents.open_copies(self._copies)

    def save(self, step: int, pieces: Sequence[StatePiece], values: dict[str, Any], *, must_last: bool) -> bool:
        """Save a step; false if it is not saved, as far as is known.

        must_last: wait until it is committed, and never leave it out.

        Raises:
            CheckpointError: it failed, or the one before did, unless checkpoint.on_error=continue; or, whatever that
                says, a save neither fails nor gets on.
        """
        self.open(pieces)
        try:
            if self._agents is None:
                is_saved = self._save_by_ranks(step, pieces, values)
                if must_last and is_saved:
                    self._drop_copies()
                return is_saved
            when_busy = "wait" if must_last else self._config.when_busy
            has_copy = self.is_copy_due(step) and not must_last
            is_begun = self._agents.save(step, pieces, values, when_busy, hurry=must_last, has_copy=has_copy)
            if is_begun:
                self._record.begun(step)
            if must_last:
                self._agents.settle()
                self._drop_copies()
            return is_begun
        except SaveFailed as error:
            self._bear(error)
            # Where the one before failed, this one has still to be saved.
            return error.step != step and self.save(step, pieces, values, must_last=must_last)
        except AgentGone as problem:
            self._leave_agents(problem)
            return self.save(step, pieces, values, must_last=must_last)

    def is_copy_due(self, step: int) -> bool:
        """Whether the nodes' own disks get a copy of a step. Not collective, and the same on every rank."""
        return self._copies is not None and self._agents is not None and self._copies.is_due(step)

    def copy_locally(self, step: int, pieces: Sequence[StatePiece], values: dict[str, Any]) -> bool:
        """Copy a step to the nodes' own disks alone, unless a save before is not done: training does not wait for it.

        Where an agent has taken the save before along, the ranks save this step to the store in its place.

        Returns:
            Whether the copy is begun.

        Raises:
            CheckpointError: the save before failed, unless checkpoint.on_error=continue.
        """
        if self._agents is None:
            return False
        try:
            return self._agents.save(step, pieces, values, "skip", is_for_store=False, has_copy=True)
        except SaveFailed as error:
            self._bear(error)
        except AgentGone as problem:
            lost_step = self._agents.lost_step
            self._leave_agents(problem)
            if lost_step is not None:
                self.save(step, pieces, values, must_last=False)
        return False

    def look(self) -> None:
        """On rank 0, say what has become of a save written beside the training. Not collective, never waits."""
        failed = self._agents.look() if self._agents is not None else None
        if failed is not None:
            self._failed = failed if self._config.on_error == "stop" else None
            self._warn_of(failed)

    @property
    def has_failed(self) -> bool:
        """On rank 0: a save has failed while training went on, and checkpoint.on_error=stop.

        The next `save` or `finish` raises that on every rank.
        """
        return self._failed is not None

    @property
    def is_writing(self) -> bool:
        """Whether a save is still on its way beside the training, as far as this rank knows. Not collective."""
        return self._agents is not None and self._agents.is_writing

    @property
    def failed_saves(self) -> str | None:
        """On rank 0, in words: the saves that failed, and what was saved last; None where none failed."""
        return self._record.failures()

    def finish(self) -> None:
        """When all steps are taken, wait until what was copied is committed.

        Raises:
            CheckpointError: the last save failed, whatever checkpoint.on_error says; or as `save`.
        """
        step = self._agents.pending_step if self._agents is not None else None
        if self._agents is not None and step is not None:
            try:
                self._agents.settle()
            except SaveFailed as error:
                self._bear(error)
            except AgentGone as problem:
                # What was copied is lost with the agent, and the state has changed since.
                self._bear(SaveFailed(step, str(problem)))
        self._record.require_last()

    def close(self) -> None:
        """Not collective; agents write on."""
        if self._agents is not None:
            self._agents.close()

    def _save_by_ranks(self, step: int, pieces: Sequence[StatePiece], values: dict[str, Any]) -> bool:
        begin = time.perf_counter()
        self._record.begun(step)
        try:
            save_checkpoint(self._root, step, pieces, values, self._world, keep=self._config.keep)
        except CheckpointError as error:
            self._record.failed(step, str(error))
            # A call that hangs still holds this state, which the next step would change.
            if self._config.on_error == "stop" or isinstance(error, HangError):
                raise
            if self._world.rank == 0:
                warn(f"step {step} is not saved, training goes on (checkpoint.on_error=continue): {error}")
            return False
        seconds = time.perf_counter() - begin
        if self._world.rank == 0:
            self._note_saved(step)
            self._report(Saved(step, seconds, seconds))
        return True

    def _note_saved(self, step: int) -> None:
        def note() -> None:
            note_saved(self._root, self._run_dir, step)

        try:
            bounded(locate(self._run_dir), note, f"telling the run folder of step {step}", self._bound)
        except (CheckpointError, OSError) as problem:
            warn(f"the run folder could not be told of step {step}, which is saved: {problem}")

    def _drop_copies(self) -> None:
        """Nothing is gone on from but the store, which has the run's last save."""
        if self._copies is not None:
            assert self._agent is not None
            self._copies.drop(self._agent)

    def _report(self, saved: Saved) -> None:
        self._record.saved(saved.step)
        if self._copies is not None:
            self._copies.store_step = saved.step
        is_all = saved.seconds - saved.stall_s < _SAME_S
        waited = "" if is_all else f", of which training waited {saved.stall_s:.2f} s"
        say(f"saved {step_folder(saved.step)} in {saved.seconds:.2f} s{waited}")
        too_short = self._completed(saved.seconds)
        if too_short is not None:
            warn(too_short)

    def _bear(self, error: SaveFailed) -> None:
        self._failed = None
        self._record.failed(error.step, error.why)
        if self._config.on_error == "stop":
            raise error
        self._warn_of(error)

    def _raise_what_was_told(self) -> None:
        """On every rank: the failure for which the run is about to stop, where the agents that know of it are gone."""
        mine = None if self._failed is None else [self._failed.step, self._failed.why]
        told = self._world.control.broadcast(mine)
        if told is not None:
            self._bear(SaveFailed(*told))

    def _warn_of(self, error: SaveFailed) -> None:
        if self._world.rank == 0 and self._warned_of != error.step:
            self._warned_of = error.step
            warn(f"{error} (checkpoint.on_error={self._config.on_error})")

    def _leave_agents(self, problem: HpcTrainError) -> None:
        """Save by the ranks from here on, unless checkpoint.writer=agent.

        Raises:
            CheckpointError: on every rank: with checkpoint.writer=agent; or a failure that stops the run was told of.
        """
        lost_step = self._agents.lost_step if self._agents is not None else None
        lost = "" if lost_step is None else f"; step {lost_step}, which was being written, may be lost"
        self.close()
        self._agents = None
        if self._config.writer == "agent":
            error = CheckpointError(
                f"checkpoint.writer=agent, but {problem}{lost}. The agents' logs, logs/agent-*.log in the run folder, "
                "may say why; start the run again, or set checkpoint.writer=auto, with which the ranks write then."
            )
            error.reporter = 0
            raise error from problem
        if self._world.rank == 0:
            assert self._agent is not None
            try:
                # One that was stopped may go on at any time.
                shut_out_agents(self._root, attempt_of(self._agent[0]))
            except (CheckpointError, OSError) as more:
                warn(f"node agents could not be told that the ranks write now: {more}")
            warn(
                f"{problem}{lost}: from here on the ranks write checkpoints by themselves, and training waits for "
                "them (checkpoint.writer=auto)"
            )
            if self._copies is not None:
                warn(
                    "no more copies are made on the nodes' own disks (checkpoint.local); those that are there stay "
                    "until the run's last save is in the store"
                )
        self._raise_what_was_told()
