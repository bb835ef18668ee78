"""Every number of ranks gives the one-rank losses and gradient norms; bad steps are skipped on all alike."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from hpc_train.config import OptimizerConfig
from hpc_train.models.attention import AttentionPlan
from hpc_train.models.transformer import Transformer
from hpc_train.train.optimizer import learning_rate
from tests.ranks import run_ranks
from tests.train.trainers import MODELS, SEQ_LEN, TREES, make_config, make_trainer, sequences, share_of

NUM_SEQUENCES = 24


def _train(me, family, num_steps, dtype=torch.float32):
    trainer = make_trainer(me, make_config(TREES[family]), dtype)
    figures = []
    for step in range(1, num_steps + 1):
        result = trainer.step(step, share_of(trainer, sequences(step, NUM_SEQUENCES)), lr=3e-3)
        figures.append((result.loss, result.grad_norm, result.num_supervised, result.skipped))
    return figures


def _plain(family: str, num_steps: int) -> list[tuple[float, float]]:
    """The same training by torch alone, on one process, in one batch: the reference."""
    model = Transformer(MODELS[family], SEQ_LEN)
    model.init_weights(seed=7)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=3e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    figures = []
    for step in range(1, num_steps + 1):
        batches = sequences(step, NUM_SEQUENCES)
        tokens, labels, positions = (
            torch.cat([getattr(batch, part) for batch in batches]) for part in ("tokens", "labels", "positions")
        )
        boundaries = tuple(batch.boundaries[0] for batch in batches)
        plan = AttentionPlan.from_boundaries(boundaries, SEQ_LEN, torch.device("cpu"))
        logits = model(tokens, positions, plan)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        figures.append((loss.item(), norm.item()))
    return figures


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_give_the_losses_and_norms_of_plain_torch_on_one_process(family, world_size):
    """FC-89: each parameter counts once in the norm, a tied embedding (gpt) too."""
    reference = _plain(family, 10)
    for figures in run_ranks(_train, world_size, family, 10, timeout_s=120):
        for (loss, norm, _, skipped), (loss_ref, norm_ref) in zip(figures, reference, strict=True):
            assert not skipped
            assert loss == pytest.approx(loss_ref, rel=1e-5)
            assert norm == pytest.approx(norm_ref, rel=1e-5)


def test_bf16_follows_fp32_to_its_rounding():
    """bf16 has 8 bits of mantissa: a loss of about 4 is off by some 1e-2 after a few steps of equal direction."""
    bf16 = run_ranks(_train, 2, "llama", 5, torch.bfloat16)[0]
    for (loss, _, _, _), (loss_ref, _) in zip(bf16, _plain("llama", 5), strict=True):
        assert loss == pytest.approx(loss_ref, rel=2e-2)


def _train_with_bad_steps(me):
    trainer = make_trainer(me, make_config(TREES["llama"]))
    results = []
    for step in range(1, 5):
        batches = sequences(step, 2)[me.rank : me.rank + 1]
        trainer.publish_parameters()
        if step == 2 and me.rank == 1:
            with torch.no_grad():
                keep = trainer.pipeline.chunks[0].norm.weight.clone()
                trainer.pipeline.chunks[0].norm.weight.fill_(math.nan)
        if step == 3:
            batches = [dataclasses.replace(b, labels=torch.full_like(b.labels, -100)) for b in batches]
        before = trainer.parameters[0].parameters.clone()
        results.append(trainer.step(step, batches, lr=1e-2))
        if step == 2 and me.rank == 1:
            with torch.no_grad():
                trainer.pipeline.chunks[0].norm.weight.copy_(keep)
        trainer.publish_parameters()
        changed = not torch.equal(before, trainer.parameters[0].parameters)
        assert step == 2 or changed != results[-1].skipped
    return [(r.loss, r.skipped, r.num_supervised) for r in results], trainer.parameters[0].parameters


def test_a_step_with_nan_or_without_labels_is_skipped_on_all_ranks_alike():
    """FC-87, and NaN on one rank only."""
    (first, weights_0), (second, weights_1) = run_ranks(_train_with_bad_steps, 2)
    assert [skipped for _, skipped, _ in first] == [False, True, True, False]
    assert [skipped for _, skipped, _ in second] == [False, True, True, False]
    assert math.isnan(first[2][0]) and first[2][1:] == (True, 0)
    assert torch.equal(weights_0, weights_1)
    assert torch.isfinite(weights_0).all()


def _train_with_one_rank_unsupervised(me):
    trainer = make_trainer(me, make_config(TREES["llama"]))
    batches = sequences(1, 2)
    batches[1].labels.fill_(-100)
    result = trainer.step(1, batches[me.rank :: me.world_size], lr=1e-2)
    return result.loss, result.grad_norm


def test_a_rank_whose_labels_are_all_ignored_changes_nothing():
    """FC-87: equal to the single-process result."""
    (alone,) = run_ranks(_train_with_one_rank_unsupervised, 1)
    for loss, norm in run_ranks(_train_with_one_rank_unsupervised, 2):
        assert (loss, norm) == (pytest.approx(alone[0], rel=1e-6), pytest.approx(alone[1], rel=1e-5))


def test_optimizer_memory_is_shared_out_over_ranks():
    (alone,) = run_ranks(_moment_bytes, 1)
    for share in run_ranks(_moment_bytes, 2):
        assert share <= alone / 2 + 1024


def _moment_bytes(me):
    trainer = make_trainer(me, make_config(TREES["llama"]))
    return sum(moment.untyped_storage().nbytes() for (moment,) in trainer.optimizer.moments.values())


def test_learning_rate_warms_up_then_falls_along_a_cosine():
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=4)
    rates = [learning_rate(step, config, 20) for step in range(1, 26)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:20] == sorted(set(rates[3:20]), reverse=True)
    assert rates[19:] == [0.1] * 6
    assert learning_rate(12, config, 20) == pytest.approx(0.55)


def test_a_run_that_is_all_warm_up_ends_at_the_full_rate():
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(step, config, 4) for step in (1, 4)] == [0.25, 1.0]
    assert learning_rate(1, OptimizerConfig(lr=1.0), 1) == 0.0


def _train_by_parts(me, overlap, wire="fp32"):
    """Losses, final weights, and what was begun in each of the steps: gathers and sums by model_chunk."""
    from hpc_train.parallel.data import ShardedParameters

    begun = []

    class Noted(ShardedParameters):
        def begin_gather(self):
            if not self._is_whole and self._gather is None:
                begun[-1].append(("gather", trainer.parameters.index(self)))
            super().begin_gather()

        def begin_reduce(self):
            begun[-1].append(("sum", trainer.parameters.index(self)))
            super().begin_reduce()

    tree = {**TREES["gpt"], "num_layers": 4}
    parallel = {"virtual_stages": 4, "overlap": overlap, "gradient_wire": wire}
    trainer = make_trainer(me, make_config(tree, parallel))
    for chunk in trainer.parameters:
        chunk.__class__ = Noted
    losses = []
    for step in range(1, 5):
        begun.append([])

        def batches(step=step):
            begun[-1].append("data")
            yield from share_of(trainer, sequences(step, 4))

        result = trainer.step(step, batches(), lr=1e-2)
        losses.append((result.loss, result.grad_norm))
        if step == 3:
            begun.append([])
            losses.append(trainer.evaluate([share_of(trainer, sequences(9, 4))]))
    noted = list(begun)
    begun.append([])
    trainer.publish_parameters()
    return losses, torch.cat([chunk.parameters for chunk in trainer.parameters]), noted


def test_overlap_changes_no_bit_and_each_chunk_is_gathered_and_summed_once_a_step():
    """The embeddings are tied, so the last chunk's sum is behind the first one's."""
    with_overlap = run_ranks(_train_by_parts, 2, True)
    without = run_ranks(_train_by_parts, 2, False)
    gathers, sums = [("gather", chunk) for chunk in range(4)], [("sum", chunk) for chunk in (2, 1, 0, 3)]
    for (losses, weights, begun), (losses_off, weights_off, begun_off) in zip(with_overlap, without, strict=True):
        assert losses == losses_off
        assert torch.equal(weights, weights_off)
        # Beside the next data; what an evaluation needs is on its way, and the next step has it from there.
        step = ["data", *sums, *gathers]
        assert begun == [step, step, step, [], step]
        assert begun_off[1] == ["data", *gathers, *sums]
    assert torch.equal(with_overlap[0][1], with_overlap[1][1])


def test_with_gradients_as_bf16_on_their_way_losses_follow_to_its_rounding():
    exact, rounded = run_ranks(_train_by_parts, 2, True), run_ranks(_train_by_parts, 2, True, "bf16")
    assert rounded[0][0] != exact[0][0]
    assert torch.equal(rounded[0][1], rounded[1][1])
    for ours, theirs in zip(rounded[0][0], exact[0][0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-2)
