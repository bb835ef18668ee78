"""Where ranks may run: nodes, tasks and GPUs of each, as Slurm gave them and the user asked for them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from hpc_train.cluster.devices import gres_total, parse_gres
from hpc_train.cluster.hostlist import expand_hostlist, hosts_of_setting
from hpc_train.cluster.slurm import JobFacts
from hpc_train.cluster.whole_number import whole_number
from hpc_train.errors import LaunchError

# assumed: more GPUs than any job has.
_MAX_GPUS = 10_000_000
_RECORD = re.compile(r"^(?=JobId=)", re.MULTILINE)
_FIELD = re.compile(r"\b(JobId|ArrayJobId|ArrayTaskId|HetJobId|HetJobOffset)=(\S+)")
_DETAIL = re.compile(r"^\s*Nodes=(\S+)\s.*?\bGRES=(\S*)", re.MULTILINE)


@dataclass(frozen=True)
class Allocation:
    """One entry a node in each tuple, in Slurm's order. warnings are for the user, once."""

    nodes: tuple[str, ...]
    tasks_per_node: tuple[int, ...]
    gpus_per_node: tuple[int, ...]
    job_id: str | None
    source: str
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_tasks(self) -> int:
        return sum(self.tasks_per_node)


def allocation_from_job(
    job: JobFacts,
    num_tasks: int | None = None,
    tasks_per_node: int | None = None,
    gpus_per_node: tuple[int, ...] | None = None,
    why_not_told: str = "Slurm was not asked",
) -> Allocation:
    """Lay out ranks over the job's nodes.

    The user's own numbers come first. Then SLURM_NTASKS; SLURM_TASKS_PER_NODE and SLURM_NTASKS_PER_NODE
    are requests, and where they disagree with it the count wins, spread evenly, with a warning of all three
    numbers. Without any count there is one rank a GPU. Where SLURM_TASKS_PER_NODE is all that is known it
    is taken only if it says one a node: with --exclusive it counts cores.

    Args:
        num_tasks: `-n` of the user, or the number that the configuration needs.
        tasks_per_node: `--ntasks-per-node` of the user.
        gpus_per_node: Of job.nodes, from gpus_from_scontrol, where the variables cannot tell (needs_gpus_of_nodes).
        why_not_told: Why there are none in that case, for the warning.

    Raises:
        LaunchError: The numbers contradict each other, or nothing tells the number of ranks.
    """
    warnings: list[str] = []
    gpus = gpus_per_node if gpus_per_node is not None else _gpus_of_job(job, why_not_told, warnings)
    nodes = job.nodes
    if num_tasks is not None or tasks_per_node is not None:
        tasks, source = _asked(job, num_tasks, tasks_per_node, warnings)
        nodes, gpus = nodes[: len(tasks)], gpus[: len(tasks)]
    elif job.num_tasks is not None:
        tasks, source = _counted(job, job.num_tasks, warnings)
        nodes, gpus = nodes[: len(tasks)], gpus[: len(tasks)]
    elif all(gpus):
        tasks, source = gpus, "one rank a GPU, since SLURM_NTASKS is not set"
    elif job.tasks_per_node is not None and set(job.tasks_per_node) == {1}:
        tasks, source = job.tasks_per_node, "SLURM_TASKS_PER_NODE, one rank a node"
    else:
        raise LaunchError(
            f"Job {job.job_id} has {job.num_nodes} nodes, but its number of ranks is unknown: SLURM_NTASKS is not set, "
            "or is that of an interactive step. Give it with -n or --ntasks-per-node."
        )
    short = [f"{node} ({n} ranks, {g} GPUs)" for node, n, g in zip(nodes, tasks, gpus, strict=True) if g > n]
    if short:
        warnings.append(f"GPUs stay idle on {', '.join(short[:4])}: one rank uses one GPU. Ask for more ranks.")
    return Allocation(nodes, tasks, gpus, job.job_id, source, tuple(warnings))


def job_without(job: JobFacts, excluded: str | None) -> JobFacts:
    """The job as if it had never got some of its nodes (a host list); those that it has not anyway do not matter.

    Its ranks are those of the nodes that are left.

    Raises:
        ConfigError: the list is none.
        LaunchError: no node is left, or how many ranks go with the nodes is not known.
    """
    gone = set(hosts_of_setting("fabric.exclude", excluded))
    kept = [index for index, node in enumerate(job.nodes) if node not in gone]
    if len(kept) == job.num_nodes:
        return job
    if not kept:
        raise LaunchError(f"fabric.exclude={excluded} leaves none of the job's {job.num_nodes} nodes.")
    num_tasks = job.num_tasks
    tasks = None if job.tasks_per_node is None else tuple(job.tasks_per_node[index] for index in kept)
    if num_tasks is not None and tasks is not None and sum(job.tasks_per_node or ()) == num_tasks:
        num_tasks = sum(tasks)
    elif num_tasks is not None:
        num_tasks, rest = divmod(num_tasks * len(kept), job.num_nodes)
        if rest:
            raise LaunchError(
                f"fabric.exclude={excluded} leaves {len(kept)} of {job.num_nodes} nodes, and how many of the "
                f"{job.num_tasks} ranks go with them is not known. Give their number with -n."
            )
    cpus = None if job.cpus_per_node is None else tuple(job.cpus_per_node[index] for index in kept)
    nodes = tuple(job.nodes[index] for index in kept)
    return replace(
        job,
        nodes=nodes,
        num_nodes=len(nodes),
        tasks_per_node=tasks,
        num_tasks=num_tasks,
        cpus_per_node=cpus,
        whole=job.whole or job,
    )


def allocation_local(num_ranks: int, host: str, num_gpus: int = 0, excluded: str | None = None) -> Allocation:
    """The allocation of one machine without a scheduler. excluded: a host list, of which no other node would be used.

    Raises:
        ConfigError: the list is none.
        LaunchError: less than one rank, or the machine is excluded.
    """
    if num_ranks < 1:
        raise LaunchError(f"{num_ranks} ranks were asked for; at least one is needed.")
    gone = set(hosts_of_setting("fabric.exclude", excluded))
    if gone & {host, host.partition(".")[0]}:
        raise LaunchError(
            f"fabric.exclude={excluded} names {host}, and without a job all ranks are on this machine. Start the run "
            "in a job, or leave the name out of the list."
        )
    warnings: tuple[str, ...] = ()
    if gone:
        warnings = (f"fabric.exclude={excluded} has no effect without a job: all ranks are on this machine, {host}",)
    return Allocation((host,), (num_ranks,), (num_gpus,), None, "this machine", warnings)


def needs_gpus_of_nodes(job: JobFacts) -> bool:
    """Whether Slurm has to be asked how many GPUs each node has: only their number in all and this node's are known.

    Two nodes may still tell: what is not on this one is on the other. On three and more, an even share here proves
    nothing.
    """
    whole = job.whole or job
    if whole.num_gpus is None or whole.gpus_per_node is not None or whole.num_nodes == 1:
        return False
    here = _gpus_here(whole)
    return whole.num_nodes > 2 or here is None or 2 * here != _request("SLURM_GPUS", whole.num_gpus)


def gpus_from_scontrol(text: str, job_id: str, nodes: tuple[str, ...]) -> tuple[int, ...]:
    """Read the GPUs that each node really gave from `scontrol show job -d JOB`.

    For the id of an array's last task, or of the first component of a heterogeneous job, it prints the others, too.

    Raises:
        LaunchError: the text has no such job, or lacks one of the nodes.
    """
    record = next((text for text in _RECORD.split(text) if _is_of_job(text, job_id)), None)
    if record is None:
        raise LaunchError(f"scontrol does not know job {job_id}")
    found: dict[str, int] = {}
    for hosts, gres in _DETAIL.findall(record):
        for host in expand_hostlist(hosts):
            found[host] = found.get(host, 0) + gres_total(parse_gres(gres))
    missing = [node for node in nodes if node not in found]
    if missing:
        raise LaunchError(f"scontrol does not say what job {job_id} has on {', '.join(missing[:4])}")
    return tuple(found[node] for node in nodes)


def _is_of_job(record: str, job_id: str) -> bool:
    """job_id: a number, `<array>_<task>` or `<first>+<component>`."""
    fields = dict(_FIELD.findall(record))
    array, has_task, task = job_id.partition("_")
    first, has_component, component = job_id.partition("+")
    if has_task:
        return (fields.get("ArrayJobId"), fields.get("ArrayTaskId")) == (array, task)
    if has_component:
        return (fields.get("HetJobId"), fields.get("HetJobOffset")) == (first, component)
    return fields.get("JobId") == job_id


def _asked(
    job: JobFacts, num_tasks: int | None, tasks_per_node: int | None, warnings: list[str]
) -> tuple[tuple[int, ...], str]:
    for name, value in (("-n", num_tasks), ("--ntasks-per-node", tasks_per_node)):
        if value is not None and value < 1:
            raise LaunchError(f"{name} {value} was asked for; at least one task is needed.")
    if num_tasks is None:
        assert tasks_per_node is not None
        return (tasks_per_node,) * job.num_nodes, f"--ntasks-per-node={tasks_per_node} as asked"
    if tasks_per_node is not None and num_tasks != tasks_per_node * job.num_nodes:
        raise LaunchError(
            f"-n {num_tasks} and --ntasks-per-node={tasks_per_node} were asked for, but job {job.job_id} has "
            f"{job.num_nodes} nodes, which makes {tasks_per_node * job.num_nodes} tasks. Give one of the two."
        )
    if job.tasks_per_node is not None and sum(job.tasks_per_node) == num_tasks:
        return job.tasks_per_node, f"-n {num_tasks} as asked, laid out by SLURM_TASKS_PER_NODE"
    return _spread(num_tasks, job, warnings), f"-n {num_tasks} as asked, spread evenly"


def _counted(job: JobFacts, num_tasks: int, warnings: list[str]) -> tuple[tuple[int, ...], str]:
    asked = job.tasks_per_node_asked
    total = None if job.tasks_per_node is None else sum(job.tasks_per_node)
    per_node_total = None if asked is None else asked * job.num_nodes
    if per_node_total is not None and num_tasks > per_node_total:
        raise LaunchError(
            f"SLURM_NTASKS={num_tasks}, but SLURM_NTASKS_PER_NODE={asked} on {job.num_nodes} nodes allows "
            f"{per_node_total}. Give -n, or submit with numbers that agree."
        )
    if total == num_tasks and per_node_total in (None, num_tasks):
        assert job.tasks_per_node is not None
        return job.tasks_per_node, "SLURM_NTASKS and SLURM_TASKS_PER_NODE"
    if total is not None and total < num_tasks:
        raise LaunchError(
            f"SLURM_NTASKS={num_tasks}, but SLURM_TASKS_PER_NODE adds up to {total} on {job.num_nodes} nodes: the "
            "count was inherited from another job, or changed. Give -n, and submit from a clean environment."
        )
    if total is not None or per_node_total is not None:
        warnings.append(
            f"SLURM_NTASKS={num_tasks} tasks on {job.num_nodes} nodes, but the per-node request makes "
            f"{per_node_total or total}. {num_tasks} ranks are started; give -n or --ntasks-per-node for another "
            "number."
        )
    if total == num_tasks and job.tasks_per_node is not None:
        return job.tasks_per_node, "SLURM_NTASKS and SLURM_TASKS_PER_NODE"
    return _spread(num_tasks, job, warnings), "SLURM_NTASKS, spread evenly"


def _spread(num_tasks: int, job: JobFacts, warnings: list[str]) -> tuple[int, ...]:
    """Give each node its even share, the first ones one more; nodes past num_tasks are left out."""
    num_nodes = min(job.num_nodes, num_tasks)
    if num_nodes < job.num_nodes:
        warnings.append(f"{num_tasks} ranks leave {job.num_nodes - num_nodes} of {job.num_nodes} nodes idle.")
    share, more = divmod(num_tasks, num_nodes)
    return tuple(share + (index < more) for index in range(num_nodes))


def _gpus_of_job(job: JobFacts, why_not_told: str, warnings: list[str]) -> tuple[int, ...]:
    if job.gpus_per_node is not None:
        per_node = _request("SLURM_GPUS_PER_NODE", job.gpus_per_node)
        total = None if job.num_gpus is None else _request("SLURM_GPUS", job.num_gpus)
        num_nodes = (job.whole or job).num_nodes
        if total is not None and total != per_node * num_nodes:
            warnings.append(
                f"SLURM_GPUS={job.num_gpus}, but SLURM_GPUS_PER_NODE={job.gpus_per_node} on {num_nodes} nodes "
                f"makes {per_node * num_nodes}. The latter is used; ask for GPUs by one of the two."
            )
        return (per_node,) * job.num_nodes
    whole = job.whole or job
    here = _gpus_here(whole)
    if needs_gpus_of_nodes(job):
        total = _request("SLURM_GPUS", whole.num_gpus or "")
        is_even = here is not None and here * whole.num_nodes == total
        taken = f"each is taken to have {here}" if is_even else "it is not known"
        warnings.append(
            f"SLURM_GPUS={total} over {whole.num_nodes} nodes and {'?' if here is None else here} on this one: how "
            f"many each node has is not in the environment, and `scontrol show job -d {job.job_id}` does not tell "
            f"({why_not_told}); {taken}. Ask with --gpus-per-node."
        )
        return (here if is_even and here is not None else 0,) * job.num_nodes
    return (here or 0,) * job.num_nodes


def _gpus_here(job: JobFacts) -> int | None:
    if job.gpus_on_node is None and job.job_gpus is not None:
        return len(job.job_gpus.split(","))
    return job.gpus_on_node


def _request(name: str, text: str) -> int:
    """Count a GPU request as in --gpus-per-node: `4`, `a100:4`, `a100:2,h100:2`; a type alone is one GPU.

    Raises:
        LaunchError: what stands behind a type is no number.
    """
    counts = []
    for part in text.split(","):
        kind, colon, number = part.rpartition(":")
        count = whole_number(number, 0, _MAX_GPUS) if colon or number.isdecimal() else 1
        if count is None:
            raise LaunchError(
                f"{name}={text[:60]} is not a number of GPUs: {part[:60]!r} has {number[:60]!r} where a number up to "
                f"{_MAX_GPUS} belongs, as in 4 or {kind[:20] or 'a100'}:4. Slurm sets it; remove what overwrites it."
            )
        counts.append(count)
    return sum(counts)
