"""How much of tensor parallel's communication tiles hide beside matrix products on a slow network.

Two ranks, one thread each, that share a model of equal layers with a small vocabulary. In one interleaved run: steps
with tiles and with one (each transfer awaited where it is begun), the same steps without their transfers (compute), and
the transfers alone, each untiled. Losses of all steps with transfers are compared.

Hidden is 1 - (step with tiles - compute) / transfers alone, once with the compute of the same tiles, once with that of
whole products, which also counts what cutting them costs. Its bound is `plan.hidden_tiles`'. Prints JSON. Transfers
alone should be about 0.8 of the compute that they can run beside, which is matrix products: choose the rate so.

    python -m tests.bench.bench_overlap_tp --cluster NAME --rate 150mbit [--block parallel] [--tiles 4] [--rounds 7]

starts a rank on each of the first two nodes of a devcluster that runs (slurm/devcluster start --name NAME --nodes 2
--gpus 1), whose interfaces it shapes and frees again. Without --cluster, two processes here or the ranks of a launcher.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from tests.bench.on_nodes import run_on_two
from tests.ranks import TestRank

VOCAB = 256
LOSS_TOLERANCE = 1e-5
"""Relative, of three steps in fp32: rows multiplied in other blocks."""


def _config(args: Mapping[str, Any], tiles: int) -> Any:
    from tests.train.trainers import make_config

    hidden = args["hidden_size"]
    model = {
        "family": "gpt", "num_layers": args["layers"], "hidden_size": hidden, "num_heads": max(2, hidden // 64),
        "vocab_size": VOCAB, "block": args["block"],
    }  # fmt: skip
    parallel = {"tp": 2, "sequence_parallel": not args["whole_stream"], "tp_tiles": tiles}
    config = make_config(model, parallel, seq_len=args["seq_len"], seed=1, global_batch_size=args["micro_batches"])
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"clip_grad_norm": 1.0})})


def _batches(args: Mapping[str, Any]) -> list[Any]:
    from tests.bench.rounds import batches_of

    return batches_of(args["micro_batches"], 1, vocab_size=VOCAB, seq_len=args["seq_len"])


def _step(me: TestRank, args: Mapping[str, Any], tiles: int) -> Callable[[list[Any]], float]:
    from tests.train.trainers import make_trainer

    trainer = make_trainer(me, _config(args, tiles))
    numbers = itertools.count(1)
    return lambda batches: trainer.step(next(numbers), batches, 1e-4).loss


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """While entered, nothing is sent over tp: each rank takes its own numbers for those of the others."""
    from hpc_train.comm.begin import Pending
    from hpc_train.parallel import exchange, replicated, tensor

    class SilentSums:
        def __init__(self, *_: Any) -> None: ...
        def begin(self, *_: Any) -> None: ...
        def wait(self) -> None: ...

    def own_share(partial: Any, group: Any) -> Any:
        B, _, h = partial.shape
        return partial.view(B, group.group_size, -1, h)[:, group.group_rank].clone()

    def gathered(share: Any, group: Any) -> Any:
        whole = share.new_empty(share.shape[0], group.group_size, *share.shape[1:])
        return whole.copy_(share[:, None]).flatten(1, 2)

    def filled(flat: Any, group: Any) -> None:
        parts = flat.view(group.group_size, -1)
        parts.copy_(parts[group.group_rank].clone())

    tokens = {"all_gather_tokens": gathered, "reduce_scatter_tokens": own_share}
    whole = {"all_reduce_": lambda tensor, group: tensor}
    tiles = {
        "begin_gather_tokens": lambda whole, num_tiles, group: [Pending()] * num_tiles,
        "room_for_whole": gathered,
        "TokenSums": SilentSums,
        "begin_all_reduce": lambda tensor, group: Pending(),
    }
    with (
        mock.patch.multiple(exchange, **tokens, **whole, **tiles),
        mock.patch.multiple(tensor, **tokens, **whole, all_gather_=filled),
        mock.patch.multiple(replicated, **whole),
    ):
        yield


def _compute(step: Callable[[list[Any]], float]) -> Callable[[list[Any]], float]:
    """A step without tp's transfers: its products are all there, its numbers mean nothing."""

    def silent(batches: list[Any]) -> float:
        with _silence():
            return step(batches)

    return silent


def _transfers(me: TestRank, args: Mapping[str, Any]) -> Callable[[list[Any]], float]:
    """A step's transfers of the residual stream, and nothing else."""
    import torch

    from hpc_train.comm.collectives import all_reduce_
    from hpc_train.comm.tokens import all_gather_tokens, reduce_scatter_tokens
    from tests.worlds import make_group

    group, seq_len, hidden = make_group(me), args["seq_len"], args["hidden_size"]
    whole, share = torch.zeros(1, seq_len, hidden), torch.zeros(1, seq_len // 2, hidden)
    # Of each kind, entering and leaving, forward and backward: a block's parts, the head's and the embedding's.
    count = args["micro_batches"] * (args["layers"] * (2 if args["block"] == "serial" else 1) * 2 + 2)

    def step(batches: list[Any]) -> float:
        for _ in range(count):
            if args["whole_stream"]:
                all_reduce_(whole, group)
            else:
                all_gather_tokens(share, group)
                reduce_scatter_tokens(whole, group)
        return 0.0

    return step


def _measure(me: TestRank, args: Mapping[str, Any]) -> dict[str, Any]:
    """On each rank: seconds of each peer's step in each round, and the losses of its first steps."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    tiles, whole = _step(me, args, args["tiles"]), _step(me, args, 1)
    peers = {
        "tiles": tiles,
        "no_tiles": whole,
        "compute": _compute(tiles),
        "compute_whole": _compute(whole),
        "transfers": _transfers(me, args),
    }
    batches = _batches(args)
    losses = {name: [step(batches) for _ in range(args["warm_up"])] for name, step in peers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    names = list(peers)
    for number in range(args["rounds"]):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(args["steps_a_round"]):
                peers[name](batches)
            seconds[name].append((time.perf_counter() - start) / args["steps_a_round"])
    return {"seconds": seconds, "losses": {name: losses[name] for name in ("tiles", "no_tiles")}}


def _bound(args: Mapping[str, Any], ratio: float) -> float:
    from hpc_train.plan.hidden_tiles import best_hidden_tiles
    from hpc_train.plan.mesh import Mesh

    ((_, share),) = best_hidden_tiles(_config(args, args["tiles"]), Mesh(1, 1, 1, 2), (ratio,))
    return share


def _beside(args: Mapping[str, Any]) -> float:
    from hpc_train.plan.mesh import Mesh
    from tests.plan.beside_share import beside_share

    return beside_share(_config(args, args["tiles"]), Mesh(1, 1, 1, 2))


def report(args: Mapping[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """A round's time is that of its slowest rank; shares and ratios are medians of paired rounds.

    Raises:
        AssertionError: losses with tiles differ from those without by more than the tolerance.
    """
    of_ranks = {name: [result["seconds"][name] for result in results] for name in results[0]["seconds"]}
    slowest = {name: [max(times) for times in zip(*seconds, strict=True)] for name, seconds in of_ranks.items()}
    losses = results[0]["losses"]
    for ours, theirs in zip(losses["tiles"], losses["no_tiles"], strict=True):
        assert abs(ours - theirs) <= LOSS_TOLERANCE * abs(theirs), f"tiles change losses: {losses}"

    def hidden(compute: str) -> list[float]:
        rounds = zip(slowest["tiles"], slowest[compute], slowest["transfers"], strict=True)
        return [1 - (step - alone) / transfers for step, alone, transfers in rounds]

    shares = hidden("compute")
    ratios = [a / b for a, b in zip(slowest["transfers"], slowest["compute_whole"], strict=True)]
    bounds = [_bound(args, ratio) for ratio in ratios]
    return {
        "what": "median seconds a step of the slowest rank; hidden: 1 - (tiles - compute) / transfers",
        "settings": dict(args),
        "load_average": os.getloadavg(),
        "step_s": {name: statistics.median(times) for name, times in slowest.items()},
        "transfers / compute": statistics.median(ratios),
        "transfers / compute that they can run beside": statistics.median(ratios) / _beside(args),
        "hidden": statistics.median(shares),
        "hidden_range": (min(shares), max(shares)),
        "hidden, cutting counted": statistics.median(hidden("compute_whole")),
        "bound": statistics.median(bounds),
        "hidden / bound": statistics.median(a / b for a, b in zip(shares, bounds, strict=True)),
        "tiles / no_tiles": statistics.median(
            a / b for a, b in zip(slowest["tiles"], slowest["no_tiles"], strict=True)
        ),
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps-a-round", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--micro-batches", type=int, default=1, help="of one sequence, in a step")
    parser.add_argument("--block", choices=("serial", "parallel"), default="parallel")
    parser.add_argument("--tiles", type=int, default=4)
    parser.add_argument("--whole-stream", type=int, choices=(0, 1), default=0, help="1: without sequence parallel")
    run_on_two(parser, "150mbit", "tests.bench.bench_overlap_tp", _measure, report)


if __name__ == "__main__":
    main()
