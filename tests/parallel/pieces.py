"""Batches of documents of any lengths for tests: planned, dealt out as pieces, and whole on one rank."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpc_train.config import Config
from hpc_train.plan.batch import BatchPlan
from hpc_train.plan.batch_check import check_batch_plan
from hpc_train.plan.batch_cost import BatchCosts, OffloadCosts
from hpc_train.plan.batch_pieces import PieceBatch
from hpc_train.plan.batch_play import check_rings
from hpc_train.plan.batch_problem import BatchProblem, HdpRanks
from hpc_train.plan.batch_setup import BatchSetup
from hpc_train.plan.batch_table import BatchTable
from hpc_train.plan.schedule_orders import Kind, plan_schedule
from hpc_train.train.step import Trainer
from tests.parallel.meshes import MODELS, VOCAB, Trace, counted_gradients
from tests.ranks import TestRank
from tests.train.trainers import TestBatch, make_config, make_trainer

NUM_LAYERS = 3
COSTS = BatchCosts(1, 24576, 5560, 3, 7)
OFFLOAD_COSTS = BatchCosts(1, 24576, 5560, 3, 7, OffloadCosts(NUM_LAYERS, 20_000))


@dataclass(frozen=True)
class PieceCase:
    """A mesh, a planner and options; lengths of each step's documents are drawn from the seed."""

    pp: int
    dp: int
    tp: int
    planner: str
    model: str = "gpt"
    seed: int = 0
    recompute: str = "none"
    sequence_parallel: bool = False
    tp_tiles: int = 1
    block: str = "serial"
    schedule: Kind = "1f1b"
    dropout: float = 0.0
    capacity: int = 24
    offload: bool = False
    virtual_stages: int = 1
    num_layers: int = NUM_LAYERS

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def longest(self) -> int:
        """All ranks hold it, whose parts may be padded to equal ones."""
        return (self.capacity // 2) * 2 * self.dp

    def lengths(self, step: int) -> list[int]:
        """From one token to as many as all ranks hold, mostly short; more than two micro-batches for each rank."""
        chance = random.Random(100 * self.seed + step)
        drawn = [chance.choice([1, chance.randint(1, self.capacity), chance.randint(1, 8)]) for _ in range(5 * self.dp)]
        drawn[chance.randrange(len(drawn))] = chance.randint(self.longest // 2, self.longest)
        drawn[chance.randrange(len(drawn))] = chance.randint(self.capacity, self.longest)
        return drawn

    def config(self) -> Config:
        parallel: dict[str, object] = {
            "pp": self.pp, "dp": self.dp, "tp": self.tp, "sequence_parallel": self.sequence_parallel,
            "tp_tiles": self.tp_tiles, "schedule": self.schedule, "virtual_stages": self.virtual_stages,
        }  # fmt: skip
        windows = [None, 7, 30, None][: self.num_layers]
        model = {
            **MODELS[self.model], "num_layers": self.num_layers, "hidden_size": 48, "num_heads": 24,
            "dropout": self.dropout, "init_std": 0.2, "block": self.block, "attention_window": windows,
        }  # fmt: skip
        return make_config(model, parallel, seq_len=max(self.longest, 30), recompute=self.recompute)


def planned(case: PieceCase, step: int) -> BatchTable:
    """A step's plan, which the checkers that know no planner have found sound."""
    ranks = HdpRanks.alike(case.dp, case.capacity)
    lengths, costs = case.lengths(step), OFFLOAD_COSTS if case.offload else COSTS
    setup = BatchSetup(case.planner, case.longest, ranks, costs, case.num_layers, case.pp, case.virtual_stages)
    table = setup.plan_with(case.planner, BatchProblem.make(step, lengths, ranks, costs, block_tokens=2))
    check_plan_of(table.plan(), lengths, case)
    return table


def check_plan_of(plan: BatchPlan, lengths: Sequence[int], case: PieceCase) -> None:
    is_aligned = case.pp * case.virtual_stages > 1
    check_batch_plan(plan, lengths, [case.capacity] * case.dp, num_layers=case.num_layers, is_aligned=is_aligned)
    counts = [len(micro_batches) for micro_batches in plan.ranks]
    check_rings(plan, [plan_schedule(case.schedule, case.pp, count, case.virtual_stages) for count in counts])


def documents(step: int, lengths: Sequence[int]) -> list[TestBatch]:
    """Each document whole, as a micro-batch of its own; labels are its next tokens, but for some that are masked."""
    generator = torch.Generator().manual_seed(1000 + step)
    found = []
    for index, length in enumerate(lengths):
        tokens = torch.randint(0, VOCAB, (1, length), generator=generator)
        labels = torch.roll(tokens, -1, dims=1)
        labels[:, -1] = -100
        labels[0, : (index * 7) % (length + 1)] = -100
        found.append(TestBatch(tokens, labels, torch.arange(length)[None], ((length,),), (index,)))
    return found


def pieces_of(table: BatchTable, rank: int, whole: Sequence[TestBatch]) -> list[PieceBatch]:
    """An hdp rank's micro-batches, as something that has read the documents gives them."""
    found = []
    for micro_batch, lengths in zip(table.micro_batches(rank), table.lengths_of(rank), strict=True):
        values = np.zeros((2, micro_batch.num_tokens), np.int64)
        at = 0
        for piece in micro_batch.sequences:
            document = whole[piece.sequence]
            for row, tensor in zip(values, (document.tokens, document.labels), strict=True):
                row[at : at + piece.length] = tensor[0, piece.start : piece.start + piece.length].numpy()
            at += piece.length
        found.append(PieceBatch(rank, micro_batch, lengths, *values))
    return found


def train_pieces(
    me: TestRank, cases: Sequence[tuple[PieceCase, Sequence[BatchTable]]], dtype: torch.dtype
) -> list[Trace]:
    """One rank's part in each case, a step for each plan; on one rank every document whole instead."""
    return [_train(me, case, tables, dtype) for case, tables in cases]


def _train(me: TestRank, case: PieceCase, tables: Sequence[BatchTable], dtype: torch.dtype) -> Trace:
    trainer = make_trainer(me, case.config(), dtype)
    trace = Trace([], [])
    update = trainer.optimizer.step

    def note_and_update(*args: Any) -> None:
        trace.gradients.append(counted_gradients(trainer))
        update(*args)

    trainer.optimizer.step = note_and_update  # type: ignore[method-assign]
    for table in tables:
        whole = documents(table.step, table.lengths.tolist())
        batches = whole if _is_reference(trainer) else pieces_of(table, trainer.groups.coords["dp"], whole)
        result = trainer.step(table.step, batches, lr=1e-3)
        assert not result.skipped
        assert result.num_tokens == table.lengths.sum()
        trace.figures.append((result.loss, result.grad_norm))
    return trace


def _is_reference(trainer: Trainer) -> bool:
    return trainer.groups.mesh.world_size == 1
