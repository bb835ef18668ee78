"""A rank's conversation with its node agent about saves, and what all ranks hear of all agents."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, final

from hpc_train.checkpoint.saving.pending_save import PATIENCE_S, PendingSave
from hpc_train.cluster.agent_address import AgentConnection, AgentGone
from hpc_train.cluster.agent_wait import AgentLimits, AgentWait, words_meanwhile
from hpc_train.comm.world import World
from hpc_train.errors import CheckpointError, HpcTrainError
from hpc_train.log import warn


@final
class AgentLink:
    """session: what the agents know this start of the run by. speak: says that this rank waits; None where another one
    of the node does.
    """

    def __init__(self, world: World, agent: tuple[str, str], limits: AgentLimits) -> None:
        """Connect. Collective over all ranks.

        agent: its job key and node. limits: how long it is waited for.

        Raises:
            HpcTrainError: on every rank: some node has no agent.
        """
        self.world, self.agent, self.limits = world, agent, limits
        self.speak = warn if world.local_rank == 0 else None
        self.session = str(world.control.broadcast(secrets.token_hex(4) if world.rank == 0 else None))
        self._connection: AgentConnection | None = None
        self._gone: str | None = None
        self.together(self._connect)

    @property
    def node(self) -> str:
        return self.agent[1]

    @property
    def connection(self) -> AgentConnection:
        assert self._connection is not None
        return self._connection

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The agent's answer; `gone` with the reason where there is none, or it has lost what it was told."""
        silence_s = self.limits.silence_s
        if self._gone is None:
            # Answers to these wait for nothing, so that there is no need to ask for a sign of life.
            wait = AgentWait(self.agent, "an answer about checkpoints", silence_s, self.speak)
            try:
                answer, _ = self.connection.ask(message, timeout_s=silence_s, look=lambda: wait.look(answers=False))
                if "error" not in answer:
                    return answer
                return {"gone": f"the node agent refuses: {answer['error']} (on {self.node})"}
            except AgentGone as problem:
                # An answer that came late would be taken for that of the next question.
                self.connection.close()
                self._gone = str(problem) if f"agent of {self.node}" in str(problem) else f"{problem} (on {self.node})"
        return {"gone": self._gone}

    def listen(self, pending: PendingSave) -> None:
        """Have a save hear of its end beside the training."""
        pending.listen(self.agent, self.session, self.limits.silence_s)

    def hear_all(self, answer: dict[str, Any], step: int) -> list[dict[str, Any]]:
        """All ranks' answers. Collective."""
        tell = self.speak if self.world.rank == 0 and self.world.num_nodes > 1 else None
        what = f"ranks of other nodes at the save of step {step}, which may wait for their node agents (logs/NODE.log)"
        with words_meanwhile(tell, what):
            return self.world.control.all_gather(answer)

    def wait(self, what: str, hang_s: float, hangs: Callable[[float], HpcTrainError]) -> AgentWait:
        """One for what the agent says later, and is asked meanwhile whether it lives."""
        return AgentWait(self.agent, what, self.limits.silence_s, self.speak, hang_s=hang_s, hangs=hangs)

    def together(self, act: Callable[[], None]) -> None:
        """Do what may fail on some ranks; where it does on any, all raise alike and are linked no more. Collective."""
        error: HpcTrainError | None = None
        try:
            act()
        except HpcTrainError as problem:
            error = problem
        except Exception as problem:
            # Not raised as it is: one rank would end by what all can do without.
            error = CheckpointError(f"{type(problem).__name__}: {problem}")
            error.__cause__ = problem
        try:
            self.world.agree(error)
        except HpcTrainError:
            self.close()
            raise

    def close(self) -> None:
        """Leave the agent, which writes on. Safe to call twice. Not collective."""
        if self._connection is not None:
            self._connection.close()

    def _connect(self) -> None:
        self._connection = AgentConnection.open_patiently(*self.agent, PATIENCE_S)
