"""Step time of our tensor parallel, without and with sequence parallel, against torch's DTensor parallelize_module.

The same plain model, data, precision and fused AdamW. DTensor is used in two ways: as the plans of its tutorial's text
have it, where the head gathers the logits (`dtensor`), and at its best (`dtensor_tuned`): the loss on sharded logits
(loss_parallel, the tutorial's last section), and one entry into attention for q, k and v without sequence parallel too.
Prints JSON.

    python -m tests.bench.bench_tensor_parallel [--rounds 10] [--micro-batches 4]
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from tests.bench.rounds import Peer, batches_of, measure, our_peer, our_trainer, plain_model, report, torch_optimizer
from tests.ranks import TestRank, run_ranks

PAIRS = [
    ("hpc_train", "dtensor"),
    ("hpc_train", "dtensor_tuned"),
    ("hpc_train_sequence", "dtensor_sequence"),
    ("hpc_train_sequence", "dtensor_sequence_tuned"),
]


def _plan(by_tokens: bool, tuned: bool) -> dict[str, Any]:
    """A style for each module, as the tutorial's Llama example has them. by_tokens: with sequence parallel."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    stream = Shard(1) if by_tokens else Replicate()
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "layers.*.attention.q": ColwiseParallel(),
        "layers.*.attention.k": ColwiseParallel(),
        "layers.*.attention.v": ColwiseParallel(),
        "layers.*.attention.out": RowwiseParallel(output_layouts=stream),
        "layers.*.ffn.up": ColwiseParallel(),
        "layers.*.ffn.down": RowwiseParallel(output_layouts=stream),
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }
    if tuned:
        plan["head"] = ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)
    if tuned or by_tokens:
        plan["layers.*.attention"] = PrepareModuleInput(
            input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None)
        )
        plan["layers.*.ffn"] = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
    if by_tokens:
        norms = ("layers.*.attention_norm", "layers.*.ffn_norm", "norm")
        plan |= {name: SequenceParallel(use_local_output=True) for name in ("positions", *norms)}
    return plan


def _dtensor(me: TestRank, *, by_tokens: bool = False, tuned: bool = False) -> Peer:
    import contextlib

    import torch
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    from hpc_train.models.attention import AttentionPlan

    model = plain_model()
    parallelize_module(model, init_device_mesh("cpu", (me.world_size,)), _plan(by_tokens, tuned))
    for layer in model.layers.values():
        layer.attention.num_heads //= me.world_size
        layer.attention.kv_heads //= me.world_size
    if by_tokens:
        model.stream_part = (me.rank, me.world_size)
    parameters = list(model.parameters())
    optimizer = torch_optimizer(parameters)

    def clip() -> None:
        """The kinds apart, since no operation takes both; plain ones are the same on all ranks."""
        kinds = [[p for p in parameters if hasattr(p, "to_local") == of_mesh] for of_mesh in (False, True)]
        norms = [get_total_norm([p.grad for p in some]) for some in kinds if some]
        total = torch.stack([norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]).norm()
        for some in kinds:
            clip_grads_with_norm_(some, 1.0, total)

    def step(batches: list[Any]) -> float:
        optimizer.zero_grad()
        num_tokens = sum(batch.num_supervised for batch in batches)
        total = 0.0
        for batch in batches:
            with loss_parallel() if tuned else contextlib.nullcontext():
                logits = model(batch.tokens, batch.positions, AttentionPlan(None))
                loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum") / num_tokens
                loss.backward()
            total += loss.item()
        clip()
        optimizer.step()
        return total

    return Peer(step)


def _measure(me: TestRank, rounds: int, num_micro_batches: int) -> dict[str, Any]:
    peers = {
        "hpc_train": our_peer(our_trainer(me, {"tp": me.world_size})),
        "dtensor": _dtensor(me),
        "dtensor_tuned": _dtensor(me, tuned=True),
        "hpc_train_sequence": our_peer(our_trainer(me, {"tp": me.world_size, "sequence_parallel": True})),
        "dtensor_sequence": _dtensor(me, by_tokens=True),
        "dtensor_sequence_tuned": _dtensor(me, by_tokens=True, tuned=True),
    }
    return measure(peers, batches_of(num_micro_batches, 1), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--micro-batches", type=int, default=4, help="in a step, of one sequence each")
    args = parser.parse_args()
    results = run_ranks(_measure, 2, args.rounds, args.micro_batches, timeout_s=1800)
    print(json.dumps(report(results, PAIRS, vars(args)), indent=1))


if __name__ == "__main__":
    main()
