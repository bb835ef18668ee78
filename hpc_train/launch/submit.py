"""`hpc-train submit`: check, write the batch script, give it to sbatch, make the run folder.

The folder is made by whoever is first, this command or the job, by moving a whole one into place.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_train import __version__, log
from hpc_train.cluster.environment import process_env, scrubbed_for_submission, site_defaults
from hpc_train.config import Config, dump_yaml, load_config
from hpc_train.errors import ConfigError, LaunchError
from hpc_train.launch.batch_script import CONFIG_REQUEST_FILE, BatchValues, batch_script, is_array
from hpc_train.launch.checks import check_before_start
from hpc_train.launch.queue import ask, job_id_in, job_is_live
from hpc_train.launch.run_folder import (
    REQUEST_FILE,
    RUN_DIR_VARIABLE,
    SUBMIT_FILE,
    is_live,
    read_owner,
    time_name,
)
from hpc_train.launch.slurm_flags import check_signal, given_flags, world_size_of
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.run_files import CONFIG_FILE


def submit_command(options: Namespace) -> int:
    """Carry out `submit`."""
    env = process_env()
    values = batch_values(options, env)
    if options.chain < 1:
        raise ConfigError(f"--chain {options.chain} is no number of jobs of 1 or more")
    if options.chain > 1 and is_array(values):
        raise ConfigError("--chain and --array exclude each other: a chain is one run, an array is several")
    if options.chain > 1 and "job-name" not in values.flags:
        # Jobs of one name wait for each other: a name that no other chain has.
        values = replace(values, flags={**values.flags, "job-name": f"{values.name}-{time_name()}"})
    if options.chain > 1:
        values = replace(values, requeue="chain")
    if options.dry_run:
        print(_dry_run_text(options.via, values), end="")
        return 0
    _refuse_live_folder(values)
    make_output_folder(values)
    submit = _submitit().submit if options.via == "submitit" else submit_by_sbatch
    job_ids = [submit(values, env)]
    folder = run_folder_of(values, job_ids[0])
    if folder is not None:
        place_folder(Path(folder), values)
    for _ in range(options.chain - 1):
        asked = values.flags.get("dependency")
        flags = {**values.flags, "dependency": f"{asked},singleton" if asked else "singleton"}
        job_ids.append(submit(replace(values, run_dir=folder, flags=flags), env))
    _announce(options, values, job_ids, folder)
    if options.follow:
        from hpc_train.launch.logs import follow_run

        return follow_run(folder or job_ids[0], job_ids[-1])
    return 0


def batch_values(options: Namespace, env: Mapping[str, str]) -> BatchValues:
    """All that the script depends on, checked.

    Raises:
        ConfigError: the configuration, the number of ranks, the mesh or the batch do not work.
        DataError: data files are missing.
    """
    config = load_config(options.config, options.overrides)
    defaults = {flag.removeprefix("--"): value for flag, value in site_defaults(env).items()}
    world_size, flags = world_size_of({**defaults, **given_flags(options)})
    parallel = config.parallel
    mesh = Mesh.fill(world_size, pp=parallel.pp, dp=parallel.dp, cp=parallel.cp, tp=parallel.tp)
    check_before_start(config, mesh)
    check_signal(flags.get("signal"), config.launch.stop_signal)
    run_dir = options.run_dir or env.get(RUN_DIR_VARIABLE)
    return BatchValues(
        name=config.name,
        flags=flags,
        runs_dir=os.path.abspath(config.launch.runs_dir),
        run_dir=os.path.abspath(run_dir) if run_dir else None,
        config_yaml=dump_yaml(config),
        request_json=request_text(config, mesh, flags),
        python=sys.executable,
        version=__version__,
        modules=config.launch.modules,
        mpi=options.mpi,
        verbatim=tuple(options.verbatim or ()),
        stop_signal=config.launch.stop_signal,
        requeue=config.launch.requeue,
        max_requeues=config.launch.max_requeues,
    )


def request_text(config: Config, mesh: Mesh, flags: Mapping[str, str]) -> str:
    """plan.request.json: what was asked for. The plan itself is made in the job, from what it really gets."""
    request = {
        "version": 1,
        "name": config.name,
        "world_size": mesh.world_size,
        "axes": mesh.axes,
        "slurm": dict(flags),
    }
    return json.dumps(request, indent=1) + "\n"


def run_folder_of(values: BatchValues, job_id: str) -> str | None:
    """Where a job's run lies; None for an array, each of whose tasks has a folder of its own."""
    if values.run_dir is not None:
        return values.run_dir
    return None if is_array(values) else f"{values.runs_dir}/{values.name}/{job_id}"


def place_folder(folder: Path, values: BatchValues) -> bool:
    """Make the folder as the job's script would, whole; false if it is there already."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f"{folder.name}.new.", dir=folder.parent))
    try:
        (new / "logs").mkdir()
        (new / CONFIG_REQUEST_FILE).write_text(values.config_yaml, encoding="utf-8")
        (new / CONFIG_FILE).write_text(values.config_yaml, encoding="utf-8")
        (new / REQUEST_FILE).write_text(values.request_json, encoding="utf-8")
        (new / SUBMIT_FILE).write_text(batch_script(values), encoding="utf-8")
        new.chmod(0o755)
        os.rename(new, folder)
    except OSError:
        # A folder with something in it cannot be replaced: the job was quicker, or it is an earlier run's.
        shutil.rmtree(new, ignore_errors=True)
        if not folder.is_dir():
            raise
        return False
    return True


def _refuse_live_folder(values: BatchValues) -> None:
    """A job that would start into a folder in use is refused now, not in its log when it starts."""
    owner = read_owner(Path(values.run_dir)) if values.run_dir else None
    if owner is None or "dependency" in values.flags:
        return
    if is_live(owner, socket.gethostname(), job_is_live):
        behind = f"submit with --dependency=afterany:{owner.job_id} to go on after it, " if owner.job_id else ""
        raise ConfigError(
            f"the run folder {values.run_dir} belongs to a run that is alive: {owner.describe()}. Wait for it, {behind}"
            "or give another folder by --run-dir"
        )


def make_output_folder(values: BatchValues) -> None:
    """Slurm makes no folders for a job's output."""
    try:
        Path(values.runs_dir, values.name).mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigError(f"the folder for runs {values.runs_dir} cannot be made: {problem.strerror}") from problem


def _dry_run_text(via: str, values: BatchValues) -> str:
    return _submitit().dry_run_text(values) if via == "submitit" else batch_script(values)


def _submitit() -> Any:
    """The module that imports submitit, which nothing else needs."""
    try:
        from hpc_train.launch import via_submitit
    except ModuleNotFoundError as problem:
        raise LaunchError(
            f"--via submitit needs the Python package {problem.name}, which is not installed"
        ) from problem
    return via_submitit


def submit_by_sbatch(values: BatchValues, env: Mapping[str, str]) -> str:
    """Give the script to sbatch and return the job's id."""
    argv = ["sbatch", "--parsable", *values.verbatim]
    return job_id_in(ask(argv, env=scrubbed_for_submission(env), text=batch_script(values), timeout_s=None))


def _announce(options: Namespace, values: BatchValues, job_ids: list[str], folder: str | None) -> None:
    if options.parsable:
        print("\n".join(job_ids), flush=True)
        return
    jobs = f"job {job_ids[0]}" if len(job_ids) == 1 else f"jobs {', '.join(job_ids)}"
    where = folder or f"{values.runs_dir}/{values.name}/{job_ids[0]}_TASK for each task"
    given = f" (from {RUN_DIR_VARIABLE})" if folder == values.run_dir and folder and not options.run_dir else ""
    log.say(f"submitted {jobs}, run folder {where}{given}")
