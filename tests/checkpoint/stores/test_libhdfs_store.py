"""The store that speaks through pyarrow, whose file system is a made one here: no Java, no pyarrow.

What pyarrow does is known from its source (Arrow, hdfs.cc): a path that cannot be looked at, for whatever reason, is
one where nothing is; a listing and an opening fail with libhdfs' error number.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hpc_train.checkpoint.folders.folder import sound_checkpoints
from hpc_train.checkpoint.stores.cause import StoreError, is_outage
from hpc_train.checkpoint.stores.location import Location
from hpc_train.checkpoint.stores.store import Patience, Store

FileType = enum.Enum("FileType", ["NotFound", "File", "Directory"])


class _Files:
    """folders: what lies in each, by its path. problem: with which every call fails that can."""

    def __init__(self, folders: dict[str, list[str]], problem: OSError | None = None) -> None:
        self.folders, self.problem = folders, problem
        self.written: list[str] = []

    def get_file_info(self, asked: Any) -> Any:
        if isinstance(asked, str):
            return SimpleNamespace(type=FileType.NotFound)
        if self.problem is not None:
            raise self.problem
        if asked.path not in self.folders:
            raise FileNotFoundError(2, "HDFS list directory failed")
        return [
            SimpleNamespace(type=FileType.Directory, base_name=name, size=None, mtime=None)
            for name in self.folders[asked.path]
        ]

    def open_input_file(self, path: str) -> Any:
        raise self.problem or FileNotFoundError(2, path)

    def open_output_stream(self, path: str) -> Any:
        self.written.append(path)


Connect = Callable[[_Files, dict[str, str]], tuple[Location, dict[str, str]]]


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Connect:
    """Gives the folder /run through such a file system, and what libhdfs was told; by the environment of a process."""

    def connect(files: _Files, env: dict[str, str]) -> tuple[Location, dict[str, str]]:
        pyarrow, told = ModuleType("pyarrow"), dict[str, str]()
        pyarrow.fs = SimpleNamespace(  # type: ignore[attr-defined]
            FileType=FileType,
            FileSelector=lambda path: SimpleNamespace(path=path),
            HadoopFileSystem=lambda *args, **kwargs: files,
        )
        monkeypatch.setitem(sys.modules, "pyarrow", pyarrow)
        spec = importlib.util.find_spec("hpc_train.checkpoint.stores.libhdfs_store")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(module, "tell_libraries", told.update)
        backend = module.LibHdfsBackend("nn:1", {"CLASSPATH": "x.jar", **env})
        return Location(Store("libhdfs://nn:1", lambda: backend, Patience(total_s=0.0)), "/run"), told

    return connect


@pytest.mark.parametrize(
    ("number", "may_pass"),
    [pytest.param(255, True, id="lost connection, before Hadoop 3.0"), pytest.param(13, False, id="no permission")],
)
def test_a_store_that_does_not_answer_is_not_taken_for_an_empty_one(
    connect: Connect, number: int, may_pass: bool
) -> None:
    files = _Files({}, OSError(number, "HDFS list directory failed"))
    place, _ = connect(files, {})
    for ask in (place.entry, place.remove, place.read_text, lambda: place.write_text("x")):
        with pytest.raises(StoreError) as error:
            ask()
        assert is_outage(error.value) == may_pass
    assert files.written == []


def test_what_is_not_in_its_folder_is_missing(connect: Connect) -> None:
    place, _ = connect(_Files({"/run": ["step_0000001"]}), {})
    assert (place / "step_0000002").entry() is None and (place / "no" / "folder").entry() is None
    assert (place / "step_0000001").is_folder(), "it came between the two looks"
    with pytest.raises(FileNotFoundError):
        (place / "step_0000002").read_text()


def test_no_older_checkpoint_is_taken_where_the_newest_cannot_be_asked_for(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = _Files({"/run": ["step_0000001", "step_0000002"]})
    place, _ = connect(files, {})

    def lost(path: str) -> None:
        raise OSError(255, "Opening HDFS file failed")

    monkeypatch.setattr(files, "open_input_file", lost)
    with pytest.raises(StoreError, match="step_0000002"):
        next(sound_checkpoints(place))


@pytest.mark.parametrize(("given", "told"), [("", "-Xrs"), ("-Xmx1g", "-Xmx1g -Xrs"), ("-Xrs -Xmx1g", "-Xrs -Xmx1g")])
def test_java_is_told_once_to_leave_signals(connect: Connect, given: str, told: str) -> None:
    place, variables = connect(_Files({"/": []}), {"LIBHDFS_OPTS": given})
    assert place.entry() is None
    assert variables["LIBHDFS_OPTS"] == told
