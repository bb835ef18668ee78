"""Which of the launchers started this process, and what `run` must therefore do.

Decided from facts of one task, never from a task count or a job name, in this order:

1. torchrun's variables. RANK or LOCAL_RANK makes the claim; then all five must be there, or it is refused.
   WORLD_SIZE, MASTER_ADDR and MASTER_PORT without them are presets of the user and claim nothing. A
   complete set that only repeats what srun or mpirun says (a container hook does this) is not a launcher, unless a
   store is held for it, as under `hpc-train exec`.
2. mpirun's variables, if they say something other than the Slurm step does: mpirun starts its own daemons
   as a step, and can be called in an interactive step.
3. A live Slurm step. The shell of `srun --pty bash` is one task, and a world of one was hardly meant: where
   the process tree shows such a shell, it counts as an allocation shell, from which srun --overlap starts
   the ranks. Where it does not, the step is taken as it is.
4. A job without a step: the batch script (Slurm gives it SLURM_PROCID=0), or a shell of salloc.
5. Nothing: this machine alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from hpc_train.cluster.environment import STORE_IS_HELD_VARIABLE
from hpc_train.cluster.process import UNKNOWN_PROCESS, ProcessFacts
from hpc_train.cluster.slurm import StepFacts, is_pseudo_step, read_job, read_step
from hpc_train.cluster.whole_number import whole_number
from hpc_train.errors import LaunchError

ELASTIC_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Situation(Enum):
    LAPTOP = "laptop"
    BATCH_SHELL = "batch shell"
    ALLOC_SHELL = "allocation shell"
    STEP_TASK = "step task"
    MPI_TASK = "mpi task"
    ELASTIC = "elastic"


@dataclass(frozen=True)
class Found:
    """A situation and the sentence that tells the user why.

    overlap: srun must be given --overlap, because an interactive step holds the job's resources.
    """

    situation: Situation
    reason: str
    overlap: bool = False


class RankHint(NamedTuple):
    """What the variables of the launcher `source` (srun, mpirun, ...) say; local_rank may be unknown."""

    rank: int
    size: int
    local_rank: int | None
    source: str


@dataclass(frozen=True)
class ElasticRanks:
    """torchrun's variables. by_launcher: those that only torchrun's agent or `hpc-train exec` sets are there too."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    master_addr: str
    master_port: int
    by_launcher: bool


@dataclass(frozen=True)
class _MpiClaim:
    """What an MPI launcher's variables say. Some give no size."""

    rank: int
    size: int | None
    local_rank: int | None
    launcher: str
    names: str

    def repeats(self, step: StepFacts) -> bool:
        return self.rank == step.rank and self.size in (None, step.num_tasks)


# Launcher, then its names for rank, size and local rank. Those of mpirun come first: PMIX_RANK and PMI_RANK
# may also come from srun, and Open MPI sets both kinds.
_LAUNCHERS = (
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("PALS (mpiexec)", "PALS_RANKID", None, "PALS_LOCAL_RANKID"),
    ("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    ("a PMIx launcher", "PMIX_RANK", None, None),
)


def find_situation(env: Mapping[str, str], process: ProcessFacts = UNKNOWN_PROCESS) -> Found:
    """Tell how this process was started.

    Raises:
        LaunchError: A launcher's variables are incomplete or contradict each other, so that any answer
            would be a guess.
    """
    elastic = read_elastic(env)
    step = read_step(env, process)
    mpi = _mpi_claim(env)
    if elastic is not None and (elastic.by_launcher or not _repeats(elastic, step, mpi)):
        return Found(
            Situation.ELASTIC,
            f"RANK={elastic.rank} and WORLD_SIZE={elastic.world_size} are set together with LOCAL_RANK, "
            "MASTER_ADDR and MASTER_PORT: an elastic launcher such as torchrun started this rank",
        )
    if mpi is not None and (step is None or not mpi.repeats(step)):
        return Found(Situation.MPI_TASK, f"{mpi.names} set: this is one rank, started by {mpi.launcher}")
    if step is not None:
        return _found_in_step(step, process)
    return _found_outside_steps(env, process)


def rank_hint(env: Mapping[str, str], process: ProcessFacts = UNKNOWN_PROCESS) -> RankHint | None:
    """Return rank, size and local rank as the launcher's variables have them, to check MPI against.

    The innermost launcher speaks: mpirun where it disagrees with the Slurm step, else the step. None where
    no launcher is seen, or one that does not tell the size.
    """
    step = read_step(env, process)
    mpi = _mpi_claim(env)
    if mpi is not None and (step is None or not mpi.repeats(step)):
        return None if mpi.size is None else RankHint(mpi.rank, mpi.size, mpi.local_rank, mpi.launcher)
    if step is not None:
        return RankHint(step.rank, step.num_tasks, step.local_id, "srun")
    return None


def elastic_ranks(env: Mapping[str, str]) -> ElasticRanks:
    """Return torchrun's variables, which must be there."""
    ranks = read_elastic(env)
    if ranks is None:
        raise LaunchError(
            "None of RANK and LOCAL_RANK is set, so torchrun's variables cannot tell this rank. Start with "
            "torchrun, with `hpc-train exec -- PROGRAM`, or set all of " + ", ".join(ELASTIC_VARIABLES) + "."
        )
    return ranks


def read_elastic(env: Mapping[str, str]) -> ElasticRanks | None:
    """Return torchrun's variables, or None where neither RANK nor LOCAL_RANK is set.

    Raises:
        LaunchError: The set is incomplete or impossible.
    """
    if not env.get("RANK") and not env.get("LOCAL_RANK"):
        return None
    missing = [name for name in ELASTIC_VARIABLES if not env.get(name)]
    if missing:
        present = ", ".join(f"{name}={env[name]}" for name in ELASTIC_VARIABLES if env.get(name))
        raise LaunchError(
            f"{present} is set, but {', '.join(missing)} is not: an elastic launcher such as torchrun sets "
            "all five. Unset RANK and LOCAL_RANK if no such launcher is used, or set the others as well."
        )
    rank, world_size, local_rank, port = (
        _whole(env, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    )
    if rank >= world_size or local_rank > rank or not 0 < port < 65536:
        raise LaunchError(
            f"RANK={rank}, WORLD_SIZE={world_size}, LOCAL_RANK={local_rank}, MASTER_PORT={port} cannot be: "
            "expected LOCAL_RANK <= RANK < WORLD_SIZE and a port from 1 to 65535. Something overwrote them."
        )
    local_world_size = _whole(env, "LOCAL_WORLD_SIZE") if env.get("LOCAL_WORLD_SIZE") else None
    if local_world_size is not None and not local_rank < local_world_size <= world_size:
        raise LaunchError(
            f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_world_size}, WORLD_SIZE={world_size} cannot "
            "be: expected LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE. Something overwrote them."
        )
    return ElasticRanks(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=env["MASTER_ADDR"],
        master_port=port,
        by_launcher=env.get(STORE_IS_HELD_VARIABLE) == "True"
        or "TORCHELASTIC_RUN_ID" in env
        or "TORCHELASTIC_RESTART_COUNT" in env,
    )


def _repeats(elastic: ElasticRanks, step: StepFacts | None, mpi: _MpiClaim | None) -> bool:
    said = (elastic.rank, elastic.world_size, elastic.local_rank)
    if step is not None and (mpi is None or mpi.repeats(step)):
        return said == (step.rank, step.num_tasks, step.local_id)
    return mpi is not None and said == (mpi.rank, mpi.size, mpi.local_rank)


def _mpi_claim(env: Mapping[str, str]) -> _MpiClaim | None:
    for launcher, rank_name, size_name, local_name in _LAUNCHERS:
        if not env.get(rank_name):
            if size_name and env.get(size_name) and launcher == "mpirun":
                raise _half(rank_name, size_name, env)
            continue
        if _is_of_slurm(rank_name, env):
            # srun's own plugin: either it repeats the step, or it was inherited from another one.
            continue
        if size_name and not env.get(size_name):
            raise _half(size_name, rank_name, env)
        rank = _whole(env, rank_name)
        size = _whole(env, size_name) if size_name else None
        if size is not None and rank >= size:
            raise LaunchError(f"{rank_name}={rank}, but {size_name}={size} ends the ranks before it.")
        local = _whole(env, local_name) if local_name and env.get(local_name) else None
        names = f"{rank_name}={rank} and {size_name}={size} are" if size_name else f"{rank_name}={rank} is"
        return _MpiClaim(rank, size, local, launcher, names)
    return None


def _is_of_slurm(rank_name: str, env: Mapping[str, str]) -> bool:
    if rank_name == "PMI_RANK":
        # Slurm's PMI_JOBID is JOB.STEP; Hydra's is a name of its own or absent.
        job_id, _, step_id = env.get("PMI_JOBID", "").partition(".")
        return job_id.isdecimal() and step_id.isdecimal()
    if rank_name == "PALS_RANKID":
        return env.get("SLURM_MPI_TYPE", "").startswith("cray")
    return rank_name == "PMIX_RANK" and env.get("PMIX_NAMESPACE", "").startswith("slurm.pmix.")


def _found_in_step(step: StepFacts, process: ProcessFacts) -> Found:
    if process.in_terminal_shell:
        return Found(
            Situation.ALLOC_SHELL,
            f"this is a shell in the interactive step {step.name} (srun --pty), not a rank: "
            "srun --overlap is started for the ranks",
            overlap=True,
        )
    return Found(
        Situation.STEP_TASK,
        f"SLURM_PROCID={step.rank} in the live step {step.name} of {step.num_tasks} tasks: this is one rank",
    )


def _found_outside_steps(env: Mapping[str, str], process: ProcessFacts) -> Found:
    job = read_job(env, process)
    if job is None:
        return Found(
            Situation.LAPTOP,
            "neither SLURM_JOB_ID nor any MPI launcher's variables are set: this is one machine on its own, "
            "so mpirun is started",
        )
    stale = "SLURM_STEP_ID" in env and not is_pseudo_step(env)
    no_step = "SLURM_STEP_ID is another job's, inherited" if stale else "there is no step"
    is_batch = "SLURM_PROCID" in env and not is_pseudo_step(env)
    if process.held_by is not None:
        is_batch = process.held_by.startswith(f"{job.job_id}.") and process.held_by.endswith((".batch", ".4294967291"))
    if is_batch:
        return Found(
            Situation.BATCH_SHELL,
            f"SLURM_JOB_ID={job.job_id} is set but {no_step}: this is a batch script, so srun is started",
        )
    return Found(
        Situation.ALLOC_SHELL,
        f"SLURM_JOB_ID={job.job_id} is set but {no_step}: this is a shell of salloc, so srun is started",
    )


def _whole(env: Mapping[str, str], name: str) -> int:
    text = env[name]
    found = whole_number(text)
    if found is None:
        raise LaunchError(f"{name}={text[:60]!r} is not a whole number. A launcher sets it: unset it, or set a number.")
    return found


def _half(missing: str, present: str, env: Mapping[str, str]) -> LaunchError:
    return LaunchError(
        f"{present}={env[present]} is set, but {missing} is not: only a part of the MPI launcher's variables "
        "reached this process. Start it with mpirun or srun directly, or unset both."
    )
