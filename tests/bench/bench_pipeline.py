"""Step time of our pipeline, 1F1B, against torch.distributed.pipelining's Schedule1F1B.

The same plain model, data, precision and fused AdamW. Ours splits the layers by their cost, with the head and the loss
on the scale; theirs are split evenly by number, as its tutorial does and its users would. `pipelining_by_cost` has our
split, which shows what the split alone is worth. Prints JSON.

    python -m tests.bench.bench_pipeline [--rounds 10] [--micro-batches 4]
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from tests.bench.rounds import MODEL, SEQ_LEN, Peer, batches_of, measure, our_peer, our_trainer, report, torch_optimizer
from tests.ranks import TestRank, run_ranks

PAIRS = [("hpc_train", "pipelining"), ("hpc_train", "pipelining_by_cost")]


def _stage_module(me: TestRank, layers: range) -> Any:
    """One stage: token ids to the residual stream, or that to logits."""
    import torch
    from torch import nn

    from hpc_train.config import ModelConfig
    from hpc_train.models.attention import AttentionPlan
    from hpc_train.models.transformer import Inputs, Transformer

    is_first, is_last = me.rank == 0, me.rank == me.world_size - 1

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Transformer(
                ModelConfig(**MODEL), SEQ_LEN, layers=layers, has_embedding=is_first, has_head=is_last
            )
            self.part.init_weights(seed=1)
            self.positions_BT = torch.arange(SEQ_LEN)[None]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens_BT = x if is_first else self.positions_BT
            inputs = Inputs(tokens_BT, tokens_BT, self.positions_BT, AttentionPlan(None))
            x_BTh = self.part.hidden(None if is_first else x, inputs)
            return self.part.logits(x_BTh) if is_last else x_BTh

    return Stage()


def _pipelining(me: TestRank, num_micro_batches: int, layers: range) -> Peer:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    module = _stage_module(me, layers)
    parameters = list(module.parameters())
    optimizer = torch_optimizer(parameters)
    stage = PipelineStage(module, me.rank, me.world_size, torch.device("cpu"))
    num_tokens = num_micro_batches * SEQ_LEN

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_tokens

    schedule = Schedule1F1B(stage, num_micro_batches, loss_fn=loss_of, scale_grads=False)

    def step(batches: list[Any]) -> float | None:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if me.rank == 0:
            schedule.step(torch.cat([batch.tokens for batch in batches]), return_outputs=False)
        else:
            labels = torch.cat([batch.labels for batch in batches])
            schedule.step(target=labels, losses=losses, return_outputs=False)
        square = get_total_norm([p.grad for p in parameters]).square()
        dist.all_reduce(square)
        clip_grads_with_norm_(parameters, 1.0, square.sqrt())
        optimizer.step()
        return float(torch.stack(losses).sum()) if losses else None

    return Peer(step)


def _measure(me: TestRank, rounds: int, num_micro_batches: int) -> dict[str, Any]:
    from hpc_train.plan.stages import split_layers

    trainer = our_trainer(me, {"pp": me.world_size})
    by_number = split_layers([1] * int(MODEL["num_layers"]), 0, 0, me.world_size)[me.rank]
    numbers = [int(name) for name in trainer.pipeline.chunks[0].layers]
    peers = {
        "hpc_train": our_peer(trainer),
        "pipelining": _pipelining(me, num_micro_batches, by_number),
        "pipelining_by_cost": _pipelining(me, num_micro_batches, range(numbers[0], numbers[-1] + 1)),
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
