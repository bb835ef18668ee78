"""How much of a step stages idle, against what was planned: 1F1B, virtual stages and zero bubble.

Emulated: the executor runs our plans with real messages, and each F, B and W is a sleep (a whole backward is two, its B
and its W). On two cores four busy stages cannot run beside each other; four that sleep can. Real: a small model on two
stages, one thread each; what is planned there comes from the measured costs of each stage's F, B and W, so that the
split of the layers has no part in the difference.

Idle is what of the time from the common start to the last stage's end is not spent in F, B and W; a wait for a message
is idle, and so is posting one. What a sleeping stage's F and B take beside the sleep (autograd, some 0.6 ms each) is
work like that of a real one; what is idle with the sleep alone as work is printed too. Prints JSON. Under torchrun's
variables (`hpc-train exec`, torchrun) the ranks are those, else processes here.

    python -m tests.bench.bench_bubble [--rounds 5] [--micro-batches 8] [--sleep-ms 20] [--transfer-ms 0] [--real]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from hpc_train.comm.groups import build_groups
from hpc_train.models.attention import AttentionPlan
from hpc_train.models.transformer import Inputs
from hpc_train.parallel.pipeline import Pipeline
from hpc_train.plan.groups import BACKWARD, training_plan
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.schedule import COMPUTE, Action, Op, Schedule
from hpc_train.plan.schedule_orders import plan_schedule
from hpc_train.plan.simulate import simulate
from tests.bench.on_ranks import on_ranks
from tests.bench.rounds import batches_of
from tests.plan.even_costs import even_costs
from tests.ranks import TestRank
from tests.train.trainers import make_config, make_trainer
from tests.worlds import make_world

EMULATED = (("1f1b", 1), ("1f1b", 2), ("zero_bubble", 1))
REAL = (("1f1b", 1), ("1f1b", 2), ("zero_bubble", 1))
# B, T, h of a message between the sleeping stages: 64 KiB, so that what is measured is the executor.
SHAPE = (1, 64, 256)
# Long enough that a forward of a stage takes some 20 ms of one core here.
REAL_MODEL = {"family": "gpt", "num_layers": 8, "hidden_size": 256, "num_heads": 8, "vocab_size": 2048}


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sleep: Callable[[int], None], num_in_backward: int) -> torch.Tensor:
        ctx.sleep, ctx.num_in_backward = sleep, num_in_backward
        sleep(1)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.sleep(ctx.num_in_backward)
        return gradient, None, None


@dataclass
class _SleepingChunk:
    """What the executor needs of a model_chunk, and of its queue of weights."""

    sleep_s: float
    is_split: bool
    slept_s: list[float]
    stream_part: tuple[int, int] = (0, 1)
    config: Any = field(default_factory=lambda: SimpleNamespace(hidden_size=SHAPE[2]))

    def hidden(self, x_BTh: torch.Tensor | None, inputs: Inputs) -> torch.Tensor:
        entered = torch.zeros(SHAPE, requires_grad=True) if x_BTh is None else x_BTh
        return _Sleep.apply(entered, self._sleep, 1 if self.is_split else 2)

    def loss(self, x_BTh: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        return x_BTh.sum()

    def take(self) -> Callable[[], None]:
        return lambda: self._sleep(1)

    def _sleep(self, times: int) -> None:
        start = time.perf_counter()
        time.sleep(self.sleep_s * times)
        self.slept_s.append(time.perf_counter() - start)


class _TimedPipeline(Pipeline):
    """Notes how long each F, B and W took without its wait for a message."""

    spent_s: dict[tuple[Op, int], list[float]]
    waited_s: float

    def begin(self) -> None:
        self.spent_s, self.waited_s = defaultdict(list), 0.0

    def _awaited(self, *args: Any) -> torch.Tensor:
        start = time.perf_counter()
        tensor = super()._awaited(*args)
        self.waited_s += time.perf_counter() - start
        return tensor

    def _forward(self, action: Action, *args: Any) -> None:
        self._noted(action, lambda: super(_TimedPipeline, self)._forward(action, *args))

    def _backward(self, action: Action, *args: Any) -> None:
        self._noted(action, lambda: super(_TimedPipeline, self)._backward(action, *args))

    def _weights(self, action: Action, *args: Any) -> None:
        self._noted(action, lambda: super(_TimedPipeline, self)._weights(action, *args))

    def _noted(self, action: Action, work: Callable[[], None]) -> None:
        start, waited_s = time.perf_counter(), self.waited_s
        work()
        self.spent_s[action.op, action.model_chunk].append(time.perf_counter() - start - (self.waited_s - waited_s))


def _emulate(me: TestRank, kind: str, virtual: int, micro_batches: int, sleep_s: float, rounds: int) -> list[Any]:
    """Of each round this stage's busy time, the time from the common start to its end, and what it slept of it."""
    import torch.distributed as dist

    groups = build_groups(make_world(me), training_plan(Mesh(me.world_size, 1, 1, 1), with_tied=False))
    slept_s: list[float] = []
    chunks = [_SleepingChunk(sleep_s, kind == "zero_bubble", slept_s) for _ in range(virtual)]
    queues: Any = chunks if kind == "zero_bubble" else None
    pipeline = _TimedPipeline(chunks, groups.along("pp"), groups.along(BACKWARD), torch.float32, queues)  # type: ignore[arg-type]
    schedule = plan_schedule(kind, me.world_size, micro_batches, virtual)  # type: ignore[arg-type]
    zeros_BT = torch.zeros(SHAPE[:2], dtype=torch.int64)
    inputs = [Inputs(zeros_BT, zeros_BT, zeros_BT, AttentionPlan(None))] * micro_batches
    found = []
    for _ in range(rounds + 1):
        slept_s.clear()
        pipeline.begin()
        dist.barrier()
        start = time.perf_counter()
        pipeline.run(schedule, inputs)
        end_s = time.perf_counter() - start
        found.append((sum(map(sum, pipeline.spent_s.values())), end_s, sum(slept_s)))
    return found[1:]  # the first one makes connections


def _compute(me: TestRank, kind: str, virtual: int, micro_batches: int, rounds: int) -> list[Any]:
    """Of each round this stage's busy time, the time to its end, and the median cost of each op and model_chunk."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    parallel = {"pp": me.world_size, "schedule": kind, "virtual_stages": virtual}
    trainer = make_trainer(me, make_config(REAL_MODEL, parallel, seq_len=512))
    trainer.pipeline.__class__ = _TimedPipeline
    pipeline: Any = trainer.pipeline
    schedule = plan_schedule(kind, me.world_size, micro_batches, virtual)  # type: ignore[arg-type]
    inputs = trainer._inputs(batches_of(micro_batches, 1, vocab_size=2048), None)
    found = []
    for _ in range(rounds + 1):
        pipeline.begin()
        dist.barrier()
        start = time.perf_counter()
        pipeline.run(schedule, inputs)
        end_s = time.perf_counter() - start
        spent = pipeline.spent_s
        costs = {f"{op}.{own}": statistics.median(times) for (op, own), times in spent.items()}
        found.append((sum(map(sum, spent.values())), end_s, costs))
    return found[1:]


def idle_share(of_stages: list[tuple[float, float]]) -> float:
    """of_stages: busy and whole time of each stage in one round."""
    whole_s = max(end_s for _, end_s in of_stages)
    return 1.0 - sum(busy_s for busy_s, _ in of_stages) / (whole_s * len(of_stages))


def _report(planned: list[float], executed: list[float]) -> dict[str, Any]:
    apart = [100 * (found - plan) for plan, found in zip(planned, executed, strict=True)]
    return {
        "planned_idle": statistics.median(planned),
        "executed_idle": statistics.median(executed),
        "points_apart": statistics.median(apart),
        "points_apart_range": (min(apart), max(apart)),
    }


def emulated(args: argparse.Namespace, kind: str, virtual: int) -> dict[str, Any] | None:
    sleep_s = args.sleep_ms / 1000
    results = on_ranks(_emulate, 4, kind, virtual, args.micro_batches, sleep_s, args.rounds)
    if results is None:
        return None
    schedule: Schedule = plan_schedule(kind, len(results), args.micro_batches, virtual)  # type: ignore[arg-type]
    sleep_us, transfer_us = round(1000 * args.sleep_ms), round(1000 * args.transfer_ms)
    weight = {"backward": sleep_us, "weight": sleep_us} if schedule.splits_backward else {"backward": 2 * sleep_us}
    planned = simulate(schedule, even_costs(forward=sleep_us, transfer=transfer_us, **weight)).bubble
    rounds = list(zip(*results, strict=True))
    executed = [idle_share([(busy_s, end_s) for busy_s, end_s, _ in of_stages]) for of_stages in rounds]
    asleep = [idle_share([(slept_s, end_s) for _, end_s, slept_s in of_stages]) for of_stages in rounds]
    plan = [planned] * len(executed)
    return {**_report(plan, executed), "points_apart_if_only_sleep_is_work": _report(plan, asleep)["points_apart"]}


def real(args: argparse.Namespace, kind: str, virtual: int) -> dict[str, Any] | None:
    results = on_ranks(_compute, 2, kind, virtual, args.micro_batches, args.rounds)
    if results is None:
        return None
    schedule = plan_schedule(kind, len(results), args.micro_batches, virtual)  # type: ignore[arg-type]
    planned, executed = [], []
    for of_stages in zip(*results, strict=True):
        costs = [costs for _, _, costs in of_stages]

        def cost(stage: int, action: Action, costs: list[dict[str, float]] = costs) -> int:
            if action.op in COMPUTE:
                return round(1e6 * costs[stage][f"{action.op}.{action.model_chunk}"])
            return round(1000 * args.transfer_ms) if action.op is Op.SEND else 0

        planned.append(simulate(schedule, cost).bubble)
        executed.append(idle_share([(busy_s, end_s) for busy_s, end_s, _ in of_stages]))
    return _report(planned, executed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--sleep-ms", type=float, default=20.0, help="of each F, B and W")
    parser.add_argument("--transfer-ms", type=float, default=0.0, help="what the plan takes a message to need")
    parser.add_argument("--real", action="store_true", help="a real model on two stages instead of sleeps on four")
    args = parser.parse_args()
    measure, kinds = (real, REAL) if args.real else (emulated, EMULATED)
    found = {f"{kind}, {virtual} a stage": measure(args, kind, virtual) for kind, virtual in kinds}
    if None not in found.values():
        print(json.dumps({"what": "share of all stages' time in which they idle", **vars(args), **found}, indent=1))


if __name__ == "__main__":
    main()
