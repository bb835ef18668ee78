"""Updates ahead of the norm of all gradients: every figure and every bit of the state as without them."""

from __future__ import annotations

import math
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from hpc_train.errors import ConfigError
from hpc_train.plan.memory import memory_of_stage
from hpc_train.train.state import plain_values, state_pieces
from tests.parallel.pieces import PieceCase, documents, pieces_of, planned
from tests.ranks import run_ranks
from tests.train.trainers import TREES, make_config, make_trainer, sequences, share_of

CLIP = 4.0
"""Twice and more the norm of a mean over all tokens, below that of one token's gradient, in the models here."""
STEPS = ("plain", "plain", "one token", "plain", "plain", "nan", "plain", "plain", "no token", "plain", "plain")
STANDING = [None, True, False, None, True, False, None, True, False, None, True]
"""What becomes of a step's early updates: they stand, are taken back, or the step before called for none."""
NUM_SEQUENCES = 8


def _batches(trainer, number, kind):
    batches = sequences(number, NUM_SEQUENCES)
    for index, batch in enumerate(batches):
        if kind == "no token" or (kind == "one token" and index):
            batch.labels.fill_(-100)
        elif kind == "one token":
            batch.labels[:, :-2] = -100
    return share_of(trainer, batches)


def _spoilt(me, trainer, kind):
    """Have a gradient of the chunk whose sum comes last be NaN on one rank."""
    chunk = trainer.parameters[0]
    if kind != "nan" or me.rank != me.world_size - 1:
        return nullcontext()
    begin_reduce = chunk.begin_reduce

    def spoil():
        chunk.gradients[0] = math.nan
        begin_reduce()

    return mock.patch.object(chunk, "begin_reduce", spoil)


def _step(me, trainer, number, kind, lr):
    """A step's figures, and whether its early updates stood; None where it had none on this rank."""
    standing = []
    early = trainer._early
    watched = nullcontext()
    if early is not None:
        settle = early.settle

        def noted(grad_norm):
            num_early = len(early.norms)
            updated = settle(grad_norm)
            standing.append(None if not num_early else len(updated) == num_early)
            return updated

        watched = mock.patch.object(early, "settle", noted)
    with _spoilt(me, trainer, kind), watched:
        result = trainer.step(number, _batches(trainer, number, kind), lr)
    return repr(result), standing[0] if standing else None


def _compare(me, cases):
    """Of each case what became of its steps' early updates; both ways are compared after each step."""
    return [_compare_case(me, *case) for case in cases]


def _compare_case(me, tree, parallel, dtype, clip):
    def trainer_config(early):
        return make_config(tree, {**parallel, "early_updates": early}, {"clip_grad_norm": clip})

    both = [make_trainer(me, trainer_config(early), dtype) for early in (True, False)]
    found = []
    for number, kind in enumerate(STEPS, start=1):
        (figures, standing), (figures_late, _) = [_step(me, one, number, kind, 1e-3) for one in both]
        assert figures == figures_late, (number, kind)  # as text, in which NaN is like itself
        found.append(standing)
        for early, late in zip(*(state_pieces(one) for one in both), strict=True):
            assert torch.equal(early.data, late.data), (number, kind, early.name)
        values, values_late = (plain_values(one, {}, 0) for one in both)
        assert values == values_late
        if number in (2, 6):
            losses = [one.evaluate([share_of(one, sequences(90, NUM_SEQUENCES))]) for one in both]
            assert losses[0] == losses[1], (number, kind)
    _check_memory(both[0], trainer_config(True), trainer_config(False))
    for one in both:
        one.finish()
    for early, late in zip(*(one.parameters for one in both), strict=True):
        early.begin_gather()
        late.begin_gather()
        early.await_parameters()
        late.await_parameters()
        assert torch.equal(early.parameters, late.parameters)
    return found


def _check_memory(trainer, config, config_late):
    """What is kept is what the plan counts; of tp ranks it counts the one with most of the vocabulary."""
    stage, mesh = trainer.groups.coords["pp"], trainer.groups.mesh
    early, late = (memory_of_stage(one, mesh, stage).optimizer for one in (config, config_late))
    kept = sum(part.nbytes for parts in trainer._early._kept.values() for part in parts)
    assert kept == pytest.approx(early - late, rel=0.02 if mesh.tp > 1 else 0)


def _compare_pieces(me, case, tables):
    """Steps of pieces of documents, which ranks share in rings, without a limit to norms: early from the second on."""
    both = []
    for early in (True, False):
        config = case.config()
        parallel = config.parallel.model_copy(update={"early_updates": early})
        optimizer = config.optimizer.model_copy(update={"clip_grad_norm": None})
        both.append(make_trainer(me, config.model_copy(update={"parallel": parallel, "optimizer": optimizer})))
    for table in tables:
        whole = documents(table.step, table.lengths.tolist())
        early, late = (one.step(table.step, pieces_of(table, me.rank, whole), 1e-3) for one in both)
        assert early == late and not early.skipped
    for early, late in zip(*(state_pieces(one) for one in both), strict=True):
        assert torch.equal(early.data, late.data), early.name
    return [bool(both[0]._early._kept), bool(both[1]._early)]


def _compare_ways(me, cases, case, tables):
    return [*_compare(me, cases), _compare_pieces(me, case, tables)]


def _tree(family, num_layers):
    return {**TREES[family], "num_layers": num_layers}


def test_steps_are_the_same_to_the_bit_where_early_updates_stand_and_where_they_are_taken_back():
    cases = [
        (_tree("llama", 7), {"virtual_stages": 7}, torch.float32, CLIP),
        (_tree("gpt", 5), {"virtual_stages": 5, "gradient_wire": "bf16"}, torch.bfloat16, CLIP),
        (_tree("llama", 4), {"virtual_stages": 4}, torch.float32, None),
    ]
    rings = PieceCase(1, 2, 1, "balanced", "llama-gqa", 12, virtual_stages=4, num_layers=4)
    tables = [planned(rings, step) for step in (1, 2, 3)]
    clipped, tied, not_clipped, of_pieces = run_ranks(_compare_ways, 2, cases, rings, tables, timeout_s=120)[0]
    assert clipped == tied == STANDING
    assert of_pieces == [True, False]
    # Without a limit one token's gradient stands too, and what follows is early again.
    assert not_clipped == [None, True, True, True, True, False, None, True, False, None, True]


def test_steps_are_the_same_to_the_bit_with_pipelines_and_tensor_parallel():
    cases = [
        (_tree("llama", 8), {"pp": 2, "virtual_stages": 4}, torch.float32, CLIP),
        (_tree("gpt", 8), {"pp": 2, "virtual_stages": 4, "schedule": "zero_bubble"}, torch.float32, CLIP),
        (_tree("llama", 4), {"tp": 2, "sequence_parallel": True, "virtual_stages": 4}, torch.float32, CLIP),
    ]
    of_ranks = run_ranks(_compare, 4, cases, timeout_s=120)
    assert of_ranks[0] == [STANDING] * 3
    # The last stage's last chunk has tied embeddings, whose sum comes last, so that stage has none to update early.
    assert of_ranks[3] == [STANDING, [None] * len(STEPS), STANDING]


@pytest.mark.parametrize(
    ("parallel", "optimizer", "message"),
    [
        ({"virtual_stages": 3}, {}, "virtual_stages=3.*it is for 4 or more"),
        ({"virtual_stages": 4, "overlap": False}, {}, "overlap=false rules out"),
        ({"virtual_stages": 4}, {"name": "lamb"}, "optimizer.name=lamb.*use adamw"),
    ],
)
def test_early_updates_are_refused_where_they_cannot_be(parallel, optimizer, message):
    with pytest.raises(ConfigError, match=message):
        make_config(TREES["llama"], {**parallel, "early_updates": True}, optimizer)
