"""Step time and optimizer memory of our data parallel against DistributedDataParallel and FSDP2, in one run.

The same plain model, data, precision and fused AdamW; each peer is used as its documentation says. Rounds are
interleaved, so that what else the machine does falls on all alike; figures are medians over rounds. Prints JSON.

    python -m tests.bench.bench_data_parallel [--rounds 10] [--ranks 2] [--sequences 4]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.bench.rounds import (
    MODEL,
    SEQ_LEN,
    STEPS_A_ROUND,
    Peer,
    batches_of,
    check_losses,
    our_peer,
    plain_model,
    torch_optimizer,
)
from tests.ranks import TestRank, run_ranks


def _ours(me: TestRank) -> Peer:
    from hpc_train.config_read import build_config
    from hpc_train.plan.mesh import Mesh
    from hpc_train.train.build import build_trainer
    from tests.worlds import make_world

    tree = {
        "name": "bench",
        "model": MODEL,
        "data": {"seq_len": SEQ_LEN, "train": [{"prefix": "none"}]},
        "train": {"steps": 1, "global_batch_size": 4 * me.world_size, "seed": 1},
        "optimizer": {"lr": 1e-4},
    }
    trainer = build_trainer(build_config(tree, "bench"), Mesh.fill(me.world_size), make_world(me))
    return our_peer(trainer)


def _loss(model: Any, batch: Any) -> Any:
    """Through the wrapper's forward, which DDP and FSDP2 need; the mean over tokens, as both average ranks."""
    import torch.nn.functional as F

    from hpc_train.models.attention import AttentionPlan

    logits = model(batch.tokens, batch.positions, AttentionPlan(None))
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)


def _state_bytes(optimizer: Any) -> int:
    total = 0
    for state in optimizer.state.values():
        for value in (state["exp_avg"], state["exp_avg_sq"]):
            local = value.to_local() if hasattr(value, "to_local") else value
            total += local.numel() * local.element_size()
    return total


def _ddp(me: TestRank) -> Peer:
    import contextlib

    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(plain_model(), gradient_as_bucket_view=True)
    optimizer = torch_optimizer(list(model.parameters()))

    def step(batches: list[Any]) -> float:
        optimizer.zero_grad(set_to_none=False)
        total = 0.0
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = _loss(model, batch) / len(batches)
                loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return Peer(step, lambda: _state_bytes(optimizer))


def _fsdp2_no_sync(me: TestRank) -> Peer:
    """FSDP2 that reduces gradients once a step, and keeps unsharded ones until then."""
    return _fsdp2(me, reduce_every_micro_batch=False)


def _fsdp2(me: TestRank, reduce_every_micro_batch: bool = True) -> Peer:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (me.world_size,))
    model = plain_model()
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch_optimizer(list(model.parameters()))

    def step(batches: list[Any]) -> float:
        optimizer.zero_grad()
        total = 0.0
        for index, batch in enumerate(batches):
            model.set_requires_gradient_sync(reduce_every_micro_batch or index == len(batches) - 1)
            loss = _loss(model, batch) / len(batches)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return Peer(step, lambda: _state_bytes(optimizer))


PEERS: dict[str, Callable[[TestRank], Peer]] = {
    "hpc_train": _ours,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "fsdp2_no_sync": _fsdp2_no_sync,
}


def _measure(me: TestRank, rounds: int, num_sequences: int, micro_batch_size: int) -> dict[str, Any]:
    import torch.distributed as dist

    batches = batches_of(num_sequences, micro_batch_size, slice(me.rank, None, me.world_size))
    peers = {name: make(me) for name, make in PEERS.items()}
    losses = {name: [peer.step(batches) for _ in range(2)] for name, peer in peers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    names = list(peers)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            peers[name].step(batches)  # so that the timed steps begin as they end: with what a step before has begun
            start = time.perf_counter()
            for _ in range(STEPS_A_ROUND):
                peers[name].step(batches)
            seconds[name].append((time.perf_counter() - start) / STEPS_A_ROUND)
            peers[name].finish()
    memory = {name: peer.optimizer_bytes() for name, peer in peers.items()}
    return {"seconds": seconds, "optimizer_bytes": memory, "first_losses": losses}


def mean_losses(results: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Of each peer's first steps over ranks: DDP's and FSDP2's ranks know their own, ours all know the mean."""
    return {
        name: [statistics.fmean(losses) for losses in zip(*(of["first_losses"][name] for of in results), strict=True)]
        for name in results[0]["first_losses"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=4, help="in a step, over all ranks")
    parser.add_argument("--micro-batch-size", type=int, default=1)
    args = parser.parse_args()
    results = run_ranks(_measure, args.ranks, args.rounds, args.sequences, args.micro_batch_size, timeout_s=1800)
    slowest = {
        name: [max(result["seconds"][name][i] for result in results) for i in range(args.rounds)] for name in PEERS
    }
    ours, losses = slowest["hpc_train"], mean_losses(results)
    check_losses(losses, [("hpc_train", name) for name in PEERS])
    print(
        json.dumps(
            {
                "what": "median step time in seconds, slowest rank; ratios are medians of paired rounds",
                "settings": vars(args),
                "step_s": {name: statistics.median(values) for name, values in slowest.items()},
                "ratio_to": {
                    name: statistics.median(a / b for a, b in zip(ours, slowest[name], strict=True))
                    for name in PEERS
                    if name != "hpc_train"
                },
                "optimizer_bytes": results[0]["optimizer_bytes"],
                "first_losses": losses,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
