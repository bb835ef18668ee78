"""A disk that fills up, or is mounted read-only, at random moments of saves, and is well again a little later."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpc_train.errors import CheckpointError
from tests.checkpoint import plain_state
from tests.checkpoint.plain_state import Alone
from tests.checkpoint.saving.writers import Save

KINDS = {"full": "no space is left", "read-only": "the file system is mounted read-only"}
"""With the words that a save then fails with."""


@dataclass
class Found:
    """kinds: what was done. failed: saves that failed, by the kind that their words name. steps: saved well."""

    kinds: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    steps: list[int] = field(default_factory=lambda: [0])


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A file system of that size; skips where this user may mount none."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", folder], capture_output=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def trouble(disk: Path, save: Save, times: int, *, seed: int, num_elements: int) -> Found:
    """Save one step after another, and spoil the disk `times` times; load what is there during and after each time.

    save: of a step below `checkpoints` on the disk.

    The first time of each kind begins between two saves and lasts until one has failed; the others are at random.

    A load that finds other numbers than that step's, or less than was saved before, is an AssertionError, and so is a
    save that fails in other words.
    """
    chance, found = random.Random(seed), Found()
    place, is_over = disk / "checkpoints", threading.Event()
    saving = threading.Lock()  # a save that goes well may remove what is being loaded
    strange: list[str] = []

    def save_all() -> None:
        step = 0
        while not is_over.wait(0.001):
            step += 1
            try:
                with saving:
                    save(step)
                found.steps.append(step)
            except CheckpointError as problem:
                kind = next((kind for kind, words in KINDS.items() if words in str(problem)), None)
                found.failed[str(kind)] += 1
                strange.extend([str(problem)] * (kind is None))

    saver = threading.Thread(target=save_all)
    saver.start()
    try:
        _wait_for_a_save(found)
        begin, count = time.monotonic(), len(found.steps)
        time.sleep(0.5)
        save_s = (time.monotonic() - begin) / max(len(found.steps) - count, 1)
        for number in range(times):
            time.sleep(2 * save_s * chance.random())
            kind = list(KINDS)[number % 2]
            is_first = kind not in found.kinds
            with ExitStack() as spoiled:
                with saving if is_first else nullcontext():
                    # The first one of a kind comes between two saves, so that the next one has to fail.
                    spoil = spoiled.enter_context(_full(disk, chance) if kind == "full" else _read_only(disk))
                newest = found.steps[-1]
                time.sleep(2 * save_s * chance.random())
                with saving:
                    assert (plain_state.load(Alone(), place, num_elements) or 0) >= newest
                if is_first:
                    _wait_for_a_failure(found, kind, spoil)
            found.kinds[kind] += 1
            _wait_for_a_save(found)
            with saving:
                newest = found.steps[-1]
                assert (plain_state.load(Alone(), place, num_elements) or 0) >= newest
    finally:
        is_over.set()
        saver.join(60)
    assert not saver.is_alive() and strange == []
    return found


def _wait_for_a_save(found: Found) -> None:
    """That went well, from now on: the disk is well again."""
    count = len(found.steps)
    _wait(lambda: len(found.steps) > count, "no save goes well any more")


def _wait_for_a_failure(found: Found, kind: str, spoil: Callable[[], None]) -> None:
    def has_failed() -> bool:
        spoil()  # again: an agent removes an older checkpoint when a save is over, which makes room for one more
        return found.failed[kind] > 0

    _wait(has_failed, f"no save fails on a disk that is {kind}")


def _wait(is_so: Callable[[], object], words: str) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, words
        time.sleep(0.005)


@contextmanager
def _full(disk: Path, chance: random.Random) -> Iterator[Callable[[], None]]:
    """With less than one more checkpoint's room; makes it so again when called."""
    ballast = disk / "ballast"
    with open(ballast, "wb") as file:

        def fill() -> None:
            free = shutil.disk_usage(disk).free - chance.randrange(1 << 20)
            if free > 0:
                with suppress(OSError):  # a save was quicker, and the disk is full
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)

        fill()
        try:
            yield fill
        finally:
            ballast.unlink()


@contextmanager
def _read_only(disk: Path) -> Iterator[Callable[[], None]]:
    # Refused while a file is open for writing: asked until it falls between two files of a save.
    while subprocess.run(["mount", "-o", "remount,ro", disk], capture_output=True).returncode:
        time.sleep(0.001)
    try:
        yield lambda: None
    finally:
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
