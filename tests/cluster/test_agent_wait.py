"""A rank's wait for its node agent: a word soon, an end with a name, and no blame for a node that was suspended."""

from __future__ import annotations

import os

import pytest

from hpc_train.cluster.agent_address import AgentGone, make_job_key
from hpc_train.cluster.agent_wait import AgentLimits, AgentWait, is_answering
from hpc_train.errors import DataError
from hpc_train.health.agent_server import AgentServer
from tests.agents import NODE, served


class Wait:
    """A wait that is looked at each second of a clock of its own."""

    def __init__(self, silence_s: float = 30.0, hang_s: float = 100.0) -> None:
        self.now, self.said = 1000.0, []

        def hangs(seconds: float) -> DataError:
            return DataError(f"nothing for {seconds:.0f} s")

        self.wait = AgentWait(
            ("key", NODE), "step 7", silence_s, self.said.append, hang_s=hang_s, hangs=hangs, clock=lambda: self.now
        )

    def pass_time(self, seconds: int, *, answers: bool, moves: bool = False) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.wait.look(answers, self.now if moves else None)


def test_an_agent_that_answers_nothing_is_named_soon_and_given_up() -> None:
    wait = Wait(silence_s=30.0)
    wait.pass_time(29, answers=False)
    assert [line.partition(" so far")[0] for line in wait.said] == [
        "has waited 5 s",
        "has waited 10 s",
        "has waited 20 s",
    ]
    assert f"step 7, from the node agent of {NODE}, which answers nothing" in wait.said[0]
    with pytest.raises(AgentGone, match=rf"node agent of {NODE} has answered nothing for 30 s \(waiting for step 7\)"):
        wait.pass_time(1, answers=False)


def test_one_that_answers_is_waited_for_until_nothing_has_moved_for_too_long() -> None:
    wait = Wait(hang_s=100.0)
    wait.pass_time(500, answers=True, moves=True)
    assert len(wait.said) == 7, wait.said  # ever more rarely
    wait.pass_time(99, answers=True)
    with pytest.raises(DataError, match="nothing for 100 s"):
        wait.pass_time(2, answers=True)


def test_a_node_that_was_suspended_as_a_whole_has_an_agent_that_may_wake_up_later() -> None:
    wait = Wait(silence_s=30.0)
    wait.now += 3600.0
    wait.wait.look(answers=False)
    wait.pass_time(20, answers=False)


def test_ranks_give_their_agent_up_before_other_ranks_give_them_up() -> None:
    for timeout_s in (20.0, 600.0, 7200.0):
        limits = AgentLimits.within(timeout_s)
        assert limits.silence_s <= timeout_s / 2 and limits.data_s < timeout_s < limits.save_s


def test_an_agent_that_lives_says_so_whatever_it_is_asked() -> None:
    assert not is_answering((make_job_key(None, 0, os.getpid(), "nobody"), NODE))
    with served() as agent:
        assert isinstance(agent.server, AgentServer) and is_answering((agent.key, NODE))
