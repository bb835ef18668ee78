"""A save that is killed at any moment leaves the newest complete checkpoint, exact to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint import plain_state
from tests.checkpoint.plain_state import Alone
from tests.checkpoint.saving.agent_kills import kill_around_agents
from tests.checkpoint.saving.bad_disks import KINDS, small_disk, trouble
from tests.checkpoint.saving.kills import kill_in_saves
from tests.checkpoint.saving.writers import Writer, saves

ELEMENTS = 2 << 20
"""8 MiB of state."""


@pytest.mark.parametrize(
    "times",
    [pytest.param(3, id="short"), pytest.param(100, id="long", marks=[pytest.mark.long, pytest.mark.timeout(900)])],
)
def test_killed_ranks_leave_the_newest_complete_checkpoint(tmp_path: Path, times: int) -> None:
    """FC-19, FC-62: with keep=2, 8 MiB of state and two ranks, one of which dies first."""
    found = kill_in_saves(str(tmp_path), times, seed=times, num_elements=ELEMENTS, world_size=2)
    print(f"{times} kills, {len(set(found))} of them after a further complete save, the newest at step {found[-1]}")
    assert found[-1] > 0
    plain_state.save(Alone(), tmp_path, found[-1] + 1, ELEMENTS, keep=2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left[0] == "latest" and len(left) <= 3
    assert plain_state.load(Alone(), tmp_path, ELEMENTS) == found[-1] + 1


@pytest.mark.parametrize(
    "times",
    [pytest.param(3, id="short"), pytest.param(210, id="long", marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
)
def test_what_was_copied_for_the_agent_is_committed_whoever_dies(tmp_path: Path, times: int) -> None:
    """A rank, the agent and everything in turn, at random moments of saves of 8 MiB by two ranks."""
    found = kill_around_agents(str(tmp_path), times, seed=times, num_elements=ELEMENTS, world_size=2)
    print(
        f"{dict(found.kinds)} killed, the newest checkpoint at step {found.steps[-1]}; after {found.rescued} kills of "
        "a rank the agent completed what was copied"
    )
    assert found.steps[-1] > 0
    plain_state.save(Alone(), tmp_path, found.steps[-1] + 1, ELEMENTS, keep=2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left[0] == "latest" and len(left) <= 3


@pytest.mark.parametrize(
    "times",
    [pytest.param(2, id="short"), pytest.param(100, id="long", marks=[pytest.mark.long, pytest.mark.timeout(900)])],
)
@pytest.mark.parametrize("writer", ["rank", "agent"])
def test_a_disk_that_fills_up_or_turns_read_only_at_any_moment_costs_a_save_alone(
    tmp_path: Path, writer: Writer, times: int
) -> None:
    """FC-64: on a real file system, with room for three checkpoints of 8 MiB and a little."""
    with small_disk(tmp_path / "disk", 36 << 20) as disk:
        with saves(writer, disk / "checkpoints", tmp_path / "agent", ELEMENTS) as save:
            found = trouble(disk, save, times, seed=times, num_elements=ELEMENTS)
        print(f"{dict(found.kinds)} times, {dict(found.failed)} saves failed, {len(found.steps) - 1} went well")
        assert set(found.kinds) == set(found.failed) == set(KINDS)
        assert plain_state.load(Alone(), disk / "checkpoints", ELEMENTS) == found.steps[-1]
        assert len(list((disk / "checkpoints").iterdir())) <= 4
