"""What ranks are told about their end: when the time is over, which signal asks for it, how long before it comes."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from pathlib import Path

from hpc_train.cluster.environment import END_TIME_VARIABLE, STOP_SIGNAL_VARIABLE, WARNING_TIMES_VARIABLE
from hpc_train.cluster.slurm import JobFacts
from hpc_train.config import LaunchConfig
from hpc_train.errors import LaunchError
from hpc_train.launch.queue import ask, end_time_of
from hpc_train.launch.run_folder import REQUEST_FILE
from hpc_train.plan.run_files import read_json

_SIGNAL_FLAG = re.compile(r"(?:[RB]{1,2}:)?[A-Za-z0-9]+@([0-9]+)")


def stop_signal_of(config: LaunchConfig) -> int:
    return signal.Signals[f"SIG{config.stop_signal}"]


def stop_variables(
    config: LaunchConfig, env: Mapping[str, str], job: JobFacts | None, run_dir: Path, limit_end: float | None
) -> dict[str, str]:
    """The ranks' variables. limit_end: when a limit of the user's own is over, in epoch seconds."""
    ends = [] if limit_end is None else [limit_end]
    if job is not None and (job_end := job.end_time or end_time_of(job.job_id)) is not None:
        ends.append(float(job_end))
    variables: dict[str, str] = {STOP_SIGNAL_VARIABLE: config.stop_signal}
    if ends:
        variables[END_TIME_VARIABLE] = f"{min(ends):.0f}"
    if job is not None and (warnings := warning_times(env, run_dir)):
        variables[WARNING_TIMES_VARIABLE] = json.dumps(warnings)
    return variables


def warning_times(env: Mapping[str, str], run_dir: Path) -> dict[str, float]:
    """In which cases a job is warned, and how many seconds before its end."""
    times = {}
    flags = (read_json(run_dir / REQUEST_FILE) or {}).get("slurm")
    asked = str(flags.get("signal")) if isinstance(flags, dict) else ""
    if (match := _SIGNAL_FLAG.fullmatch(asked)) is not None:
        times[f"--signal={asked}"] = float(match[1])
    partition = env.get("SLURM_JOB_PARTITION")
    if partition:
        grace = _grace_time(partition)
        if grace is not None:
            times[f"a preemption in partition {partition} (GraceTime)"] = grace
    return times


def _grace_time(partition: str) -> float | None:
    """The warning that a job of a partition gets before it is preempted; None where that is not known or never is."""
    try:
        text = ask(["scontrol", "show", "partition", partition, "--oneliner"])
    except LaunchError:
        return None
    fields = dict(word.partition("=")[::2] for word in text.split())
    mode, grace = fields.get("PreemptMode", "OFF"), fields.get("GraceTime", "")
    # Without a grace time, Slurm's KillWait is what is left; doctor reports it.
    return float(grace) if mode not in ("OFF", "SUSPEND") and grace.isdecimal() and int(grace) > 0 else None
