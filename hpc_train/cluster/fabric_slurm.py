"""Slurm's topology in lines: the file topology.conf, and what `scontrol show topology` prints."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpc_train.cluster.fabric import Fabric
from hpc_train.cluster.fabric_block import Block, fabric_of_blocks
from hpc_train.cluster.fabric_tree import Switch, fabric_of_tree
from hpc_train.cluster.hostlist import expand_hostlist
from hpc_train.cluster.whole_number import whole_number
from hpc_train.errors import ConfigError, LaunchError

_KEYS = {
    name.lower(): name
    for name in (
        "SwitchName", "Nodes", "Switches", "LinkSpeed", "Level",
        "BlockName", "BlockSizes", "BlockIndex", "BlockSize", "AggregatedBlock",
    )
}  # fmt: skip
# The keys that may stand beside the first one of a line.
_BESIDE = {
    "SwitchName": {"Nodes", "Switches", "LinkSpeed", "Level"},
    "BlockName": {"Nodes", "BlockIndex", "BlockSize"},
    "AggregatedBlock": {"Nodes", "BlockIndex", "BlockSize"},
    "BlockSizes": set(),
}
_NUMBERS = ("LinkSpeed", "Level", "BlockIndex", "BlockSize")
_PAIR = re.compile(r'\s*([A-Za-z]+)\s*=\s*("[^"]*"|[^\s"]+)(?=\s|$)')


def read_slurm_lines(text: str, source: str) -> Fabric:
    """Read topology.conf, or the output of `scontrol show topology`, as a tree or as blocks.

    Raises:
        ConfigError: with the line, whatever Slurm would not accept, or what contradicts itself.
    """
    switches: list[Switch] = []
    blocks: list[Block] = []
    sizes: tuple[int, ...] | None = None
    sizes_line = 0
    block_size: int | None = None
    has_speed = False
    for number, line in _logical_lines(text):
        values = _pairs(line, source, number)
        kind = next(iter(values))
        if kind == "SwitchName":
            has_speed = has_speed or values.get("LinkSpeed", "1") != "1"
            switches += _switches(values, source, number)
        elif kind == "BlockName":
            block_size = _number(values, "BlockSize", source, number) if "BlockSize" in values else block_size
            names = _hosts(values, kind, source, number)
            nodes = _hosts(values, "Nodes", source, number) if "Nodes" in values else ()
            blocks += [Block(name, nodes, number) for name in names]
        elif kind == "BlockSizes":
            sizes, sizes_line = _sizes(values[kind], source, number), number
        elif kind == "AggregatedBlock" and block_size is not None:
            # scontrol tells the sizes by the groups of blocks that it lists.
            size = _number(values, "BlockSize", source, number) if "BlockSize" in values else 0
            sizes, sizes_line = tuple(sorted({*(sizes or (block_size,)), size} - {0})), number
    if switches and blocks:
        raise ConfigError(f"{source}, line {blocks[0].line}: blocks and switches are mixed; Slurm knows one of the two")
    if blocks:
        return fabric_of_blocks(blocks, sizes, source, sizes_line)
    if not switches:
        raise ConfigError(f"{source}: it describes no switch and no block")
    notes = ["LinkSpeed has no unit in Slurm, so the speeds of links are not taken from it"] if has_speed else []
    return fabric_of_tree(switches, source, notes)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments; one that ends in a backslash goes on in the next."""
    joined, first = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].rstrip()
        first = first or number
        if line.endswith("\\"):
            joined += line[:-1] + " "
            continue
        joined += line
        if joined.strip():
            yield first, joined
        joined, first = "", 0
    if joined.strip():
        yield first, joined


def _pairs(line: str, source: str, number: int) -> dict[str, str]:
    values: dict[str, str] = {}
    place = 0
    while line[place:].strip():
        match = _PAIR.match(line, place)
        if match is None:
            raise ConfigError(f"{source}, line {number}: expected NAME=VALUE, found {line[place:].strip()[:60]!r}")
        name, place = _KEYS.get(match[1].lower()), match.end()
        if name is None:
            known = ", ".join(_KEYS.values())
            raise ConfigError(f"{source}, line {number}: {match[1]} is not known here; known: {known}")
        if name in values:
            raise ConfigError(f"{source}, line {number}: {name} is given twice")
        values[name] = match[2].strip('"')
    kind = next(iter(values))
    if kind not in _BESIDE:
        raise ConfigError(f"{source}, line {number}: a line begins with one of {', '.join(_BESIDE)}, not with {kind}")
    for name in values:
        if name != kind and name not in _BESIDE[kind]:
            raise ConfigError(f"{source}, line {number}: {name} does not belong to {kind}")
        if name in _NUMBERS:
            _number(values, name, source, number)
    return values


def _switches(values: dict[str, str], source: str, number: int) -> list[Switch]:
    names = _hosts(values, "SwitchName", source, number)
    children = _hosts(values, "Switches", source, number) if "Switches" in values else ()
    # scontrol repeats the nodes of the lower switches on the upper ones, and shows the level that tells them apart.
    is_upper = bool(children) and "Level" in values
    nodes = _hosts(values, "Nodes", source, number) if "Nodes" in values else ()
    if len(names) > 1 and (nodes or children):
        raise ConfigError(
            f"{source}, line {number}: {values['SwitchName']} are {len(names)} switches with the same below them; "
            "give each a line of its own"
        )
    own, repeated = ((), nodes) if is_upper else (nodes, ())
    return [Switch(name, own, children, number, repeated) for name in names]


def _sizes(text: str, source: str, number: int) -> tuple[int, ...]:
    sizes = [whole_number(part, 1) for part in text.split(",")]
    known = tuple(size for size in sizes if size is not None)
    if len(known) < len(sizes):
        raise ConfigError(f"{source}, line {number}: BlockSizes={text[:60]} is not a list of whole numbers from 1 on")
    return known


def _number(values: dict[str, str], name: str, source: str, number: int) -> int:
    found = whole_number(values[name])
    if found is None:
        raise ConfigError(f"{source}, line {number}: {name}={values[name][:60]} is not a whole number")
    return found


def _hosts(values: dict[str, str], name: str, source: str, number: int) -> tuple[str, ...]:
    try:
        return expand_hostlist(values[name])
    except LaunchError as error:
        raise ConfigError(f"{source}, line {number}: {name}: {error}") from None
