"""One rank of `hpc-train profile`, which starts it under `exec`: measures, and rank 0 writes the profile.

    python -m hpc_train.train.profile_ranks CONFIG [key=value...] --out FILE --repeats N

1. one layer's forward and backward, with one sequence and with as many tokens in short ones, by all of a tp group
2. keys and values of a full micro-batch passed on by all ranks of the hdp axis at once, each to the next
3. a layer's activations copied between device and host
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hpc_train.cluster.environment import process_env
from hpc_train.comm.bootstrap import bootstrap
from hpc_train.comm.groups import Groups, build_groups
from hpc_train.comm.layout import Layout
from hpc_train.comm.world import World
from hpc_train.config import Config
from hpc_train.config_read import load_config
from hpc_train.errors import ConfigError, HpcTrainError
from hpc_train.log import report_failure, say
from hpc_train.plan.activations import block_bytes, shape_of
from hpc_train.plan.batch_profile import Profile, profile_key
from hpc_train.plan.cost import micro_batch_shape
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.out_file import write_out
from hpc_train.plan.parameters import TensorSplit
from hpc_train.train.profile_layer import LayerTimes, Tell, time_copy, time_layer, time_ring

_ALIKE = 0.05
"""Assumed: nodes whose times differ by less are alike, and it is noise."""
_MOST_COPIED = 1 << 28
"""Bytes; a copy's rate is that of larger ones by then (assumed)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Collective over all ranks."""
    parser = argparse.ArgumentParser(prog="profile_ranks", allow_abbrev=False)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--out", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    options = parser.parse_args(arguments)
    config = load_config(options.config, options.overrides)
    world = bootstrap("env", layout=Layout(tp=config.parallel.tp))
    groups = build_groups(world)
    try:
        world.agree(_too_few(groups.mesh))
        tell = say if world.rank == 0 else str
        own = measure_rank(config, groups, world.device, options.repeats, world.node, tell)
        report = world.control.all_gather(own)
        profile, error = None, None
        if world.rank == 0:
            try:
                profile = profile_of_measured(config, groups, report, _origin(world, report))
            except HpcTrainError as problem:
                error = problem
        world.agree(error)
    except HpcTrainError as problem:
        if problem.reporter in (world.rank, None):
            report_refusal(problem, world.rank, world.node, process_env())
        if problem.reporter is not None:
            world.control.barrier()  # the first that ends has the others ended
        os._exit(int(problem.exit_code))  # threads of torch's would abort an end as usual
    if profile is not None:
        write_out(options.out, "--out", profile.to_json())
        for line in _lines(profile, options.out):
            say(line)
    world.close()
    return 0


def report_refusal(problem: HpcTrainError, rank: int, node: str, env: Mapping[str, str]) -> None:
    """Say it and put it on record, so that `exec`, which started the ranks, ends with it and not with a code alone."""
    run_dir = env.get("HPC_TRAIN_RUN_DIR")
    report_failure(problem, run_dir=Path(run_dir) if run_dir else None, rank=rank, host=node)
    sys.stderr.flush()


def measure_rank(
    config: Config, groups: Groups, device: torch.device, repeats: int, node: str, tell: Tell = str
) -> dict[str, Any]:
    """This rank's times, as JSON. Collective over all ranks, the hdp axis having two at least."""
    hdp, tp = groups.along("dp"), groups.mesh.tp
    longest = micro_batch_shape(config)[1]
    split = TensorSplit(tp, groups.coords["tp"], config.parallel.sequence_parallel)
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    width = 2 * len(split.kv_heads(config.model)) * config.model.head_size
    activations = block_bytes(config, split, shape_of(config, groups.mesh, split, is_masked=False), "cuda", 0)
    layer = time_layer(config, groups, device, longest, repeats, tell)
    ring = time_ring(longest * width, dtype, hdp, device, repeats, tell)
    copy = time_copy(min(activations, _MOST_COPIED), device, repeats, tell)
    return {
        "node": node,
        "layer": asdict(layer),
        "ring_s_per_byte": ring.s_per_unit,
        "ring_s_per_step": ring.constant_s,
        "copy_s_per_byte": copy,
    }


def _too_few(mesh: Mesh) -> ConfigError | None:
    if mesh.dp > 1:
        return None
    return ConfigError(
        f"{mesh.describe()} has one hdp rank, and a ring's transfers need two. Start {2 * mesh.tp} ranks or more"
    )


def profile_of_measured(config: Config, groups: Groups, report: Sequence[Mapping[str, Any]], origin: str) -> Profile:
    """The profile of what all ranks measured: a layer as on the middle rank, transfers as on the slowest.

    Raises:
        ConfigError: times that do not grow with the length as a layer's do.
    """
    by_time = sorted((LayerTimes(**entry["layer"]) for entry in report), key=lambda layer: layer.one_s)
    middle = by_time[len(by_time) // 2]
    square, linear, constant = middle.parts()
    return Profile(
        model=profile_key(config, groups.mesh),
        attention_s_per_square=square,
        linear_s_per_token=linear,
        micro_batch_s=constant,
        ring_s_per_byte=max(entry["ring_s_per_byte"] for entry in report),
        ring_s_per_step=max(entry["ring_s_per_step"] for entry in report),
        copy_s_per_byte=max(entry["copy_s_per_byte"] for entry in report),
        origin=origin,
        speeds=_speeds(report),
    )


def _speeds(report: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of nodes whose ranks are faster or slower than the middle one with the longest sequence."""
    of_node: dict[str, list[float]] = {}
    for entry in report:
        of_node.setdefault(entry["node"], []).append(entry["layer"]["one_s"])
    middle_s = statistics.median(entry["layer"]["one_s"] for entry in report)
    found = {node: middle_s / statistics.median(times) for node, times in of_node.items()}
    return {node: round(speed, 2) for node, speed in found.items() if abs(speed - 1) > _ALIKE}


def _origin(world: World, report: Sequence[Mapping[str, Any]]) -> str:
    device = "CPU" if world.device.type == "cpu" else torch.cuda.get_device_name(world.device)
    day = time.strftime("%Y-%m-%d", time.gmtime())
    return (
        f"measured {day} on {world.world_size} ranks of {world.num_nodes} nodes, {device}, sequences of up to "
        f"{report[0]['layer']['longest']} tokens"
    )


def _lines(profile: Profile, path: str) -> list[str]:
    """For a person."""
    rates = [
        f"a layer, forward and backward: {profile.attention_s_per_square:.3g} s x tokens^2 + "
        f"{profile.linear_s_per_token:.3g} s x tokens + {profile.micro_batch_s:.3g} s",
        f"attention is as much as the rest at {profile.linear_s_per_token / profile.attention_s_per_square:.0f} tokens",
        f"a ring passes on {1e-9 / profile.ring_s_per_byte:.3g} GB/s and takes {profile.ring_s_per_step:.3g} s a step "
        f"beside; copies to the host take {1e-9 / profile.copy_s_per_byte:.3g} GB/s",
    ]
    if profile.speeds:
        rates.append(f"nodes of other speed: {', '.join(f'{node} {x}' for node, x in profile.speeds.items())}")
    return [*rates, f"written: {path} (hash {profile.hash[:16]}); use it by parallel.hdp.profile={path}"]


if __name__ == "__main__":
    raise SystemExit(main())
