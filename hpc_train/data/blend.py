"""Mix several sources by weight, with a position that can be saved and found again exactly."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, final

from hpc_train.data.packing import Packing
from hpc_train.errors import CheckpointError, ConfigError

_STATE_VERSION = 1
_ORDERING = ("seq_len", "long_documents", "seed", "packed")
_SETTINGS = {"seq_len": "data.seq_len", "long_documents": "data.long_documents", "seed": "train.seed"}
"""By which keys of the configuration users change these."""
"""What the order of all sources' rows depends on, beside the sources."""


@final
@dataclass(frozen=True, slots=True)
class RowRef:
    """Which row: of which source, in which epoch of that source."""

    source: int
    epoch: int
    row: int


@final
@dataclass(frozen=True)
class SourceIdentity:
    """What a source is called, and by what it is recognised: its index's hash, and which of its documents."""

    prefix: str
    idx_sha256: str
    first_document: int = 0
    num_documents: int | None = None
    loss_mask: bool = False

    def key(self) -> tuple[Any, ...]:
        """What must be equal; a data set that moved to another folder is still the same."""
        return (self.idx_sha256, self.first_document, self.num_documents, self.loss_mask)


@final
@dataclass
class _Cursor:
    """Where a source is. `row` may equal the epoch's number of rows: then the next epoch's is next."""

    epoch: int = 0
    row: int = 0
    consumed: int = 0  # rows since the run began
    taken: int = 0  # since this blend began; the weights apply to these: rows, or tokens where rows are not packed


@final
class Blend:
    """An endless, deterministic sequence of rows. At each moment the source that lacks most comes next.

    It lacks rows, or tokens where rows are not packed and so differ in length.

    All ranks hold the same blend and take the same rows, so nobody needs to be told what comes.
    """

    def __init__(
        self,
        packings: Sequence[Packing],
        weights: Sequence[float],
        identities: Sequence[SourceIdentity],
        *,
        epochs: int | None = None,
    ) -> None:
        """Mix packings by weight.

        Args:
            epochs: After so many, a source gives no more rows. None: never.

        Raises:
            ConfigError: no source, a weight that is not a positive number, or packed and unpacked sources together.
        """
        if not packings or not len(packings) == len(weights) == len(identities):
            raise ConfigError(
                f"a blend needs a weight and an identity for each source: {len(packings)} sources, "
                f"{len(weights)} weights, "
                f"{len(identities)} identities."
            )
        if len({packing.is_packed for packing in packings}) > 1:
            raise ConfigError("the sources of one blend are all packed or none of them")
        for identity, weight in zip(identities, weights, strict=True):
            if not math.isfinite(weight) or weight <= 0:
                raise ConfigError(
                    f"the weight {weight} of {identity.prefix} must be a number above 0. Leave the source out."
                )
        self._packings, self._identities, self._epochs = tuple(packings), tuple(identities), epochs
        self._weights = tuple(float(weight) for weight in weights)
        self._shares = _whole_numbers(self._weights)
        self._cursors = [_Cursor() for _ in packings]
        self._is_packed = packings[0].is_packed

    @property
    def packings(self) -> tuple[Packing, ...]:
        return self._packings

    @property
    def total(self) -> int:
        """Rows taken since the run began."""
        return sum(cursor.consumed for cursor in self._cursors)

    def take(self, num_rows: int) -> list[RowRef]:
        """Give the next rows; fewer only when every source has had its epochs."""
        rows: list[RowRef] = []
        while len(rows) < num_rows and (source := self._next_source()) is not None:
            rows.append(self._take_from(source))
        return rows

    def take_tokens(self, num_tokens: int) -> tuple[list[RowRef], list[int]]:
        """Give the next rows up to the first that goes beyond so many tokens, and the tokens of each.

        It comes first the next time, so num_tokens has to be as many as a row may have.
        """
        rows: list[RowRef] = []
        lengths: list[int] = []
        left = num_tokens
        while (source := self._next_source()) is not None and (length := self._next_length(source)) <= left:
            left -= length
            rows.append(self._take_from(source, length))
            lengths.append(length)
        return rows, lengths

    def _next_length(self, source: int) -> int:
        cursor = self._cursors[source]
        return self._packings[source].row_length(cursor.epoch, cursor.row)

    def _take_from(self, source: int, weight: int = 1) -> RowRef:
        cursor = self._cursors[source]
        row = RowRef(source, cursor.epoch, cursor.row)
        cursor.taken += weight
        cursor.row += 1
        cursor.consumed += 1
        return row

    def _next_source(self) -> int | None:
        open_sources = [i for i in range(len(self._packings)) if self._has_rows(i)]
        if not open_sources:
            return None
        whole = sum(self._shares)
        after = sum(cursor.taken for cursor in self._cursors) + 1
        # The largest deficit against the weights, in whole numbers; the first source wins a tie.
        return max(open_sources, key=lambda i: (self._shares[i] * after - self._cursors[i].taken * whole, -i))

    def _has_rows(self, source: int) -> bool:
        cursor, packing = self._cursors[source], self._packings[source]
        if self._epochs is not None and cursor.epoch >= self._epochs:
            return False
        if cursor.row < packing.rows_in_epoch(cursor.epoch):
            return True
        cursor.epoch, cursor.row = cursor.epoch + 1, 0
        return self._epochs is None or cursor.epoch < self._epochs

    def describe(self) -> dict[str, Any]:
        """What the order of rows depends on."""
        first = self._packings[0]
        return {
            "seq_len": first.seq_len,
            "long_documents": first.policy,
            "seed": first.seed,
            **({} if self._is_packed else {"packed": False}),
            "sources": [
                {
                    "prefix": identity.prefix,
                    "idx_sha256": identity.idx_sha256,
                    "first_document": identity.first_document,
                    "num_documents": identity.num_documents,
                    "loss_mask": identity.loss_mask,
                    "weight": weight,
                }
                for identity, weight in zip(self._identities, self._weights, strict=True)
            ],
        }

    def state(self) -> dict[str, Any]:
        """Give the position, as JSON."""
        cursors = [{"epoch": c.epoch, "row": c.row, "consumed": c.consumed, "taken": c.taken} for c in self._cursors]
        blend = self.describe()
        return {
            "version": _STATE_VERSION,
            "hash": _hash(blend),
            "total": self.total,
            "blend": blend,
            "cursors": cursors,
        }

    def restore(self, state: Mapping[str, Any], allow_changed: bool = False) -> list[str]:
        """Go to a saved position.

        With allow_changed, a source that is still there, and whose rows are still the same, goes on where it
        was; one whose rows differ now (seq_len, seed, policy) begins its next epoch; a new one begins. The
        weights count from here.

        Returns:
            What changed since the state was saved, a sentence each.

        Raises:
            CheckpointError: the state is not one of ours, or the blend changed and that is not allowed.
        """
        try:
            version, saved = state["version"], state["blend"]
            cursors = [_Cursor(**cursor) for cursor in state["cursors"]]
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"the saved data position cannot be read: {error!r} in {dict(state)!r:.200}."
            ) from error
        if version != _STATE_VERSION or len(cursors) != len(saved["sources"]):
            raise CheckpointError(
                f"the saved data position has version {version} and {len(cursors)} positions for "
                f"{len(saved['sources'])} "
                f"sources; this program reads version {_STATE_VERSION}."
            )
        now = self.describe()
        if _hash(saved) == _hash(now):
            self._cursors = cursors
            return []
        changes = _changes(saved, now)
        if not allow_changed:
            raise CheckpointError(
                f"the data blend is not the one of the checkpoint: {'; '.join(changes)}. Rows would repeat "
                "or be left out "
                "unseen. Restore the old blend, or accept the change with data.allow_changed_blend=true."
            )
        self._cursors = _carry_over(saved, cursors, now)
        return changes


def _whole_numbers(weights: Sequence[float]) -> list[int]:
    """Turn weights into whole numbers of the same proportion, as they were written (0.1 is one tenth)."""
    fractions = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * scale) for fraction in fractions]


def _value(blend: Mapping[str, Any], name: str) -> Any:
    """Of what is the same for all sources. Rows were always packed once, and states did not say so."""
    return blend.get(name, True) if name == "packed" else blend[name]


def _source_key(source: Mapping[str, Any]) -> tuple[Any, ...]:
    return SourceIdentity(**{name: value for name, value in source.items() if name != "weight"}).key()


def _hash(blend: Mapping[str, Any]) -> str:
    sources = [[*_source_key(source), source["weight"]] for source in blend["sources"]]
    value = [blend["seq_len"], blend["long_documents"], blend["seed"], sources]
    if not blend.get("packed", True):
        value.append("not packed")
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    changes = [
        f"{_SETTINGS.get(name, name)} was {_value(saved, name)} and is {_value(now, name)}"
        for name in _ORDERING
        if _value(saved, name) != _value(now, name)
    ]
    if len(saved["sources"]) != len(now["sources"]):
        changes.append(f"{len(saved['sources'])} sources became {len(now['sources'])}")
    for number, (old, new) in enumerate(zip(saved["sources"], now["sources"], strict=False)):
        if old["prefix"] != new["prefix"] and _source_key(old) != _source_key(new):
            changes.append(f"source {number} was {old['prefix']} and is {new['prefix']}")
        elif old["idx_sha256"] != new["idx_sha256"]:
            changes.append(f"the index of {new['prefix']} has other contents")
        else:
            for name in ("first_document", "num_documents", "loss_mask", "weight"):
                if old[name] != new[name]:
                    changes.append(f"{name} of {new['prefix']} was {old[name]} and is {new[name]}")
    return changes


def _carry_over(saved: Mapping[str, Any], cursors: Sequence[_Cursor], now: Mapping[str, Any]) -> list[_Cursor]:
    """Positions under the new blend, for the sources that both have."""
    same_rows = all(_value(saved, name) == _value(now, name) for name in _ORDERING)
    old = list(zip(saved["sources"], cursors, range(len(cursors)), strict=True))
    result = []
    for number, source in enumerate(now["sources"]):
        match = next((entry for entry in old if _source_key(entry[0]) == _source_key(source)), None)
        if match is None:
            result.append(_Cursor())
            continue
        old.remove(match)
        _, cursor, old_number = match
        # The place in the blend is part of the key of a source's order.
        if same_rows and old_number == number:
            result.append(_Cursor(cursor.epoch, cursor.row, cursor.consumed))
        else:
            result.append(_Cursor(cursor.epoch + (cursor.row > 0), 0, cursor.consumed))
    return result
