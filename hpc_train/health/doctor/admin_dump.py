"""`hpc-train doctor --admin-dump FILE`: what only root can see of the fabric, written once for everybody."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_train.cluster.devices import gres_total, parse_gres
from hpc_train.cluster.fabric import Fabric
from hpc_train.cluster.fabric_infiniband import read_ibnetdiscover
from hpc_train.cluster.fabric_write import write_fabric_file
from hpc_train.cluster.hostlist import hosts_of_setting
from hpc_train.errors import ConfigError, LaunchError
from hpc_train.health.doctor.answers import ask, last_line

# assumed: a subnet of ten thousands of ports answers within this time.
_DISCOVER_S = 600.0
_NODE = re.compile(r"^NodeName=(\S+).*?\bGres=(\S+)", re.MULTILINE)


def admin_dump(path: str, env: Mapping[str, str], cards: str | None = None) -> Fabric:
    """Look at the InfiniBand fabric and write the file, whole or not at all, readable by everybody.

    Hosts that Slurm does not know, as of storage, are left out where Slurm answers.

    Args:
        cards: a host list of the cards that are rails, such as `mlx5_[0-3,6-9]`; None: all.

    Raises:
        ConfigError: the file cannot be written, or what ibnetdiscover prints is not a fabric of tiers.
        LaunchError: ibnetdiscover is not there or fails.
    """
    program = shutil.which("ibnetdiscover", path=f"{env.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise LaunchError("ibnetdiscover is not on PATH; it is in the package infiniband-diags")
    answer = ask([program], env=env, timeout_s=_DISCOVER_S)
    if not answer.is_good:
        advice = "" if os.geteuid() == 0 else ". Mostly only root may ask the subnet: try with sudo"
        raise LaunchError(f"ibnetdiscover fails: {last_line(answer.err) or f'exit code {answer.code}'}{advice}")
    gpus = slurm_nodes(env)
    names = hosts_of_setting("--cards", cards)
    fabric = read_ibnetdiscover(answer.out, "ibnetdiscover", nodes=list(gpus) or None, cards=names)
    fabric = replace(
        fabric, nodes={name: replace(node, num_gpus=gpus.get(name)) for name, node in fabric.nodes.items()}
    )
    _write(Path(path), write_fabric_file(fabric))
    return fabric


def slurm_nodes(env: Mapping[str, str]) -> dict[str, int | None]:
    """The nodes that Slurm knows, with the number of their GPUs where it says one; empty without Slurm."""
    answer = ask(["scontrol", "show", "node", "--oneliner"], env=env, timeout_s=30.0)
    if not answer.is_good:
        return {}
    return {name: gres_total(parse_gres(gres)) or None for name, gres in _NODE.findall(answer.out)}


def describe(fabric: Fabric, path: str) -> Sequence[str]:
    """What to tell who made the dump."""
    leaves, pods = len(fabric.pod_of_leaf), len(set(fabric.pod_of_leaf.values()))
    return (
        f"{path}: {len(fabric.nodes)} nodes, {len(fabric.rail_nics)} rails ({', '.join(fabric.rail_nics)}), {leaves} "
        f"leaves, {pods} pods",
        *(f"note: {note}" for note in fabric.notes),
        f"users name it in their configuration, or on the command line: fabric.source={Path(path).absolute()}",
    )


def _write(path: Path, text: str) -> None:
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(text)
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}. Give a file in a folder that is there"
        ) from None
