"""How much of the pipeline's messages hides beside compute on a slow network, against what the schedule allows.

Two ranks, one thread each; equal layers, a small vocabulary, 1F1B with virtual stages. In one interleaved run: ours;
ours with each message received where it is needed (no_overlap); the same step without its messages (compute); the
messages alone, both directions at once; and torch.distributed.pipelining's interleaved schedule with the same split.
Losses of all that send are compared.

Hidden is 1 - (ours - compute) / messages alone. Its bound comes from the simulator, with the measured compute and
messages: what the schedule would leave if everything began as early as its list allows. Prints JSON. Messages should
take about 0.8 of compute: choose the rate so.

    python -m tests.bench.bench_overlap_pp --cluster NAME --rate 80mbit [--micro-batches 8] [--rounds 7]

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
from unittest import mock

from tests.bench.bench_pipeline import pipelining_peer
from tests.bench.on_nodes import run_on_two
from tests.bench.rounds import LOSS_TOLERANCE, MODEL, SEQ_LEN, batches_of, our_peer, our_trainer
from tests.ranks import TestRank

Step = Callable[[list[Any]], "float | None"]


def _model(args: Mapping[str, Any]) -> dict[str, Any]:
    return {**MODEL, "num_layers": args["layers"], "vocab_size": args["vocab"], "hidden_size": args["hidden_size"]}


def _parallel(args: Mapping[str, Any]) -> dict[str, Any]:
    return {"pp": 2, "virtual_stages": args["virtual_stages"]}


def _trainer(me: TestRank, args: Mapping[str, Any]) -> Any:
    return our_trainer(me, _parallel(args), _model(args))


def _no_overlap(trainer: Any) -> Step:
    """Each message is received where it is needed, so it is on its way while its receiver waits: gloo sends no sooner.

    To await sends too would be a deadlock: two stages that send to each other would wait for each other to receive.
    """
    from hpc_train.parallel.pipeline import Pipeline

    class Late(Pipeline):
        def run(self, *args: Any, **others: Any) -> Any:
            self.later: dict[Any, Any] = {}
            return super().run(*args, **others)

        def _receive(self, action: Any, step: Any) -> None:
            self.later[action.payload, action.micro_batch, action.model_chunk] = action

        def _awaited(self, action: Any, payload: Any, step: Any) -> Any:
            wanted = self.later.pop((payload, action.micro_batch, action.model_chunk), None)
            if wanted is not None:
                super()._receive(wanted, step)
            return super()._awaited(action, payload, step)

    trainer.pipeline.__class__ = Late
    return our_peer(trainer).step


class _Over:
    def wait(self) -> None: ...


def _compute(trainer: Any) -> Step:
    """A step without its messages: each stage takes what its memory holds for what the other would send."""
    step = our_peer(trainer).step

    def received(tensor: Any, *_: Any) -> _Over:
        tensor.zero_()
        return _Over()

    def silent(batches: list[Any]) -> float | None:
        from hpc_train.parallel import pipeline

        with mock.patch.multiple(pipeline, send_to=lambda *_: _Over(), receive_from=received):
            return step(batches)

    return silent


def _messages(trainer: Any, args: Mapping[str, Any]) -> Step:
    """As many messages as a step has, each way at once, one behind the other as the line takes them."""
    import torch

    from hpc_train.comm.collectives import receive_from, send_to
    from hpc_train.comm.groups import Groups
    from hpc_train.plan.groups import BACKWARD

    groups: Groups = trainer.groups
    up, down = groups.along("pp"), groups.along(BACKWARD)
    out, back = (up, down) if up.group_rank == 0 else (down, up)
    peer, h = 1 - up.group_rank, args["hidden_size"]
    given, room = torch.zeros(1, SEQ_LEN, h), torch.empty(1, SEQ_LEN, h)
    count = args["micro_batches"] * (2 * args["virtual_stages"] - 1)

    def step(batches: list[Any]) -> None:
        for _ in range(count):
            arriving = receive_from(room, peer, back)
            sending = send_to(given, peer, out)
            arriving.wait()
            sending.wait()

    return step


def _measure(me: TestRank, args: Mapping[str, Any]) -> dict[str, Any]:
    """On each rank: seconds of each peer's step in each round, and the losses of its first steps."""
    import torch
    import torch.distributed as dist

    from hpc_train.plan.stages import plan_stages
    from tests.train.trainers import make_config

    torch.set_num_threads(1)
    parts = plan_stages(make_config(_model(args), _parallel(args), seq_len=SEQ_LEN))
    ours, waiting, silent = (_trainer(me, args) for _ in range(3))
    peers: dict[str, Step] = {
        "overlap": our_peer(ours).step,
        "no_overlap": _no_overlap(waiting),
        "compute": _compute(silent),
        "messages": _messages(ours, args),
        "pipelining": pipelining_peer(me, args["micro_batches"], _model(args), parts).step,
    }
    batches = batches_of(args["micro_batches"], 1, vocab_size=args["vocab"])
    losses = {name: [step(batches) for _ in range(2)] for name, step in peers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    names = list(peers)
    for number in range(args["rounds"]):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            peers[name](batches)
            seconds[name].append(time.perf_counter() - start)
    return {"seconds": seconds, "losses": losses}


def bound(args: Mapping[str, Any], compute_s: float, messages_s: float) -> float:
    """The share that the schedule can hide: equal chunks, a forward half of a backward, equal messages."""
    from hpc_train.plan.hidden_messages import hidden_messages
    from hpc_train.plan.schedule_orders import plan_schedule
    from hpc_train.plan.simulate import simulate
    from tests.plan.even_costs import even_costs

    count, virtual = args["micro_batches"], args["virtual_stages"]
    schedule = plan_schedule("1f1b", 2, count, virtual)
    # compute_s has the bubble of a step without messages, which is what plays with this unit of F.
    unit = simulate(schedule, even_costs(forward=1000, backward=2000)).makespan / 1000
    forward = round(1e9 * compute_s / unit)
    message = round(1e9 * messages_s / (count * (2 * virtual - 1)))
    costs = even_costs(forward=forward, backward=2 * forward, transfer=message)
    return hidden_messages(schedule, [costs])[0].share


def report(args: Mapping[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """A round's time is that of its slowest rank; shares and ratios are medians of paired rounds.

    Raises:
        AssertionError: losses differ: with overlap and without in any bit, from torch's by more than the tolerance.
    """
    of_ranks = {name: [result["seconds"][name] for result in results] for name in results[0]["seconds"]}
    slowest = {name: [max(times) for times in zip(*seconds, strict=True)] for name, seconds in of_ranks.items()}
    losses = {name: next(r["losses"][name] for r in reversed(results) if None not in r["losses"][name])
              for name in ("overlap", "no_overlap", "pipelining")}  # fmt: skip
    assert losses["overlap"] == losses["no_overlap"], f"overlap changes losses: {losses}"
    for ours, theirs in zip(losses["overlap"], losses["pipelining"], strict=True):
        assert abs(ours - theirs) <= LOSS_TOLERANCE * abs(theirs), f"losses differ from torch's: {losses}"
    rounds = list(zip(slowest["overlap"], slowest["compute"], slowest["messages"], strict=True))
    hidden = [1 - (step - compute) / messages for step, compute, messages in rounds]
    bounds = [bound(args, compute, messages) for _, compute, messages in rounds]

    def ratio(ours: str, theirs: str) -> float:
        return statistics.median(a / b for a, b in zip(slowest[ours], slowest[theirs], strict=True))

    return {
        "what": "median seconds a step of the slowest rank; hidden: 1 - (overlap - compute) / messages",
        "settings": dict(args),
        "load_average": os.getloadavg(),
        "step_s": {name: statistics.median(times) for name, times in slowest.items()},
        "messages / compute": ratio("messages", "compute"),
        "hidden": statistics.median(hidden),
        "hidden_range": (min(hidden), max(hidden)),
        "bound": statistics.median(bounds),
        "hidden / bound": statistics.median(a / b for a, b in zip(hidden, bounds, strict=True)),
        "overlap / no_overlap": ratio("overlap", "no_overlap"),
        "overlap / pipelining": ratio("overlap", "pipelining"),
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--virtual-stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8, help="of one sequence, in a step")
    run_on_two(parser, "80mbit", "tests.bench.bench_overlap_pp", _measure, report)


if __name__ == "__main__":
    main()
