"""Every mesh trains as one rank does, whatever the options: gradients of each parameter, losses and norms."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel.meshes import (
    FACTORS,
    MODELS,
    Case,
    Trace,
    all_cases,
    assembled,
    covering,
    meshes_of,
    normalised,
    train_cases,
)
from tests.ranks import run_ranks

WORLD_SIZES = (1, 2, 3, 4, 6, 8)
# Three of the nine meshes of 6 ranks here, one for each pair of axes, and all of them in the long test.
MESHES = [mesh for size in WORLD_SIZES if size != 6 for mesh in meshes_of(size)] + [(1, 2, 3), (3, 2, 1), (2, 1, 3)]
CASES = [
    *covering(MESHES, seed=1),
    # Zero bubble with virtual stages, which have everything in common with one or the other.
    normalised(
        Case(2, 1, 2, "llama-gqa", "full", sequence_parallel=True, tied=True, dropout=0.2, schedule=("zero_bubble", 2))
    ),
]


# 2^-9 of each summand; some summands of a parameter's gradient are a few times the length of their sum.
BF16_TOLERANCE = 2**-6


def _of_sizes(*long_sizes: int) -> list[Any]:
    """All sizes of worlds; those that take minutes on two cores are left to `make test-long`."""
    return [pytest.param(size, marks=[pytest.mark.long] if size in long_sizes else []) for size in WORLD_SIZES]


@cache
def _reference(case: Case, num_steps: int, dtype: torch.dtype, exact: bool) -> Trace:
    (traces,) = run_ranks(train_cases, 1, [case], num_steps, dtype, exact, timeout_s=100)
    return traces[0]


def _check_gradients(case: Case, traces: Sequence[Trace], num_steps: int) -> None:
    reference = _reference(case.reference(), num_steps, torch.float64, True)
    # With summands rounded to bf16 on their way, each by 2^-9 at most, updates differ and later steps with them.
    tolerance = 1e-9 if case.wire == "fp32" else BF16_TOLERANCE
    for step in range(num_steps if case.wire == "fp32" else 1):
        ours, theirs = assembled(traces, step), assembled([reference], step)
        assert ours.keys() == theirs.keys()
        everything = np.sqrt(sum(np.sum(gradient**2) for gradient in theirs.values()))
        for name, expected in theirs.items():
            assert np.isfinite(ours[name]).all()
            error = np.linalg.norm(ours[name] - expected) / max(np.linalg.norm(expected), 1e-6 * everything)
            assert error <= tolerance, f"{case}, step {step + 1}: {name} is off by {error:.1e}"


@pytest.mark.parametrize("world_size", _of_sizes(6, 8))
@pytest.mark.timeout(900)
def test_in_fp64_each_parameter_s_gradient_is_that_of_one_rank(world_size: int) -> None:
    """FC-89, FC-91: over 3 steps, to 1e-9; pairs of options and meshes by a covering array. Where gradients travel as
    bf16, one step to its rounding.
    """
    cases = [case for case in CASES if case.world_size == world_size]
    of_ranks = run_ranks(train_cases, world_size, cases, 3, torch.float64, True, timeout_s=500)
    for index, case in enumerate(cases):
        _check_gradients(case, [traces[index] for traces in of_ranks], 3)


def test_the_covering_array_is_no_longer_than_it_may_be() -> None:
    assert len(CASES) <= 80
    assert {(case.pp, case.dp, case.tp) for case in CASES} == set(MESHES)


# One choice of options for each mesh, so that all values come up.
ONE_EACH = [
    normalised(
        Case(
            *mesh,
            model=list(MODELS)[index % 3],
            recompute=FACTORS["recompute"][index % 3],
            sequence_parallel=index % 2 == 0,
            tied=index % 4 < 2,
            dropout=0.1 * (index % 2),
            block=FACTORS["block"][index % 2],
            window=FACTORS["window"][index // 3 % 3],
            optimizer=FACTORS["optimizer"][index // 2 % 2],
        )
    )
    for index, mesh in enumerate(MESHES)
]


@pytest.mark.parametrize("world_size", _of_sizes(4, 6, 8))
@pytest.mark.timeout(900)
def test_in_fp32_losses_and_norms_are_those_of_one_rank(world_size: int) -> None:
    """10 steps, to 1e-5 of the value."""
    cases = [case for case in ONE_EACH if case.world_size == world_size]
    of_ranks = run_ranks(train_cases, world_size, cases, 10, torch.float32, False, timeout_s=500)
    for traces in of_ranks:
        for case, trace in zip(cases, traces, strict=True):
            reference = _reference(case.reference(), 10, torch.float32, False)
            np.testing.assert_allclose(trace.figures, reference.figures, rtol=1e-5, err_msg=str(case))


def test_in_bf16_losses_follow_fp32_to_its_rounding() -> None:
    """bf16 has 8 bits of mantissa: a loss is off by some 2^-8 of its value, and a norm by twice that."""
    cases = [Case(2, 1, 2, "llama-gqa", sequence_parallel=True, tied=True), Case(1, 2, 2, "gpt", recompute="full")]
    for traces in run_ranks(train_cases, 4, cases, 5, torch.bfloat16, False, timeout_s=100):
        for case, trace in zip(cases, traces, strict=True):
            reference = _reference(case.reference(), 5, torch.float32, False)
            for (loss, norm), (loss_ref, norm_ref) in zip(trace.figures, reference.figures, strict=True):
                assert loss == pytest.approx(loss_ref, rel=2e-2)
                assert norm == pytest.approx(norm_ref, rel=5e-2)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mesh", [mesh for size in WORLD_SIZES for mesh in meshes_of(size)])
def test_in_fp64_every_mixture_of_options_on_every_mesh_gives_one_rank_s_gradients(mesh: tuple[int, int, int]) -> None:
    cases = all_cases(mesh, seed=sum(mesh))
    for first in range(0, len(cases), 12):
        some = cases[first : first + 12]
        of_ranks = run_ranks(train_cases, some[0].world_size, some, 3, torch.float64, True, timeout_s=900)
        for index, case in enumerate(some):
            _check_gradients(case, [traces[index] for traces in of_ranks], 3)
