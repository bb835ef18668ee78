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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.ranks import TestRank, run_ranks

SEQ_LEN, VOCAB, STEPS_A_ROUND = 512, 8192, 3
MODEL = {"family": "gpt", "num_layers": 4, "hidden_size": 256, "num_heads": 8, "vocab_size": VOCAB}


@dataclass(frozen=True)
class Peer:
    """One way to train: a step over micro-batches, and the bytes of its optimizer state on this rank."""

    step: Callable[[list[Any]], float]
    optimizer_bytes: Callable[[], int]


def _model() -> Any:
    from hpc_train.config import ModelConfig
    from hpc_train.models.transformer import Transformer

    model = Transformer(ModelConfig.model_validate(MODEL), SEQ_LEN)
    model.init_weights(seed=1)
    return model


def _ours(me: TestRank) -> Peer:
    from hpc_train.config import build_config
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
    moments = [moment for of_chunks in trainer.optimizer.moments.values() for moment in of_chunks]
    return Peer(
        lambda batches: trainer.step(1, batches, 1e-4).loss,
        lambda: sum(moment.untyped_storage().nbytes() for moment in moments),
    )


def _loss(model: Any, batch: Any) -> Any:
    """Through the wrapper's forward, which DDP and FSDP2 need; the mean over tokens, as both average ranks."""
    import torch.nn.functional as F

    from hpc_train.models.attention import AttentionPlan

    logits = model(batch.tokens, batch.positions, AttentionPlan(None))
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)


def _torch_optimizer(model: Any) -> Any:
    import torch

    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)


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

    model = DistributedDataParallel(_model(), gradient_as_bucket_view=True)
    optimizer = _torch_optimizer(model)

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
    model = _model()
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = _torch_optimizer(model)

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


def _batches(me: TestRank, num_sequences: int, micro_batch_size: int) -> list[Any]:
    import torch

    from hpc_train.data.loader import Batch

    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (num_sequences, SEQ_LEN + 1), generator=generator)[me.rank :: me.world_size]
    batches = []
    for start in range(0, len(tokens), micro_batch_size):
        part = tokens[start : start + micro_batch_size]
        size = len(part)
        positions = torch.arange(SEQ_LEN).expand(size, SEQ_LEN)
        one_document = ((SEQ_LEN,),) * size
        batches.append(Batch(part[:, :-1], part[:, 1:], positions, one_document, size * SEQ_LEN, size * SEQ_LEN))
    return batches


def _measure(me: TestRank, rounds: int, num_sequences: int, micro_batch_size: int) -> dict[str, Any]:
    import torch.distributed as dist

    batches = _batches(me, num_sequences, micro_batch_size)
    peers = {name: make(me) for name, make in PEERS.items()}
    losses = {name: [peer.step(batches) for _ in range(2)][0] for name, peer in peers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    names = list(peers)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS_A_ROUND):
                peers[name].step(batches)
            seconds[name].append((time.perf_counter() - start) / STEPS_A_ROUND)
    memory = {name: peer.optimizer_bytes() for name, peer in peers.items()}
    return {"seconds": seconds, "optimizer_bytes": memory, "first_loss": losses}


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
    ours = slowest["hpc_train"]
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
                "first_loss": results[0]["first_loss"],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
