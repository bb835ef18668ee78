"""A file of any of the forms in which a fabric may come, told apart by what is in it."""

from __future__ import annotations

import re
from pathlib import Path

from hpc_train.cluster.fabric import Fabric
from hpc_train.cluster.fabric_file import read_fabric_file
from hpc_train.cluster.fabric_infiniband import read_ibnetdiscover
from hpc_train.cluster.fabric_slurm import read_slurm_lines
from hpc_train.cluster.fabric_topology_yaml import read_topology_yaml
from hpc_train.cluster.text_file import read_text_file
from hpc_train.errors import ConfigError

_INFINIBAND = re.compile(r"^(Switch|Ca)\s+[0-9]+\s+\"[SH]-", re.MULTILINE)
_SLURM_LINE = re.compile(r"^\s*(SwitchName|BlockName|BlockSizes|AggregatedBlock)\s*=", re.MULTILINE | re.IGNORECASE)
_OUR_FILE = re.compile(r"^version\s*:", re.MULTILINE)
_TOPOLOGY_YAML = re.compile(r"^\s*-\s*topology\s*:", re.MULTILINE)


def read_fabric(name: str) -> Fabric:
    """Read a file: ours, Slurm's topology.conf or topology.yaml (`FILE#NAME` for one of its topologies), the output of
    `scontrol show topology` or of `ibnetdiscover`.

    Raises:
        ConfigError: it cannot be read, is of no such form, or its topology is flat.
    """
    path, _, topology = name.partition("#")
    text = read_text_file(Path(path), "the fabric's source ")
    if topology and not _TOPOLOGY_YAML.search(text):
        raise ConfigError(f"{path} is no topology.yaml, so there is no topology {topology!r} in it; leave #... out")
    if _TOPOLOGY_YAML.search(text):
        fabric = read_topology_yaml(text, path, topology or None)
        if fabric is None:
            raise ConfigError(f"{name}: this topology is flat, so it tells nothing; use fabric.order=slurm without it")
        return fabric
    if _INFINIBAND.search(text):
        return read_ibnetdiscover(text, path)
    if _SLURM_LINE.search(text):
        return read_slurm_lines(text, path)
    if _OUR_FILE.search(text):
        return read_fabric_file(text, path)
    raise ConfigError(
        f"{path} is none of these: a fabric file (`version: 1`), topology.conf, topology.yaml, the output of `scontrol "
        "show topology` or of `ibnetdiscover`"
    )
