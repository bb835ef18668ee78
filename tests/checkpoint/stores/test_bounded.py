"""A store that neither answers nor fails is waited for in words, and not without bound."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_train.checkpoint.copies import local_saves
from hpc_train.checkpoint.copies.local_folder import NodeFolder
from hpc_train.checkpoint.copies.local_saves import LocalCopies, LocalFolder
from hpc_train.checkpoint.files import chunk_reader
from hpc_train.checkpoint.folders.attempt import ATTEMPT_FILE
from hpc_train.checkpoint.folders.run_location import open_location, run_location
from hpc_train.checkpoint.format.manifest import MANIFEST_FILE
from hpc_train.checkpoint.loading.load import load_newest
from hpc_train.checkpoint.saving.saver import Saver
from hpc_train.checkpoint.stores import caller, local_store, store
from hpc_train.checkpoint.stores.bounded import bounded, wait_in
from hpc_train.checkpoint.stores.caller import Bound, Caller
from hpc_train.checkpoint.stores.cause import StoreError, StoreHang, is_outage
from hpc_train.checkpoint.stores.local_store import LocalBackend
from hpc_train.checkpoint.stores.location import locate
from hpc_train.cli import main
from hpc_train.cluster import agent_wait
from hpc_train.cluster.agent_wait import AgentLimits
from hpc_train.comm.control import Control
from hpc_train.config import CheckpointConfig, LocalCopiesConfig
from hpc_train.errors import HangError
from tests.checkpoint import plain_state
from tests.checkpoint.convert.hf_folders import SPECS, weights, write_checkpoint
from tests.checkpoint.plain_state import Alone
from tests.worlds import single_world

Patch = pytest.MonkeyPatch
ELEMENTS = 8192
LOOK_S = 0.01
HANG_S = 30 * LOOK_S
"""At least 15 looks, however little time this process gets: no gap between two of them counts for more than two."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: Patch) -> None:
    monkeypatch.setattr(caller, "LOOK_S", LOOK_S)
    monkeypatch.setattr(caller, "LONGEST_GAP_S", 2 * LOOK_S)
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

    assert bounded(place, work, "this", Bound(HANG_S)) == "done"


def test_what_work_raises_is_raised_whatever_it_is(tmp_path: Path) -> None:
    def fail() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        bounded(locate(tmp_path), fail, "this", Bound(HANG_S))


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Put a pipe in the place of a file, whose opening blocks until the test is over."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def put(path: Path) -> None:
        path.unlink(missing_ok=True)
        os.link(pipe, path)

    yield put
    os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def _saver(root: str, run_dir: Path) -> Saver:
    config = CheckpointConfig(writer="rank", on_error="continue")
    limits = AgentLimits(1, 1, HANG_S)
    return Saver(config, locate(root), run_dir, single_world(), None, lambda seconds: None, limits=limits)


def _save(saver: Saver, step: int) -> bool:
    state = plain_state.state(Alone(), step, ELEMENTS)  # type: ignore[arg-type]
    return saver.save(step, state, {"num_updates": step}, must_last=False)


def test_a_save_by_the_ranks_ends_where_a_file_does_not_open(tmp_path: Path, fifo: Callable[[Path], None]) -> None:
    """Whatever checkpoint.on_error says; calls behind it fail at once, and another start cleans up."""
    root = tmp_path / "checkpoints"
    saver = _saver(str(root), tmp_path)
    assert _save(saver, 3)
    (root / "step_0000005").mkdir()
    manifest = root / "step_0000005" / MANIFEST_FILE
    fifo(manifest)
    words = rf"cannot open {manifest}: nothing has moved for .* s, so the store does not answer .*launch\.timeout_s"
    with pytest.raises(HangError, match=words) as end:
        _save(saver, 5)
    assert is_outage(end.value) and len(list(root.glob(".step_0000005.tmp-*"))) == 1
    begin = time.monotonic()
    with pytest.raises(HangError, match=words):
        _save(saver, 6)
    assert time.monotonic() - begin < HANG_S
    manifest.unlink()
    manifest.parent.rmdir()
    assert plain_state.load(Alone(), root, ELEMENTS) == 3
    assert _save(_saver(str(root), tmp_path), 5)
    assert plain_state.load(Alone(), root, ELEMENTS) == 5 and not list(root.glob(".*"))


def test_a_save_by_the_ranks_ends_where_a_server_says_nothing(tmp_path: Path, silent: str) -> None:
    pytest.importorskip("hdfs_native")
    saver = _saver(f"hdfs://{silent}/user/me", tmp_path)
    with pytest.raises(HangError, match=rf"cannot make the folder hdfs://{silent}/user/me.*: nothing has moved for "):
        _save(saver, 1)


@pytest.mark.parametrize("command", ["ls", "verify", "prune", "convert"])
@pytest.mark.parametrize("is_local", [True, False])
def test_a_command_ends_where_its_store_hangs(
    tmp_path: Path,
    fifo: Callable[[Path], None],
    silent: str,
    capsys: pytest.CaptureFixture[str],
    command: str,
    is_local: bool,
) -> None:
    root, what = f"hdfs://{silent}/user/me", f"look at hdfs://{silent}/user/me"
    if is_local:
        root = str(tmp_path / "checkpoints")
        plain_state.save(Alone(), root, 3, ELEMENTS)  # type: ignore[arg-type]
        manifest = tmp_path / "checkpoints/step_0000003" / MANIFEST_FILE
        fifo(manifest)
        what = f"open {manifest}"
    else:
        pytest.importorskip("hdfs_native")
    more = {"prune": ["--keep", "1"], "convert": [str(tmp_path / "out")]}.get(command, [])
    assert main(["ckpt", command, root, *more, "--timeout", str(HANG_S)]) == 5
    told = capsys.readouterr().err
    assert f"s so far for the store to {what}" in told
    assert f"cannot {what}" in told and ": nothing has moved for " in told and "raise --timeout" in told


def test_a_command_that_looks_for_a_run_where_files_hang_ends(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    over = threading.Event()
    monkeypatch.setattr("hpc_train.launch.find_run.folder_of_run", lambda *args: over.wait(60))
    monkeypatch.chdir(tmp_path)
    assert main(["ckpt", "ls", "123", "--timeout", str(HANG_S)]) == 5
    assert "looking for 123: nothing has moved for " in capsys.readouterr().err
    over.set()


def test_a_conversion_whose_source_hangs_leaves_nothing_half_written(
    tmp_path: Path, hangs: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "step_0000007", tmp_path / "hf/model"
    write_checkpoint(source, SPECS["llama"], weights(SPECS["llama"]))
    hangs("open_read", ".distcp")
    assert main(["ckpt", "convert", str(source), str(target), "--timeout", str(HANG_S)]) == 5
    assert "nothing has moved for " in capsys.readouterr().err
    assert list(target.parent.iterdir()) == []


def test_a_large_file_on_a_slow_store_is_waited_for(tmp_path: Path, monkeypatch: Patch) -> None:
    """In pieces, of which each takes less than the bound, and all of them more."""
    monkeypatch.setattr(store, "_PIECE_BYTES", 4)
    data = bytes(range(4 * 13))

    for kind, call in ((local_store._LocalReader, "read_into"), (local_store._LocalWriter, "write")):
        usual = getattr(kind, call)

        def slow(*args: object, usual: Callable[..., object] = usual) -> object:
            time.sleep(HANG_S / 10)
            return usual(*args)

        monkeypatch.setattr(kind, call, slow)
    place = locate(tmp_path).within(Bound(HANG_S)) / "file"
    with place.writing() as file:
        file.write(memoryview(data))
    found = bytearray(len(data) + 1)
    with place.reading() as file:
        assert file.read_into(0, memoryview(found)) == len(data)
    assert bytes(found[:-1]) == data


def test_a_wait_that_is_interrupted_leaves_its_call_to_end_before_the_next(tmp_path: Path) -> None:
    done: list[str] = []
    asking = Caller("this")

    def slow() -> None:
        time.sleep(10 * LOOK_S)
        done.append("slow")

    class Interrupted:
        def look(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asking.call(slow, Interrupted())  # type: ignore[arg-type]
    asking.call(lambda: done.append("clean-up"), wait_in([locate(tmp_path)], "this", Bound(HANG_S)))
    assert done == ["slow", "clean-up"]


def test_copies_on_a_disk_that_hangs_are_left_and_told(
    tmp_path: Path, monkeypatch: Patch, hangs: Callable[[str, str], None]
) -> None:
    said: list[str] = []
    monkeypatch.setattr(local_saves, "warn", said.append)
    monkeypatch.setattr(local_saves, "_ANSWER_S", HANG_S)
    folder = tmp_path / "disk/user/run"
    (tmp_path / "disk").mkdir()
    NodeFolder(folder, "this start", 0)
    hangs("entries", "disk/user/run")
    config = LocalCopiesConfig(path="/", every=1)
    copies = LocalCopies(single_world(), config, LocalFolder(folder, "this start"), (), lambda: "", 1.0)
    copies.drop(("no such key", "n1"))
    assert (
        said[0].startswith(f"copies stay in {folder} on n1, though the store ") and "nothing has moved for" in said[0]
    )


def test_all_ranks_hear_that_a_store_hangs() -> None:
    """Else one would go on where checkpoint.on_error=continue."""
    verdicts: list[object] = [None, None]

    class Heard(Control):
        size = 2

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def all_gather(self, value: object) -> list[object]:
            verdicts[self.rank] = value
            return verdicts

    for rank, error in ((0, StoreHang("it hangs", "Look")), (1, None)):
        with pytest.raises(HangError, match="it hangs"):
            Heard(rank).agree(error)
