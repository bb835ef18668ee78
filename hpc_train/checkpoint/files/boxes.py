"""Read bytes of a checkpoint's files: each file is opened once, a bounded number of them at a time. Needs no torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType

import numpy as np

from hpc_train.checkpoint.stores.location import Location
from hpc_train.checkpoint.stores.store import Reader
from hpc_train.errors import CheckpointError

_MOST_OPEN = 32
"""Of a checkpoint with a file a rank; assumed: far below any limit of open files."""


class BoxFiles:
    """The files of a checkpoint folder, opened as they are asked for and closed at the end."""

    def __init__(self, folder: Location, folder_of: Mapping[str, Location] | None = None) -> None:
        """folder_of: by name, of files that lie elsewhere."""
        self._folder, self._folder_of = folder, folder_of or {}
        self._open: OrderedDict[str, tuple[Reader, ExitStack]] = OrderedDict()

    def __enter__(self) -> BoxFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            self._open.popitem()[1][1].close()

    def read(self, name: str, start: int, num_bytes: int) -> np.ndarray:
        """Bytes of a file, as uint8 in memory of their own.

        Raises:
            CheckpointError: the file is missing, or ends before them.
        """
        raw = np.empty(num_bytes, dtype=np.uint8)
        try:
            count = self._reader(name).read_into(start, raw.data)
        except FileNotFoundError:
            raise CheckpointError(f"{self._place(name)} is missing") from None
        if count != num_bytes:
            raise CheckpointError(f"{self._place(name)} ends {num_bytes - count} bytes early")
        return raw

    def _place(self, name: str) -> Location:
        return self._folder_of.get(name, self._folder) / name

    def _reader(self, name: str) -> Reader:
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name][0]
        if len(self._open) == _MOST_OPEN:
            self._open.popitem(last=False)[1][1].close()
        stack = ExitStack()
        self._open[name] = stack.enter_context(self._place(name).reading()), stack
        return self._open[name][0]
