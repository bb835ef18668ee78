"""Which fabric a run has: from the user's files, else from what Slurm and the nodes tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cluster.fabric import Fabric
from hpc_train.cluster.fabric_clos import CLOS_PREFIX, clos_fabric
from hpc_train.cluster.fabric_file import read_fabric_file
from hpc_train.errors import ConfigError


@dataclass(frozen=True)
class FoundFabric:
    """A fabric that holds all nodes that were asked for, or None; notes say to the user where it is from and why."""

    fabric: Fabric | None
    notes: tuple[str, ...] = ()


def find_fabric(source: str | None, nodes: Sequence[str] | None, env: Mapping[str, str]) -> FoundFabric:
    """Find the fabric of these nodes.

    Args:
        source: fabric.source or --fabric: files with commas between them, or `clos:...`; None: ask Slurm.
        nodes: the allocation's nodes; None: whatever the source holds.
        env: the environment.

    Raises:
        ConfigError: a source cannot be read, or does not hold a node.
    """
    if source is None:
        return FoundFabric(None, ("no fabric is known, so ranks follow Slurm's order",))
    fabric = read_source(source)
    missing = [node for node in nodes or () if node not in fabric.nodes]
    if missing:
        raise ConfigError(_missing_text(fabric, missing))
    return FoundFabric(fabric, fabric.notes)


def read_source(source: str) -> Fabric:
    """Read one source by its name.

    Raises:
        ConfigError: it cannot be read.
    """
    if source.startswith(CLOS_PREFIX):
        return clos_fabric(source)
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the fabric's source {source} cannot be read: {error}") from None
    return read_fabric_file(text, source)


def _missing_text(fabric: Fabric, missing: Sequence[str]) -> str:
    shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    return (
        f"{shown} of the job is not in the fabric of {fabric.source}, which has {len(fabric.nodes)} nodes such as "
        f"{', '.join(list(fabric.nodes)[:2])}. Bring that source up to date, or leave fabric.source out"
    )
