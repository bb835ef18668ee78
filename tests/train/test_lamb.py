"""LAMB on any mesh is a plain LAMB of one process: every weight after some steps, in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hpc_train.comm.collectives import Group
from hpc_train.models.attention import AttentionPlan
from hpc_train.models.transformer import Transformer
from hpc_train.train import lamb
from tests.parallel.meshes import SEQ_LEN, Case, batches_of, config_of
from tests.ranks import TestRank, run_ranks
from tests.train.trainers import make_trainer, share_of

NUM_STEPS, LR = 4, 1e-2
# Sharded over dp, split over tp, with key/value heads that places share, tied over two stages, and all at once.
CASES = [
    Case(1, 1, 1, "gpt", tied=True),
    Case(1, 3, 1, "llama-gqa"),
    Case(1, 1, 3, "llama-gqa", sequence_parallel=True),
    Case(2, 1, 1, "gpt", tied=True, schedule=("1f1b", 2)),
    Case(2, 2, 1, "llama", tied=True, block="parallel"),
    Case(1, 2, 2, "gpt"),
    Case(2, 1, 2, "llama-gqa", tied=True, sequence_parallel=True, window="mixed"),
]
CASES = [Case(**{**vars(case), "optimizer": "lamb", "num_sequences": 4 * case.dp}) for case in CASES]


class PlainLamb:
    """LAMB parameter by parameter, as its paper has it."""

    def __init__(self, named: list[tuple[str, torch.nn.Parameter]]) -> None:
        self.state = [(p, torch.zeros_like(p), torch.zeros_like(p)) for _, p in named]
        self.num_updates = 0

    @torch.no_grad()
    def step(self) -> None:
        self.num_updates += 1
        for weight, first, second in self.state:
            assert weight.grad is not None
            first.copy_(0.9 * first + 0.1 * weight.grad)
            second.copy_(0.95 * second + 0.05 * weight.grad**2)
            unbiased = first / (1 - 0.9**self.num_updates), second / (1 - 0.95**self.num_updates)
            direction = unbiased[0] / (unbiased[1].sqrt() + 1e-8)
            ratio = 1.0
            if weight.dim() >= 2:
                direction = direction + 0.1 * weight
                ratio = float(weight.norm() / direction.norm())
            weight -= LR * ratio * direction


def _plain(case: Case) -> dict[str, np.ndarray]:
    model = Transformer(config_of(case).model, SEQ_LEN)
    model.init_weights(seed=7)
    model.double()
    optimizer = PlainLamb(list(model.named_parameters()))
    for step in range(1, NUM_STEPS + 1):
        batches = batches_of(step, case.num_sequences)
        tokens, labels, positions = (
            torch.cat([getattr(batch, part) for batch in batches]) for part in ("tokens", "labels", "positions")
        )
        boundaries = tuple(batch.boundaries[0] for batch in batches)
        plan = AttentionPlan.from_boundaries(boundaries, SEQ_LEN, torch.device("cpu"))
        model.zero_grad()
        (model.loss_sum(tokens, labels, positions, plan) / (labels >= 0).sum()).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = torch.nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, float(min(0.5 / norm, 1.0)))  # torch's own clipping adds 1e-6 to the norm
        optimizer.step()
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def _train(me: TestRank, cases: list[Case]) -> list[list[Any]]:
    """Of each case, this rank's counted pieces of the weights."""
    return [_pieces_after_training(me, case) for case in cases]


def _pieces_after_training(me: TestRank, case: Case) -> list[Any]:
    trainer = make_trainer(me, config_of(case), torch.float64)
    for step in range(1, NUM_STEPS + 1):
        result = trainer.step(step, share_of(trainer, batches_of(step, case.num_sequences)), lr=LR)
        assert not result.skipped
    return [
        (piece.name, piece.box, chunk.parameters[piece.start :][: piece.box.num_elements].numpy())
        for chunk in trainer.parameters
        for piece in chunk.pieces(counted=True)
    ]


def _count_sums(me: TestRank, case: Case) -> list[int]:
    """How many numbers each of the optimizer's sums over ranks had."""
    sums = []
    plain = lamb.all_reduce_

    def count(tensor: torch.Tensor, group: Group) -> torch.Tensor:
        sums.append(tensor.numel())
        return plain(tensor, group)

    lamb.all_reduce_ = count
    _pieces_after_training(me, case)
    return sums


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_weight_is_that_of_a_plain_lamb_on_one_process(world_size: int) -> None:
    cases = [case for case in CASES if case.world_size == world_size]
    of_ranks = run_ranks(_train, world_size, cases, timeout_s=110)
    for index, case in enumerate(cases):
        expected = _plain(case)
        wholes = {name: np.full(weight.shape, np.nan) for name, weight in expected.items()}
        for pieces in of_ranks:
            for name, box, values in pieces[index]:
                part = tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))
                wholes[name][part] = values.reshape(box.sizes)
        for name, weight in expected.items():
            # Gradients of key biases are rounding alone, and Adam's direction scales them up.
            error = np.linalg.norm(wholes[name] - weight) / max(np.linalg.norm(weight), 1.0)
            assert error <= 1e-9, f"{case}: {name} is off by {error:.1e}"


def test_norms_are_added_up_once_a_step_for_all_parameters() -> None:
    """Two numbers for each matrix, whatever a rank holds of them."""
    case = CASES[-1]
    num_matrices = sum(1 for weight in _plain(case).values() if weight.ndim >= 2)
    for sums in run_ranks(_count_sums, case.world_size, case):
        assert sums == [2 * num_matrices] * NUM_STEPS
