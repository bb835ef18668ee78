"""Refusals with advice that holds: what is advised has passed the checks that refused, and is told whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError

from hpc_train.cluster.allocation import Allocation
from hpc_train.config import Config
from hpc_train.errors import ConfigError, HpcTrainError
from hpc_train.plan.changes import MOST_TOLD, Change, CostlySizesError, SizesError, listed

T = TypeVar("T")
Check = Callable[[Config, Allocation], T]
_MOST_TRIED = 40
"""Changes that are tried for one refusal (assumed: a check takes milliseconds, and nobody waits for advice)."""
_MOST_STEPS = 3
"""Refusals in a row that changes may mend together."""
_GPU_MEMORY_BYTES = 80_000_000_000
"""What advice has to fit in where fabric.gpu_memory_bytes does not say it (assumed: that for which the recipes are)."""


def checked(config: Config, allocation: Allocation, check: Check[T], further_nodes: Sequence[str] | None = None) -> T:
    """What a check gives; where it refuses sizes, the refusal says which changes it accepts.

    Args:
        further_nodes: That there are beside those of the allocation. None: any.

    Raises:
        ConfigError: the check refuses. Other errors as the check.
    """
    try:
        return check(config, allocation)
    except SizesError as refused:
        raise ConfigError(_told(refused, config, allocation, check, further_nodes)) from None


def whole_change(config: Config, change: Change, num_ranks: int) -> Change:
    """A change with what goes along, so that no setting is left without effect and the mesh still fills the ranks."""
    parallel = config.parallel
    settings = {key: value for key, value in change.settings.items() if value != _present(config, key)}
    tp, pp = settings.get("parallel.tp", parallel.tp), settings.get("parallel.pp", parallel.pp)
    virtual_stages = settings.get("parallel.virtual_stages", parallel.virtual_stages)
    has_other_stages = (pp, virtual_stages) != (parallel.pp, parallel.virtual_stages)
    others = pp * parallel.cp * tp
    along = [
        ("parallel.sequence_parallel", False, tp == 1 and parallel.sequence_parallel),
        ("parallel.tp_tiles", 1, tp == 1 and parallel.tp_tiles > 1),
        ("parallel.layers_per_stage", None, has_other_stages and parallel.layers_per_stage is not None),
        ("parallel.schedule", "1f1b", pp == 1 and parallel.schedule == "zero_bubble"),
        ("parallel.early_updates", None, parallel.early_updates and virtual_stages < 4),
        ("parallel.dp", num_ranks // others, parallel.dp not in (None, num_ranks / others) and num_ranks % others == 0),
    ]
    needed = {key: value for key, value, is_needed in along if is_needed and key not in settings}
    return Change({**settings, **needed}, change.num_ranks)


def _present(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def with_change(config: Config, change: Change) -> Config | None:
    """The changed configuration; None where its sections refuse it."""
    tree = config.model_dump()
    for key, value in change.settings.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place[section]
        place[name] = value
    try:
        return Config.model_validate(tree)
    except ValidationError:
        return None


def _told(
    refused: SizesError,
    config: Config,
    allocation: Allocation,
    check: Check[Any],
    further_nodes: Sequence[str] | None,
) -> str:
    """The refusal with the changes that pass; or with why the likeliest does not, and what else may help."""
    passing, first_refusal = _found(refused, config, allocation, check, further_nodes)
    if passing:
        return f"{refused.problem} Use {listed(passing)}."
    if first_refusal:
        reason = f"No change near by was found that all checks accept: {first_refusal.removesuffix('.')}."
        return f"{refused.problem} {reason} {refused.otherwise}".rstrip()
    return str(refused)


def _found(
    refused: SizesError,
    config: Config,
    allocation: Allocation,
    check: Check[Any],
    further_nodes: Sequence[str] | None,
) -> tuple[list[Change], str]:
    """The changes that pass, those of fewest steps and of ranks alone first; and the first refusal of one.

    Many meshes fill the ranks and hold no large model, which are left out. Where all are, who asks has larger GPUs.
    """
    changes = refused.found[0] if isinstance(refused, CostlySizesError) else refused.changes
    waiting = deque((change, 1) for change in changes)
    passing: list[Change] = []
    too_large: list[Change] = []
    first_refusal, tried = "", 0
    while waiting and tried < _MOST_TRIED and len(passing) + len(too_large) < MOST_TOLD:
        change, steps = waiting.popleft()
        change = whole_change(config, change, change.num_ranks or allocation.num_tasks)
        is_nothing = not change.settings and change.num_ranks in (None, allocation.num_tasks)
        if is_nothing or any(found.is_within(change) for found in passing + too_large):
            continue
        changed = with_change(config, change)
        resized = allocation if change.num_ranks is None else _resized(allocation, change.num_ranks, further_nodes)
        if changed is None or resized is None:
            continue
        tried += 1
        try:
            check(changed, resized)
            (passing if _has_memory(changed, resized, check) else too_large).append(change)
        except SizesError as further:
            first_refusal = first_refusal or f"with {change} {further.problem}"
            if steps < _MOST_STEPS:
                for other in further.changes:
                    if (both := change.with_further(other)) is not None:
                        # More ranks for the mesh that was asked for come before other meshes of more ranks.
                        (waiting.append if both.settings else waiting.appendleft)((both, steps + 1))
        except HpcTrainError as problem:
            first_refusal = first_refusal or f"with {change} {problem}"
    return passing or too_large, first_refusal


def _has_memory(config: Config, allocation: Allocation, check: Check[Any]) -> bool:
    """Whether what a check accepts fits into a GPU of which the configuration says nothing."""
    if config.fabric.gpu_memory_bytes is not None:
        return True
    limited = with_change(config, Change({"fabric.gpu_memory_bytes": _GPU_MEMORY_BYTES}))
    assert limited is not None
    try:
        check(limited, allocation)
    except HpcTrainError:
        return False
    return True


def _resized(allocation: Allocation, num_ranks: int, further_nodes: Sequence[str] | None) -> Allocation | None:
    """So many ranks on as many nodes as they need, each with as many as now; None where nodes differ or are too few."""
    per_node = allocation.tasks_per_node[0]
    if len(allocation.nodes) == 1 and (num_ranks <= per_node or further_nodes is None):
        return replace(allocation, tasks_per_node=(num_ranks,))
    if {*allocation.tasks_per_node} != {per_node} or num_ranks % per_node:
        return None
    count = num_ranks // per_node
    missing = max(0, count - len(allocation.nodes))
    names = [f"further{number}" for number in range(missing)] if further_nodes is None else further_nodes[:missing]
    nodes = (*allocation.nodes, *names)[:count]
    if len(nodes) < count:
        return None
    gpus = (allocation.gpus_per_node[0],) * count
    return replace(allocation, nodes=nodes, tasks_per_node=(per_node,) * count, gpus_per_node=gpus)
