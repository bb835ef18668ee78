"""Slurm's variables as two values, one a scope: the job that was allocated, the step that was started.

Names do not tell the scope. In a step of two nodes in a job of four (seen with 22.05), SLURM_NNODES,
SLURM_NTASKS and SLURM_TASKS_PER_NODE speak of the step, SLURM_NODELIST of the job. So a step is read from
SLURM_STEP_* and the per-task variables only, and a job from SLURM_JOB_*.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_train.cluster.hostlist import expand_hostlist, parse_tasks_per_node
from hpc_train.cluster.process import UNKNOWN_PROCESS, ProcessFacts
from hpc_train.cluster.whole_number import whole_number
from hpc_train.errors import LaunchError

# cited: slurm.h. Pseudo steps: interactive (salloc's shell on a compute node), batch, extern, pending.
FIRST_PSEUDO_STEP = 0xFFFFFFFA

STEP_VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURMD_NODENAME",
)
_STEP_DETAILS = (
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
)
# The last form but one is that of an array's task, the last that of a component of a heterogeneous job.
_JOB_ID = re.compile(r"[0-9]{1,18}(_[0-9]{1,18})?(\+[0-9]{1,18})?", re.ASCII)
JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST")


def broken_configuration(env: Mapping[str, str]) -> str | None:
    """Why Slurm's commands cannot work: SLURM_CONF names a file that is not there. None where it does, or names none.

    Each command tries for a minute before it says so (seen with 22.05).
    """
    path = env.get("SLURM_CONF")
    if not path:
        return None
    try:
        with open(path, "rb"):
            return None
    except OSError as problem:
        return f"SLURM_CONF={path} cannot be read ({problem.strerror}), and Slurm's commands need it"


@dataclass(frozen=True)
class JobFacts:
    """One Slurm job: what was allocated.

    requeue_id is what `scontrol requeue` must be given: for an array task `<array>_<task>`, since the job id
    of the last task is the whole array's. num_tasks and tasks_per_node are None inside a step, whose
    variables of those names are the step's; tasks_per_node and tasks_per_node_asked are requests, and under
    --exclusive without -n the list counts cores. gpus_per_node and num_gpus are requests; gpus_on_node is
    what this node really gave. whole is the job with all its nodes, where some are left out (job_without): the
    requests and this node's own GPUs speak of that.
    """

    job_id: str
    array_job_id: str | None
    array_task_id: str | None
    requeue_id: str
    nodes: tuple[str, ...]
    num_nodes: int
    tasks_per_node: tuple[int, ...] | None
    num_tasks: int | None
    tasks_per_node_asked: int | None
    cpus_per_task: int | None
    cpus_per_node: tuple[int, ...] | None
    gpus_per_node: str | None
    num_gpus: str | None
    gpus_on_node: int | None
    job_gpus: str | None
    restart_count: int
    end_time: int | None
    submit_dir: str | None
    het_size: int
    whole: JobFacts | None = None


@dataclass(frozen=True)
class StepFacts:
    """One task of a live srun step. rank is SLURM_PROCID; nodes[node_id] is this node."""

    job_id: str
    step_id: int
    rank: int
    local_id: int
    node_id: int
    num_tasks: int
    nodes: tuple[str, ...]
    tasks_per_node: tuple[int, ...]
    node_name: str
    cpus_per_task: int | None
    launch_node_address: str | None
    gpus_on_node: int | None = None
    step_gpus: str | None = None

    @property
    def tasks_on_node(self) -> int:
        return self.tasks_per_node[self.node_id]

    @property
    def name(self) -> str:
        return f"{self.job_id}.{self.step_id}"


def read_job(env: Mapping[str, str], process: ProcessFacts = UNKNOWN_PROCESS) -> JobFacts | None:
    """Return the job whose variables are set, or None outside of any job.

    Raises:
        LaunchError: Only a part of the variables is set, they contradict each other, or the job is
            heterogeneous.
    """
    if not any(env.get(name) for name in (*JOB_VARIABLES, "SLURM_STEP_ID")):
        return None
    missing = [name for name in JOB_VARIABLES if not env.get(name)]
    if missing:
        present = ", ".join(f"{name}={env[name]}" for name in (*JOB_VARIABLES, "SLURM_STEP_ID") if env.get(name))
        raise LaunchError(
            f"{present} is set, but {' and '.join(missing)} is not: only a part of the job's variables "
            "reached this process, as in an ssh session on its node. Start inside the job, with srun "
            "(`srun --jobid=JOB --overlap ...`), or unset all SLURM_* variables to run without Slurm."
        )
    _refuse_heterogeneous(env)
    job_id = _job_id(env)
    nodes = expand_hostlist(env["SLURM_JOB_NODELIST"])
    twice = [node for node, count in Counter(nodes).items() if count > 1]
    if twice:
        raise LaunchError(
            f"SLURM_JOB_NODELIST={env['SLURM_JOB_NODELIST'][:200]} names {', '.join(twice[:4])} more than once, which "
            "Slurm never does. Remove what overwrites it in the script or the shell's start-up files."
        )
    num_nodes = _optional_int(env, "SLURM_JOB_NUM_NODES", least=1)
    if num_nodes is not None and num_nodes != len(nodes):
        raise LaunchError(
            f"SLURM_JOB_NUM_NODES={num_nodes}, but SLURM_JOB_NODELIST={env['SLURM_JOB_NODELIST']} names "
            f"{len(nodes)} nodes. Variables of two jobs are mixed; start from a clean shell."
        )
    array_job_id = env.get("SLURM_ARRAY_JOB_ID") or None
    array_task_id = env.get("SLURM_ARRAY_TASK_ID") or None
    is_array_task = array_job_id is not None and array_task_id is not None
    counts_are_the_jobs = not _in_step(env, process)
    return JobFacts(
        job_id=job_id,
        array_job_id=array_job_id,
        array_task_id=array_task_id,
        requeue_id=f"{array_job_id}_{array_task_id}" if is_array_task else job_id,
        nodes=nodes,
        num_nodes=len(nodes),
        tasks_per_node=_count_list(env, "SLURM_TASKS_PER_NODE", len(nodes)) if counts_are_the_jobs else None,
        num_tasks=_optional_int(env, "SLURM_NTASKS", least=1) if counts_are_the_jobs else None,
        tasks_per_node_asked=_optional_int(env, "SLURM_NTASKS_PER_NODE", least=1),
        cpus_per_task=_optional_int(env, "SLURM_CPUS_PER_TASK", least=1),
        cpus_per_node=_count_list(env, "SLURM_JOB_CPUS_PER_NODE", len(nodes)),
        gpus_per_node=env.get("SLURM_GPUS_PER_NODE") or None,
        num_gpus=env.get("SLURM_GPUS") or None,
        gpus_on_node=_optional_int(env, "SLURM_GPUS_ON_NODE"),
        job_gpus=env.get("SLURM_JOB_GPUS") or None,
        restart_count=_optional_int(env, "SLURM_RESTART_COUNT") or 0,
        end_time=_optional_int(env, "SLURM_JOB_END_TIME"),
        submit_dir=env.get("SLURM_SUBMIT_DIR") or None,
        het_size=1,
    )


def read_step(env: Mapping[str, str], process: ProcessFacts = UNKNOWN_PROCESS) -> StepFacts | None:
    """Return the live srun step of which this process is a task, or None.

    SLURM_STEP_ID alone proves nothing, since it is inherited by nested sbatch scripts and salloc shells.
    The process tree decides where it can be read. Otherwise the variables must be complete, and must not
    show the marks of a batch script under stale step variables.

    Raises:
        LaunchError: The process is in a step but its variables are incomplete, or they contradict each other.
    """
    missing = [name for name in STEP_VARIABLES if not env.get(name)]
    if is_pseudo_step(env) or not _in_step(env, process):
        return None
    if missing:
        raise LaunchError(
            f"The variables of the Slurm step {env.get('SLURM_JOB_ID', '?')}.{env.get('SLURM_STEP_ID', '?')} "
            f"are incomplete: {', '.join(missing)} is not set, so this rank and the number of ranks are not "
            "known for certain. Let srun pass the whole environment (`--export=ALL`), also into a container."
        )
    _refuse_heterogeneous(env)
    step = _parse_step(env)
    _check_step(env, step)
    return step


def is_pseudo_step(env: Mapping[str, str]) -> bool:
    """Say whether SLURM_STEP_ID stands for salloc's interactive shell or a batch script, not srun's tasks."""
    step_id = env.get("SLURM_STEP_ID", "")
    return whole_number(step_id, FIRST_PSEUDO_STEP) is not None


def _in_step(env: Mapping[str, str], process: ProcessFacts) -> bool:
    """Say whether the step variables speak of this process rather than of one that submitted its job.

    True also for a step whose variables are incomplete: its ranks must be refused, not take themselves for
    batch scripts and start a step each.
    """
    if is_pseudo_step(env):
        return False
    name = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    if process.held_by is not None:
        job_id, _, step_id = process.held_by.partition(".")
        is_srun_step = whole_number(step_id, 0, FIRST_PSEUDO_STEP - 1) is not None
        # A missing variable cannot disagree; two that are there must both be this step's.
        return (
            is_srun_step
            and env.get("SLURM_JOB_ID", job_id) == job_id
            and env.get("SLURM_STEP_ID", step_id) == step_id
            and any(env.get(variable) for variable in STEP_VARIABLES)
        )
    if name in (env.get("PMI_JOBID"), env.get("PMIX_NAMESPACE", "").removeprefix("slurm.pmix.")):
        return True
    if all(env.get(variable) for variable in STEP_VARIABLES):
        return not _marks_of_a_batch_script(env)
    # Slurm sets these four together, and nothing but srun sets a rank above 0.
    if any(env.get(variable) for variable in _STEP_DETAILS) or env.get("SLURM_PROCID", "0") != "0":
        return True
    return bool(env.get("SLURM_STEP_ID")) and not env.get("SLURM_JOB_ID")


def _marks_of_a_batch_script(env: Mapping[str, str]) -> bool:
    """Compare what Slurm sets anew for a batch script with the step variables that it does not touch."""
    if any(env[name] != "0" for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")):
        return False
    try:
        step_nodes = expand_hostlist(env["SLURM_STEP_NODELIST"])
        tasks_on_first = parse_tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"], len(step_nodes))[0]
        job_nodes = expand_hostlist(env.get("SLURM_JOB_NODELIST") or env["SLURM_STEP_NODELIST"])
    except LaunchError:
        return False
    num_tasks_here = len(env["SLURM_GTIDS"].split(",")) if env.get("SLURM_GTIDS") else tasks_on_first
    layout = env.get("SLURM_TASKS_PER_NODE") or env["SLURM_STEP_TASKS_PER_NODE"]
    return (
        env["SLURMD_NODENAME"] != step_nodes[0]
        or not set(step_nodes) <= set(job_nodes)
        or num_tasks_here != tasks_on_first
        or layout != env["SLURM_STEP_TASKS_PER_NODE"]
    )


def _parse_step(env: Mapping[str, str]) -> StepFacts:
    num_nodes = _int(env, "SLURM_STEP_NUM_NODES", least=1)
    nodes = expand_hostlist(env["SLURM_STEP_NODELIST"])
    if num_nodes != len(nodes):
        raise _contradiction(env, "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST", f"names {len(nodes)} nodes")
    return StepFacts(
        job_id=_job_id(env),
        step_id=_int(env, "SLURM_STEP_ID"),
        rank=_int(env, "SLURM_PROCID"),
        local_id=_int(env, "SLURM_LOCALID"),
        node_id=_int(env, "SLURM_NODEID"),
        num_tasks=_int(env, "SLURM_STEP_NUM_TASKS", least=1),
        nodes=nodes,
        tasks_per_node=_count_list(env, "SLURM_STEP_TASKS_PER_NODE", num_nodes) or (),
        node_name=env["SLURMD_NODENAME"],
        cpus_per_task=_optional_int(env, "SLURM_CPUS_PER_TASK", least=1),
        launch_node_address=env.get("SLURM_LAUNCH_NODE_IPADDR") or None,
        gpus_on_node=_optional_int(env, "SLURM_GPUS_ON_NODE"),
        step_gpus=env.get("SLURM_STEP_GPUS") or None,
    )


def _check_step(env: Mapping[str, str], step: StepFacts) -> None:
    total = sum(step.tasks_per_node)
    if step.num_tasks != total:
        raise _contradiction(env, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", f"adds up to {total} tasks")
    if env.get("SLURM_STEPID", env["SLURM_STEP_ID"]) != env["SLURM_STEP_ID"]:
        raise _contradiction(env, "SLURM_STEP_ID", "SLURM_STEPID", "is another step")
    if step.rank >= step.num_tasks:
        raise _contradiction(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "ends the ranks before it")
    if step.node_id >= len(step.nodes):
        raise _contradiction(env, "SLURM_NODEID", "SLURM_STEP_NODELIST", f"names {len(step.nodes)} nodes")
    if step.node_name not in step.nodes:
        raise _contradiction(env, "SLURMD_NODENAME", "SLURM_STEP_NODELIST", "does not name this node")
    if step.nodes[step.node_id] != step.node_name:
        here = step.nodes[step.node_id]
        raise _contradiction(env, "SLURM_NODEID", "SLURMD_NODENAME", f"is not node {step.node_id}, {here}")
    if step.local_id >= step.tasks_on_node:
        raise _contradiction(
            env,
            "SLURM_LOCALID",
            "SLURM_STEP_TASKS_PER_NODE",
            f"gives this node, number {step.node_id}, {step.tasks_on_node} tasks",
        )
    on_node = env.get("SLURM_GTIDS", "").split(",")
    if on_node != [""] and (str(step.rank) not in on_node or len(on_node) != step.tasks_on_node):
        raise _contradiction(env, "SLURM_PROCID", "SLURM_GTIDS", "lists other ranks for this node")
    job_nodes = env.get("SLURM_JOB_NODELIST")
    if job_nodes and not set(step.nodes) <= set(expand_hostlist(job_nodes)):
        raise _contradiction(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "does not hold all of the step's nodes")


def _job_id(env: Mapping[str, str]) -> str:
    job_id = env["SLURM_JOB_ID"]
    if not _JOB_ID.fullmatch(job_id):
        raise LaunchError(
            f"SLURM_JOB_ID={job_id[:60]!r} is not the number of a job. Slurm sets it; remove what overwrites it in the "
            "script or the shell's start-up files."
        )
    return job_id


def _refuse_heterogeneous(env: Mapping[str, str]) -> None:
    het_size = _optional_int(env, "SLURM_HET_SIZE") or 1
    if het_size > 1:
        raise LaunchError(
            f"SLURM_HET_SIZE={het_size}: this is a heterogeneous job of {het_size} components, each with "
            "nodes and ranks of its own, which is not supported. Submit one component, with one kind of node "
            "(no `:` between groups of options, no `#SBATCH hetjob`)."
        )


def _count_list(env: Mapping[str, str], name: str, num_nodes: int) -> tuple[int, ...] | None:
    text = env.get(name)
    if not text:
        return None
    try:
        return parse_tasks_per_node(text, num_nodes)
    except LaunchError as error:
        raise LaunchError(f"{name}: {error}") from error


def _int(env: Mapping[str, str], name: str, least: int = 0) -> int:
    value = _optional_int(env, name, least)
    if value is None:
        raise LaunchError(f"{name} is not set. Start with srun, which sets it.")
    return value


def _optional_int(env: Mapping[str, str], name: str, least: int = 0) -> int | None:
    text = env.get(name)
    if not text:
        return None
    found = whole_number(text, least)
    if found is None:
        raise LaunchError(
            f"{name}={text[:60]!r} is not a whole number of at least {least}. Slurm sets it; "
            "remove what overwrites it in the script or the shell's start-up files."
        )
    return found


def _contradiction(env: Mapping[str, str], name: str, other: str, what: str) -> LaunchError:
    return LaunchError(
        f"{name}={env[name]}, but {other}={env[other]} {what}. Variables of two steps or jobs are mixed: "
        "start with srun from a clean environment, or from the batch script or salloc shell of this job."
    )
