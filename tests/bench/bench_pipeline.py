"""Step time of our pipeline against torch.distributed.pipelining: 1F1B, and interleaved with --virtual-stages.

The same plain model, data, precision and fused AdamW. Ours splits the layers by their cost, with the head and the loss
on the scale; theirs are split evenly by number, as its tutorial does and its users would. `pipelining_by_cost` has our
split, which shows what the split alone is worth. `hpc_train_zero_bubble` is our pipeline in its other order, which
keeps no more memory. All send the same fp32 tensors over gloo. Prints JSON. Under
torchrun's variables (`hpc-train exec`, torchrun) the ranks are those, on whatever hosts, else two processes here.

    python -m tests.bench.bench_pipeline [--rounds 10] [--micro-batches 4] [--virtual-stages 2]
        [--layers 8] [--vocab 512]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.bench.on_ranks import on_ranks
from tests.bench.rounds import MODEL, SEQ_LEN, Peer, batches_of, measure, our_peer, our_trainer, report, torch_optimizer
from tests.ranks import TestRank

PAIRS = [("hpc_train", "pipelining"), ("hpc_train", "pipelining_by_cost")]
PAIRS_OF_ZERO_BUBBLE = [("hpc_train_zero_bubble", "pipelining"), ("hpc_train_zero_bubble", "hpc_train")]


def _stage_module(model: Mapping[str, object], layers: range) -> Any:
    """One (virtual) stage: token ids to the residual stream, or that to logits."""
    import torch
    from torch import nn

    from hpc_train.config import ModelConfig
    from hpc_train.models.attention import AttentionPlan
    from hpc_train.models.transformer import Inputs, Transformer

    is_first, is_last = layers.start == 0, layers.stop == model["num_layers"]

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Transformer(
                ModelConfig.model_validate(model), SEQ_LEN, layers=layers, has_embedding=is_first, has_head=is_last
            )
            self.part.init_weights(seed=1)
            self.positions_BT = torch.arange(SEQ_LEN)[None]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens_BT = x if is_first else self.positions_BT
            inputs = Inputs(tokens_BT, tokens_BT, self.positions_BT, AttentionPlan(None))
            x_BTh = self.part.hidden(None if is_first else x, inputs)
            return self.part.logits(x_BTh) if is_last else x_BTh

    return Stage()


def pipelining_peer(me: TestRank, num_micro_batches: int, model: Mapping[str, object], parts: Sequence[range]) -> Peer:
    """parts: the layers of every (virtual) stage, of which this rank has each me.world_size-th."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    own = range(me.rank, len(parts), me.world_size)
    modules = [_stage_module(model, parts[index]) for index in own]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch_optimizer(parameters)
    stages = [
        PipelineStage(module, index, len(parts), torch.device("cpu"))
        for module, index in zip(modules, own, strict=True)
    ]
    num_tokens = num_micro_batches * SEQ_LEN

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_tokens

    schedule: Any
    if len(stages) == 1:
        schedule = Schedule1F1B(stages[0], num_micro_batches, loss_fn=loss_of, scale_grads=False)
    else:
        schedule = ScheduleInterleaved1F1B(stages, num_micro_batches, loss_fn=loss_of, scale_grads=False)

    def step(batches: list[Any]) -> float | None:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if me.rank == 0:
            schedule.step(torch.cat([batch.tokens for batch in batches]), return_outputs=False)
        elif me.rank == me.world_size - 1:
            labels = torch.cat([batch.labels for batch in batches])
            schedule.step(target=labels, losses=losses, return_outputs=False)
        else:
            schedule.step(return_outputs=False)
        square = get_total_norm([p.grad for p in parameters]).square()
        dist.all_reduce(square)
        clip_grads_with_norm_(parameters, 1.0, square.sqrt())
        optimizer.step()
        return float(torch.stack(losses).detach().sum()) if losses else None

    return Peer(step)


def _measure(
    me: TestRank, rounds: int, num_micro_batches: int, virtual_stages: int, model: Mapping[str, object]
) -> dict[str, Any]:
    from hpc_train.plan.stages import plan_stages, split_layers
    from tests.train.trainers import make_config

    parallel = {"pp": me.world_size, "virtual_stages": virtual_stages}
    by_cost = plan_stages(make_config(model, parallel, seq_len=SEQ_LEN))
    by_number = split_layers([1] * int(str(model["num_layers"])), 0, 0, len(by_cost))
    peers = {
        "hpc_train": our_peer(our_trainer(me, parallel, model)),
        "pipelining": pipelining_peer(me, num_micro_batches, model, by_number),
        "pipelining_by_cost": pipelining_peer(me, num_micro_batches, model, by_cost),
    }
    if virtual_stages == 1:
        peers["hpc_train_zero_bubble"] = our_peer(our_trainer(me, {**parallel, "schedule": "zero_bubble"}, model))
    return measure(peers, batches_of(num_micro_batches, 1, vocab_size=int(str(model["vocab_size"]))), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--micro-batches", type=int, default=4, help="in a step, of one sequence each")
    parser.add_argument("--virtual-stages", type=int, default=1, help="on each stage; torch's interleaved then")
    parser.add_argument("--layers", type=int, default=MODEL["num_layers"])
    parser.add_argument("--vocab", type=int, default=MODEL["vocab_size"])
    args = parser.parse_args()
    model = {**MODEL, "num_layers": args.layers, "vocab_size": args.vocab}
    results = on_ranks(_measure, 2, args.rounds, args.micro_batches, args.virtual_stages, model)
    if results is not None:
        pairs = PAIRS + (PAIRS_OF_ZERO_BUBBLE if args.virtual_stages == 1 else [])
        print(json.dumps(report(results, pairs, vars(args)), indent=1))


if __name__ == "__main__":
    main()
