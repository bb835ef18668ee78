"""How much of data parallel's communication hides beside compute on a slow network, against what the schedule allows.

Two ranks, one thread each; a model of equal layers with a small vocabulary, a model_chunk for each layer. In one
interleaved run: ours with early updates, with parallel.overlap alone, and without; the same step without its
collectives (compute), the collectives alone, and torch's DistributedDataParallel with bucket_cap_mb of 1, 5 and 25. All
in fp32 on the wire, with the same model, data and fused AdamW, and all losses are compared. Everybody clips by the
global norm, which stays below the limit, as it does in the steps of a run but for its beginning.

Hidden is 1 - (step - compute alone) / communication alone. Its bound comes from the simulator, with the measured
compute and communication: what the schedule would leave if everything began as early as its list allows.
Prints JSON. Communication should be about 0.8 of compute: choose the rate and --hidden-size so.

    python -m tests.bench.bench_overlap_dp --cluster NAME --rate 150mbit [--micro-batches 1] [--rounds 7]

starts a rank on each of the first two nodes of a devcluster that runs (slurm/devcluster start --name NAME --nodes 2
--gpus 1), whose interfaces it shapes and frees again. Without --cluster, two processes here or the ranks of a launcher.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.bench.on_nodes import run_on_two
from tests.ranks import TestRank

BUCKETS_MB = (1, 5, 25)
VOCAB = 256
CLIP = 100.0
"""Norm that is clipped: far above that of these steps, which is printed."""
LOSS_TOLERANCE = 1e-4
"""Relative, of two steps in fp32: sums in another order, then updates by them."""


def _model(args: Mapping[str, Any]) -> dict[str, Any]:
    hidden = args["hidden_size"]
    return {
        "family": args["family"],
        "num_layers": args["layers"],
        "hidden_size": hidden,
        "num_heads": max(1, hidden // 32),
        "vocab_size": VOCAB,
    }


def _batches(rank: int, args: Mapping[str, Any]) -> list[Any]:
    """This rank's micro-batches, the same at each step."""
    import torch

    from hpc_train.data.loader import Batch

    seq_len = args["seq_len"]
    generator = torch.Generator().manual_seed(5 + rank)
    batches = []
    for _ in range(args["micro_batches"]):
        tokens = torch.randint(0, VOCAB, (1, seq_len + 1), generator=generator)
        positions = torch.arange(seq_len)[None]
        batches.append(Batch(tokens[:, :-1], tokens[:, 1:], positions, ((seq_len,),), seq_len, seq_len))
    return batches


def _trainer(me: TestRank, args: Mapping[str, Any], *, overlap: bool, early: bool = False) -> Any:
    from tests.train.trainers import make_config, make_trainer

    parallel = {"virtual_stages": args["layers"], "overlap": overlap, "early_updates": early}
    config = make_config(_model(args), parallel, {"clip_grad_norm": CLIP}, seq_len=args["seq_len"], seed=1)
    return make_trainer(me, config)


def _step_of(trainer: Any, norms: list[float]) -> Callable[[list[Any]], float]:
    def step(batches: list[Any]) -> float:
        result = trainer.step(1, batches, 1e-4)
        norms.append(result.grad_norm)
        return float(result.loss)

    return step


def _compute(me: TestRank, args: Mapping[str, Any]) -> Callable[[list[Any]], float]:
    """A step without its gathers and sums: forwards, backwards, the five numbers' sum, the update of this shard."""
    from hpc_train.comm.begin import Pending
    from hpc_train.parallel.data import ShardedParameters

    class Silent(ShardedParameters):
        def begin_gather(self) -> None:
            self._is_whole = True

        def begin_reduce(self) -> None:
            self._reduction = Pending()

    trainer = _trainer(me, args, overlap=True)
    for chunk in trainer.parameters:
        chunk.__class__ = Silent
    return lambda batches: trainer.step(1, batches, 1e-4).loss


def _collectives(me: TestRank, args: Mapping[str, Any]) -> Callable[[list[Any]], float]:
    """A step's gathers and sums, and nothing else."""
    trainer = _trainer(me, args, overlap=False)

    def step(batches: list[Any]) -> float:
        for chunk in trainer.parameters:
            chunk.publish_shard()
            chunk.zero_gradients()
            chunk.begin_gather()
            chunk.await_parameters()
        for chunk in reversed(trainer.parameters):
            chunk.begin_reduce()
            chunk.await_gradients()
        return 0.0

    return step


def _gather_ends(me: TestRank, args: Mapping[str, Any]) -> list[float]:
    """When each chunk's parameters are there, in seconds, where all gathers are begun at once: one after another, or
    all of them late.
    """
    import torch.distributed as dist

    trainer = _trainer(me, args, overlap=True)
    ends: list[float] = []
    for _ in range(2):  # the first time makes connections
        ends.clear()
        dist.barrier()
        start = time.perf_counter()
        for chunk in trainer.parameters:
            chunk.publish_shard()
            chunk.begin_gather()
        for chunk in trainer.parameters:
            chunk.await_parameters()
            ends.append(time.perf_counter() - start)
    return ends


def _ddp(me: TestRank, args: Mapping[str, Any], bucket_mb: int) -> Callable[[list[Any]], float]:
    import contextlib

    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    from hpc_train.config import ModelConfig
    from hpc_train.models.attention import AttentionPlan
    from hpc_train.models.transformer import Transformer
    from tests.bench.rounds import torch_optimizer

    plain = Transformer(ModelConfig(**_model(args)), args["seq_len"])
    plain.init_weights(seed=1)
    model = DistributedDataParallel(plain, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    optimizer = torch_optimizer(list(model.parameters()))

    def step(batches: list[Any]) -> float:
        optimizer.zero_grad(set_to_none=False)
        total = 0.0
        for index, batch in enumerate(batches):
            with contextlib.nullcontext() if index == len(batches) - 1 else model.no_sync():
                logits = model(batch.tokens, batch.positions, AttentionPlan(None))
                loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()) / len(batches)
                loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        mean = torch.tensor(total, dtype=torch.float64)
        dist.all_reduce(mean)
        return float(mean) / me.world_size

    return step


def _measure(me: TestRank, args: Mapping[str, Any]) -> dict[str, Any]:
    """On each rank: seconds of each peer's step in each round, and the losses of its two first steps."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    norms: list[float] = []
    ours = {
        "early": _trainer(me, args, overlap=True, early=True),
        "overlap": _trainer(me, args, overlap=True),
        "no_overlap": _trainer(me, args, overlap=False),
    }
    peers = {
        **{name: _step_of(trainer, norms) for name, trainer in ours.items()},
        "compute": _compute(me, args),
        "communication": _collectives(me, args),
        **{f"ddp_{size}": _ddp(me, args, size) for size in BUCKETS_MB},
    }
    batches = _batches(me.rank, args)
    # Four, since only then has every gather been made twice, early ones too, and every buffer been touched.
    losses = {name: [step(batches) for _ in range(4)] for name, step in peers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    names = list(peers)
    for number in range(args["rounds"]):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            peers[name](batches)  # the timed steps begin as they end: with gathers under way
            start = time.perf_counter()
            for _ in range(args["steps_a_round"]):
                peers[name](batches)
            seconds[name].append((time.perf_counter() - start) / args["steps_a_round"])
            if name in ours:
                ours[name].finish()  # else its gathers are on the line in the next one's time
    return {
        "seconds": seconds,
        "losses": losses,
        "grad_norms": (min(norms), max(norms)),
        "gather_ends_s": _gather_ends(me, args),
    }


def bound(args: Mapping[str, Any], compute_s: float, communication_s: float, *, early: bool = False) -> float:
    """The share that the schedule can hide: equal layers, a forward half of a backward, gather and sum equally long."""
    from hpc_train.plan.hidden import hidden_shares
    from hpc_train.plan.schedule_collectives import plan_training
    from tests.plan.even_costs import even_costs

    chunks, micro_batches = args["layers"], args["micro_batches"]
    forward = round(1e9 * compute_s / (3 * chunks * micro_batches))
    once = round(1e9 * communication_s / (2 * chunks))
    schedule = plan_training("1f1b", 1, micro_batches, chunks, early_updates=early)
    costs = even_costs(forward=forward, backward=2 * forward, gather=once, reduce=once)
    return hidden_shares(schedule, [costs])[0].share


def report(args: Mapping[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """A round's time is that of its slowest rank; shares and ratios are medians of paired rounds.

    Raises:
        AssertionError: losses differ: between our ways in any bit, from DDP's by more than the tolerance; or gradients
            were near the norm that is clipped.
    """
    of_ranks = {name: [result["seconds"][name] for result in results] for name in results[0]["seconds"]}
    slowest = {name: [max(times) for times in zip(*seconds, strict=True)] for name, seconds in of_ranks.items()}
    losses = results[0]["losses"]
    assert losses["early"] == losses["overlap"] == losses["no_overlap"], f"overlap changes losses: {losses}"
    norms = results[0]["grad_norms"]
    assert norms[1] < CLIP / 2, f"norms of gradients {norms} are not far below {CLIP}, which is clipped"
    for size in BUCKETS_MB:
        for ours, theirs in zip(losses["overlap"], losses[f"ddp_{size}"], strict=True):
            assert abs(ours - theirs) <= LOSS_TOLERANCE * abs(theirs), f"losses differ from DDP's: {losses}"
    median = {name: statistics.median(times) for name, times in slowest.items()}
    best = min(median[f"ddp_{size}"] for size in BUCKETS_MB)
    best_bucket = min(BUCKETS_MB, key=lambda size: median[f"ddp_{size}"])
    return {
        "what": "median seconds a step of the slowest rank; hidden: 1 - (step - compute) / communication",
        "settings": dict(args),
        "load_average": os.getloadavg(),
        "step_s": median,
        "communication / compute": median["communication"] / median["compute"],
        **{way: _way(args, slowest, way, f"ddp_{best_bucket}") for way in ("early", "overlap")},
        "best ddp": {"bucket_cap_mb": best_bucket, "step_s": best},
        "gather_ends_s": results[0]["gather_ends_s"],
        "grad_norms": norms,
        "losses": losses,
    }


def _way(args: Mapping[str, Any], slowest: Mapping[str, list[float]], way: str, best_ddp: str) -> dict[str, Any]:
    """What one of our ways of overlap hides and gains."""
    rounds = list(zip(slowest[way], slowest["compute"], slowest["communication"], strict=True))
    hidden = [1 - (step - compute) / communication for step, compute, communication in rounds]
    bounds = [bound(args, compute, communication, early=way == "early") for _, compute, communication in rounds]
    return {
        "hidden": statistics.median(hidden),
        "hidden_range": (min(hidden), max(hidden)),
        "bound": statistics.median(bounds),
        "hidden / bound": statistics.median(a / b for a, b in zip(hidden, bounds, strict=True)),
        "against no_overlap": _ratio(slowest, way, "no_overlap"),
        "against best ddp": _ratio(slowest, way, best_ddp),
    }


def _ratio(slowest: Mapping[str, list[float]], ours: str, theirs: str) -> float:
    return statistics.median(a / b for a, b in zip(slowest[ours], slowest[theirs], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps-a-round", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8, help="each is a model_chunk")
    parser.add_argument("--family", choices=("llama", "gpt"), default="llama", help="gpt: has positions too")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batches", type=int, default=1, help="of one sequence, a rank and step")
    run_on_two(parser, "150mbit", "tests.bench.bench_overlap_dp", _measure, report)


if __name__ == "__main__":
    main()
