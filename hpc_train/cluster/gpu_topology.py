"""Which network card is nearest to which GPU of a node, and which GPUs share NVLink, as `nvidia-smi` tells it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_train.errors import ConfigError

# cited: the legend that nvidia-smi prints: one PCIe bridge, several, a host bridge, a NUMA node, the whole system.
_NEAREST_FIRST = ("PIX", "PXB", "PHB", "NODE", "SYS")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU = re.compile(r"GPU[0-9]+")
_NIC = re.compile(r"NIC[0-9]+")
_NVLINK = re.compile(r"NV[0-9]+")
_LEGEND = re.compile(r"\s*(NIC[0-9]+):\s+(\S+)\s*")


@dataclass(frozen=True)
class GpuTopology:
    """The matrix. nics: the cards' device names; ways[gpu][nic]: how far the two are, in nvidia-smi's words; islands:
    GPUs that reach each other over NVLink, the same number for those that do.
    """

    num_gpus: int
    nics: tuple[str, ...]
    ways: tuple[tuple[str, ...], ...]
    islands: tuple[int, ...]


def parse_topo_matrix(text: str, source: str = "nvidia-smi topo -m") -> GpuTopology:
    """Read the matrix by the names of its columns; columns of affinity are passed over, whatever they hold.

    Raises:
        ConfigError: there is no matrix, as where the command failed; or with the line, what is malformed.
    """
    lines = _COLOUR.sub("", text).splitlines()
    start = next((index for index, line in enumerate(lines) if "GPU0" in _cells(line)), None)
    if start is None:
        said = next((line.strip() for line in lines if line.strip()), "nothing")
        tabs = " The matrix's columns have to be separated by tabs." if "GPU0" in said.split() else ""
        raise ConfigError(f"{source}: there is no matrix of GPUs; it says: {said[:120]}{tabs}")
    columns, where = _cells(lines[start]), f"{source}, line {start + 1}"
    is_device = [bool(name) and "Affinity" not in name and "NUMA" not in name for name in columns]
    gpu_columns = {index: name for index, name in enumerate(columns) if _GPU.fullmatch(name)}
    nic_columns = {index: name for index, name in enumerate(columns) if is_device[index] and index not in gpu_columns}
    _check_once([*gpu_columns.values(), *nic_columns.values()], where)
    gpus = list(gpu_columns.values())
    rows: dict[str, list[str]] = {}
    for number, line in enumerate(lines[start + 1 :], start + 2):
        cells = _cells(line)
        if cells[0] in rows:
            raise ConfigError(f"{source}, line {number}: {cells[0]} has a row already")
        if _GPU.fullmatch(cells[0]):
            rows[cells[0]] = cells
        for index, name in (*gpu_columns.items(), *nic_columns.items()) if cells[0] in gpus else ():
            word = cells[index] if index < len(cells) else ""
            is_known = word in _NEAREST_FIRST or (index in gpu_columns and _NVLINK.fullmatch(word) is not None)
            if (word != "X") if name == cells[0] else not is_known:
                raise ConfigError(f"{source}, line {number}: {word!r} below {name} is no kind of connection there")
    if sorted(rows) != sorted(gpus):
        raise ConfigError(f"{where}: the columns are {', '.join(gpus)}, the rows {', '.join(rows)}")
    nics = _device_names(list(nic_columns.values()), lines, where)
    _check_once(nics, where)
    ways = tuple(tuple(rows[gpu][index] for index in nic_columns) for gpu in gpus)
    between = [[rows[gpu][index] for index in gpu_columns] for gpu in gpus]
    _check_both_ways(gpus, between, source)
    links = [[_NVLINK.fullmatch(word) is not None for word in words] for words in between]
    return GpuTopology(len(gpus), nics, ways, _islands(links))


def nics_of_gpus(topology: GpuTopology) -> tuple[str | None, ...]:
    """The card for each GPU: the nearest one, None where that is not clear.

    GPUs that are equally near to several cards take them in turn. Cards that are on another NUMA node, and more cards
    than GPUs at the same distance, decide nothing: some may be for storage or management.
    """
    nearest: list[tuple[int, ...]] = []
    for ways in topology.ways:
        best = min((_NEAREST_FIRST.index(way) for way in ways), default=len(_NEAREST_FIRST))
        is_far = best >= _NEAREST_FIRST.index("SYS")
        nearest.append(() if is_far else tuple(i for i, way in enumerate(ways) if _NEAREST_FIRST.index(way) == best))
    chosen: list[str | None] = []
    for gpu, cards in enumerate(nearest):
        rivals = [other for other, their in enumerate(nearest) if their == cards]
        is_clear = 0 < len(cards) <= len(rivals)
        chosen.append(topology.nics[cards[rivals.index(gpu) % len(cards)]] if is_clear else None)
    return tuple(chosen)


def parse_nvlink_domain(text: str) -> str | None:
    """The domain of NVLink over several nodes in the output of `nvidia-smi -q`: cluster and clique; None without one.

    Raises:
        ConfigError: the GPUs of the node are in different ones, or half of what says it is missing.
    """
    sections: list[dict[str, str]] = []
    for line in text.splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if name == "Fabric":
            sections.append({})
        elif name in ("ClusterUUID", "CliqueId") and sections:
            sections[-1][name] = value
    told = [section for section in sections if section]
    if any(len(section) == 1 for section in told):
        raise ConfigError("nvidia-smi -q: a GPU has one of ClusterUUID and CliqueId and not the other")
    pairs = [(section["ClusterUUID"], section["CliqueId"]) for section in told]
    known = {pair for pair in pairs if "N/A" not in pair and set(pair[0]) - set("0-")}
    if len(known) > 1 or (known and len(set(pairs)) > 1):
        raise ConfigError(f"nvidia-smi -q: the GPUs of one node are in different NVLink domains: {sorted(set(pairs))}")
    return None if not known else ".".join(known.pop())


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("\t")]


def _check_once(names: Sequence[str], where: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: {name} is there more than once")


def _check_both_ways(gpus: Sequence[str], words: Sequence[Sequence[str]], source: str) -> None:
    for gpu, row in enumerate(words):
        for other in range(gpu):
            if row[other] != words[other][gpu]:
                raise ConfigError(
                    f"{source}: {gpus[other]} reaches {gpus[gpu]} over {words[other][gpu]}, and this one that over "
                    f"{row[other]}"
                )


def _device_names(columns: Sequence[str], lines: Sequence[str], where: str) -> tuple[str, ...]:
    """Names of devices: in the columns themselves before driver 515, in a legend below since then."""
    matches = (_LEGEND.fullmatch(line) for line in lines)
    legend: Mapping[str, str] = {match[1]: match[2] for match in matches if match is not None}
    for name in columns:
        if _NIC.fullmatch(name) and name not in legend:
            raise ConfigError(f"{where}: the legend does not say which device {name} is")
    return tuple(legend.get(name, name) for name in columns)


def _islands(links: Sequence[Sequence[bool]]) -> tuple[int, ...]:
    island = list(range(len(links)))
    for gpu, row in enumerate(links):
        for other, is_linked in enumerate(row):
            if is_linked and island[gpu] != island[other]:
                low, high = sorted((island[gpu], island[other]))
                island = [low if number == high else number for number in island]
    return tuple(island)
