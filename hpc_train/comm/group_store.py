"""Where the members of one group meet: a store in which each costs as few operations as the smallest group's.

gloo asks its store for every peer's address, one after another, so that a group of n costs n * n questions at the one
server of all ranks. Here a member appends its address to one value, and reads that value once all have come.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hpc_train.errors import CollectiveError

if TYPE_CHECKING:
    # torch's types leave out that a Store can be derived from, and half of its methods.
    _Store = object
else:
    _Store = dist.Store

_HEADER = struct.Struct("<III")  # rank, length of the key, length of the value
_MET, _COUNT, _ALL = "met", "count", "all"


class GroupStore(_Store):
    """One group's view of the store of all ranks. Its members call `set` once each before they ask for anything.

    The first `set` of a member is what the others wait for: five operations in all, whatever the size of the group.
    Everything else goes to `inner` as it is.

    Args:
        inner: a store that can append (a TCPStore, or a PrefixStore of one), with a prefix of this group's own.
        rank: this rank, by which others name it where it does not come.
        ranks: the members' ranks.
        name: of the group, in words.
    """

    def __init__(self, inner: Any, rank: int, ranks: Sequence[int], name: str) -> None:
        super().__init__()
        self._inner = inner
        self._rank = rank
        self._ranks = tuple(ranks)
        self._name = name
        self._has_told = False
        self._known: dict[str, bytes] | None = None

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        if self._has_told:
            self._inner.set(key, data)
            return
        self._has_told = True
        name = key.encode()
        record = _HEADER.pack(self._rank, len(name), len(data)) + name + data
        self._inner.append(_MET, record)
        if self._inner.add(_COUNT, 1) == len(self._ranks):
            self._inner.set(_ALL, b"1")

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        unknown = [key for key in keys if key not in self._meet(timeout)]
        if unknown:
            self._inner.wait(unknown, timeout or self._inner.timeout)

    def get(self, key: str) -> bytes:
        known = self._meet(None)
        return known[key] if key in known else bytes(self._inner.get(key))

    def check(self, keys: Sequence[str]) -> bool:
        unknown = [key for key in keys if self._known is None or key not in self._known]
        return not unknown or bool(self._inner.check(unknown))

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(key, amount))

    def append(self, key: str, value: bytes | str) -> None:
        self._inner.append(key, value)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return bytes(self._inner.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(key))

    def has_extended_api(self) -> bool:
        return False  # what gloo asks for by several keys at once would not pass `get`

    def _meet(self, timeout: timedelta | None) -> dict[str, bytes]:
        """What every member has set, by key; waits until all have."""
        if self._known is None:
            limit = timeout or self._inner.timeout
            try:
                self._inner.wait([_ALL], limit)
            except dist.DistStoreError as error:
                raise self._missing(limit) from error
            self._known = {key: value for _, key, value in _records(bytes(self._inner.get(_MET)))}
        return self._known

    def _missing(self, limit: timedelta) -> CollectiveError:
        came = {rank for rank, _, _ in _records(bytes(self._inner.get(_MET)))} if self._has_told else set()
        missing = [rank for rank in self._ranks if rank not in came]
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        return CollectiveError(
            f"the {self._name} group of {len(self._ranks)} ranks was not made within {limit.total_seconds():g} s: "
            f"{len(missing)} did not arrive: rank {shown}. Look at what they last logged (ranks.tsv has their nodes)."
        )


def _records(data: bytes) -> list[tuple[int, str, bytes]]:
    """(rank, key, value) of each member that has come."""
    records, start = [], 0
    while start < len(data):
        rank, key_length, value_length = _HEADER.unpack_from(data, start)
        middle = start + _HEADER.size + key_length
        records.append((rank, data[middle - key_length : middle].decode(), data[middle : middle + value_length]))
        start = middle + value_length
    return records
