"""The environment as a value: read once here, cleaned for a new job, filled where unset, compared over ranks.

This package is the only one that reads os.environ; everything else is given a mapping.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hpc_train.cluster.slurm import StepFacts

_LAUNCHER_PREFIXES = (
    "SLURM_", "SLURMD_", "SBATCH_", "SALLOC_", "SRUN_", "PMI", "OMPI_", "PRTE_", "PRRTE_",
    "MV2_COMM_WORLD_", "MPI_LOCAL", "PALS_", "HYDRA_", "HYDI_", "FLUX_", "TORCHELASTIC_", "HPC_TRAIN_",
)  # fmt: skip
_KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SBATCH_CLUSTERS"}
_TORCHRUN_VARIABLES = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK",
    "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
# Set by Slurm in a job, under names that are not its own.
_SET_BY_SLURM = {
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ENVIRONMENT",
}
# A user's or a site's own parameters for MPI, which are no trace of a launcher until one has run.
_MPI_PARAMETERS = re.compile(r"(OMPI|PRTE|PMIX)_MCA_.*")
_JOB_SWITCHES = {"HPC_TRAIN_ROOT", "HPC_TRAIN_REQUIRE"}

# Variables that must not differ between ranks without a word. NCCL, gloo and fabrics; threads; libraries.
_RELEVANT = re.compile(
    r"(NCCL|GLOO|UCX|FI|TORCH|TORCH_NCCL|PYTORCH|OMPI_MCA|MPICH|OMP|MKL|CUBLAS|NVTE)_.*"
    r"|CUDA_DEVICE_(ORDER|MAX_CONNECTIONS)|CUDA_LAUNCH_BLOCKING|LD_LIBRARY_PATH|LD_PRELOAD|PATH|PYTHON(PATH|HASHSEED)"
    r"|MPI4PY_(LIBMPI|MPIABI)"
)
_PER_RANK = re.compile(r"OMPI_MCA_(ess|orte|prte|pmix|initial|ess_base).*|NCCL_DEBUG_FILE|TORCH_FR_DUMP.*")

# How ranks meet, as JSON from the driver: ranks read the whole configuration only when they are connected.
RENDEZVOUS_VARIABLE = "HPC_TRAIN_RENDEZVOUS"
# When the job's time ends, in epoch seconds, and the name of the signal that asks for a save and an end.
END_TIME_VARIABLE = "HPC_TRAIN_END_TIME"
STOP_SIGNAL_VARIABLE = "HPC_TRAIN_STOP_SIGNAL"
# How many seconds of warning the job gets in which cases, as a JSON object.
WARNING_TIMES_VARIABLE = "HPC_TRAIN_WARNING_TIMES"

# Set to True by torchrun and by `hpc-train exec`, which hold the store on MASTER_PORT themselves.
STORE_IS_HELD_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"

# measured: MPI's import and init take 0.2 s a rank with these and 1.5 s without, Open MPI 5.0 on two cores.
_CPU_COMPONENTS = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_coll": "basic,libnbc,tuned,inter,self,sync",
}
# A site that has chosen any of these frameworks has chosen its transport.
_TRANSPORT_PARAMETERS = ("pml", "btl", "mtl", "osc", "coll", "pml_base_include", "btl_base_include")

_SITE_DEFAULTS = {
    "SBATCH_ACCOUNT": "--account",
    "SBATCH_PARTITION": "--partition",
    "SBATCH_QOS": "--qos",
    "SBATCH_RESERVATION": "--reservation",
    "SBATCH_CONSTRAINT": "--constraint",
}


def process_env() -> Mapping[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def tell_libraries(variables: Mapping[str, str]) -> None:
    """Set variables that C libraries of this process read when they are loaded, which know no other way."""
    os.environ.update(variables)


def scrubbed_for_submission(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for sbatch and salloc, without what ties it to a running job.

    Submitted from inside a job, its variables would pin the new one to a few cores, or make its batch
    script look like a step. SLURM_CONF and the choice of a cluster stay. Parameters of Open MPI
    (OMPI_MCA_*) stay unless mpirun or srun started this process, which may have set them.
    """
    launched = any(env.get(name) for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_STEP_ID"))
    removed = set()
    if env.get("RANK") or env.get("LOCAL_RANK"):
        removed |= _TORCHRUN_VARIABLES
    if env.get("SLURM_JOB_ID"):
        removed |= _SET_BY_SLURM
    return {
        name: value
        for name, value in env.items()
        if name in _KEPT | _JOB_SWITCHES
        or (_MPI_PARAMETERS.fullmatch(name) and not launched)
        or not (name.startswith(_LAUNCHER_PREFIXES) or name in removed)
    }


def site_defaults(env: Mapping[str, str]) -> dict[str, str]:
    """Return as sbatch flags the defaults that users keep in SBATCH_ACCOUNT and the like.

    scrubbed_for_submission removes those variables; as flags they stay, and are seen in the script.
    """
    return {flag: env[name] for name, flag in _SITE_DEFAULTS.items() if env.get(name)}


def salloc_defaults(env: Mapping[str, str]) -> dict[str, str]:
    """Return the same as flags of salloc, long name to value; SALLOC_ACCOUNT and the like come before SBATCH_'s."""
    chosen = {}
    for name, flag in _SITE_DEFAULTS.items():
        value = env.get(name.replace("SBATCH_", "SALLOC_")) or env.get(name)
        if value:
            chosen[flag.removeprefix("--")] = value
    return chosen


def fill_unset(env: Mapping[str, str], defaults: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return env with defaults where it has nothing, and a log line for each of them."""
    filled, lines = dict(env), []
    for name, value in defaults.items():
        if name not in env:
            filled[name] = value
            lines.append(f"{name}={value} (was not set)")
        elif env[name] != value:
            lines.append(f"{name}={env[name]} (kept; the default would be {value})")
    return filled, tuple(lines)


def training_defaults(
    step: StepFacts | None, *, num_threads: int | None = None, trace_dir: Path | None = None
) -> dict[str, str]:
    """Return variables of a rank to be filled where unset.

    OMP_NUM_THREADS is num_threads, else SLURM_CPUS_PER_TASK; where neither is known it is left out.
    CUDA_DEVICE_MAX_CONNECTIONS is left out too: overlapped tensor parallelism wants 1, sharded data
    parallelism must not have it.
    """
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        # assumed: enough for the last steps of a model of a hundred layers; a record takes about 1 kB.
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    threads = num_threads or (step.cpus_per_task if step is not None else None)
    if threads:
        defaults["OMP_NUM_THREADS"] = str(threads)
    if trace_dir is not None:
        defaults["TORCH_FR_DUMP_TEMP_FILE"] = f"{trace_dir}/flight_recorder_"
    return defaults


def relevant(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ought to be equal on all ranks."""
    return {name: env[name] for name in sorted(env) if _RELEVANT.fullmatch(name) and not _PER_RANK.fullmatch(name)}


def relevant_hash(env: Mapping[str, str]) -> str:
    """Hash of relevant(env), to be compared over ranks before the variables themselves are sent."""
    return hashlib.sha256(json.dumps(relevant(env), sort_keys=True).encode()).hexdigest()


def differences(environments: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Return a line for each relevant variable that is not equal on all ranks (the index is the rank)."""
    chosen = [relevant(env) for env in environments]
    lines = []
    for name in sorted(set().union(*chosen)):
        by_value: dict[str | None, list[int]] = {}
        for rank, env in enumerate(chosen):
            by_value.setdefault(env.get(name), []).append(rank)
        if len(by_value) > 1:
            told = "; ".join(
                f"{'not set' if value is None else repr(value)} on {_few(ranks)}"
                for value, ranks in sorted(by_value.items(), key=lambda item: -len(item[1]))
            )
            lines.append(f"{name} differs between ranks: {told}")
    return tuple(lines)


def mpi_cpu_defaults(
    env: Mapping[str, str], param_files: Iterable[Path] = (), *, kind: str = "openmpi5"
) -> dict[str, str]:
    """Return Open MPI's components for runs without a GPU, which start in a seventh of the time.

    Nothing where the site or the user has chosen any component, in the environment or in param_files: a
    mixture of theirs and ours would be neither.
    """
    names = {f"OMPI_MCA_{name}" for name in _TRANSPORT_PARAMETERS}
    if any(name in env for name in names):
        return {}
    chosen = re.compile(rf"\s*({'|'.join(_TRANSPORT_PARAMETERS)})\s*=")
    for path in param_files:
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        if any(chosen.match(line) for line in lines):
            return {}
    if kind == "openmpi4":
        # What release 5 calls sm has this name before it, and there sm is one that ends the program.
        return {**_CPU_COMPONENTS, "OMPI_MCA_btl": "self,vader,tcp"}
    return dict(_CPU_COMPONENTS)


def mpi_param_files(env: Mapping[str, str], prefix: str) -> tuple[Path, ...]:
    """Return the files in which Open MPI of prefix looks for a site's and a user's parameters."""
    files = [Path(prefix) / "etc/openmpi-mca-params.conf"]
    if Path(prefix).is_relative_to("/usr"):
        files.append(Path("/etc/openmpi/openmpi-mca-params.conf"))  # where Debian keeps it
    if env.get("HOME"):
        files.append(Path(env["HOME"]) / ".openmpi/mca-params.conf")
    return tuple(files)


def _few(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:4])
    return f"rank {shown}" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown}{', ...' if len(ranks) > 4 else ''})"
