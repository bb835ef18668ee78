"""Two runs that start in one moment in one folder of a store that cannot create a file only where there is none."""

from __future__ import annotations

import io
import itertools
import json
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from hpc_train.checkpoint.folders.attempt import ATTEMPT_FILE
from hpc_train.checkpoint.folders.run_location import CLAIM_FILE, open_location
from hpc_train.checkpoint.stores.fsspec_store import FsspecBackend
from hpc_train.checkpoint.stores.location import Location
from hpc_train.checkpoint.stores.store import Store
from hpc_train.errors import CheckpointError
from tests.worlds import single_world

_LIMIT_S = 60.0


class _Pace:
    """Lets another thread make its calls one by one, as many as it is let."""

    def __init__(self) -> None:
        self._let: queue.Queue[bool] = queue.Queue()
        self._comes: queue.Queue[bool] = queue.Queue()

    def call(self) -> None:
        """By that thread: it comes to a call of its own."""
        self._comes.put(True)
        self._let.get(timeout=_LIMIT_S)

    def end(self) -> None:
        self._comes.put(False)

    def let(self, calls: int | None = None) -> bool:
        """Wait until it has made so many calls and comes to the next one; None: to its end. Whether there is a next."""
        made = 0
        while self._comes.get(timeout=_LIMIT_S):
            if made == calls:
                self._comes.put(True)
                return True
            made += 1
            self._let.put(True)
        self._comes.put(False)
        return False


class _Client:
    """Of an object store: what is written is there as a whole, when its file is closed."""

    def __init__(self, fs: Any, pace: _Pace) -> None:
        self._fs, self._pace = fs, pace

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._fs, name)
        if not callable(found) or name.startswith("_"):
            return found

        def call(place: Any, *further: Any, **options: Any) -> Any:
            self._wait(place)
            return found(place, *further, **options)

        return call

    def open(self, place: str, mode: str, **options: Any) -> Any:
        if mode == "rb":
            self._wait(place)
            return self._fs.open(place, mode)
        return _Object(lambda data: self.pipe_file(place, data))

    def _wait(self, place: Any) -> None:
        if str(place).endswith((CLAIM_FILE, ATTEMPT_FILE)):
            self._pace.call()


class _Object(io.BytesIO):
    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self._send = send

    def close(self) -> None:
        if not self.closed:
            self._send(self.getvalue())
        super().close()


class _Backend(FsspecBackend):
    def __init__(self, pace: _Pace) -> None:
        super().__init__("memory", "")
        self._pace = pace

    def _client(self) -> Any:
        return _Client(super()._client(), self._pace)


class _Start(threading.Thread):
    """A start of a run by that name; `refusal` when it has ended."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name=name, daemon=True)
        self.pace, self.refusal, self._folder = _Pace(), "", folder / name / "runs" / "llama" / "7"
        self._folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        root = Location(Store("memory://", lambda: _Backend(self.pace)), "/root")
        try:
            open_location(root, self._folder, 1, single_world(), self.name)
        except CheckpointError as problem:
            self.refusal = str(problem)
        self.pace.end()


def _read(name: str) -> str:
    return fsspec.filesystem("memory").cat_file(f"/root/{name}").decode()


@pytest.fixture(autouse=True)
def store() -> Iterator[None]:
    fsspec.filesystem("memory").store.clear()
    yield
    fsspec.filesystem("memory").store.clear()


def test_of_two_starts_in_one_moment_at_most_one_may_save_and_the_folder_is_its_own(tmp_path: Path) -> None:
    """The first up to each of its calls, then the second up to each of its own, then each to its end."""
    saved, refusals, is_longer = set[str](), list[str](), True
    for first_calls in itertools.count():
        if not is_longer:
            break
        for second_calls in itertools.count():
            fsspec.filesystem("memory").store.clear()
            folder = tmp_path / f"{first_calls}-{second_calls}"
            first, second = _Start("first", folder), _Start("second", folder)
            first.start()
            is_longer = first.pace.let(first_calls)
            second.start()
            is_second_longer = second.pace.let(second_calls)
            first.pace.let()
            second.pace.let()
            saved.add(_may_save(first, second))
            refusals += [first.refusal, second.refusal]
            if not is_second_longer:
                break
    assert first_calls > 10 and saved == {"first", "second", "nobody"}
    assert any("another start of the run writes to" in told for told in refusals), "without waiting for its first save"


def _may_save(first: _Start, second: _Start) -> str:
    """Who of the two has started and finds its own name in `attempt`, as each save asks."""
    name, owner = _read(ATTEMPT_FILE).strip(), json.loads(_read(CLAIM_FILE))["run_dir"]
    start = {"first": first, "second": second}[name]
    if start.refusal:
        assert "holds the checkpoints of the run" in start.refusal or "another start" in start.refusal
        return "nobody"
    assert owner == str(start._folder), "it would save in the folder of another run"
    return name
