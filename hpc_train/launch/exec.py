"""`hpc-train exec`: any program on the ranks of this job or machine, with torchrun's variables.

The table of ranks is made before anything is started; every task looks itself up in it. Rank 0's address is
told over a rendezvous that lives in this process, unless MASTER_ADDR and MASTER_PORT are set already.
"""

from __future__ import annotations

import socket
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path

from hpc_train import log
from hpc_train.cluster.allocation import Allocation, allocation_local
from hpc_train.cluster.binding import read_machine
from hpc_train.cluster.environment import fill_unset, process_env, training_defaults
from hpc_train.cluster.fabric import Fabric
from hpc_train.cluster.network import preset_address
from hpc_train.cluster.process import own_process
from hpc_train.cluster.situation import Found, Situation, find_situation
from hpc_train.cluster.slurm import JobFacts
from hpc_train.config import FabricConfig
from hpc_train.errors import ConfigError, LaunchError
from hpc_train.launch import exec_task, record, run_folder
from hpc_train.launch.children import terminations_raise
from hpc_train.launch.driver import describe_allocation, find_job, run_variables, write_plan
from hpc_train.launch.fabric_step import fabric_of_run
from hpc_train.launch.file_errors import room_needed
from hpc_train.launch.job_allocation import allocation_of_job
from hpc_train.launch.queue import job_is_live
from hpc_train.launch.rank_facts import rank_facts
from hpc_train.launch.ranks import RanksToStart, node_log, run_ranks
from hpc_train.launch.rendezvous import RendezvousServer
from hpc_train.launch.site import choose_launcher
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.node_order import in_topology_order
from hpc_train.plan.run import plan_mesh
from hpc_train.plan.run_files import write_atomically

EXEC_NAME = "exec"


def exec_command(options: Namespace) -> int:
    """Carry out `exec`."""
    if not options.verbatim:
        raise ConfigError("no program is given; write `hpc-train exec -n RANKS -- PROGRAM ARGUMENTS`")
    env = process_env()
    found = find_situation(env, own_process())
    if found.situation in (Situation.STEP_TASK, Situation.MPI_TASK, Situation.ELASTIC):
        raise LaunchError(
            f"hpc-train exec starts the ranks itself, but {found.reason}. Start it once, in the batch script or "
            "the salloc shell, without srun, mpirun or torchrun before it"
        )
    job = find_job(env, found)
    host = socket.gethostname()
    allocation = _allocation(options, job, host)
    run_dir = _run_dir(options, job, found)
    owner = run_folder.this_process(host, job.requeue_id if job else None, job.restart_count if job else 0)
    claim = run_folder.claim(run_dir, owner, job_is_live)
    with terminations_raise():
        try:
            with room_needed(run_dir):
                return _exec_claimed(options, env, found, job, allocation, claim)
        finally:
            claim.release()


def _exec_claimed(
    options: Namespace,
    env: Mapping[str, str],
    found: Found,
    job: JobFacts | None,
    allocation: Allocation,
    claim: run_folder.Claim,
) -> int:
    """Write the table of ranks, start the tasks, serve the rendezvous, and end with the first failure's code."""
    run_dir, job_id = claim.run_dir, claim.owner.job_id
    attempt = claim.begin_attempt()
    job_log = record.JobLog(run_dir, quiet=True)
    settings = FabricConfig(source=options.fabric)
    found_fabric = fabric_of_run(settings, allocation, env, is_in_job=job is not None)
    ordered = in_topology_order(allocation, found_fabric.fabric)
    plan = plan_mesh(Mesh.fill(allocation.num_tasks), ordered)
    site = choose_launcher(env, found, job, allocation, mpi=options.mpi, wait_s=0)
    defaults = {**training_defaults(None, num_threads=site.cpus_per_rank), **site.defaults}
    filled, lines = fill_unset(env, defaults)
    order = _describe_order(allocation, ordered, found_fabric.fabric)
    variables = f"variables: {'; '.join(lines)}"
    for line in (found.reason, describe_allocation(allocation), *found_fabric.notes, order, site.reason, variables):
        job_log.say(line)
    log.say(f"hpc-train: {allocation.num_tasks} ranks; logs in {run_dir / 'logs'}", sys.stderr)
    write_plan(run_dir, plan, rank_facts(plan, allocation, found_fabric.fabric, site.launcher))
    rank_env = {**filled, **run_variables(claim, attempt)}
    if options.interface:
        rank_env[exec_task.INTERFACE] = options.interface
    write_atomically(run_dir / "env.txt", record.environment_text(rank_env))
    record.write_banner([node_log(run_dir, node) for node in allocation.nodes], record.banner(attempt, job_id))
    command = (sys.executable, "-m", "hpc_train.launch.exec_task", *options.verbatim)
    server = None if _is_preset(env) else RendezvousServer(allocation.num_tasks)
    watch = _no_watch
    if server is not None:
        rank_env[exec_task.RENDEZVOUS_PORT] = str(server.port)
        rank_env[exec_task.RENDEZVOUS_TOKEN] = server.token
        rank_env[exec_task.TIMEOUT] = str(options.timeout)
        hosts = {planned.rank: planned.node for planned in plan.ranks}
        watch = missing_ranks_watch(server, hosts, options.timeout, time.monotonic)
    try:
        start = RanksToStart(run_dir, allocation, command, rank_env, site.launcher, plan.nodes[0], show_all=True)
        end = run_ranks(start, job_log.say, watch)
    finally:
        if server is not None:
            server.close()
    outcome = record.decide_outcome(run_dir, end, any_code=True)
    record.write_outcome(run_dir, outcome, attempt=attempt, job_id=job_id)
    if outcome.failure is not None:
        log.say(f"hpc-train: error: {record.failure_text(outcome.failure)}", sys.stderr)
    elif outcome.exit_code:
        log.say(f"hpc-train: error: {outcome.reason}", sys.stderr)
    job_log.say(f"{outcome.outcome}, exit code {outcome.exit_code}: {outcome.reason}")
    return outcome.exit_code


def missing_ranks_watch(
    server: RendezvousServer, hosts: Mapping[int, str], timeout_s: float, clock: Callable[[], float]
) -> Callable[[], str | None]:
    """A watch that, once the time is over, stops the job if there are ranks that were never heard from."""
    deadline = clock() + timeout_s
    met = False

    def watch() -> str | None:
        nonlocal met
        if met:
            return None
        missing = server.not_heard_from()
        met = not missing
        if met or clock() < deadline:
            return None
        shown = ", ".join(f"{rank} on {hosts[rank]}" for rank in missing[:16])
        more = f" and {len(missing) - 16} more" if len(missing) > 16 else ""
        return (
            f"{len(missing)} of {len(hosts)} ranks were not heard from in {timeout_s:.0f} s: {shown}{more}. Look at "
            "these nodes, or raise the limit by --timeout SECONDS"
        )

    return watch


def _describe_order(allocation: Allocation, ordered: Allocation, fabric: Fabric | None) -> str:
    """Which node has the first ranks, and why."""
    if fabric is None:
        return "nodes are in Slurm's order"
    if ordered.nodes == allocation.nodes:
        return f"nodes are in the order of the switches, which is Slurm's too (from {fabric.source})"
    shown = ", ".join(ordered.nodes[:8]) + (", ..." if len(ordered.nodes) > 8 else "")
    return f"nodes are in the order of the switches: {shown} (from {fabric.source})"


def _no_watch() -> str | None:
    return None


def _allocation(options: Namespace, job: JobFacts | None, host: str) -> Allocation:
    if job is not None:
        return allocation_of_job(job, options.ranks, options.ranks_per_node)
    ranks = options.ranks or options.ranks_per_node
    if ranks is None:
        raise ConfigError("the number of ranks is not given; use -n RANKS, or start inside a Slurm job")
    return allocation_local(ranks, host, len(read_machine().gpus))


def _run_dir(options: Namespace, job: JobFacts | None, found: Found) -> Path:
    if options.run_dir:
        return Path(options.run_dir).absolute()
    # Several may run in one job, one after another or at once: each gets a folder of its own.
    name = job.requeue_id if job is not None else run_folder.time_name()
    return run_folder.new_folder(Path("runs").absolute() / EXEC_NAME, name)


def _is_preset(env: Mapping[str, str]) -> bool:
    preset = preset_address(env)
    return preset is not None and preset[1] is not None
