"""Checkpoints of meshes: global names and shapes, nothing stored twice, resumed to the bit, read by another mesh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.checkpoint.format.model_tensors import ModelSpec, model_tensors
from hpc_train.checkpoint.loading.load import load_newest
from hpc_train.checkpoint.saving.save import save_checkpoint
from hpc_train.train.state import state_pieces
from tests.parallel.meshes import SEQ_LEN, Case, batches_of, config_of
from tests.ranks import TestRank, run_ranks
from tests.train.trainers import make_trainer, share_of
from tests.worlds import make_world

CASES = [
    Case(2, 1, 2, "llama-gqa", sequence_parallel=True, tied=True, dropout=0.1),
    Case(1, 2, 2, "gpt", recompute="full", dropout=0.1, optimizer="lamb"),
    Case(2, 2, 1, "gpt", tied=True, uneven=True),
    Case(2, 2, 1, "gpt", tied=True, dropout=0.1, schedule=("zero_bubble", 2)),
]


def _train(me: TestRank, case: Case, root: str, last: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Resume if there is a checkpoint, train to step `last`, save; returns the losses and the weights of this rank."""
    world = make_world(me)
    trainer = make_trainer(me, config_of(case), dtype)
    loaded = load_newest(Path(root), state_pieces(trainer), world)
    first = 0
    if loaded is not None:
        first = loaded.step
        trainer.optimizer.num_updates = loaded.step
        trainer.publish_parameters()
    losses = []
    for step in range(first + 1, last + 1):
        result = trainer.step(step, share_of(trainer, batches_of(step, case.num_sequences)), lr=1e-2)
        losses.append((result.loss, result.grad_norm))
    if last > first:
        trainer.publish_parameters()
        save_checkpoint(Path(root), last, state_pieces(trainer, counted=True), {}, world, keep=0)
    return {"losses": losses, "weights": torch.cat([chunk.parameters for chunk in trainer.parameters]), "first": first}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(CASES[0], torch.bfloat16), (CASES[1], torch.float32), (CASES[2], torch.float32), (CASES[3], torch.bfloat16)],
    ids=["pp-tp-bf16", "dp-tp", "pp-dp", "virtual-bf16"],
)
def test_the_same_mesh_resumes_to_the_bit(tmp_path: Path, case: Case, dtype: torch.dtype) -> None:
    """FC-91: what is dropped out as well."""
    whole = run_ranks(_train, case.world_size, case, str(tmp_path / "whole"), 4, dtype)
    run_ranks(_train, case.world_size, case, str(tmp_path / "parts"), 2, dtype)
    resumed = run_ranks(_train, case.world_size, case, str(tmp_path / "parts"), 4, dtype)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours["first"] == 2
        assert ours["losses"] == theirs["losses"][2:]
        assert torch.equal(ours["weights"], theirs["weights"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_names_and_shapes_are_the_whole_model_s_and_nothing_is_stored_twice(tmp_path: Path, case: Case) -> None:
    run_ranks(_train, case.world_size, case, str(tmp_path), 1)
    manifest = read_manifest(tmp_path / "step_0000001")
    expected = model_tensors(ModelSpec(config_of(case).model, SEQ_LEN))
    stored = {name.removeprefix("model."): t.shape for name, t in manifest.tensors.items() if name.startswith("model.")}
    assert stored == {name: tuple(shape) for name, shape in expected.items()}
    for name, tensor in manifest.tensors.items():
        covered = torch.zeros(tensor.shape, dtype=torch.int32)
        for box in tensor.boxes:
            covered[tuple(slice(a, a + n) for a, n in zip(box.box.offsets, box.box.sizes, strict=True))] += 1
        assert (covered == 1).all(), name


def test_a_checkpoint_of_one_mesh_is_gone_on_with_on_another(tmp_path: Path) -> None:
    """Names know no mesh, so pp=2 x tp=2 may become dp=2, or one rank: to rounding, as the order of sums differs."""
    case = CASES[0]
    run_ranks(_train, 4, case, str(tmp_path), 2)
    others = [Case(1, 2, 1, case.model, tied=True, dropout=0.1), case.reference()]
    others.append(replace(case, tp=1, sequence_parallel=False, schedule=("1f1b", 2)))
    continued = [run_ranks(_train, other.world_size, other, str(tmp_path), 2)[0] for other in others]
    assert [result["first"] for result in continued] == [2, 2, 2]
    after = run_ranks(_train, 4, case, str(tmp_path), 3)[0]["losses"]
    (tmp_path / "step_0000003").rename(tmp_path.parent / "set-aside")
    (tmp_path / "latest").unlink()
    for other in others:
        (loss, norm), *_ = run_ranks(_train, other.world_size, other, str(tmp_path), 3)[0]["losses"]
        assert loss == pytest.approx(after[0][0], rel=1e-5)
        assert norm == pytest.approx(after[0][1], rel=1e-4)
        for path in tmp_path.glob("step_0000003"):
            path.rename(tmp_path.parent / f"set-aside-{other.pp}-{other.dp}")
        (tmp_path / "latest").unlink(missing_ok=True)
