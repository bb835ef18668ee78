"""Steps of hybrid data parallelism: tokens a second of several ways to plan the same documents, in one run.

Documents are the C++ headers that come with torch, whole up to eight times (real-compute: twice) what a rank holds,
with their natural tail; the rest is what training runs: batch plans, rings, offloading, Trainer.step. Prints JSON.

--case planners: 8 ranks that hold 4K tokens; `static`, `naive` and `balanced`. As two cores cannot compute for eight
ranks, a layer takes the time of the plan's costs (hdp_emulation), which keep the proportions of ByteScale's at half its
capacity: a ring step's transfer takes 0.68 of a full block's attention (1.9 : 2.8), which the interfaces' rate is set
to. `modelled` is what the costs alone say.

--case ablation: the same with four layers of less width, a step of half the tokens and 0.4 of the time a block.
`static`; `rings`, each as long as its sequence needs and packs dealt out in rounds (naive); `offload`, the same with
rings that are shorter by as much as copies hide; `balance`, both and balanced. Copies keep ByteScale's proportions as
well: half of what a sequence of 64K saves, 32K here, is copied in the time of a layer's forward.

--case real-compute: 2 ranks of one thread each, nothing emulated; of the documents each eighth by length, so
that a step takes some seconds. `hpc-train profile`'s code measures this model first, and plans and `modelled` go by
that. On nodes, attention is measured before the rate of the interfaces is set, to the same 0.68.

    python -m tests.bench.bench_hdp_speed --case CASE [--cluster NAME] [--rounds 3] [--unshaped]

starts a rank on each of the first nodes of a devcluster that runs (slurm/devcluster start --name NAME --nodes 8
--gpus 1), whose interfaces it shapes and frees again. Without --cluster, processes here, whose network is fast.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_train.plan.batch_cost import BatchCosts, OffloadCosts
from hpc_train.plan.batch_table import BatchTable
from tests.bench.hdp_corpus import VOCAB, documents, headers, sampled, whole_batches
from tests.bench.on_nodes import on_nodes
from tests.bench.on_ranks import on_ranks
from tests.ranks import TestRank, run_ranks

RING_SHARE = 1.9 / 2.8
# Per square, per token, per token on a ring: those of bench_hdp_planner at half the capacity. Of what travels, all in
# fp32, a third are gradients, which go home.
COSTS = BatchCosts(1, 12288, 2780, ring_last_hop_per_token=2780, ring_home_per_token=2780 // 3)
# Half of a sequence's activations are copied in the time of a layer's forward: cited of 64K, which is 32K here.
COPY_PER_TOKEN = 2 * (32 * 1024 + COSTS.linear_per_token)
PROFILE_REPEATS = 5


@dataclass(frozen=True)
class Case:
    """tokens: of the documents, of which a step has each `every`-th by length. block_s: of attention of a full block,
    one layer forward; 0 where nothing is emulated.
    """

    ranks: int
    capacity: int
    context: int
    tokens: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    block_s: float
    plans: tuple[str, ...]
    every: int = 1

    def config(self) -> Any:
        from tests.train.trainers import make_config

        model = {
            "family": "llama", "num_layers": self.layers, "hidden_size": self.hidden, "num_heads": self.heads,
            "num_kv_heads": self.kv_heads, "vocab_size": VOCAB,
        }  # fmt: skip
        parallel = {"dp": self.ranks, "hdp": {"capacity_tokens": self.capacity}}
        return make_config(model, parallel, seq_len=self.context, seed=1, micro_batch_size=1)

    @property
    def kv_bytes(self) -> int:
        """Of a full block, in fp32."""
        return self.capacity * 2 * (self.hidden // self.heads) * self.kv_heads * 4

    @property
    def unit_s(self) -> float:
        return self.block_s / self.capacity**2


CASES = {
    "planners": Case(8, 4096, 32 * 1024, 96 * 4096, 1, 64, 4, 4, 0.1, ("static", "naive", "balanced")),
    "ablation": Case(8, 4096, 32 * 1024, 48 * 4096, 4, 16, 4, 4, 0.04, ("static", "rings", "offload", "balance")),
    "real-compute": Case(2, 4096, 8 * 1024, 96 * 4096, 1, 256, 8, 2, 0.0, ("static", "naive", "balanced"), 8),
}


def plans(case: Case, lengths: list[int], costs: BatchCosts) -> dict[str, BatchTable]:
    from hpc_train.plan.batch_balanced import BalancedPlanner
    from hpc_train.plan.batch_naive import NaivePlanner
    from hpc_train.plan.batch_problem import BatchPlanner, BatchProblem, HdpRanks
    from hpc_train.plan.batch_static import StaticPlanner

    offloading = replace(costs, offload=OffloadCosts(case.layers, COPY_PER_TOKEN))
    ways: dict[str, tuple[BatchPlanner, BatchCosts]] = {
        "static": (StaticPlanner(case.context), costs),
        "naive": (NaivePlanner(), costs),
        "rings": (NaivePlanner(), costs),
        "offload": (NaivePlanner(), offloading),
        "balanced": (BalancedPlanner(), costs),
        "balance": (BalancedPlanner(), offloading),
    }
    ranks = HdpRanks.alike(case.ranks, case.capacity)
    found = {}
    for name in case.plans:
        planner, of_planner = ways[name]
        found[name] = planner.plan(BatchProblem.make(1, lengths, ranks, of_planner))
    return found


def modelled_s(case: Case, table: BatchTable, costs: BatchCosts) -> float:
    """Of all layers' forwards and backwards."""
    from hpc_train.plan.batch_problem import HdpRanks
    from hpc_train.plan.batch_times import model_times

    ticks = model_times(table, HdpRanks.alike(case.ranks, case.capacity), costs).makespan
    return case.layers * ticks * (costs.tick_s if case.block_s == 0 else 3 * case.unit_s)


def _profile(case: Case, trainer: Any, control: Any) -> Any:
    """Of this case's model on these ranks, the same on each."""
    import torch

    from hpc_train.train.profile_ranks import measure_rank, profile_of_measured

    config, groups = case.config(), trainer.groups
    report = control.all_gather(measure_rank(config, groups, torch.device("cpu"), PROFILE_REPEATS, "n1"))
    return profile_of_measured(config, groups, report, "this benchmark")


def _measure(me: TestRank, args: Mapping[str, Any]) -> dict[str, Any]:
    """On each rank: seconds of each plan's step in each round, and what is known of the plans."""
    import torch
    import torch.distributed as dist

    from hpc_train.plan.batch_of_run import set_up_batches
    from tests.bench.hdp_emulation import emulate
    from tests.parallel.pieces import pieces_of
    from tests.train.trainers import make_trainer, mesh_of
    from tests.worlds import make_world

    case, costs, profile, room = CASES[args["case"]], COSTS, None, None
    torch.set_num_threads(1)
    texts = sampled(documents(Path(args["root"]), case.tokens, case.context), case.every)
    lengths, whole = [len(text) for text in texts], whole_batches(texts)
    trainer = make_trainer(me, case.config())
    if case.block_s:
        offload = OffloadCosts(case.layers, COPY_PER_TOKEN) if "offload" in case.plans else None
        room = emulate(trainer, replace(costs, offload=offload), case.unit_s)
    else:
        profile = _profile(case, trainer, make_world(me).control)
        costs = set_up_batches(case.config(), mesh_of(case.config(), me.world_size), profile).costs
    tables = plans(case, lengths, costs)
    batches = {name: pieces_of(table, me.rank, whole) for name, table in tables.items()}
    seconds: dict[str, list[float]] = {name: [] for name in tables}
    waited: dict[str, list[float]] = {name: [] for name in tables}
    losses: dict[str, float] = {}
    for _ in range(args["rounds"] + 1):
        for name in tables:
            before_s = room.waited_s if room else 0.0
            dist.barrier()
            start = time.perf_counter()
            losses[name] = trainer.step(1, batches[name], 0.0).loss
            seconds[name].append(time.perf_counter() - start)
            waited[name].append(room.waited_s - before_s if room else 0.0)
    return {
        "seconds": {name: times[1:] for name, times in seconds.items()},  # the first round warms up
        "waited_s": {name: max(times) for name, times in waited.items()},
        "losses": losses,
        "lengths": lengths,
        "modelled_s": {name: modelled_s(case, table, costs) for name, table in tables.items()},
        "plans": {name: _described(table) for name, table in tables.items()},
        "profile": None if profile is None else json.loads(profile.to_json()),
    }


def _described(table: BatchTable) -> dict[str, Any]:
    return {
        "rings": {str(size): count for size, count in sorted(Counter(table.sizes.tolist()).items())},
        "micro_batches": [int(table.num_micro_batches.min()), int(table.num_micro_batches.max())],
        "offload_milli": sorted({int(share) for share in table.offload_milli}),
    }


def report(args: Mapping[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """A round's time is that of its slowest rank; ratios are medians of paired rounds."""
    case, first = CASES[args["case"]], results[0]
    slowest = {
        name: [max(times) for times in zip(*(result["seconds"][name] for result in results), strict=True)]
        for name in case.plans
    }
    losses, lengths, modelled = first["losses"], first["lengths"], first["modelled_s"]
    assert max(losses.values()) - min(losses.values()) <= 1e-5 * max(losses.values()), f"losses differ: {losses}"
    step_s = {name: statistics.median(times) for name, times in slowest.items()}
    paired = {name: [a / b for a, b in zip(slowest["static"], slowest[name], strict=True)] for name in case.plans}
    return {
        "what": "tokens a second by the slowest rank; speed-up to static: median of paired rounds",
        "settings": dict(args),
        "load_average": os.getloadavg(),
        "documents": {
            "number": len(lengths),
            "tokens": sum(lengths),
            "median": statistics.median(lengths),
            "share_of_tokens_above_capacity": sum(x for x in lengths if x > case.capacity) / sum(lengths),
        },
        "tokens_per_s": {name: sum(lengths) / seconds for name, seconds in step_s.items()},
        "speed_up_to_static": {name: statistics.median(ratios) for name, ratios in paired.items()},
        "speed_up_range": {name: [min(ratios), max(ratios)] for name, ratios in paired.items()},
        "modelled_speed_up": {name: modelled["static"] / modelled[name] for name in case.plans},
        "step_s": step_s,
        "modelled_s": modelled,
        "waited_for_copies_s": {name: max(result["waited_s"][name] for result in results) for name in case.plans},
        "plans": first["plans"],
        "profile": first["profile"],
        "losses": losses,
    }


def _attention_s(me: TestRank, case: Case) -> float:
    """Of a full block on this rank, forward and backward, while the others compute too."""
    import torch

    from hpc_train.train.profile_layer import time_layer
    from tests.train.trainers import make_trainer

    torch.set_num_threads(1)
    groups = make_trainer(me, case.config()).groups
    square, _, _ = time_layer(case.config(), groups, torch.device("cpu"), case.capacity, PROFILE_REPEATS).parts()
    return square * case.capacity**2


def transfer_s(case: Case) -> float:
    """What a ring step's keys and values are to take; of real compute a third of what they take to and fro, where
    gradients come as well, as attention is measured to and fro.
    """
    if case.block_s:
        return RING_SHARE * case.block_s
    return RING_SHARE * max(run_ranks(_attention_s, case.ranks, case, timeout_s=300)) / 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="planners")
    parser.add_argument("--rounds", type=int, default=3, help="behind one that warms up")
    parser.add_argument("--root", default=str(headers()), help="whose .h files are the documents")
    parser.add_argument("--cluster", help="name of a devcluster that runs")
    parser.add_argument("--unshaped", action="store_true", help="leave the nodes' interfaces as fast as they are")
    args = vars(parser.parse_args())
    cluster, is_unshaped = args.pop("cluster"), args.pop("unshaped")
    case = CASES[args["case"]]
    if cluster is not None:
        rate = None if is_unshaped else f"{round(8 * case.kv_bytes / transfer_s(case) / 1000)}kbit"
        print(f"interfaces: {rate or 'as they are'}", file=sys.stderr)
        sys.exit(on_nodes("tests.bench.bench_hdp_speed", cluster, args, rate, num_nodes=case.ranks))
    results = on_ranks(_measure, case.ranks, args)
    if results is not None:
        print(json.dumps(report(args, results), indent=1))


if __name__ == "__main__":
    main()
