"""A store that neither answers nor fails is waited for in words, and not without bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_train.checkpoint.files import chunk_reader
from hpc_train.checkpoint.folders.attempt import ATTEMPT_FILE
from hpc_train.checkpoint.folders.run_location import open_location, run_location
from hpc_train.checkpoint.loading.load import load_newest
from hpc_train.checkpoint.stores import bounded as module
from hpc_train.checkpoint.stores.bounded import bounded
from hpc_train.checkpoint.stores.local_store import LocalBackend
from hpc_train.checkpoint.stores.location import locate
from hpc_train.checkpoint.stores.store import StoreError, is_outage
from hpc_train.cluster import agent_wait
from hpc_train.cluster.agent_wait import AgentLimits
from tests.checkpoint import plain_state
from tests.checkpoint.plain_state import Alone
from tests.worlds import single_world

Patch = pytest.MonkeyPatch
ELEMENTS = 8192
LOOK_S = 0.01
HANG_S = 30 * LOOK_S
"""At least 15 looks, however little time this process gets: no gap between two of them counts for more than two."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: Patch) -> None:
    monkeypatch.setattr(module, "LOOK_S", LOOK_S)
    monkeypatch.setattr(module, "LONGEST_GAP_S", 2 * LOOK_S)
    monkeypatch.setattr(chunk_reader, "LOOK_S", LOOK_S)
    monkeypatch.setattr(agent_wait, "_FIRST_WORD_S", 5 * LOOK_S)


@pytest.fixture
def hangs(monkeypatch: Patch) -> Iterator[Callable[[str, str], None]]:
    """Have a call of the local file system not return for paths that end so, until the test is over."""
    over = threading.Event()

    def hang(call: str, ending: str) -> None:
        usual = getattr(LocalBackend, call)

        def wait(backend: LocalBackend, path: str) -> object:
            if path.endswith(ending):
                over.wait(60)
            return usual(backend, path)

        monkeypatch.setattr(LocalBackend, call, wait)

    yield hang
    over.set()


@pytest.mark.parametrize(("call", "ending"), [("remove", ATTEMPT_FILE), ("make_folder", "7/checkpoints")])
def test_a_store_that_hangs_when_a_run_takes_its_folder_is_told_and_ends_the_start(
    tmp_path: Path, monkeypatch: Patch, hangs: Callable[[str, str], None], call: str, ending: str
) -> None:
    said: list[str] = []
    monkeypatch.setattr("hpc_train.checkpoint.folders.run_location.warn", said.append)
    run_dir = tmp_path / "llama" / "7"
    run_dir.mkdir(parents=True)
    root = run_location(None, run_dir)
    hangs(call, ending)
    with pytest.raises(StoreError, match=rf"on \S+: nothing has moved for .*, so {root} does not answer here") as end:
        open_location(root, run_dir, 1, single_world(), "this start", limits=AgentLimits(1, 1, HANG_S))
    assert is_outage(end.value)
    assert said and f"so far for taking the folder of checkpoints on {single_world().node}, in {root}" in said[0]


@pytest.mark.parametrize(
    ("call", "ending", "what"),
    [("entries", "checkpoints", "looking for checkpoints on"), ("open_read", ".distcp", "reading step_0000003")],
)
def test_a_store_that_hangs_while_a_checkpoint_is_looked_for_or_read_ends_the_load(
    tmp_path: Path, hangs: Callable[[str, str], None], call: str, ending: str, what: str
) -> None:
    """It is an outage, so that no older checkpoint is taken in the place of one that nobody has read."""
    root = tmp_path / "checkpoints"
    for step in (2, 3):
        plain_state.save(Alone(), root, step, ELEMENTS)  # type: ignore[arg-type]
    hangs(call, ending)
    pieces = plain_state.state(Alone(), None, ELEMENTS)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match=rf"{what}.*: nothing has moved for ") as end:
        load_newest(root, pieces, single_world(), limits=AgentLimits(1, HANG_S, HANG_S))
    assert is_outage(end.value)


def test_work_that_takes_long_but_gets_on_is_waited_for(tmp_path: Path) -> None:
    place = locate(tmp_path)

    def work() -> str:
        end = time.monotonic() + 2 * HANG_S
        while time.monotonic() < end:
            time.sleep(0.02)
            place.store.moved()
        return "done"

    assert bounded(place, work, "this", HANG_S, None) == "done"


def test_what_work_raises_is_raised_whatever_it_is(tmp_path: Path) -> None:
    def fail() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        bounded(locate(tmp_path), fail, "this", HANG_S, None)
