"""Changes of settings that a refusal advises, as values: `advice.checked` tries them before they are told."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

from hpc_train.errors import ConfigError

MOST_TOLD = 4


@final
@dataclass(frozen=True)
class Change:
    """Settings by their dotted keys, and perhaps another number of ranks."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int | None = None

    def with_further(self, other: Change) -> Change:
        """This one with what the other one changes put over it."""
        return Change({**self.settings, **other.settings}, other.num_ranks or self.num_ranks)

    def is_within(self, other: Change) -> bool:
        """Whether the other one does all that this one does."""
        is_of_ranks = self.num_ranks in (None, other.num_ranks)
        return is_of_ranks and all(
            key in other.settings and other.settings[key] == value for key, value in self.settings.items()
        )

    def __str__(self) -> str:
        """As it is typed."""
        words = [
            f"{key}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"
            for key, value in self.settings.items()
        ]
        if self.num_ranks is not None:
            words.append(f"{'on ' if words else ''}{self.num_ranks} ranks")
        return " ".join(words)


class SizesError(ConfigError):
    """Sizes that do not go together.

    problem: what does not. changes: what may mend it, the likeliest first; whether all other checks accept it, nobody
    has asked yet. advice: what to say meanwhile; left out, the changes. otherwise: what to do where no change passes.
    """

    def __init__(
        self, problem: str, changes: Sequence[Change], advice: str | None = None, *, otherwise: str = ""
    ) -> None:
        self.problem, self.changes, self.otherwise = problem, tuple(changes), otherwise
        told = f"Use {listed(self.changes[:MOST_TOLD])}" if advice is None and changes else advice
        super().__init__(f"{problem} {told}" if told else problem)


class CostlySizesError(SizesError):
    """One whose best changes and advice are looked for only when they are asked for, since that takes seconds.

    changes: others, which cost nothing, for a search that meets it many times.
    """

    def __init__(
        self,
        problem: str,
        find: Callable[[], tuple[Sequence[Change], str]],
        otherwise: str,
        changes: Sequence[Change],
    ) -> None:
        super().__init__(problem, changes, otherwise=otherwise)
        self._find = find

    @cached_property
    def found(self) -> tuple[Sequence[Change], str]:
        return self._find()

    def __str__(self) -> str:
        return f"{self.problem} {self.found[1]}"


def listed(changes: Sequence[Change]) -> str:
    return ", or ".join(map(str, changes))


def one_of(key: str, values: Sequence[Any]) -> list[Change]:
    """A change for each value of a setting."""
    return [Change({key: value}) for value in values]


def largest_divisor(number: int, at_most: int) -> int | None:
    """Of a number above 0 the largest divisor that is not above another; None where that is below 1."""
    small = (divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0)
    fitting = (each for divisor in small for each in (divisor, number // divisor) if each <= at_most)
    return max(fitting, default=None)


def nearest(numbers: Sequence[int], to: int) -> list[int]:
    """Of numbers the few that are nearest to one, the nearest first."""
    return sorted(numbers, key=lambda number: (abs(number - to), number))[:MOST_TOLD]
