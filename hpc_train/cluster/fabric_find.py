"""Which fabric a run has: from the user's files, else from what Slurm and the nodes tell."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from hpc_train.cluster.fabric import Fabric
from hpc_train.cluster.fabric_address import fabric_from_addresses
from hpc_train.cluster.fabric_clos import CLOS_PREFIX, clos_fabric
from hpc_train.cluster.fabric_merge import merge_fabrics, merge_reports, with_gpus
from hpc_train.cluster.fabric_node import NodeReport
from hpc_train.cluster.fabric_read import read_fabric
from hpc_train.cluster.fabric_slurm import read_slurm_lines
from hpc_train.cluster.fabric_topology_yaml import read_topology_yaml
from hpc_train.cluster.slurm import broken_configuration
from hpc_train.cluster.text_file import read_text_file
from hpc_train.errors import ConfigError, LaunchError

SCONTROL = "scontrol show topology"
# cited: where packages and releases look for slurm.conf; the last one is slurmd's copy without a shared file.
_CONF_FOLDERS = (Path("/etc/slurm"), Path("/etc/slurm-llnl"), Path("/run/slurm/conf"))
# assumed: a busy controller answers within this time, or the job has worse trouble.
_ANSWER_S = 30


@dataclass(frozen=True)
class FoundFabric:
    """A fabric that holds all nodes that were asked for, or None; notes say to the user where it is from and why."""

    fabric: Fabric | None
    notes: tuple[str, ...] = ()


def find_fabric(
    source: str | None,
    nodes: Sequence[str] | None,
    env: Mapping[str, str],
    *,
    gpus: Mapping[str, int] | None = None,
    gather: Callable[[], Sequence[NodeReport]] | None = None,
) -> FoundFabric:
    """Find the fabric of these nodes.

    Sources that the user names have to be right. Of what is found by itself the first that tells something is used:
    SLURM_TOPOLOGY_ADDR of all nodes, `scontrol show topology`, topology.yaml or topology.conf beside slurm.conf; one
    that cannot be used is told and passed over. What the nodes report of their cards is added to either.

    Args:
        source: fabric.source or --fabric: files with commas between them, or `clos:...`; None: find one.
        nodes: the allocation's nodes; None: whatever the source holds.
        env: the environment.
        gpus: how many GPUs the job has on each node, where that is known.
        gather: asks all nodes for their reports; None: they are not asked.

    Raises:
        ConfigError: a named source cannot be read, does not hold a node, or knows of fewer GPUs than the job has.
    """
    reports, notes = _gathered(gather)
    if source is not None:
        fabric: Fabric | None = read_sources(source)
        assert fabric is not None
        missing = _missing(fabric, nodes)
        if missing:
            raise ConfigError(_missing_text(fabric, missing, nodes or ()))
    else:
        fabric, more = _search(nodes, env, reports)
        notes += more
    if fabric is None:
        return FoundFabric(None, (*notes, "no fabric is known, so ranks follow Slurm's order. fabric.source names one"))
    fabric = merge_reports(fabric, reports)
    fabric, problems = with_gpus(fabric, gpus or {})
    if problems and source is not None:
        raise ConfigError(f"{problems[0]}. Bring {source} up to date, or leave fabric.source out")
    return FoundFabric(fabric, (*notes, *problems, f"fabric from {fabric.source}", *fabric.notes))


def read_sources(source: str) -> Fabric:
    """Read and merge the sources that a user names, the first one first.

    Raises:
        ConfigError: one cannot be read, or tells nothing.
    """
    if source.startswith(CLOS_PREFIX):
        return clos_fabric(source)
    names = [name.strip() for name in source.split(",")]
    if not all(names):
        raise ConfigError(f"the fabric's source {source!r} has an empty name; give files with one comma between them")
    return reduce(merge_fabrics, map(read_fabric, names))


def _gathered(gather: Callable[[], Sequence[NodeReport]] | None) -> tuple[Sequence[NodeReport], list[str]]:
    if gather is None:
        return (), []
    try:
        return gather(), []
    except LaunchError as error:
        return (), [f"the nodes could not be asked about the fabric: {error}"]


def _search(
    nodes: Sequence[str] | None, env: Mapping[str, str], reports: Sequence[NodeReport]
) -> tuple[Fabric | None, list[str]]:
    """The first of Slurm's sources that tells something of all nodes."""
    notes: list[str] = []
    sources: list[tuple[str, Callable[[], Fabric | None]]] = [
        ("SLURM_TOPOLOGY_ADDR", lambda: _from_reports(reports, nodes)),
        (SCONTROL, lambda: _from_scontrol(env)),
        ("Slurm's topology file", lambda: _from_configuration(env)),
    ]
    for name, look in sources:
        try:
            fabric = look()
        except ConfigError as error:
            notes.append(f"{name} cannot be used: {error}")
            continue
        if fabric is None:
            continue
        missing = _missing(fabric, nodes)
        if not missing:
            return fabric, notes
        notes.append(f"{name} cannot be used: {_missing_text(fabric, missing, nodes or ())}")
    return None, notes


def _from_reports(reports: Sequence[NodeReport], nodes: Sequence[str] | None) -> Fabric | None:
    if not reports:
        return None
    told = {report.node for report in reports}
    silent = [node for node in nodes or () if node not in told]
    if silent:
        raise ConfigError(f"{_few(silent)} gave no answer")
    return fabric_from_addresses({report.node: (report.address, report.pattern) for report in reports})


def _from_scontrol(env: Mapping[str, str]) -> Fabric | None:
    broken = broken_configuration(env)
    if broken is not None:
        raise ConfigError(broken)
    # With SLURM_TOPO_LEN the lines would be cut off.
    text = _ask(["scontrol", "show", "topology"], {name: env[name] for name in env if name != "SLURM_TOPO_LEN"})
    return read_slurm_lines(text, SCONTROL) if text is not None and "=" in text else None


def _from_configuration(env: Mapping[str, str]) -> Fabric | None:
    """The topology file beside slurm.conf. Slurm takes topology.yaml where both are there."""
    folders = [Path(env["SLURM_CONF"]).parent] if env.get("SLURM_CONF") else list(_CONF_FOLDERS)
    for path in (folder / name for folder in folders for name in ("topology.yaml", "topology.conf")):
        if path.is_file():
            text = read_text_file(path)
            if path.suffix == ".yaml":
                return read_topology_yaml(text, str(path), _topology_of_partition(env))
            return read_slurm_lines(text, str(path))
    return None


def _topology_of_partition(env: Mapping[str, str]) -> str | None:
    """Slurm 25.05 and later: the named topology that the job's partition uses."""
    partition = None if broken_configuration(env) else env.get("SLURM_JOB_PARTITION")
    text = _ask(["scontrol", "show", "partition", partition], env) if partition else None
    match = re.search(r"\bTopology=(\S+)", text or "")
    return match[1] if match and match[1] not in ("(null)", "NONE") else None


def _ask(argv: Sequence[str], env: Mapping[str, str]) -> str | None:
    """What a command prints; None where it is not there or does not answer well."""
    try:
        done = subprocess.run(
            argv, env=dict(env), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_ANSWER_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _missing(fabric: Fabric, nodes: Sequence[str] | None) -> list[str]:
    return [node for node in nodes or () if node not in fabric.nodes]


def _missing_text(fabric: Fabric, missing: Sequence[str], nodes: Sequence[str]) -> str:
    verb = "is" if len(missing) == 1 else "are"
    return (
        f"{_few(missing)} of the job's {len(nodes)} nodes {verb} not in the fabric of {fabric.source}, which has "
        f"{len(fabric.nodes)} nodes such as {', '.join(list(fabric.nodes)[:2])}. Bring it up to date, or name another "
        "by fabric.source"
    )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
