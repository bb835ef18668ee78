"""What `hpc-train shell` has salloc start once nodes are granted: a greeting, then a shell with all that is needed.

It replaces itself by the shell, so that terminal and signals are the shell's own.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_train import log
from hpc_train.cluster.environment import process_env
from hpc_train.cluster.process import own_process
from hpc_train.cluster.slurm import JobFacts, read_job
from hpc_train.errors import ExitCode, LaunchError
from hpc_train.launch.job_allocation import allocation_of_job
from hpc_train.launch.queue import end_time_of
from hpc_train.launch.templates import fill_template, read_template

_MOST_NAMED_NODES = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Greet and become the shell; returns only where that fails."""
    parser = argparse.ArgumentParser(prog="hpc_train.launch.shell_start", allow_abbrev=False)
    parser.add_argument("--module", action="append", default=[])
    parser.add_argument("--command")
    options = parser.parse_args(arguments)
    env = process_env()
    job = read_job(env, own_process())
    if job is None:
        log.say("hpc-train: error: this is not inside a Slurm job; type `hpc-train shell`", sys.stderr)
        return int(ExitCode.LAUNCH)
    is_typed = options.command is None and os.isatty(0)
    for line in greeting(job, end_time_of(job.job_id), time.time(), is_typed=is_typed):
        log.say(f"hpc-train: {line}", sys.stderr)
    argv = shell_argv(env, options.module, options.command, is_typed=is_typed)
    try:
        os.execvp(argv[0], argv)
    except OSError as problem:
        log.say(f"hpc-train: error: {argv[0]} cannot be started: {problem.strerror}", sys.stderr)
    return int(ExitCode.LAUNCH)


def greeting(job: JobFacts, end_time: int | None, now: float, *, is_typed: bool) -> list[str]:
    """What was granted, and what to type."""
    nodes = ", ".join(job.nodes[:_MOST_NAMED_NODES])
    more = f" and {len(job.nodes) - _MOST_NAMED_NODES} more" if len(job.nodes) > _MOST_NAMED_NODES else ""
    try:
        ranks = f"{allocation_of_job(job, None, None).num_tasks} ranks"
    except LaunchError:
        ranks = "the number of ranks is yours to give (`run -n RANKS`)"
    until = "without a time limit"
    if end_time is not None:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end_time))
        until = f"until {clock}, in {max(0, int(end_time - now)) // 60} minutes"
    plural = "s" if len(job.nodes) > 1 else ""
    lines = [f"job {job.job_id}: {len(job.nodes)} node{plural} ({nodes}{more}), {ranks}, {until}"]
    if is_typed:
        lines.append("`hpc-train run CONFIG` starts ranks on them, as often as you like; `exit` gives the nodes back")
    return lines


def shell_argv(env: Mapping[str, str], modules: Sequence[str], command: str | None, *, is_typed: bool) -> list[str]:
    """The shell to become. Its start file is written here, and removes itself."""
    users = env.get("SHELL") or "/bin/bash"
    is_bash = Path(users).name == "bash"
    descriptor, path = tempfile.mkstemp(prefix="hpc_train_shell_", suffix=".rc")
    values = {
        "THIS_FILE": shlex.quote(path),
        "USER_FILE": "[ -r ~/.bashrc ] && . ~/.bashrc" if is_typed and is_bash else "",
        "MODULES": shlex.join(modules),
        "ON_FAILURE": ":" if is_typed else f"exit {int(ExitCode.LAUNCH)}",
        "BIN": shlex.quote(str(Path(sys.executable).parent)),
        "PYTHON": shlex.quote(sys.executable),
        "PROMPT": 'PS1="(job $SLURM_JOB_ID) $PS1"' if is_typed and is_bash else "",
    }
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(fill_template(read_template("shell.rc.in"), values))
    if is_typed and is_bash:
        return [users, "--rcfile", path, "-i"]
    inner = [users] if is_typed else ["bash"] if command is None else ["bash", "-c", command]
    # Another shell than bash takes over the environment that bash has made ready. salloc takes a signal's end for 0, so
    # that of a command is made a number by a bash around it, which Ctrl-C does not end before the command.
    start = 'exec "$@"' if is_typed else 'trap : INT QUIT TERM HUP; "$@"; exit $?'
    return ["bash", "-c", f'. "$0"; {start}', path, *inner]


if __name__ == "__main__":
    sys.exit(main())
