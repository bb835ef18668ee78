"""Runs with several faults at once, drawn by a seed: sizes of model, mesh and batch that seldom go together; and what
their refusals advise, read as a user would.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

from hpc_train.cluster.allocation import Allocation
from hpc_train.plan.changes import Change


@dataclass(frozen=True)
class Shape:
    """What a user types for a run, and where it is to run."""

    words: tuple[str, ...]
    allocation: Allocation


def allocation_of(num_nodes: int, per_node: int) -> Allocation:
    counts = (per_node,) * num_nodes
    return Allocation(tuple(f"n{number}" for number in range(num_nodes)), counts, counts, None, "a test")


def drawn_shapes(seed: int) -> Iterator[Shape]:
    """Without end; the same for the same seed."""
    for number in count():
        yield _drawn(Random(f"{seed} {number}"))


def _drawn(random: Random) -> Shape:
    num_nodes = random.choice((1, 1, 1, 2, 3, 4))
    allocation = allocation_of(num_nodes, random.randint(1, 16 // num_nodes))
    heads, layers = random.choice((1, 2, 3, 4, 6, 8)), random.randint(1, 12)
    settings: dict[str, Any] = {
        "model.num_layers": layers,
        "model.num_heads": heads,
        "model.num_kv_heads": random.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "model.hidden_size": heads * random.choice((16, 32)),
        "data.seq_len": random.choice((16, 24, 31, 64, 100, 255, 256)),
        "train.global_batch_size": random.choice((1, 2, 3, 4, 6, 8, 12, 16, 24, 30)),
        "train.micro_batch_size": random.choice((1, 1, 1, 2, 3, 4, 5, 8)),
        "train.recompute": random.choice(("none", "none", "selective", "full")),
        "parallel.pp": random.choice((1, 1, 2, 2, 3, 4, 5, 8)),
        "parallel.tp": random.choice((1, 1, 2, 2, 3, 4, 5, 8)),
        "parallel.virtual_stages": random.choice((1, 1, 1, 2, 3, 4, 5)),
    }
    now_and_then = {
        "model.ffn_hidden_size": random.choice((96, 100, 128, 192, 250)),
        "model.attention_window": random.choice((8, 16, 64, 128)),
        "parallel.dp": random.choice((1, 2, 3, 4, 6)),
        "parallel.sequence_parallel": "true",
        "parallel.tp_tiles": random.choice((2, 3, 4, 5, 7, 8)),
        "parallel.schedule": "zero_bubble",
        "parallel.overlap": "false",
        "parallel.gradient_wire": "bf16",
        "parallel.early_updates": "true",
        "fabric.gpu_memory_bytes": random.choice((2, 5, 10, 40)) * 1_000_000,
    }
    share = {
        "parallel.sequence_parallel": 0.4,
        "parallel.tp_tiles": 0.4,
        "parallel.schedule": 0.3,
        "parallel.dp": 0.3,
        "fabric.gpu_memory_bytes": 0.08,
    }
    settings |= {key: value for key, value in now_and_then.items() if random.random() < share.get(key, 0.15)}
    if random.random() < 0.1:
        stages = settings["parallel.pp"] * settings["parallel.virtual_stages"]
        settings["parallel.layers_per_stage"] = f"[{','.join(str(random.randint(1, 3)) for _ in range(stages))}]"
    if random.random() < 0.15:
        settings |= {
            "train.micro_batch_size": 1,
            "parallel.hdp.capacity_tokens": random.choice((64, 128, 130, 200, 256)),
            "parallel.hdp.offload": random.choice(("true", "false")),
            "parallel.hdp.planner": random.choice(("static", "balanced", "balanced")),
            "data.seq_len": random.choice((200, 500, 1000, 5000)),
        }
    return Shape(tuple(f"{key}={value}" for key, value in settings.items()), allocation)


def advised(refusal: str) -> list[Change]:
    """The changes that a refusal names, as a user would type them; none where it says that none was found."""
    if "No change near by was found" in refusal:
        return []
    told = re.search(r" Use ((?:(?! Use ).)+)\.$", refusal, re.DOTALL)
    assert told is not None, refusal
    found = []
    for part in told[1].split(", or "):
        ranks = re.fullmatch(r"(?:(.*) on |)(\d+) ranks", part)
        words = (ranks[1] or "") if ranks else part
        found.append(Change(dict(word.split("=", 1) for word in words.split()), int(ranks[2]) if ranks else None))
    return found


def typed(change: Change) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in change.settings.items())


def followed(shape: Shape, change: Change) -> Shape:
    """The run with a change that was advised."""
    nodes, per_node = len(shape.allocation.nodes), shape.allocation.tasks_per_node[0]
    ranks = change.num_ranks or nodes * per_node
    size = (1, ranks) if nodes == 1 else (ranks // per_node, per_node)
    return Shape((*shape.words, *typed(change)), allocation_of(*size))
