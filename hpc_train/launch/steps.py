"""The command lines that start ranks and agents: srun under Slurm, mpirun on one machine. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_train.cluster.allocation import Allocation
from hpc_train.cluster.hostlist import compress_hostlist
from hpc_train.cluster.slurm import JobFacts

_RANK_SIZES = re.compile(
    r"SLURM_(NTASKS.*|NPROCS|NNODES|TASKS_PER_NODE|CPUS_PER_(TASK|GPU)|TRES_PER_TASK|MEM_PER_.*|GPUS|GPUS_PER_.*|"
    r"GPU_BIND|GRES|THREADS_PER_CORE|DISTRIBUTION|HINT|EXACT|EXCLUSIVE)|SRUN_CPUS_PER_TASK"
)


@dataclass(frozen=True)
class StepValues:
    """What an srun line depends on.

    output: the file pattern for the ranks' output (%N is the node), or None for srun's own. overlap: the step
    must share what an interactive step holds. host_file: one node a rank, for ranks that are spread unevenly.
    options: further words for srun, as of a container plugin.
    """

    allocation: Allocation
    cpus_per_task: int
    mpi: str
    output: str | None
    overlap: bool = False
    host_file: str | None = None
    wait_s: int = 60
    options: tuple[str, ...] = ()


def ranks_argv(values: StepValues, command: Sequence[str]) -> list[str]:
    """The srun line of a step of ranks.

    --cpus-per-task is repeated since srun does not take it from the job any more (Slurm 22.05). The
    environment goes along whole, whatever the job was submitted with. One rank that fails ends all.
    """
    allocation = values.allocation
    tasks = allocation.tasks_per_node
    argv = ["srun", f"--nodes={len(tasks)}", f"--ntasks={sum(tasks)}", *_layout(values)]
    argv += [
        f"--cpus-per-task={values.cpus_per_task}",
        f"--mpi={values.mpi}",
        "--kill-on-bad-exit=1",
        f"--wait={values.wait_s}",
        "--unbuffered",
        "--export=ALL",
    ]
    if any(allocation.gpus_per_node):
        # All GPUs of a node are seen by all its ranks, or peers could not reach each other directly.
        argv.append("--gpu-bind=none")
    if values.output:
        argv += [f"--output={values.output}", "--open-mode=append"]
    if values.overlap:
        argv.append("--overlap")
    return [*argv, *values.options, *command]


def cpus_per_task(job: JobFacts, allocation: Allocation) -> int:
    """CPUs of each rank: as the job asks, else each node's CPUs shared by its ranks, the least of all nodes."""
    if job.cpus_per_task:
        return job.cpus_per_task
    if job.cpus_per_node is None:
        return 1
    shares = zip(job.cpus_per_node, allocation.tasks_per_node, strict=False)
    return max(1, min(cpus // tasks for cpus, tasks in shares))


def is_uneven(allocation: Allocation) -> bool:
    return len(set(allocation.tasks_per_node)) > 1


def host_file_text(allocation: Allocation) -> str:
    """One node name a rank, in rank order."""
    pairs = zip(allocation.nodes, allocation.tasks_per_node, strict=True)
    return "".join(f"{node}\n" * tasks for node, tasks in pairs)


def agents_argv(nodes: Sequence[str], command: Sequence[str]) -> list[str]:
    """The srun line of a step with one agent on each node, beside the ranks and holding nothing."""
    return [
        "srun",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        f"--nodelist={compress_hostlist(nodes)}",
        "--cpus-per-task=1",
        "--overlap",
        "--gres=none",
        "--mem=0",
        "--mpi=none",
        "--kill-on-bad-exit=0",
        "--wait=0",  # one that has ended must not end those that still write, whatever a site's WaitTime is
        "--export=ALL",
        "--input=all",
        "--quiet",
        *command,
    ]


def agents_env(env: Mapping[str, str]) -> dict[str, str]:
    """The environment for the agents' srun, without the ranks' sizes, which srun would read as options."""
    return {name: value for name, value in env.items() if not _RANK_SIZES.fullmatch(name)}


def mpirun_argv(mpirun: str, ranks: int, *, options: Sequence[str], command: Sequence[str]) -> list[str]:
    """The mpirun line for one machine."""
    return [mpirun, "-n", str(ranks), *options, *command]


def _layout(values: StepValues) -> list[str]:
    allocation = values.allocation
    if values.host_file:
        return [f"--nodelist={values.host_file}", "--distribution=arbitrary"]
    return [
        f"--ntasks-per-node={allocation.tasks_per_node[0]}",
        f"--nodelist={compress_hostlist(allocation.nodes)}",
        "--distribution=block",
    ]
