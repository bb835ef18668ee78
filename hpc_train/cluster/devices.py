"""GPUs as the environment and Slurm describe them. Entries are counted and kept as text, never converted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cluster.whole_number import whole_number
from hpc_train.errors import LaunchError

AMD_REFUSAL = "hpc_train runs on NVIDIA GPUs (CUDA) and on CPUs; AMD GPUs are out of its scope"
_AMD_VENDOR = "0x1002"
# cited: PCI code and ID assignment specification: display controller other than VGA, processing accelerator. AMD's
# Instinct cards are one of the two; the graphics of a laptop or workstation is a VGA controller, and does not count.
_ACCELERATOR_CLASSES = ("0x0380", "0x1200")
_GRES_ENTRY = re.compile(r"(?:gres[:/])?gpu(?::([^:=,()]+?))?(?:[:=]([0-9]+))?(?:\([^)]*\))?")


@dataclass(frozen=True)
class DeviceChoice:
    """Which device a rank uses: its index among the visible ones, or None for the CPU.

    mode is "all visible", "one per task", "cpu" or "unlisted" (the job's list was lost; see the warning).
    """

    index: int | None
    mode: str
    warning: str | None = None


def visible_devices(env: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES that count, as written; None where it is not set.

    The index of a device is its position here. As in CUDA, the first entry that cannot be a device (-1, a
    word, another kind of name than the entries before) hides itself and all later ones, and a list that
    names a device twice shows none. Whether a device exists only the driver knows.
    """
    text = env.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    entries: list[str] = []
    for entry in (item.strip() for item in text.split(",")):
        kind = _kind(entry)
        if kind is None or (entries and kind != _kind(entries[0])):
            break
        entries.append(entry)
    return tuple(entries) if len(set(entries)) == len(entries) else ()


def choose_device(
    env: Mapping[str, str], local_id: int, tasks_on_node: int | None, num_visible: int | None = None
) -> DeviceChoice:
    """Choose the device of the task local_id of tasks_on_node (None: not known).

    With all devices visible that is number local_id. With exactly one visible for each of several tasks it
    is number 0, and local rank 0 gets a warning, since ranks that cannot see each other's GPUs copy through
    the host or fail to start.

    Args:
        num_visible: What the driver counts (torch.cuda.device_count()). Without it the environment is
            counted, and an unset list means that there is no GPU to choose.

    Raises:
        LaunchError: Fewer devices than tasks, or no device for this task.
    """
    listed = visible_devices(env)
    count = num_visible if num_visible is not None else len(listed or ())
    if count == 0:
        return DeviceChoice(None, "cpu")
    tasks = tasks_on_node if tasks_on_node is not None else local_id + 1
    if listed is None and (env.get("SLURM_STEP_GPUS") or env.get("SLURM_JOB_GPUS")):
        return _choose_unlisted(env, local_id, tasks, count)
    on_node = env.get("SLURM_GPUS_ON_NODE", "")
    known_too_few = whole_number(on_node, 0, tasks - 1) is not None
    if count == 1 and tasks > 1 and not known_too_few:
        warning = (
            f"each of the {tasks} tasks of this node sees one GPU only, so they cannot reach each other's "
            "memory: transfers inside the node are slow or fail. Allocate GPUs per node "
            "(--gpus-per-node) and start with srun --gpu-bind=none; each rank then takes its own by "
            "SLURM_LOCALID."
        )
        return DeviceChoice(0, "one per task", warning if local_id == 0 else None)
    if count < tasks:
        shown = "" if listed is None else f" (CUDA_VISIBLE_DEVICES={env['CUDA_VISIBLE_DEVICES']})"
        raise LaunchError(
            f"{tasks} tasks on this node, but {count} GPUs are visible{shown}, and one rank needs one GPU. Use "
            f"--ntasks-per-node={count}, or allocate {tasks} GPUs a node and start with --gpu-bind=none."
        )
    return DeviceChoice(local_id, "all visible")


def count_amd_gpus(sys_root: str | Path = "/sys") -> int:
    """Count AMD's accelerators. Variables do not tell: Slurm sets ROCR_VISIBLE_DEVICES for every brand."""
    folder = Path(sys_root) / "bus/pci/devices"
    try:
        devices = list(folder.iterdir())
    except OSError:
        return 0
    found = [_read(device / "vendor") == _AMD_VENDOR and _read(device / "class") for device in devices]
    return sum(kind.startswith(_ACCELERATOR_CLASSES) for kind in found if kind)


def refuse_amd_only(num_nvidia: int, sys_root: str | Path = "/sys") -> None:
    """Refuse a node whose only GPUs are AMD's, on which a run would silently take the CPU.

    Raises:
        LaunchError: It is such a node.
    """
    count = count_amd_gpus(sys_root)
    if count and not num_nvidia:
        raise LaunchError(
            f"This node has {count} AMD GPUs and no NVIDIA ones, and {AMD_REFUSAL}. Choose nodes with NVIDIA GPUs "
            "(`-C` or another partition), or nodes without GPUs for a run on the CPU."
        )


def parse_gres(text: str) -> dict[str, int]:
    """Count the GPUs of a GRES or TRES text by type; untyped ones under "".

    Accepts what Slurm prints: `gpu:a100:4(S:0-1)`, `gpu`, `(null)`, `gres/gpu:a100=4,gres/gpu=4`. Other
    resources are passed over.
    """
    counts: dict[str, int] = {}
    for entry in re.split(r",(?![^(]*\))", text.strip()):
        match = _GRES_ENTRY.fullmatch(entry.strip())
        if match is None:
            continue
        kind, number = match.group(1) or "", match.group(2)
        if number is None and kind.isdecimal():
            kind, number = "", kind
        counts[kind] = counts.get(kind, 0) + int(number or 1)
    return counts


def gres_total(counts: Mapping[str, int]) -> int:
    """Total of parse_gres: the untyped entry if there is one (it repeats the typed ones), else their sum."""
    return counts[""] if "" in counts else sum(counts.values())


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _kind(entry: str) -> str | None:
    if entry.startswith(("GPU-", "MIG-")):
        return entry[:4]
    return "index" if entry.isascii() and entry.isdecimal() else None


def _choose_unlisted(env: Mapping[str, str], local_id: int, tasks: int, count: int) -> DeviceChoice:
    """Inside a job whose CUDA_VISIBLE_DEVICES was lost, as in an ssh session: take the job's own GPUs."""
    name = "SLURM_STEP_GPUS" if env.get("SLURM_STEP_GPUS") else "SLURM_JOB_GPUS"
    owned = env[name].split(",")
    if len(owned) == count and count >= tasks:
        # Confined by cgroup: all that is visible is the job's, whatever its numbers on the node are.
        return DeviceChoice(local_id, "all visible")
    if len(owned) < tasks or not all(whole_number(item, 0, count - 1) is not None for item in owned):
        raise LaunchError(
            f"CUDA_VISIBLE_DEVICES is not set inside a job, {name}={env[name]}, {count} GPUs are visible and "
            f"{tasks} tasks run here: which GPUs are this job's is not clear. Start with srun, which sets the list, "
            "or set CUDA_VISIBLE_DEVICES to the GPUs that `scontrol show job -d JOB` names (IDX)."
        )
    warning = (
        f"CUDA_VISIBLE_DEVICES is not set inside a job, so all {count} GPUs of the node are visible, also other "
        f"people's; the job's own are taken from {name}={env[name]}. Start with srun, which sets the list."
    )
    return DeviceChoice(int(owned[local_id]), "unlisted", warning if local_id == 0 else None)
