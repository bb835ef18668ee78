"""Training that changes its mesh at each resumption: losses go on as on the mesh that it began with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from hpc_train.checkpoint.loading.load import load_newest
from hpc_train.checkpoint.saving.save import save_checkpoint
from hpc_train.plan.checkpoint_state import held_state
from hpc_train.train.state import state_pieces
from hpc_train.train.step import Trainer
from tests.parallel.meshes import Case, batches_of, config_of
from tests.ranks import TestRank, run_ranks
from tests.train.trainers import make_trainer, mesh_of, share_of
from tests.worlds import make_world

pytestmark = pytest.mark.timeout(300)

EIGHT = [
    Case(1, 1, 8, "llama-gqa", sequence_parallel=True, tied=True, dropout=0.1, num_layers=8),
    Case(2, 2, 2, "llama-gqa", sequence_parallel=True, tied=True, dropout=0.1, num_layers=8),
    Case(8, 1, 1, "llama-gqa", tied=True, dropout=0.1, num_layers=8),
    Case(1, 8, 1, "llama-gqa", tied=True, dropout=0.1, num_layers=8),
    Case(2, 2, 2, "llama-gqa", tied=True, dropout=0.1, num_layers=8, schedule=("1f1b", 2)),
    Case(2, 1, 4, "llama-gqa", tied=True, dropout=0.1, num_layers=8, schedule=("zero_bubble", 4)),
]
FOUR = [
    Case(1, 1, 4, "gpt", sequence_parallel=True, tied=True, dropout=0.1),
    Case(2, 1, 2, "gpt", sequence_parallel=True, tied=True, dropout=0.1),
    Case(4, 1, 1, "gpt", tied=True, dropout=0.1),
    Case(1, 4, 1, "gpt", tied=True, dropout=0.1),
    Case(2, 2, 1, "gpt", tied=True, dropout=0.1, schedule=("1f1b", 2)),
]
TWO = [
    Case(1, 1, 2, "llama", dropout=0.1, optimizer="lamb"),
    Case(2, 1, 1, "llama", dropout=0.1, optimizer="lamb", schedule=("zero_bubble", 2)),
    Case(1, 2, 1, "llama", dropout=0.1, optimizer="lamb"),
]


@dataclass(frozen=True)
class Walked:
    """unchanged: losses on the first mesh alone. changing: losses with another mesh every few steps.

    is_equal: whether the first mesh, resumed on itself, went on to the bit.
    """

    unchanged: list[float]
    changing: list[float]
    is_equal: bool


def _steps(trainer: Trainer, case: Case, first: int, last: int) -> list[float]:
    found = []
    for step in range(first, last + 1):
        result = trainer.step(step, share_of(trainer, batches_of(step, case.num_sequences)), lr=1e-3)
        assert not result.skipped
        found.append(result.loss)
    trainer.publish_parameters()
    return found


def _save(me: TestRank, trainer: Trainer, root: str, step: int) -> None:
    save_checkpoint(Path(root), step, state_pieces(trainer, counted=True), {}, make_world(me), keep=0)


def _resumed(me: TestRank, case: Case, root: str, step: int) -> Trainer:
    trainer = make_trainer(me, config_of(case))
    loaded = load_newest(Path(root), state_pieces(trainer), make_world(me))
    assert loaded is not None and loaded.step == step
    trainer.optimizer.num_updates = step
    trainer.publish_parameters()
    return trainer


def _weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([chunk.parameters for chunk in trainer.parameters]).clone()


def _walk(me: TestRank, cases: list[Case], num_steps: int, root: str) -> Walked:
    """Train `num_steps` on each mesh."""
    first = make_trainer(me, config_of(cases[0]))
    unchanged = _steps(first, cases[0], 1, num_steps)
    _save(me, first, root, num_steps)
    unchanged += _steps(first, cases[0], num_steps + 1, 2 * num_steps)
    weights = _weights(first)
    again = _resumed(me, cases[0], root, num_steps)
    is_equal = _steps(again, cases[0], num_steps + 1, 2 * num_steps) == unchanged[num_steps:]
    is_equal = is_equal and torch.equal(_weights(again), weights)
    unchanged += _steps(first, cases[0], 2 * num_steps + 1, len(cases) * num_steps)
    changing = unchanged[:num_steps]
    for number, case in enumerate(cases[1:], start=1):
        trainer = _resumed(me, case, root, number * num_steps)
        changing += _steps(trainer, case, number * num_steps + 1, (number + 1) * num_steps)
        _save(me, trainer, root, (number + 1) * num_steps)
    return Walked(unchanged, changing, is_equal)


@pytest.mark.parametrize(
    ("cases", "num_steps"),
    [
        pytest.param(TWO, 2, id="2-ranks"),
        pytest.param(FOUR, 1, id="4-ranks"),
        pytest.param(EIGHT, 1, id="8-ranks", marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
    ],
)
def test_losses_go_on_over_changes_of_the_mesh(tmp_path: Path, cases: list[Case], num_steps: int) -> None:
    """To 1e-5 in fp32, since sums are in another order; on the same mesh to the bit. FC-91: dropout goes on too."""
    for walked in run_ranks(_walk, cases[0].world_size, cases, num_steps, str(tmp_path), timeout_s=1100.0):
        assert walked.is_equal
        assert walked.changing == pytest.approx(walked.unchanged, rel=1e-5)
        apart = np.abs(np.array(walked.changing) / np.array(walked.unchanged) - 1).max()
    ranks = cases[0].world_size
    print(f"{len(cases)} meshes of {ranks} ranks, {num_steps} steps each: losses at most {apart:.1e} apart")


def _held(me: TestRank, cases: list[Case]) -> list[dict[bool, list[tuple[object, ...]]]]:
    """By case the boxes that this rank counts, and that it holds."""
    found = []
    for case in cases:
        trainer = make_trainer(me, config_of(case))
        of_case = {}
        for counted in (True, False):
            pieces = state_pieces(trainer, counted=counted)
            of_case[counted] = sorted((p.name, p.box.offsets, p.box.sizes) for p in pieces)
        found.append(of_case)
    return found


def test_what_is_planned_to_be_written_and_needed_is_what_ranks_hold() -> None:
    """`plan` and the bench list the state of all ranks of a mesh at once; here are the ranks themselves."""
    by_rank = run_ranks(_held, 4, FOUR)
    for number, case in enumerate(FOUR):
        config = config_of(case)
        for counted in (True, False):
            state = held_state(config, mesh_of(config, 4), counted=counted)
            for rank, found in enumerate(by_rank):
                listed = [
                    (state.names[state.boxes.tensor[row]], state.boxes.box(row).offsets, state.boxes.box(row).sizes)
                    for row in np.flatnonzero(state.rank == rank)
                ]
                assert sorted(listed) == found[number][counted], (case, rank, counted)
