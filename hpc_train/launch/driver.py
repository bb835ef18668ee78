"""The driver of a training run: one process in the batch script, the salloc shell or on a laptop.

1. allocation: what Slurm granted, or this machine; and the fabric that its nodes hang in
2. plan: who is which rank; and a look at all that can be wrong
3. claim the run folder, and write the plan and its report into it
4. ranks by one srun or mpirun, and an agent on each node beside them
5. wait, or stop them when told to
6. outcome: written whole, and its exit code is the driver's; a batch script starts again what was interrupted
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train import log
from hpc_train.cluster.agent_address import JOB_KEY_VARIABLE
from hpc_train.cluster.allocation import Allocation, allocation_local, job_without
from hpc_train.cluster.binding import read_machine
from hpc_train.cluster.environment import (
    END_TIME_VARIABLE,
    RENDEZVOUS_VARIABLE,
    fill_unset,
    training_defaults,
)
from hpc_train.cluster.process import own_process
from hpc_train.cluster.situation import Found, Situation
from hpc_train.cluster.slurm import JobFacts, broken_configuration, read_job
from hpc_train.config import Config
from hpc_train.config_read import dump_yaml
from hpc_train.errors import ConfigError, ExitCode, HpcTrainError, LaunchError
from hpc_train.launch import record, run_folder
from hpc_train.launch.checks import check_data_files, check_plan, check_ranks, compare_with_earlier
from hpc_train.launch.children import Interrupted, terminations_raise
from hpc_train.launch.debugging import check_debug_rank, for_debugging
from hpc_train.launch.fabric_step import fabric_of_run
from hpc_train.launch.file_errors import room_needed
from hpc_train.launch.job_allocation import allocation_of_job
from hpc_train.launch.queue import job_is_live
from hpc_train.launch.rank_facts import rank_facts
from hpc_train.launch.ranks import RanksToStart, node_log, run_ranks
from hpc_train.launch.saved_last import stalled_starts
from hpc_train.launch.site import Site, choose_launcher, with_options
from hpc_train.launch.stage_env import stage_for_ranks
from hpc_train.launch.stop_times import stop_signal_of, stop_variables
from hpc_train.plan.nccl_settings import NcclSetting
from hpc_train.plan.page import page_html
from hpc_train.plan.report import PlanReport, report_plan
from hpc_train.plan.run import Plan, RankFacts
from hpc_train.plan.run_files import (
    CONFIG_FILE,
    PLAN_FILE,
    PLAN_PAGE_FILE,
    PLAN_TEXT_FILE,
    RANKS_FILE,
    write_atomically,
)
from hpc_train.plan.table import report_text, summary_line


@dataclass(frozen=True)
class RunRequest:
    """What the user asked for.

    run_dir None: a new folder. ranks None: what the job or the mesh says. time_limit_s: stop before so much time.
    """

    config: Config
    run_dir: Path | None = None
    ranks: int | None = None
    ranks_per_node: int | None = None
    mpi: str | None = None
    time_limit_s: float | None = None
    debug_rank: int | None = None


def drive(request: RunRequest, env: Mapping[str, str], found: Found) -> int:
    """Carry out a run, phase by phase, and return its exit code.

    Raises:
        HpcTrainError: it cannot be started.
    """
    begin = time.time()
    job = find_job(env, found)
    if job is not None:
        job = job_without(job, request.config.fabric.exclude)
    host = socket.gethostname()
    asked = asked_run_dir(request, env)
    report = None
    if asked is None or not os.path.exists(asked):  # which takes names of any length
        # What is wrong already must not leave a folder; in one that is there it is recorded below.
        report = make_report(request, job, host, env)
    run_dir = asked or default_run_dir(request.config, found, job)
    owner = run_folder.this_process(host, job.requeue_id if job else None, job.restart_count if job else 0)
    claim = run_folder.claim(run_dir, owner, job_is_live)
    with terminations_raise(stop_signal_of(request.config.launch)):
        try:
            with room_needed(run_dir):
                return _drive_claimed(request, env, found, job, claim, begin, report)
        finally:
            claim.release()


def _drive_claimed(
    request: RunRequest,
    env: Mapping[str, str],
    found: Found,
    job: JobFacts | None,
    claim: run_folder.Claim,
    begin: float,
    report: PlanReport | None,
) -> int:
    run_dir, config, job_id = claim.run_dir, request.config, claim.owner.job_id
    notes = compare_with_earlier(run_dir, config)
    if notes.is_done:
        log.say(f"hpc-train: {run_dir} is done already ({notes.done}); nothing to do. Raise train.steps to go on")
        return int(ExitCode.DONE)
    attempt = claim.begin_attempt()
    job_log = record.JobLog(run_dir)
    log.say(record.banner(attempt, job_id))
    job_log.say(f"attempt {attempt} in {run_dir}")
    job_log.say(found.reason)
    if claim.taken_over is not None:
        job_log.say(f"the folder is taken over from a run that is gone: {claim.taken_over.describe()}")
    for line in notes.changes:
        job_log.say(line)
    is_batch = found.situation is Situation.BATCH_SHELL
    try:
        outcome = _stalled_before(run_dir, config, job_id, job) if is_batch else None
        if outcome is None:
            times = {**env, **stop_variables(config.launch, env, job, run_dir, _limit_end(request, begin))}
            if report is None:
                report = make_report(request, job, claim.owner.host, env)
            start = _prepare(request, report, times, found, job, claim, attempt, job_log)
            outcome = record.decide_outcome(run_dir, run_ranks(start, job_log.say), stop_signal=start.stop_signal)
            if is_batch:
                count = functools.partial(stalled_starts, run_dir, job_id, job_log.say)
                outcome = record.bound_by_progress(outcome, count, config.launch)
    except Interrupted as interruption:
        reason = f"{interruption} before the ranks started"
        outcome = record.Outcome("interrupted", int(ExitCode.REQUEUE), reason, None)
    except BaseException as error:
        code = int(error.exit_code) if isinstance(error, HpcTrainError) else int(ExitCode.INTERNAL)
        failed = record.Outcome("failed", code, f"before the ranks started: {error or type(error).__name__}", None)
        record.write_outcome(run_dir, failed, attempt=attempt, job_id=job_id)
        raise
    record.write_outcome(run_dir, outcome, attempt=attempt, job_id=job_id)
    if outcome.failure is not None:
        log.try_to_say(f"hpc-train: error: {record.failure_text(outcome.failure)}")
    job_log.say(f"{outcome.outcome}, exit code {outcome.exit_code}: {outcome.reason}")
    return outcome.exit_code


def _prepare(
    request: RunRequest,
    report: PlanReport,
    env: Mapping[str, str],
    found: Found,
    job: JobFacts | None,
    claim: run_folder.Claim,
    attempt: int,
    job_log: record.JobLog,
) -> RanksToStart:
    """Launcher and environment; everything that ranks read is in the folder afterwards."""
    run_dir, config = claim.run_dir, request.config
    allocation, plan = report.allocation, report.plan
    wrap, mpi = config.launch.wrap, request.mpi or config.launch.mpi
    site = choose_launcher(env, found, job, allocation, mpi=mpi, is_wrapped=bool(wrap))
    launcher = with_options(site.launcher, config.launch.srun_options)
    wanted = report.nccl if any(allocation.gpus_per_node) else ()
    rank_env, lines = rank_environment(env, config, site, claim, attempt, wanted)
    job_log.say(describe_allocation(allocation))
    job_log.say(f"plan {plan.hash[:12]}: {plan.world_size} ranks, {plan.mesh.describe()}")
    job_log.say(summary_line(report))
    job_log.say(site.reason)
    job_log.say(f"variables for the ranks: {'; '.join(lines)}")
    if job is not None and END_TIME_VARIABLE not in env and request.debug_rank is None:
        job_log.say("note: no time limit of this job is known, so only a signal makes the run save and end before it")
    for note in report.notes:
        job_log.say(f"note: {note}")
    for warning in allocation.warnings:
        job_log.say(f"warning: {warning}")
    staged = stage_for_ranks(config.launch, launcher, allocation.nodes, rank_env, job_log.say)
    own_python, rank_env = (staged.python, staged.rank_env(rank_env)) if staged else (sys.executable, rank_env)
    write_plan(run_dir, plan, rank_facts(plan, allocation, report.fabric, launcher))
    write_report(run_dir, report)
    write_atomically(run_dir / CONFIG_FILE, dump_yaml(config))
    write_atomically(run_dir / "env.txt", record.environment_text(rank_env))
    text = record.banner(attempt, claim.owner.job_id)
    record.write_banner([node_log(run_dir, node) for node in allocation.nodes], text)
    python = config.launch.rank_python or own_python
    command = (*wrap, python, "-m", "hpc_train", "run", str(run_dir / CONFIG_FILE))
    start = RanksToStart(
        run_dir, allocation, command, rank_env, launcher, plan.nodes[0],
        stop_signal=stop_signal_of(config.launch), agent_python=own_python, agents_finish_s=config.checkpoint.finish_s,
    )  # fmt: skip
    return start if request.debug_rank is None else for_debugging(start, plan, request.debug_rank, claim.owner.host)


def find_job(env: Mapping[str, str], found: Found) -> JobFacts | None:
    """The job that this process is in.

    Raises:
        LaunchError: its variables are left over from a job that has ended, or no command of Slurm's can work here.
    """
    job = None if found.situation is Situation.LAPTOP else read_job(env, own_process())
    broken = broken_configuration(env) if job is not None else None
    if broken is not None:
        raise LaunchError(f"{broken}. Correct it, or unset SLURM_CONF where the site needs none")
    if job is not None and job_is_live(job.job_id) is False:
        raise LaunchError(
            f"SLURM_JOB_ID={job.job_id} is set, but Slurm has no such job any more: variables of an earlier job are "
            "left over here, as in a terminal multiplexer that was started inside it. Leave that shell, or unset all "
            "SLURM_* variables, and start from a new salloc"
        )
    return job


def _limit_end(request: RunRequest, begin: float) -> float | None:
    return None if request.time_limit_s is None else begin + request.time_limit_s


def _stalled_before(run_dir: Path, config: Config, job_id: str | None, job: JobFacts | None) -> record.Outcome | None:
    """Whether Slurm has put a job back that makes no progress; this start is not counted."""
    stalled = run_folder.num_stalled(run_dir, job_id) - 1
    if job is None or not job.restart_count or stalled < config.launch.max_stalled:
        return None
    return record.no_progress(stalled, "see the outcome files of its earlier attempts")


def asked_run_dir(request: RunRequest, env: Mapping[str, str]) -> Path | None:
    """The folder of --run-dir, or that of the job's script."""
    asked = request.run_dir or env.get(run_folder.RUN_DIR_VARIABLE)
    return Path(asked).absolute() if asked else None


def default_run_dir(config: Config, found: Found, job: JobFacts | None) -> Path:
    """A folder named by the job, or a new one named by job or time."""
    parent = Path(config.launch.runs_dir).absolute() / config.name
    if job is not None and found.situation is Situation.BATCH_SHELL:
        # A requeued job comes back to the same name.
        return parent / job.requeue_id
    return run_folder.new_folder(parent, job.requeue_id if job is not None else run_folder.time_name())


def make_report(request: RunRequest, job: JobFacts | None, host: str, env: Mapping[str, str]) -> PlanReport:
    """Who is which rank on what is there, with the batch and the data files checked."""
    config = request.config
    allocation = find_allocation(request, job, host)
    check_ranks(config, allocation.num_tasks)
    check_data_files(config)
    found = fabric_of_run(config.fabric, allocation, env, is_in_job=job is not None)
    check_plan(config, allocation, found.fabric)
    report = report_plan(config, allocation, found.fabric, notes=found.notes)
    check_debug_rank(request.debug_rank, report.plan.world_size)
    return report


def find_allocation(request: RunRequest, job: JobFacts | None, host: str) -> Allocation:
    """The nodes and how many ranks each gets.

    Raises:
        ConfigError: on a machine without Slurm, when nothing says how many ranks.
        LaunchError: Slurm's numbers disagree, or say nothing; this machine is excluded, and there is no job.
    """
    if job is not None:
        return allocation_of_job(job, request.ranks, request.ranks_per_node)
    ranks = request.ranks or request.ranks_per_node
    parallel = request.config.parallel
    if ranks is None and parallel.dp is not None:
        ranks = parallel.pp * parallel.dp * parallel.cp * parallel.tp
    if ranks is None:
        raise ConfigError(
            "the number of ranks is not given. Use -n RANKS (this machine lets "
            f"{len(os.sched_getaffinity(0))} CPUs be "
            "used), or set parallel.dp"
        )
    return allocation_local(ranks, host, len(read_machine().gpus), request.config.fabric.exclude)


def rank_environment(
    env: Mapping[str, str],
    config: Config,
    site: Site,
    claim: run_folder.Claim,
    attempt: int,
    nccl: Sequence[NcclSetting] = (),
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The ranks' environment: ours, with what they need where it is unset; and a line for each such variable."""
    threads = config.launch.num_threads or site.cpus_per_rank
    defaults = {
        **training_defaults(None, num_threads=threads, trace_dir=None),
        **site.defaults,
        **{setting.name: setting.value for setting in nccl},
        **config.launch.env,
    }
    filled, lines = fill_unset(env, defaults)
    meeting = config.launch.model_dump(include={"timeout_s", "interface", "address_template"})
    return {**filled, **run_variables(claim, attempt), RENDEZVOUS_VARIABLE: json.dumps(meeting)}, lines


def run_variables(claim: run_folder.Claim, attempt: int) -> dict[str, str]:
    """How ranks and agents find the run that they belong to."""
    return {
        run_folder.RUN_DIR_VARIABLE: str(claim.run_dir),
        run_folder.ATTEMPT_VARIABLE: str(attempt),
        JOB_KEY_VARIABLE: claim.owner.job_key,
    }


def write_plan(run_dir: Path, plan: Plan, facts: Sequence[RankFacts]) -> None:
    write_atomically(run_dir / PLAN_FILE, plan.to_json())
    write_atomically(run_dir / RANKS_FILE, plan.ranks_tsv(facts))


def write_report(run_dir: Path, report: PlanReport) -> None:
    """The plan for people: as text, and as a page that draws it."""
    write_atomically(run_dir / PLAN_TEXT_FILE, report_text(report))
    write_atomically(run_dir / PLAN_PAGE_FILE, page_html(report))


def describe_allocation(allocation: Allocation) -> str:
    nodes, tasks = allocation.nodes, allocation.tasks_per_node
    shown = ", ".join(f"{node} {count}" for node, count in list(zip(nodes, tasks, strict=True))[:8])
    more = f" and {len(nodes) - 8} more nodes" if len(nodes) > 8 else ""
    return f"{allocation.num_tasks} ranks: {shown}{more} (from {allocation.source})"
