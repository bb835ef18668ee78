"""A synthetic fabric from a few numbers: `clos:pods=4,nodes=128,gpus=8,ports=64,core_oversubscription=2`."""

from __future__ import annotations

import random
import re

from hpc_train.cluster.fabric import Fabric, FabricNode
from hpc_train.cluster.whole_number import whole_number
from hpc_train.errors import ConfigError

CLOS_PREFIX = "clos:"
_KNOWN = (
    "pods", "nodes", "gpus", "rails", "ports", "spine_oversubscription", "core_oversubscription", "gbps", "prefix",
    "shuffle",
)  # fmt: skip
# cited: MegaScale (arXiv 2402.15627): switches of 64 ports at 400 Gb/s, half of them down and half up; 8 GPUs a node.
_DEFAULTS = {"gpus": 8, "ports": 64, "gbps": 400}


def clos_fabric(text: str) -> Fabric:
    """Build pods of leaves below a core.

    In a pod each rail has leaves of its own, and a run of neighbouring nodes hangs on one leaf of each rail: as many
    nodes as a leaf has ports down. Spines are as large as the pod needs; all pods meet in one core.

    Args:
        text: `clos:` and settings with commas between them. pods and nodes (of each pod) are required. gpus: of each
            node (8). rails: cards of each node (one a GPU). ports: of a leaf (64). spine_oversubscription: a leaf's
            ports down to those up (1). core_oversubscription: links into a pod's spines to those above (1). gbps: of
            each link (400). prefix: of the nodes' names (n). shuffle: a seed; names then do not follow the switches.

    Raises:
        ConfigError: an unknown, missing or repeated setting, or a number that does not fit.
    """
    settings = _settings(text)
    pods, nodes = _number(settings, "pods", text), _number(settings, "nodes", text)
    gpus, ports, gbps = (_number(settings, name, text) for name in ("gpus", "ports", "gbps"))
    rails = _number({"rails": str(gpus), **settings}, "rails", text)
    if gpus % rails:
        raise ConfigError(f"{text}: gpus={gpus} cannot share rails={rails} evenly; use a divisor of the GPUs")
    ratios = {tier: _ratio(settings, f"{tier}_oversubscription", text) for tier in ("spine", "core")}
    down = int(ports * ratios["spine"] / (1 + ratios["spine"]))
    if not 0 < down < ports:
        raise ConfigError(
            f"{text}: of ports={ports}, spine_oversubscription={ratios['spine']:g} leaves {down} down and "
            f"{ports - down} up; a leaf needs at least one of each. Use more ports"
        )
    return _build(text, pods, nodes, (gpus, rails), (down, ports - down), gbps, ratios, settings)


def _build(
    text: str,
    pods: int,
    nodes: int,
    gpus_rails: tuple[int, int],
    down_up: tuple[int, int],
    gbps: int,
    ratios: dict[str, float],
    settings: dict[str, str],
) -> Fabric:
    gpus, rails = gpus_rails
    down, up = down_up
    names = _names(pods * nodes, settings, text)
    shared = tuple(gpu * rails // gpus for gpu in range(gpus))
    by_name: dict[str, FabricNode] = {}
    pod_of_leaf: dict[str, str] = {}
    for pod in range(pods):
        for group, first in enumerate(range(0, nodes, down)):
            leaves = tuple(f"pod{pod}.leaf{group}.rail{rail}" for rail in range(rails))
            pod_of_leaf.update(dict.fromkeys(leaves, f"pod{pod}"))
            for name in names[pod * nodes + first : pod * nodes + min(first + down, nodes)]:
                by_name[name] = FabricNode(name, leaves, gpus, shared)
    leaves_of_pod = len(pod_of_leaf) // pods
    uplinks = max(1, round(leaves_of_pod * up / ratios["core"]))
    return Fabric(
        nodes=by_name,
        pod_of_leaf=pod_of_leaf,
        core_of_pod={f"pod{pod}": "core" for pod in range(pods)} if pods > 1 else {},
        source=text,
        spine_oversubscription=ratios["spine"],
        core_oversubscription=ratios["core"],
        leaf_uplinks=dict.fromkeys(pod_of_leaf, up),
        pod_uplinks={f"pod{pod}": uplinks for pod in range(pods)} if pods > 1 else {},
        link_bytes_per_s=dict.fromkeys(("leaf", "spine", "core"), gbps * 10**9 // 8),
        are_rails_known=True,
        notes=(f"the fabric is synthetic: {text}",),
    )


def _settings(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in text.removeprefix(CLOS_PREFIX).split(","):
        name, separator, value = (part.strip() for part in item.partition("="))
        if not separator or name not in _KNOWN:
            raise ConfigError(f"{text}: {item!r} is not a setting; write NAME=VALUE with one of {', '.join(_KNOWN)}")
        if name in found:
            raise ConfigError(f"{text}: {name} is given twice")
        found[name] = value
    for name in ("pods", "nodes"):
        if name not in found:
            raise ConfigError(f"{text}: {name}= is missing; for example clos:pods=4,nodes=128 (nodes of each pod)")
    return {**{name: str(value) for name, value in _DEFAULTS.items()}, **found}


def _number(settings: dict[str, str], name: str, text: str) -> int:
    # assumed: larger than any network that is built; it keeps a slip of the finger from filling the memory.
    found = whole_number(settings[name], 1, 1_000_000)
    if found is None:
        raise ConfigError(f"{text[:200]}: {name}={settings[name][:60]} is not a whole number from 1 to 1000000")
    return found


def _ratio(settings: dict[str, str], name: str, text: str) -> float:
    try:
        value = float(settings.get(name, "1"))
    except ValueError:
        value = 0.0
    if not 1 <= value <= 1000:
        raise ConfigError(f"{text}: {name}={settings[name]} is not a ratio from 1 to 1000; 4 means 4:1")
    return value


def _names(count: int, settings: dict[str, str], text: str) -> list[str]:
    if count > 1_000_000:
        raise ConfigError(f"{text}: {count} nodes in all are more than a million")
    prefix = settings.get("prefix", "n")
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", prefix):
        raise ConfigError(f"{text}: prefix={prefix} cannot begin the name of a node; give letters and digits, as in n")
    names = [f"{prefix}{index:0{len(str(count - 1))}d}" for index in range(count)]
    if "shuffle" in settings:
        seed = whole_number(settings["shuffle"])
        if seed is None:
            raise ConfigError(f"{text[:200]}: shuffle={settings['shuffle'][:60]} is not a whole number")
        random.Random(seed).shuffle(names)
    return names
