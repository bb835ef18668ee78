"""The ranks of a job over its nodes, with the GPUs of each: Slurm is asked where its variables cannot tell."""

from __future__ import annotations

from hpc_train.cluster.allocation import Allocation, allocation_from_job, gpus_from_scontrol, needs_gpus_of_nodes
from hpc_train.cluster.environment import process_env
from hpc_train.cluster.slurm import JobFacts, broken_configuration
from hpc_train.errors import LaunchError
from hpc_train.launch.queue import ask


def allocation_of_job(job: JobFacts, num_tasks: int | None = None, tasks_per_node: int | None = None) -> Allocation:
    """As allocation_from_job; with `--gpus N` over several nodes, `scontrol show job -d` says who has how many.

    Where it does not, the allocation's warning says why.

    Raises:
        LaunchError: The numbers contradict each other, or nothing tells the number of ranks.
    """
    if not needs_gpus_of_nodes(job):
        return allocation_from_job(job, num_tasks, tasks_per_node)
    try:
        gpus = _gpus_of_nodes(job)
    except LaunchError as problem:
        return allocation_from_job(job, num_tasks, tasks_per_node, why_not_told=str(problem))
    return allocation_from_job(job, num_tasks, tasks_per_node, gpus)


def _gpus_of_nodes(job: JobFacts) -> tuple[int, ...]:
    # Slurm's commands would try for a minute first.
    broken = broken_configuration(process_env())
    if broken is not None:
        raise LaunchError(broken)
    return gpus_from_scontrol(ask(["scontrol", "show", "job", "-d", job.job_id]), job.job_id, job.nodes)
