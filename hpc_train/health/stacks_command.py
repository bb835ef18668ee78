"""`hpc-train stacks JOB|RUN`: a collector on every node of the run, by a step of its own beside the ranks."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from hpc_train.cluster.environment import process_env, scrubbed_for_submission
from hpc_train.cluster.hostlist import expand_hostlist
from hpc_train.errors import ConfigError, LaunchError
from hpc_train.health.stack_report import group_by_stack, report
from hpc_train.health.stacks import RankStacks, collect, from_lines
from hpc_train.launch.find_run import Run, find_run
from hpc_train.launch.queue import ask
from hpc_train.launch.run_folder import Owner
from hpc_train.launch.steps import agents_argv
from hpc_train.plan.run_files import RANKS_FILE

_STEP_S = 30.0
"""From the request for a step to the end of it, beside what the ranks take (assumed: a large job needs seconds)."""


def stacks_command(options: Namespace) -> int:
    """Carry out `stacks`."""
    run = find_run(options.run, Path(options.runs_dir))
    found, silent = collect_run(run, process_env(), timeout_s=options.timeout)
    if options.rank is not None:
        found = [stacks for stacks in found if stacks.rank == options.rank]
        if not found:
            raise ConfigError(f"{run.folder} has no rank {options.rank} on a node that answered")
    if options.json:
        print(json.dumps(_as_json(run, found, silent), indent=1))
    else:
        nodes = len({stacks.node for stacks in found} | set(silent))
        print(f"{run.folder}: {len(found)} ranks on {nodes} node{'s' if nodes > 1 else ''}")
        print(report(found, silent, num_frames=options.frames or sys.maxsize))
    return 0


def collect_run(run: Run, env: Mapping[str, str], *, timeout_s: float) -> tuple[list[RankStacks], list[str]]:
    """The stacks of a live run, by rank, and the nodes that gave none.

    Raises:
        ConfigError: the run is not running.
        LaunchError: its nodes cannot be reached from here.
    """
    owner = run.owner
    if owner is None or run.driver_is_live() is False:
        raise ConfigError(f"{run.folder} is not running, so that there are no stacks to look at")
    job_key = owner.job_key
    if owner.job_id is None:
        if owner.host != socket.gethostname():
            raise LaunchError(f"{run.folder} runs on {owner.host}; type this command there ({owner.describe()})")
        return collect(run.folder, owner.host, job_key, timeout_s=timeout_s), []
    nodes = _nodes(run, owner)
    lines = _run_collectors(_argv(run, owner, nodes, job_key, timeout_s), env, _STEP_S + timeout_s)
    by_node = from_lines(lines)
    found = [stacks for node in nodes for stacks in by_node.get(node, [])]
    return sorted(found, key=lambda stacks: (stacks.rank is None, stacks.rank)), [
        node for node in nodes if node not in by_node
    ]


def _nodes(run: Run, owner: Owner) -> list[str]:
    """The nodes of the run's ranks; all of the job's where there is no table yet."""
    try:
        rows = (run.folder / RANKS_FILE).read_text(encoding="utf-8").splitlines()[1:]
    except OSError:
        text = ask(["squeue", "--noheader", "--jobs", str(owner.job_id), "--format=%N"])
        return list(expand_hostlist(text.strip()))
    return list(dict.fromkeys(row.split("\t")[1] for row in rows))


def _argv(run: Run, owner: Owner, nodes: Sequence[str], job_key: str, timeout_s: float) -> list[str]:
    collector = [sys.executable, "-m", "hpc_train.health.stacks", "--run-dir", str(run.folder)]
    collector += ["--job-key", job_key, "--timeout", str(timeout_s)]
    # An array's task has a number of its own, which srun wants.
    job = ask(["squeue", "--noheader", "--jobs", str(owner.job_id), "--format=%A"]).split()
    if not job:
        raise ConfigError(f"job {owner.job_id} of {run.folder} is not in the queue any more")
    argv = agents_argv(nodes, collector)
    return [argv[0], f"--jobid={job[0]}", *argv[1:]]


def _run_collectors(argv: Sequence[str], env: Mapping[str, str], limit_s: float) -> list[str]:
    """The collectors' lines; after the limit, those that have come."""
    try:
        done = subprocess.run(
            list(argv),
            env=scrubbed_for_submission(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except FileNotFoundError as problem:
        raise LaunchError(f"{argv[0]} is not on PATH: type this on a login node or inside the job") from problem
    except subprocess.TimeoutExpired as slow:
        return (slow.stdout or b"").decode(errors="replace").splitlines()
    if done.returncode != 0 and not done.stdout:
        raise LaunchError(f"srun could not start a step in the job: {done.stderr.strip()}")
    return done.stdout.splitlines()


def _as_json(run: Run, found: Sequence[RankStacks], silent: Sequence[str]) -> dict[str, object]:
    groups = [{"ranks": group.ranks, "odd": group.odd} for group in group_by_stack(found)]
    return {
        "run_dir": str(run.folder),
        "job_id": run.job_id,
        "silent_nodes": list(silent),
        "ranks": [asdict(stacks) for stacks in found],
        "groups": groups,
    }
