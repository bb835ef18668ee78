"""`hpc-train submit`: check, write the batch script, give it to sbatch, make the run folder.

The folder is written before sbatch is asked, and put into its place by whoever is first, this command or the job.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_train import __version__, log
from hpc_train.cluster.environment import process_env, scrubbed_for_submission, site_defaults
from hpc_train.config import Config
from hpc_train.config_read import dump_yaml, load_config
from hpc_train.errors import ConfigError, HpcTrainError, LaunchError
from hpc_train.launch.batch_script import BatchValues, batch_script, is_array
from hpc_train.launch.checks import check_data_files, check_ranks
from hpc_train.launch.file_errors import reason
from hpc_train.launch.prepared_folder import place_folder, prepare_folder
from hpc_train.launch.queue import ask, job_id_in, job_is_live
from hpc_train.launch.run_folder import RUN_DIR_VARIABLE, is_live, read_owner, time_name
from hpc_train.launch.slurm_flags import check_signal, given_flags, verbatim_value, world_size_of
from hpc_train.launch.submitted_jobs import SubmittedJob, note_job
from hpc_train.plan.mesh import Mesh


def submit_command(options: Namespace) -> int:
    """Carry out `submit`."""
    env = process_env()
    values = batch_values(options, env)
    _check_together(options, values)
    if options.chain > 1:
        values = _of_a_chain(values)
    if options.dry_run:
        print(_dry_run_text(options.via, values), end="")
        return 0
    _refuse_live_folder(values)
    make_output_folder(values)
    submit = _submitit().submit if options.via == "submitit" else submit_by_sbatch
    job_ids, folder = _submit_jobs(values, env, options.chain, submit)
    _announce(options, values, job_ids, folder)
    if options.follow:
        from hpc_train.launch.logs import follow_run

        return follow_run(folder or job_ids[0], job_ids[-1])
    return 0


def _submit_jobs(
    values: BatchValues, env: Mapping[str, str], num_jobs: int, submit: Callable[[BatchValues, Mapping[str, str]], str]
) -> tuple[list[str], str | None]:
    """Their ids, and the folder of the run, which is in its place then; None for an array.

    Raises:
        LaunchError: Slurm refuses; or the folder cannot be put into its place, which names the jobs that wait already.
    """
    prepared = prepare_folder(values)
    job_ids: list[str] = []
    try:
        job_ids.append(submit(values, env))
        folder = run_folder_of(values, job_ids[0])
        if folder is not None:
            place_folder(prepared, Path(folder))
            _note(Path(folder), job_ids[0], values)
        for _ in range(num_jobs - 1):
            asked = values.flags.get("dependency")
            flags = {**values.flags, "dependency": f"{asked},singleton" if asked else "singleton"}
            job_ids.append(submit(replace(values, run_dir=folder, flags=flags), env))
            _note(Path(str(folder)), job_ids[-1], values)
    except (HpcTrainError, OSError) as problem:
        if isinstance(problem, HpcTrainError) and not job_ids:
            raise
        what = reason(problem) if isinstance(problem, OSError) else problem
        jobs = f"job{'s' if len(job_ids) > 1 else ''} {', '.join(job_ids)}, and `scancel {' '.join(job_ids)}` ends that"
        raise LaunchError(f"{what}. Submitted before this: {jobs if job_ids else 'nothing'}") from problem
    finally:
        shutil.rmtree(prepared, ignore_errors=True)
    return job_ids, folder


def _note(folder: Path, job_id: str, values: BatchValues) -> None:
    if folder.name != job_id:
        name = verbatim_value(values.verbatim, "job-name", "-J") or values.flags.get("job-name", values.name)
        note_job(folder, SubmittedJob(job_id, name))


def _check_together(options: Namespace, values: BatchValues) -> None:
    """What is right by itself, but not with the other things that were asked for.

    Raises:
        ConfigError: it is not.
    """
    if is_array(values):
        if options.chain > 1:
            raise ConfigError("--chain and --array exclude each other: a chain is one run, an array is several")
        if values.run_dir is not None:
            asked = "--run-dir" if options.run_dir else f"{RUN_DIR_VARIABLE}={values.run_dir}"
            raise ConfigError(f"{asked} and --array exclude each other: each task of an array is a run of its own")
        if options.follow:
            raise ConfigError(
                "--follow and --array exclude each other: each task has a log of its own. Leave --follow out, and "
                "type `hpc-train logs ARRAY_TASK -f` later"
            )
    if options.chain > 1 and ("requeue" in values.flags or "--requeue" in values.verbatim):
        raise ConfigError(
            "--chain and --requeue exclude each other: a job of a chain is not requeued, the next one goes on"
        )
    try:
        check_signal(verbatim_value(values.verbatim, "signal"), values.stop_signal)
    except ConfigError as problem:
        log.say(f"hpc-train: warning: passed on to sbatch as it is, though {problem}", sys.stderr)


def _of_a_chain(values: BatchValues) -> BatchValues:
    flags = values.flags
    if "job-name" not in flags:
        # Jobs of one name wait for each other: a name that no other chain has.
        flags = {**flags, "job-name": f"{values.name}-{time_name()}"}
    return replace(values, flags=flags, requeue="chain")


def batch_values(options: Namespace, env: Mapping[str, str]) -> BatchValues:
    """All that the script depends on, checked.

    Raises:
        ConfigError: the configuration, the number of ranks, the mesh or the batch do not work.
        DataError: data files are missing.
    """
    config = load_config(options.config, options.overrides)
    defaults = {flag.removeprefix("--"): value for flag, value in site_defaults(env).items()}
    world_size, flags = world_size_of({**defaults, **given_flags(options)})
    mesh = check_ranks(config, world_size)
    check_data_files(config)
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
        raise ConfigError(f"the folder for runs {values.runs_dir} cannot be made: {reason(problem)}") from problem


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
