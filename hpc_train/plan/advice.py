"""Refusals with advice that holds: what is advised has passed the checks that refused, and is told whole."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from hpc_train.cluster.allocation import Allocation
from hpc_train.config import Config
from hpc_train.errors import ConfigError, HpcTrainError
from hpc_train.plan.changes import MOST_TOLD, Change, CostlySizesError, SizesError, listed

T = TypeVar("T")
Check = Callable[[Config, Allocation], T]
_MOST_TRIED = 600
"""Changes that are tried for one refusal (assumed; what that leaves without advice:
docs/measurements/advice.md)."""
_SURE_TRIED, _MOST_S = 20, 0.5
"""So many are tried in any case, the others while that has taken less than so long of the processor (assumed: nobody
waits for advice; a check takes 0.3 ms with a small model, and up to 40 ms with a large one on 12,288 ranks)."""
_OF_THE_RUN = {"data.seq_len", "train.global_batch_size"}
"""With which another run is trained than was asked for."""
_COUNT_OF_RANKS = 2.5
"""Other ranks, which may be hard to get, for another run: behind two settings. For the same run they are one change."""
_MOST_STEPS = 8
"""Refusals in a row that changes may mend together."""
_FURTHER_TRIED = 40
"""Tries for further advice behind the first that passes (assumed)."""
_GPU_MEMORY_BYTES = 80_000_000_000
"""What advice has to fit in where fabric.gpu_memory_bytes does not say it (assumed: that for which the recipes are)."""


def checked(
    config: Config,
    allocation: Allocation,
    check: Check[T],
    further_nodes: Sequence[str] | None = None,
    clock: Callable[[], float] = time.process_time,
) -> T:
    """What a check gives; where it refuses sizes, the refusal says which changes it accepts.

    Args:
        further_nodes: That there are beside those of the allocation. None: any.
        clock: By which the search for changes ends, in seconds.

    Raises:
        ConfigError: the check refuses. Other errors as the check.
    """
    try:
        return check(config, allocation)
    except SizesError as refused:
        raise ConfigError(_told(refused, _Search(config, allocation, check, further_nodes, clock))) from None


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
    whole = {**settings, **needed}
    return Change({key: whole[key] for key in sorted(whole, key=lambda key: _place(config, key))}, change.num_ranks)


def _place(config: Config, key: str) -> list[int]:
    """Where a setting stands in the configuration."""
    value: Any = config
    places = []
    for name in key.split("."):
        places.append(list(type(value).model_fields).index(name))
        value = getattr(value, name)
    return places


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


def _told(refused: SizesError, search: _Search) -> str:
    """The refusal with the changes that pass; or with why one near by does not, and what else may help."""
    found = search.found(refused)
    if found:
        return f"{refused.problem} Use {listed(found)}."
    met = search.met
    reason = f"No change near by was found that all checks accept{f': {met[0]}' if met else ''}."
    return f"{refused.problem} {reason} {refused.otherwise or (met[1] if met else '')}".rstrip()


class _Search:
    """Tries changes by the check that refused, the nearest of all that wait first.

    Where one meets a refusal, each of that one's changes is put over it and waits, too. While that finds nothing, the
    second half of the tries goes on from those changes on whose way most refusals were mended.

    met: a refusal of a change and what may help where none passes; the first that says so, if any does.
    """

    def __init__(
        self,
        config: Config,
        allocation: Allocation,
        check: Check[Any],
        further_nodes: Sequence[str] | None,
        clock: Callable[[], float],
    ) -> None:
        self._config, self._allocation, self._check = config, allocation, check
        self._further_nodes, self._clock = further_nodes, clock
        self._waiting: list[tuple[tuple[float, ...], int, _Step]] = []
        self._seen: set[str] = set()
        self._is_deep = False
        self.met: tuple[str, str] | None = None

    def found(self, refused: SizesError) -> list[Change]:
        """The changes that pass, the nearest first.

        Many meshes fill the ranks and hold no large model, which are left out. Where all are, who asks has larger GPUs.
        """
        if isinstance(refused, CostlySizesError):
            self._wait(refused.found[0], Change(), 0)
        self._wait(refused.changes, Change(), 1)
        passing: list[Change] = []
        too_large: list[Change] = []
        tried, most_tried, begin_s = 0, _MOST_TRIED, self._clock()
        while self._waiting and tried < most_tried and len(passing) < MOST_TOLD:
            took_s = self._clock() - begin_s if tried >= _SURE_TRIED else 0.0
            if took_s > _MOST_S:
                break
            if not passing and (tried > _MOST_TRIED // 2 or took_s > _MOST_S / 2):
                self._go_deep()
            step = heapq.heappop(self._waiting)[-1]
            changed = self._changed(step.whole)
            if changed is None or any(known.is_within(step.whole) for known in passing + too_large):
                continue
            tried += 1
            further = self._refusal(changed)
            if further is None:
                if not self._has_memory(*changed):
                    too_large.append(step.whole)
                    continue
                least = self._least(step)
                if not any(known.is_within(least) for known in passing):
                    passing.append(least)
                    most_tried = min(most_tried, tried + _FURTHER_TRIED)
                continue
            otherwise = further.otherwise if isinstance(further, SizesError) else ""
            if self.met is None or (otherwise and not self.met[1]):
                problem = further.problem if isinstance(further, SizesError) else str(further)
                self.met = f"with {step.whole} {problem.removesuffix('.')}", otherwise
            if isinstance(further, SizesError):
                self._wait(further.changes, step.chosen, step.number + 1)
        return passing or too_large[:MOST_TOLD]

    def _wait(self, changes: Sequence[Change], before: Change, number: int) -> None:
        """For each change over those before, if it is one and new. number: of steps; 0: to be tried at once."""
        for change in changes:
            step = self._step(before.with_further(change), number)
            text = str(step.whole)
            if text and text not in self._seen and number <= _MOST_STEPS:
                self._seen.add(text)
                heapq.heappush(self._waiting, (self._order(step), len(self._seen), step))

    def _step(self, chosen: Change, number: int) -> _Step:
        if chosen.num_ranks == self._allocation.num_tasks:
            chosen = replace(chosen, num_ranks=None)
        whole = whole_change(self._config, chosen, chosen.num_ranks or self._allocation.num_tasks)
        return _Step(chosen, whole, number)

    def _order(self, step: _Step) -> tuple[float, ...]:
        nearest = _distance(self._config, self._allocation, step.whole) if step.number else (0.0, 0.0)
        return (-step.number, *nearest) if self._is_deep else nearest

    def _go_deep(self) -> None:
        """From now on those of most steps first, instead of the nearest."""
        if not self._is_deep:
            self._is_deep = True
            self._waiting = [(self._order(step), number, step) for _, number, step in self._waiting]
            heapq.heapify(self._waiting)

    def _changed(self, change: Change) -> tuple[Config, Allocation] | None:
        """None where the configuration's sections refuse it, or the nodes have no such number of ranks."""
        config, allocation = with_change(self._config, change), self._allocation
        resized: Allocation | None = allocation
        if change.num_ranks is not None:
            resized = _resized(allocation, change.num_ranks, self._further_nodes)
        return None if config is None or resized is None else (config, resized)

    def _refusal(self, changed: tuple[Config, Allocation]) -> HpcTrainError | None:
        try:
            self._check(*changed)
        except HpcTrainError as problem:
            return problem
        return None

    def _least(self, step: _Step) -> Change:
        """What is left of a change that passes without what is not needed, since a later one mended that, too."""
        for key in [*step.chosen.settings, None] if step.number > 1 else []:
            settings = {other: value for other, value in step.chosen.settings.items() if other != key}
            fewer = self._step(Change(settings, None if key is None else step.chosen.num_ranks), step.number)
            changed = self._changed(fewer.whole)
            if changed and self._refusal(changed) is None and self._has_memory(*changed):
                step = fewer
        return step.whole

    def _has_memory(self, config: Config, allocation: Allocation) -> bool:
        """Whether what a check accepts fits into a GPU of which the configuration says nothing."""
        if config.fabric.gpu_memory_bytes is not None:
            return True
        limited = with_change(config, Change({"fabric.gpu_memory_bytes": _GPU_MEMORY_BYTES}))
        assert limited is not None
        return self._refusal((limited, allocation)) is None


@dataclass(frozen=True)
class _Step:
    """A change that waits: what refusals proposed, that with what goes along, and how many refusals it is from."""

    chosen: Change
    whole: Change
    number: int


def _distance(config: Config, allocation: Allocation, change: Change) -> tuple[float, float]:
    """How much a change asks for: as how many settings it counts; then by which factors."""
    factors = {key: _doublings(_present(config, key), value) for key, value in change.settings.items()}
    count = sum(_counts(key, factor) for key, factor in factors.items())
    if change.num_ranks is None:
        return count, sum(factors.values())
    return count + (_COUNT_OF_RANKS if count else 1.25), sum(factors.values()) + _doublings(
        allocation.num_tasks, change.num_ranks
    )


def _counts(key: str, factor: float) -> float:
    """As how many settings one counts: what makes another run for more; by more than a factor of two, for most."""
    return 1.0 if key not in _OF_THE_RUN else 1.5 if factor <= 1 else _COUNT_OF_RANKS + 0.25


def _doublings(before: Any, after: Any) -> float:
    """Between two numbers; 1 between other values."""
    if type(before) is type(after) is int:
        return abs(math.log2(after / before))
    return 1.0


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
