"""Two starts of one run that write into one folder, as after a SIGKILL of the driver: the last one has it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_train.checkpoint.folders import folder as folders
from hpc_train.checkpoint.folders.attempt import (
    ATTEMPT_VALUE,
    attempt_of,
    begin_attempt,
    require_agents,
    require_attempt,
)
from hpc_train.checkpoint.saving import saver as saver_module
from hpc_train.checkpoint.saving import torch_files
from hpc_train.checkpoint.saving.save import save_checkpoint
from hpc_train.checkpoint.stores.location import locate
from hpc_train.errors import CheckpointError
from tests.checkpoint import plain_state
from tests.checkpoint.thread_ranks import ELEMENTS, ThreadRank, agents, end_agent, run_threads

REFUSAL = "another start of the run writes to {root} now, and its checkpoints are left to it"


def _told(root: Path) -> list[str]:
    """What each of two ranks is told: rank 0 alone has looked."""
    return [f"{reporter}{REFUSAL.format(root=root)}" for reporter in ("", "rank 0 on n1: ")]


def _save(rank: ThreadRank, root: Path, step: int, attempt: str | None, keep: int = 0) -> None:
    state = plain_state.state(rank, step, ELEMENTS)  # type: ignore[arg-type]
    values = {"num_updates": step, ATTEMPT_VALUE: attempt if rank.rank == 0 else "each rank's own"}
    save_checkpoint(root, step, state, values, rank.world, keep=keep)


def _refusal(rank: ThreadRank, root: Path, step: int, keep: int = 0) -> str:
    """What a rank of the first start is told."""
    with pytest.raises(CheckpointError) as refusal:
        _save(rank, root, step, "first", keep)
    return str(refusal.value)


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With steps 1 to 3 of the first start."""
    folder = tmp_path / "root"
    folder.mkdir()
    begin_attempt(locate(folder), "first")

    def train(rank: ThreadRank) -> None:
        for step in (1, 2, 3):
            _save(rank, folder, step, "first")

    run_threads(train, 2)
    return folder


def test_ranks_of_an_earlier_start_remove_and_commit_nothing(root: Path) -> None:
    begin_attempt(locate(root), "second")
    (root / ".step_0000003.tmp-0123").mkdir()
    before = _names(root)
    told, _ = run_threads(lambda rank: _refusal(rank, root, 4, keep=1), 2)
    assert told == _told(root)
    assert _names(root) == before


def test_ranks_commit_nothing_when_the_next_start_has_begun_while_they_wrote(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = torch_files.write_pieces

    def write_pieces(folder: Any, pieces: Any, rank: int, *further: Any) -> Any:
        written = write(folder, pieces, rank, *further)
        if rank == 1:
            begin_attempt(locate(root), "second")
        return written

    monkeypatch.setattr(torch_files, "write_pieces", write_pieces)
    told, _ = run_threads(lambda rank: _refusal(rank, root, 4, keep=1), 2)
    assert told == _told(root)
    assert (root / "latest").read_text() == "step_0000003\n"
    assert [step for step, _ in folders.steps_newest_first(locate(root))] == [3, 2, 1]


def test_ranks_that_have_committed_remove_no_older_ones_when_the_next_start_has_begun(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remove = folders.remove_checkpoint

    def remove_one(path: Any) -> None:
        remove(path)
        begin_attempt(locate(root), "second")

    monkeypatch.setattr(folders, "remove_checkpoint", remove_one)
    run_threads(lambda rank: _save(rank, root, 4, "first", keep=1), 2)
    assert [step for step, _ in folders.steps_newest_first(locate(root))] == [4, 2, 1]
    assert f"old checkpoints are left: {REFUSAL.format(root=root)}" in capsys.readouterr().err


def test_without_a_start_that_has_begun_or_is_named_nobody_is_kept_off(root: Path) -> None:
    run_threads(lambda rank: _save(rank, root, 4, None), 2)
    (root / "attempt").unlink()
    run_threads(lambda rank: _save(rank, root, 5, "any"), 2)
    assert plain_state.load(plain_state.Alone(), root, ELEMENTS) == 5  # type: ignore[arg-type]


def test_ranks_whose_agents_are_gone_take_the_folder_from_no_later_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that is killed takes its agents along."""
    root, said = tmp_path / "root", list[str]()
    monkeypatch.setattr(saver_module, "warn", said.append)

    def train(rank: ThreadRank) -> tuple[bool, str]:
        saver = rank.saver(root, key, keep=1)
        values = {"num_updates": 1, ATTEMPT_VALUE: attempt_of(key)}
        is_saved = saver.save(1, rank.state, values, must_last=True)
        if rank.rank == 0:
            end_agent(key, "n1")
            begin_attempt(locate(root), "second")
        rank.world.control.barrier()
        with pytest.raises(CheckpointError) as refusal:
            saver.save(2, rank.state, {**values, "num_updates": 2}, must_last=False)
        return is_saved, str(refusal.value)

    with agents(1) as key:
        root.mkdir()
        begin_attempt(locate(root), attempt_of(key))
        found, _ = run_threads(train, 2, one_node=True)
    assert found == [(True, told) for told in _told(root)]
    require_attempt(locate(root), "second")
    assert _names(root) == ["attempt", "latest", "step_0000001"]
    assert sum("node agents could not be told that the ranks write now: another start" in line for line in said) == 1


def test_ranks_whose_agents_are_gone_write_by_themselves_and_agents_that_come_back_do_not(tmp_path: Path) -> None:
    root = tmp_path / "root"

    def train(rank: ThreadRank) -> list[bool]:
        saver = rank.saver(root, key)
        values = {ATTEMPT_VALUE: attempt_of(key)}
        saved = [saver.save(1, rank.state, {**values, "num_updates": 1}, must_last=True)]
        if rank.rank == 0:
            end_agent(key, "n1")
        rank.world.control.barrier()
        return saved + [
            saver.save(step, rank.state, {**values, "num_updates": step}, must_last=True) for step in (2, 3)
        ]

    with agents(1) as key:
        root.mkdir()
        begin_attempt(locate(root), attempt_of(key))
        assert run_threads(train, 2, one_node=True)[0] == [[True] * 3] * 2
    assert [step for step, _ in folders.steps_newest_first(locate(root))] == [3, 2, 1]
    begin_attempt(locate(root), "second")
    require_agents(locate(root), "second")
