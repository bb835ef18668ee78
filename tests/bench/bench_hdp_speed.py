"""Steps of hybrid data parallelism on 8 ranks: tokens a second of balanced, naive and static plans in one run.

Documents are the C++ headers that come with torch, whole up to 32K tokens, with their natural tail (46 % of the tokens
in documents above 4K, 15 % at 32K; in ByteScale's GitHub set 56 % above its capacity and 25 % above 8 times that); a
rank holds 4K. A token is a word, a sign or a space between them, about as long as those of tokenizers made for code.
Tokens, plans, rings and the sum of gradients are real. The time of attention and of the rest of a layer is a sleep of
what the plan's costs say, as two cores cannot compute for eight ranks. Costs keep the proportions of ByteScale's at
half its capacity: a ring step's transfer takes 0.68 of a full block's attention (1.9 : 2.8), which the interfaces' rate
is set to. `modelled` is what the costs alone say. Prints JSON.

    python -m tests.bench.bench_hdp_speed --cluster NAME [--rounds 3] [--block-s 0.1] [--unshaped]

starts a rank on each of the first 8 nodes of a devcluster that runs (slurm/devcluster start --name NAME --nodes 8
--gpus 1), whose interfaces it shapes and frees again. Without --cluster, eight processes here, whose network is fast.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from tests.bench.on_nodes import on_nodes
from tests.bench.on_ranks import on_ranks
from tests.ranks import TestRank

RANKS, CAPACITY, CONTEXT, VOCAB, HIDDEN, HEADS = 8, 4096, 32 * 1024, 256, 64, 4
# Per square, per token, per token on a ring: those of bench_hdp_planner at half the capacity.
COSTS = (1, 12288, 2780)
RING_SHARE = 1.9 / 2.8
PLANNERS = ("static", "naive", "balanced")


def documents(root: Path, num_tokens: int) -> list[bytes]:
    """Source files as tokens in the order of a hash of their names, longer ones cut at the context, until enough."""
    import hashlib
    import re
    import zlib

    token = re.compile(rb"\w+|[^\w\s]|\s+")
    found: list[bytes] = []
    left = num_tokens
    paths = sorted(root.rglob("*.h"), key=lambda path: hashlib.sha256(str(path.relative_to(root)).encode()).digest())
    for path in paths:
        text = bytes(zlib.crc32(word) & 0xFF for word in token.findall(path.read_bytes()))
        for start in range(0, len(text), CONTEXT):
            if left <= 0:
                return found
            found.append(text[start : start + min(CONTEXT, left)])
            left -= len(found[-1])
    return found


def tables(lengths: Sequence[int]) -> dict[str, Any]:
    from hpc_train.plan.batch_balanced import BalancedPlanner
    from hpc_train.plan.batch_cost import BatchCosts
    from hpc_train.plan.batch_naive import NaivePlanner
    from hpc_train.plan.batch_problem import BatchPlanner, BatchProblem, HdpRanks
    from hpc_train.plan.batch_static import StaticPlanner

    problem = BatchProblem.make(1, lengths, HdpRanks.alike(RANKS, CAPACITY), BatchCosts(*COSTS))
    planners: dict[str, BatchPlanner] = {
        "static": StaticPlanner(CONTEXT), "naive": NaivePlanner(), "balanced": BalancedPlanner()
    }  # fmt: skip
    return {name: planners[name].plan(problem) for name in PLANNERS}


def modelled(of_planners: Mapping[str, Any]) -> dict[str, float]:
    """Speed-ups to static by the costs that the plans were made with."""
    from hpc_train.plan.batch_cost import BatchCosts
    from hpc_train.plan.batch_problem import HdpRanks
    from hpc_train.plan.batch_times import model_times

    ranks, costs = HdpRanks.alike(RANKS, CAPACITY), BatchCosts(*COSTS)
    ticks = {name: model_times(table, ranks, costs).makespan for name, table in of_planners.items()}
    return {name: ticks["static"] / ticks[name] for name in PLANNERS}


def _emulated(trainer: Any, unit_s: float) -> None:
    """Have attention and feed-forward part take their modelled time, and attention compute nothing else."""
    import torch

    from hpc_train.parallel import ring_attention
    from hpc_train.parallel.attention_blocks import BlockKernel, Meeting, Sums

    def pairs(blocks: Sequence[Any]) -> int:
        return sum(
            b.num_queries * (b.num_queries + 1) // 2 if b.is_diagonal else b.num_queries * b.num_keys for b in blocks
        )

    class Sleeping(BlockKernel):
        def forward_(self, sums: Sums, q: Any, kv: Any, meeting: Meeting, window: int | None) -> None:
            time.sleep(2 * pairs(meeting.blocks) * COSTS[0] * unit_s)

        def backward_(self, of_q: Any, of_kv: Any, results: Any, kv: Any, meeting: Meeting, window: int | None) -> None:
            time.sleep(4 * pairs(meeting.blocks) * COSTS[0] * unit_s)

    class Rest(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.seconds = x.shape[1] * COSTS[1] * unit_s
            time.sleep(ctx.seconds)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(2 * ctx.seconds)
            return gradient

    ring_attention._kernel = lambda q, window: Sleeping()  # the process is this benchmark's own
    for chunk in trainer.pipeline.chunks:
        for layer in chunk.layers.values():
            layer.ffn.register_forward_hook(lambda module, inputs, output: Rest.apply(output))


def _measure(me: TestRank, args: Mapping[str, Any]) -> dict[str, Any]:
    """On each rank: seconds of each planner's step in each round, and the losses of its first one."""
    import torch
    import torch.distributed as dist

    from tests.parallel.pieces import pieces_of
    from tests.train.trainers import TestBatch, make_config, make_trainer

    torch.set_num_threads(1)
    texts = documents(Path(args["root"]), args["tokens"])
    whole = []
    for text in texts:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[None]
        labels = torch.cat([tokens[:, 1:], tokens.new_full((1, 1), -100)], dim=1)
        whole.append(TestBatch(tokens, labels, torch.arange(len(text))[None], ((len(text),),), (0,)))
    of_planners = tables([len(text) for text in texts])
    batches = {name: pieces_of(table, me.rank, whole) for name, table in of_planners.items()}
    model = {"family": "llama", "num_layers": 1, "hidden_size": HIDDEN, "num_heads": HEADS, "vocab_size": VOCAB}
    trainer = make_trainer(me, make_config(model, seq_len=CONTEXT, seed=1))
    _emulated(trainer, args["block_s"] / CAPACITY**2)
    losses = {name: trainer.step(1, batches[name], 0.0).loss for name in PLANNERS}
    seconds: dict[str, list[float]] = {name: [] for name in PLANNERS}
    for _ in range(args["rounds"]):
        for name in PLANNERS:
            dist.barrier()
            start = time.perf_counter()
            trainer.step(1, batches[name], 0.0)
            seconds[name].append(time.perf_counter() - start)
    rings = {
        name: sorted({len(batch.members) for batch in of_planner}) for name, of_planner in batches.items()
    }  # fmt: skip
    return {
        "seconds": seconds,
        "losses": losses,
        "rings": rings,
        "lengths": sorted(len(text) for text in texts),
        "modelled": modelled(of_planners),
    }


def report(args: Mapping[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """A round's time is that of its slowest rank; ratios are medians of paired rounds."""
    slowest = {
        name: [max(times) for times in zip(*(result["seconds"][name] for result in results), strict=True)]
        for name in PLANNERS
    }
    losses, lengths = results[0]["losses"], results[0]["lengths"]
    assert max(losses.values()) - min(losses.values()) <= 1e-5 * max(losses.values()), f"losses differ: {losses}"
    return {
        "what": "tokens a second by the slowest rank; speed-up to static: median of paired rounds",
        "settings": dict(args),
        "load_average": os.getloadavg(),
        "documents": {"number": len(lengths), "tokens": sum(lengths), "median": statistics.median(lengths)},
        "tokens_in_documents_above_capacity": sum(x for x in lengths if x > CAPACITY) / sum(lengths),
        "tokens_per_s": {name: sum(lengths) / statistics.median(times) for name, times in slowest.items()},
        "speed_up_to_static": {
            name: statistics.median(a / b for a, b in zip(slowest["static"], slowest[name], strict=True))
            for name in PLANNERS
        },
        "modelled": results[0]["modelled"],
        "ring_sizes_of_rank_0": results[0]["rings"],
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=12 * RANKS * CAPACITY, help="of a step")
    parser.add_argument("--block-s", type=float, default=0.1, help="attention of a full block of 4K, one layer forward")
    headers = Path(str(files("torch"))) / "include"
    parser.add_argument("--root", default=str(headers), help="whose .h files are the documents")
    parser.add_argument("--cluster", help="name of a devcluster that runs")
    parser.add_argument("--unshaped", action="store_true", help="leave the nodes' interfaces as fast as they are")
    args = vars(parser.parse_args())
    cluster, is_unshaped = args.pop("cluster"), args.pop("unshaped")
    if cluster is not None:
        kv_bytes = CAPACITY * 2 * HIDDEN * 4
        rate = f"{round(8 * kv_bytes / (RING_SHARE * args['block_s']) / 1000)}kbit"
        module = "tests.bench.bench_hdp_speed"
        sys.exit(on_nodes(module, cluster, args, None if is_unshaped else rate, num_nodes=RANKS))
    results = on_ranks(_measure, RANKS, args)
    if results is not None:
        print(json.dumps(report(args, results), indent=1))


if __name__ == "__main__":
    main()
