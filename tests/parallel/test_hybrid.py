"""Batches of pieces train as whole documents do on one rank, whoever has how many of them: gradients and losses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch

from hpc_train.errors import ConfigError
from hpc_train.plan.batch import MicroBatch, SequenceSlice
from hpc_train.plan.batch_pieces import PieceBatch
from hpc_train.plan.batch_table import BatchTable
from tests.parallel.meshes import MODELS, Trace, assembled
from tests.parallel.pieces import PieceCase, planned, train_pieces
from tests.ranks import TestRank, run_ranks
from tests.train.trainers import TREES, make_config, make_trainer

PLANNERS = ("static", "naive", "balanced")
CASES = [
    PieceCase(1, 2, 1, "balanced", "llama-gqa", 1, recompute="full"),
    PieceCase(1, 2, 1, "static", "gpt", 2, dropout=0.2),
    PieceCase(1, 3, 1, "balanced", "gpt", 3, dropout=0.2, recompute="selective"),
    PieceCase(1, 3, 1, "naive", "llama-gqa", 4, block="parallel"),
    PieceCase(1, 3, 1, "balanced", "llama", 11, offload=True),
    PieceCase(1, 4, 1, "balanced", "llama-gqa", 5),
    PieceCase(1, 4, 1, "static", "llama", 6, recompute="full"),
    PieceCase(1, 2, 2, "balanced", "llama-gqa", 7, sequence_parallel=True, tp_tiles=2, dropout=0.2),
    PieceCase(1, 2, 2, "naive", "gpt", 8, recompute="full"),
    PieceCase(2, 2, 1, "balanced", "llama-gqa", 9, recompute="selective"),
    PieceCase(2, 2, 1, "naive", "gpt", 10, schedule="zero_bubble", dropout=0.2),
    PieceCase(2, 2, 1, "balanced", "llama-gqa", 12, virtual_stages=2, num_layers=4),
]


Pair = tuple[PieceCase, list[BatchTable]]
"""A case and the plans of its steps."""


def _table(lengths: list[int], packs: list[tuple[list[int], list[int]]], num_ranks: int) -> BatchTable:
    """A plan by hand: packs of sequences and ranks, in order."""
    counts = [0] * num_ranks
    places = []
    for _, ranks in packs:
        for rank in ranks:
            places.append(counts[rank])
            counts[rank] += 1
    first_sequence = np.cumsum([0, *(len(sequences) for sequences, _ in packs)])
    first_rank = np.cumsum([0, *(len(ranks) for _, ranks in packs)])
    flat = [np.array([x for pack in packs for x in pack[part]], np.int64) for part in (0, 1)]
    return BatchTable(
        1, np.array(lengths), first_sequence, flat[0], first_rank, flat[1], np.array(places),
        np.zeros(len(packs), np.int64), np.maximum(counts, 1),
    )  # fmt: skip


def _by_hand() -> Pair:
    """Rank 1 of four has nothing at all; three others meet in two rings, one of which has a sequence of one token."""
    table = _table([40, 1, 17, 9, 30], [([0, 1], [3, 0, 2]), ([3], [0]), ([2], [0, 3]), ([4], [2])], 4)
    assert [len(table.micro_batches(rank)) for rank in range(4)] == [3, 1, 2, 2]
    return PieceCase(1, 4, 1, "by hand", "gpt"), [table]


def _every_short_length() -> Pair:
    """FC-82, FC-87: 1 to 17 tokens on a ring of two, whose rows tp=2 shares; some have no supervised token."""
    case = PieceCase(1, 2, 2, "by hand", "llama-gqa", sequence_parallel=True)
    return case, [_table([*range(1, 18)], [([*range(17)], [1, 0])], 2)]


def _with_plans(case: PieceCase, num_steps: int) -> Pair:
    tables = [planned(case, step) for step in range(1, num_steps + 1)]
    assert any(table.offload_milli.any() for table in tables) == case.offload
    return case, tables


@cache
def _pairs() -> list[Pair]:
    """Two steps, the second one with other lengths."""
    return [*(_with_plans(case, 2) for case in CASES), _by_hand(), _every_short_length()]


def _on_one_rank(pair: Pair) -> Pair:
    """The same with every document whole. Its capacity keeps the longest one, and with it the table of positions."""
    case, tables = pair
    alone = PieceCase(
        1, 1, 1, case.planner, case.model, case.seed, block=case.block, dropout=case.dropout,
        capacity=case.capacity * case.dp, num_layers=case.num_layers,
    )  # fmt: skip
    return alone, tables


def _references(pairs: Sequence[Pair], dtype: torch.dtype = torch.float64) -> list[Trace]:
    (found,) = run_ranks(train_pieces, 1, [_on_one_rank(pair) for pair in pairs], dtype, timeout_s=500)
    return found


@cache
def _known_references() -> list[Trace]:
    return _references(_pairs())


def _check(world_size: int, pairs: Sequence[Pair], references: Sequence[Trace]) -> None:
    of_ranks = run_ranks(train_pieces, world_size, pairs, torch.float64, timeout_s=500)
    for index, ((case, tables), reference) in enumerate(zip(pairs, references, strict=True)):
        _compare(case, [traces[index] for traces in of_ranks], reference, len(tables))


def _compare(case: PieceCase, traces: Sequence[Trace], reference: Trace, num_steps: int) -> None:
    for step in range(num_steps):
        ours, theirs = assembled(traces, step), assembled([reference], step)
        assert ours.keys() == theirs.keys()
        everything = np.sqrt(sum(np.sum(gradient**2) for gradient in theirs.values()))
        for name, expected in theirs.items():
            error = np.linalg.norm(ours[name] - expected) / max(np.linalg.norm(expected), 1e-6 * everything)
            assert error <= 1e-9, f"{case}, step {step + 1}: {name} is off by {error:.1e}"
        for trace in traces:
            np.testing.assert_allclose(trace.figures[step], reference.figures[step], rtol=1e-9, err_msg=str(case))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.timeout(300)
def test_in_fp64_pieces_give_each_parameter_one_rank_s_gradient(world_size: int) -> None:
    """Planners static, naive and balanced, with tp=2 and pp=2 too; ranks that run dry, and offloading."""
    chosen = [index for index, (case, _) in enumerate(_pairs()) if case.world_size == world_size]
    _check(world_size, [_pairs()[index] for index in chosen], [_known_references()[index] for index in chosen])


def _long_cases(world_size: int) -> list[PieceCase]:
    meshes = [(1, world_size, 1), (1, world_size // 2, 2), (2, world_size // 2, 1)]
    if world_size == 8:
        meshes += [(2, 2, 2), (4, 2, 1)]
    seeds = itertools.count(100 * world_size)
    return [
        PieceCase(
            *mesh,
            planner,
            list(MODELS)[(seed := next(seeds)) % 3],
            seed,
            recompute=("none", "selective", "full")[seed % 3],
            sequence_parallel=mesh[2] > 1 and seed % 2 == 0,
            tp_tiles=2 if mesh[2] > 1 else 1,
            block=("serial", "parallel")[seed // 2 % 2],
            schedule="zero_bubble" if mesh[0] > 1 and seed % 2 else "1f1b",
            dropout=0.2 * (seed // 3 % 2),
            virtual_stages=2 if mesh[0] == 2 and seed % 3 == 0 else 1,
            num_layers=4,
        )
        for mesh in meshes
        for planner in PLANNERS
        for _ in range(2)
    ]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [6, 8])
def test_in_fp64_pieces_on_many_ranks_give_each_parameter_one_rank_s_gradient(world_size: int) -> None:
    pairs = [_with_plans(case, 2) for case in _long_cases(world_size)]
    if world_size == 8:
        # A ring of three ranks and one of five in the same step.
        packs = [([0], [6, 0, 3]), ([1, 2], [1, 2, 4, 5, 7]), ([3], [6]), ([4], list(range(8)))]
        pairs.append((PieceCase(1, 8, 1, "by hand", "llama-gqa"), [_table([70, 100, 2, 20, 190], packs, 8)]))
    _check(world_size, pairs, _references(pairs))


def test_in_fp32_losses_are_those_of_one_rank() -> None:
    """Three steps, to 1e-5 of the value."""
    pair = _with_plans(PieceCase(1, 2, 1, "balanced", "llama-gqa", 20), 3)
    (reference,) = _references([pair], torch.float32)
    for (trace,) in run_ranks(train_pieces, 2, [pair], torch.float32, timeout_s=240):
        np.testing.assert_allclose(trace.figures, reference.figures, rtol=1e-5)


OFFLOADED = MicroBatch((SequenceSlice(0, 0, 1),), offload_milli=300)


@pytest.mark.parametrize(
    ("virtual_stages", "recompute", "words"),
    [(2, "none", "virtual_stages=1"), (1, "selective", "recompute=none"), (1, "full", "recompute=none")],
)
def test_offloading_that_a_rank_cannot_carry_out_is_refused(virtual_stages: int, recompute: str, words: str) -> None:
    model = {**MODELS["gpt"], "num_layers": 2, "hidden_size": 48, "num_heads": 24}
    config = make_config(model, {"virtual_stages": virtual_stages}, recompute=recompute)
    trainer = make_trainer(TestRank(0, 1, None, None), config)  # type: ignore[arg-type]
    batch = PieceBatch(0, OFFLOADED, (1,), *np.zeros((2, 1), np.int64))
    with pytest.raises(ConfigError, match=words):
        trainer.step(1, [batch], lr=1e-3)


def test_a_step_without_tokens_is_skipped() -> None:
    """FC-87: this rank's one empty micro-batch is all there is."""
    trainer = make_trainer(TestRank(0, 1, None, None), make_config(TREES["gpt"]))  # type: ignore[arg-type]
    before = [parameter.clone() for parameter in trainer.pipeline.chunks[0].parameters()]
    result = trainer.step(1, [PieceBatch(0, MicroBatch(()), (), *np.zeros((2, 0), np.int64))], lr=1e-3)
    assert result.skipped and math.isnan(result.loss) and (result.num_tokens, result.mean_length) == (0, 0.0)
    after = trainer.pipeline.chunks[0].parameters()
    assert all(torch.equal(mine, parameter) for mine, parameter in zip(before, after, strict=True))
