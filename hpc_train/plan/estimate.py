"""How long a step takes: the pipeline's bubble, step time and model FLOP utilisation, before anything is run.

A step is the pipeline's time with stages at a share of their peak, and behind it what data parallel sends and does not
hide. What tensor and pipeline parallel send goes into that share, as it did where the share is from. Each figure says
how it is known; what is not known is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.config import Config
from hpc_train.plan.axis_bytes import axis_traffic, micro_batches_of
from hpc_train.plan.cost import mfu
from hpc_train.plan.memory import fullest_stage
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.schedule import Action, Op
from hpc_train.plan.schedule_orders import check_micro_batches, chunks_of_stages, shortened_work
from hpc_train.plan.simulate import time_of_work
from hpc_train.plan.stages import chunk_costs

_MOST_PLAYED = 50_000
"""Forwards of all stages and chunks that are played of groups of one size, or what two groups have (measured: 4 us each
with what belongs to it).
"""


@dataclass(frozen=True)
class Rates:
    """How fast ranks compute and send.

    peak_flops: of one rank, in FLOP/s; None where not known. efficiency: the share of it that stages reach while they
    compute, tensor and pipeline transfers included. dp_bytes_per_s: of one rank, at which the bytes of the dp axis go
    that are not hidden; None where not known. origin: where the figures are from, for the reader.
    """

    peak_flops: float | None
    efficiency: float | None
    dp_bytes_per_s: float | None
    origin: str


MEGATRON_LM = Rates(312e12, 0.556, 8.4e9, "fitted to Megatron-LM's 175B runs on 256 to 12,288 A100 GPUs")
"""A published system. Derived: the least squares of relative errors, by tests/plan/calibration.py, which docs/
measurements/cost-model.md reports row by row. Source of the runs: Jiang et al., "MegaScale", NSDI'24, tables 2 and 3,
with Megatron-LM at commit 285068c8.
"""


@dataclass(frozen=True)
class StepEstimate:
    """memory_bytes: of the fullest rank. bubble: share of the pipeline's time in which stages idle. notes: how step
    time and utilisation are known, or why they are not; both are None then.
    """

    memory_bytes: int
    bubble: float
    step_time_s: float | None
    mfu: float | None
    notes: tuple[str, ...]


def estimate_step(config: Config, mesh: Mesh, rates: Rates) -> StepEstimate:
    """What a plan takes of memory and time.

    Args:
        rates: Of the machine. MEGATRON_LM's are of A100 GPUs with a 200 Gb/s card each.

    Raises:
        ConfigError: the model or the batch cannot be split so.
    """
    memory_bytes = fullest_stage(config, mesh)[1].total
    num_micro_batches = micro_batches_of(config, mesh)
    check_micro_batches(mesh.pp, num_micro_batches)
    costs = stage_costs(config, mesh)
    makespan = _makespan(config, mesh, costs, num_micro_batches)
    bubble = 1.0 - num_micro_batches * sum(costs) / (mesh.pp * makespan)
    if config.parallel.hdp is not None:
        note = "step time and MFU depend on the lengths of a step's sequences: see `hpc-train plan --batch STEP`"
        return StepEstimate(memory_bytes, bubble, None, None, (note,))
    notes = _unknown(mesh, rates)
    if notes or not rates.peak_flops or not rates.efficiency:
        return StepEstimate(memory_bytes, bubble, None, None, tuple(notes))
    computing_s = makespan / (mesh.tp * mesh.cp) / (rates.peak_flops * rates.efficiency)
    sending_s = dp_bytes(config, mesh) / rates.dp_bytes_per_s if rates.dp_bytes_per_s else 0.0
    step_time_s = computing_s + sending_s
    tokens_per_s = config.train.global_batch_size * config.data.seq_len / step_time_s
    utilisation = mfu(tokens_per_s, config.model, config.data.seq_len, rates.peak_flops * mesh.world_size)
    sending = f", {sending_s:.3g} s in data-parallel transfers that are not hidden" if sending_s else ""
    notes = [
        f"step time: modelled, {computing_s:.3g} s in the pipeline{sending}",
        f"rates: {rates.origin}: {rates.efficiency:.1%} of {rates.peak_flops:.3g} FLOP/s a rank",
    ]
    return StepEstimate(memory_bytes, bubble, step_time_s, utilisation, tuple(notes))


def stage_costs(config: Config, mesh: Mesh) -> tuple[int, ...]:
    """Floating-point operations of one micro-batch on each stage, on all its ranks, recomputation included."""
    of_chunks = chunk_costs(config, mesh)
    return tuple(sum(of_chunks[stage :: mesh.pp]) for stage in range(mesh.pp))


def _makespan(config: Config, mesh: Mesh, costs: Sequence[int], num_micro_batches: int) -> float:
    """How long the configuration's schedule takes, in the costs' unit: by the formula, zero bubble by a simulation.

    There F, B and W are taken to cost a third each. Of long schedules what repeats is not played: it takes as long as
    it did where it was, and at least the slowest stage's work. That is exact once the slowest stage sets the pace;
    until then, which takes the longer the less it is slower, too long by less than what the pipeline takes to fill
    (measured, stages equal or nearly so: the bubble by 2 points with two groups, by 0.2 with 12).
    """
    kind, virtual_stages = config.parallel.schedule, config.parallel.virtual_stages
    if kind == "1f1b" or mesh.pp == 1:
        return pipeline_cost(costs, num_micro_batches, virtual_stages)
    of_chunks, chunks = chunk_costs(config, mesh), chunks_of_stages(mesh.pp, virtual_stages)

    def cost(stage: int, action: Action) -> int:
        return of_chunks[chunks[stage][action.model_chunk]]

    def played(most_alike: int) -> tuple[int, int]:
        work = shortened_work(kind, mesh.pp, num_micro_batches, virtual_stages, most_alike)
        count = sum(1 for action in work[0] if action.op is Op.F) // virtual_stages
        return count, time_of_work(work, chunks, cost)

    most_alike = max(2, _MOST_PLAYED // (virtual_stages * mesh.pp * mesh.pp))
    count, makespan = played(most_alike)
    if count == num_micro_batches:
        return makespan / 3
    fewer, earlier = played(most_alike // 2)
    pace = max(3 * max(costs), (makespan - earlier) / (count - fewer))
    return (makespan + (num_micro_batches - count) * pace) / 3


def pipeline_cost(costs: Sequence[int], num_micro_batches: int, virtual_stages: int = 1) -> float:
    """How long 1F1B takes, in the unit of the costs of a micro-batch on each stage; messages take no time.

    The slowest stage works on all micro-batches, once the first one has come through the stages before it and until the
    last one has gone back through them. It pauses where the stages behind it need longer for the first one's way there
    and back than it for the forwards that it does ahead; and so for the last one, beside the backwards left over. With
    virtual stages all but the work is through one chunk of each. For equal stages the bubble is then
    (p - 1) / (v m + p - 1) of the time. plan.simulate agrees, to the number without virtual stages or for equal ones.
    A backward is taken to cost twice a forward.
    """
    return max(
        num_micro_batches * cost + (sum(costs[:stage]) + _pauses(costs, stage)) / virtual_stages
        for stage, cost in enumerate(costs)
    )


def _pauses(costs: Sequence[int], stage: int) -> float:
    behind = costs[stage + 1 :]
    ahead = len(behind) * costs[stage]
    return max(0.0, sum(behind) - ahead / 3) + max(0.0, sum(behind) - ahead * 2 / 3)


def dp_bytes(config: Config, mesh: Mesh) -> int:
    """What a rank sends along dp in a step."""
    return sum(traffic.forward_bytes for traffic in axis_traffic(config, mesh) if traffic.axis == "dp")


def _unknown(mesh: Mesh, rates: Rates) -> list[str]:
    missing = []
    if rates.peak_flops is None:
        missing.append("the peak of a rank in FLOP/s: give train.peak_flops_per_rank")
    if rates.efficiency is None:
        missing.append("the share of the peak that stages reach, which a run's mfu tells")
    if mesh.dp > 1 and rates.dp_bytes_per_s is None:
        missing.append("the rate of data-parallel transfers, from the fabric's link speeds")
    return [f"step time and MFU are not known, for want of {'; '.join(missing)}"] if missing else []
