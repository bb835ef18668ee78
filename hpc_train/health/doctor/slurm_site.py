"""Slurm: whether it answers, how it was set up for jobs like ours, and whether this shell's job still lives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from hpc_train.cluster.limits import parse_time_limit
from hpc_train.cluster.mpi_site import parse_mpi_list
from hpc_train.health.doctor.answers import NO_ANSWER, Answer, ask, last_line
from hpc_train.health.doctor.findings import Finding

_COMMANDS: dict[str, tuple[str, ...]] = {
    "version": ("srun", "--version"),
    "ping": ("scontrol", "ping"),
    "config": ("scontrol", "show", "config"),
    "partitions": ("scontrol", "show", "partition", "--oneliner"),
    "mpi": ("srun", "--mpi=list"),
    "sbatch": ("sbatch", "--version"),
    "salloc": ("salloc", "--version"),
    "squeue": ("squeue", "--version"),
}
# assumed: the least time in which a model of some billion parameters is copied and its ranks meet at a step's end.
_SHORT_S = 60
# What scontrol says on a machine where only the packages are installed (22.05 to 25.05).
_NO_CLUSTER = ("Could not establish a configuration source", "Unable to process configuration file")
_NO_COMMAND = Answer(None, "", "is not on PATH")


@dataclass(frozen=True)
class SlurmFacts:
    """Answers of Slurm's commands by the names above; job and job_state where this shell is in a job."""

    answers: Mapping[str, Answer] = field(default_factory=dict)
    job: Answer | None = None

    def answer(self, name: str) -> Answer:
        return self.answers.get(name, _NO_COMMAND)

    @property
    def is_installed(self) -> bool:
        # A command that hangs is there: its controller, or the server of its configuration, is not.
        return any(answer.code is not None or NO_ANSWER in answer.err for answer in self.answers.values())

    @property
    def is_here(self) -> bool:
        """Whether there are commands, and a cluster that they belong to."""
        return self.is_installed and not any(mark in self.answer("ping").text for mark in _NO_CLUSTER)

    @property
    def plugins(self) -> tuple[str, ...]:
        return parse_mpi_list(self.answer("mpi").text)


def gather_slurm(env: Mapping[str, str]) -> SlurmFacts:
    """Ask all of Slurm's commands at once."""
    commands = dict(_COMMANDS)
    if job_id := env.get("SLURM_JOB_ID"):
        commands["job"] = ("scontrol", "show", "job", "--oneliner", job_id)
    with ThreadPoolExecutor(len(commands)) as pool:
        # No variable of a job: SLURM_NTASKS and the like are options to srun, also to `srun --mpi=list`.
        plain = {name: value for name, value in env.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
        answers = dict(zip(commands, pool.map(lambda argv: ask(argv, env=plain), commands.values()), strict=True))
    return SlurmFacts(answers, answers.pop("job", None))


def slurm_findings(facts: SlurmFacts, env: Mapping[str, str], *, in_job: bool) -> list[Finding]:
    """All that is known without starting anything."""
    if not facts.is_here:
        if in_job or env.get("SLURM_JOB_ID"):
            return [
                Finding(
                    "slurm.commands",
                    "error",
                    f"SLURM_JOB_ID={env.get('SLURM_JOB_ID')} is set, but Slurm's commands cannot be used: "
                    f"{last_line(facts.answer('ping').err)}",
                    "load the module that brings Slurm's commands, or start `hpc-train` outside of the container",
                )
            ]
        why = "Slurm's commands belong to no cluster here" if facts.is_installed else "no Slurm here"
        return [Finding("slurm.none", "note", f"{why}: `hpc-train run` starts ranks by mpirun on this machine")]
    missing = [name for name in ("sbatch", "salloc", "squeue", "version") if facts.answer(name).code is None]
    named = ["srun" if name == "version" else name for name in missing]
    found = []
    if named:
        why = last_line(facts.answer(missing[0]).err)
        cure = "load the module that brings Slurm's commands, or ask the site where they are"
        found.append(Finding("slurm.commands", "error", f"{', '.join(named)} cannot be used: {why}", cure))
    if not facts.answer("ping").is_good or " UP" not in facts.answer("ping").out:
        said = last_line(facts.answer("ping").text) or "no answer"
        cure = "wait, and try `scontrol ping` again; if it stays so, tell the site"
        found.append(Finding("slurm.controller", "error", f"the controller does not answer: {said}", cure))
        return found
    version = last_line(facts.answer("version").out) or "unknown version"
    offered = ", ".join(facts.plugins) or "nothing"
    found.append(Finding("slurm.version", "ok", f"{version}; its controller answers; srun --mpi offers {offered}"))
    config = parse_config(facts.answer("config").out)
    return [*found, *_job_findings(facts, env), *config_findings(config), *partition_findings(facts, config, env)]


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config` as a table; values without their units' words."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def parse_partitions(text: str) -> list[dict[str, str]]:
    """`scontrol show partition --oneliner`: one table a partition."""
    lines = [line for line in text.splitlines() if line.startswith("PartitionName=")]
    return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]


def config_findings(config: Mapping[str, str]) -> list[Finding]:
    """Requeueing, confinement and the time between TERM and KILL."""
    found = []
    if config.get("JobRequeue") == "0":
        found.append(
            Finding(
                "slurm.requeue",
                "note",
                "JobRequeue=0: only jobs whose script asks for it are put back into the queue",
                "submit with --requeue; where the site refuses, use `hpc-train submit --chain K`",
            )
        )
    tracking, plugin = config.get("ProctrackType", ""), config.get("TaskPlugin", "")
    devices, cores = (config.get(name, "").lower() for name in ("ConstrainDevices", "ConstrainCores"))
    if "cgroup" not in tracking:
        found.append(
            Finding(
                "slurm.tracking",
                "note",
                f"ProctrackType={tracking}: a process that leaves its session may outlive its step on a node",
            )
        )
    if "cgroup" not in plugin or "no" in (devices, cores):
        open_ones = f"TaskPlugin={plugin}, ConstrainDevices={devices or '-'}, ConstrainCores={cores or '-'}"
        found.append(
            Finding(
                "slurm.cgroups",
                "note",
                f"tasks are not confined to their GPUs and cores ({open_ones}): CUDA_VISIBLE_DEVICES alone says whose "
                "GPUs are whose",
                "do not unset CUDA_VISIBLE_DEVICES in a job on a shared node, or ask for whole nodes by --exclusive",
            )
        )
    else:
        found.append(Finding("slurm.cgroups", "ok", "tasks are confined to their cores and GPUs by cgroups"))
    wait = _seconds(config.get("KillWait", ""))
    if wait is not None:
        found.append(
            Finding(
                "slurm.killwait",
                "note",
                f"KillWait={wait} s lie between TERM and KILL when the time limit is reached or the job is cancelled",
                "a run stops by itself before its time limit (launch.stop_before_s), so only a cancelled job has to "
                f"save within {wait} s; compare with the time of a save in the log",
            )
        )
    return found


def partition_findings(facts: SlurmFacts, config: Mapping[str, str], env: Mapping[str, str]) -> list[Finding]:
    """Time limits and preemption of the partitions that a job here would use."""
    partitions = parse_partitions(facts.answer("partitions").out)
    used = env.get("SLURM_JOB_PARTITION") or env.get("SBATCH_PARTITION")
    wait = _seconds(config.get("KillWait", "")) or 0
    found = []
    for partition in partitions:
        name = partition["PartitionName"]
        if used and name not in used.split(","):
            continue
        found += [_time_finding(partition), *_preemption_findings(partition, config, wait)]
        if partition.get("State", "UP") != "UP":
            cure = "choose another one with -p; `sinfo -s` lists them"
            found.append(Finding("slurm.partition", "warning", f"partition {name} is {partition['State']}", cure))
    return found


def _time_finding(partition: Mapping[str, str]) -> Finding:
    name, default, most = partition["PartitionName"], partition.get("DefaultTime", ""), partition.get("MaxTime", "")
    limit = parse_time_limit(most)
    told = f"partition {name}: time limit {default.lower()} by default, {most.lower()} at most"
    if default not in ("NONE", most):
        return Finding("slurm.time", "note", told, "give -t LIMIT to submit; without it the default holds")
    if isinstance(limit, int) and limit < 24 * 3600:
        return Finding("slurm.time", "note", told, "for longer runs use `hpc-train submit --chain K`, or requeueing")
    return Finding("slurm.time", "ok", told)


def _preemption_findings(partition: Mapping[str, str], config: Mapping[str, str], wait: int) -> list[Finding]:
    name, mode = partition["PartitionName"], partition.get("PreemptMode", "OFF")
    if config.get("PreemptType", "preempt/none") == "preempt/none" or mode == "OFF":
        return []
    grace = _seconds(partition.get("GraceTime", "")) or 0
    told = (
        f"jobs in partition {name} may be preempted (PreemptMode={mode}): {grace} s of GraceTime and then {wait} s of "
        f"KillWait, so {grace + wait} s to save"
    )
    if "REQUEUE" not in mode:
        told += f"; they are not put back into the queue (PreemptMode={mode})"
    level = "warning" if grace + wait < _SHORT_S else "note"
    return [
        Finding(
            "slurm.preemption",
            level,  # type: ignore[arg-type]
            told,
            "save often enough (checkpoint.every) that losing the steps since the last save is cheap, and compare with "
            "the save's time in the log",
        )
    ]


def _job_findings(facts: SlurmFacts, env: Mapping[str, str]) -> list[Finding]:
    job_id = env.get("SLURM_JOB_ID")
    if not job_id or facts.job is None:
        return []
    fields = dict(re.findall(r"(\w+)=(\S*)", facts.job.out))
    state = fields.get("JobState", "")
    if (not facts.job.is_good and "Invalid job id" in facts.job.text) or (
        state and state not in ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "CONFIGURING")
    ):
        told = f"SLURM_JOB_ID={job_id} is set, but that job is {state or 'not known to Slurm any more'}"
        cure = "leave this shell and open a new one, or clean it: `unset ${!SLURM_*} ${!SLURMD_*} ${!PMI*}`"
        return [Finding("slurm.stale", "error", told, cure)]
    if not state:
        return []
    found = [Finding("slurm.job", "ok", f"job {job_id} is {state} on {fields.get('NodeList', '?')}")]
    if fields.get("Requeue") == "0":
        told = f"job {job_id} was submitted so that it is not put back into the queue (Requeue=0)"
        found.append(Finding("slurm.requeue", "note", told, "submit with --requeue, or use `submit --chain K`"))
    return found


def _seconds(text: str) -> int | None:
    match = re.match(r"([0-9]+)", text)
    return int(match[1]) if match else None
