"""Stores through fsspec: an object store (S3 over HTTP), which has no rename, and a real SFTP server, which has one."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest

from hpc_train.checkpoint.folders.folder import commit, create_temporary, remove_checkpoint, sound_checkpoints
from hpc_train.checkpoint.folders.verify import list_checkpoints
from hpc_train.checkpoint.format.manifest import MANIFEST_FILE, Manifest
from hpc_train.checkpoint.stores.cause import StoreError
from hpc_train.checkpoint.stores.fsspec_store import FsspecBackend
from hpc_train.checkpoint.stores.location import Location, locate
from hpc_train.checkpoint.stores.store import Patience, Store
from hpc_train.errors import ConfigError
from tests.checkpoint.saving.bad_disks import small_disk
from tests.checkpoint.stores.store_contract import StoreContract
from tests.services.s3 import S3Server
from tests.services.sftp import SftpServer
from tests.train.runs import hpc_train, metrics, write_config, write_corpus

SHORT = Patience(total_s=1.5)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.env.items():
                patch.setenv(name, value)
            patch.setitem(fsspec.config.conf, "s3", {"endpoint_url": server.address})
            server.make_bucket()
            yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def sftp() -> Iterator[SftpServer]:
    server = SftpServer()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(fsspec.config.conf, "sftp", server.options)
            yield server
    finally:
        server.stop()


def _place(url: str, request: pytest.FixtureRequest) -> Location:
    name = "".join(letter if letter.isalnum() else "_" for letter in request.node.name)[:60]
    place = locate(f"{url}/{name}-{os.getpid()}")
    place.make_folder()
    return place


class TestS3(StoreContract):
    @pytest.fixture
    def folder(self, s3: S3Server, request: pytest.FixtureRequest) -> Location:
        return _place(s3.url, request)


@pytest.mark.sftp
class TestSftp(StoreContract):
    @pytest.fixture
    def folder(self, sftp: SftpServer, request: pytest.FixtureRequest) -> Location:
        return _place(sftp.url, request)


# A folder without a rename: killed at each moment


class _Killed(BaseException):
    """As a process is: nothing of ours runs behind it."""


class _Dying(FsspecBackend):
    """An object store in memory; ends with the process that is killed after so many changes."""

    def __init__(self, changes: int) -> None:
        super().__init__("memory", "")
        self._left = changes

    def _client(self) -> Any:
        return _Counted(super()._client(), self)

    def change(self) -> None:
        if self._left == 0:
            raise _Killed
        self._left -= 1


class _Counted:
    """A client each of whose changes is one of those left; of several files removed by one request, each."""

    def __init__(self, fs: Any, backend: _Dying) -> None:
        self._fs, self._backend = fs, backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def cp_file(self, source: str, target: str) -> None:
        self._backend.change()
        self._fs.cp_file(source, target)

    def rm(self, names: list[str]) -> None:
        for name in names:
            self.rm_file(name)

    def rm_file(self, name: str) -> None:
        self._backend.change()
        self._fs.rm_file(name)


@pytest.fixture
def root() -> Iterator[Location]:
    """In memory, where what a store holds outlives those who write to it."""
    fsspec.filesystem("memory").store.clear()
    yield _root(100_000)
    fsspec.filesystem("memory").store.clear()


def _root(changes: int) -> Location:
    return Location(Store("memory://", lambda: _Dying(changes)), "/root")


def _save(root: Location, step: int, text: str) -> None:
    """What a save is to a store, with two files beside torch's index and the manifest."""
    temporary = create_temporary(root, step)
    names = ("__0_0.distcp", "__1_0.distcp", ".metadata")
    for name in names:
        (temporary / name).write_text(text)
    files = {name: len(text) for name in names}
    (temporary / MANIFEST_FILE).write_text(Manifest(step, {"text": text}, {}, files).to_json())
    commit(temporary, root, step, tell=lambda line: None)


def _newest(root: Location) -> tuple[int, str]:
    path, manifest = next(sound_checkpoints(root, sleep=lambda seconds: None))
    texts = {(path / name).read_text() for name in manifest.files}
    assert texts == {manifest.values["text"]}, f"{path} is of several saves"
    return manifest.step, manifest.values["text"]


def _die_at_each_change(root: Location, act: Callable[[Location], None]) -> Iterator[None]:
    """`act`, killed before its first change, its second, and so on, each time on what was there at first."""
    first = dict(fsspec.filesystem("memory").store)
    for changes in itertools.count():
        fsspec.filesystem("memory").store.clear()
        fsspec.filesystem("memory").store.update(first)
        try:
            act(_root(changes))
        except _Killed:
            yield
        else:
            assert changes >= 5, "as many as it has files"
            yield
            return


def test_a_commit_that_is_killed_at_any_change_leaves_a_whole_checkpoint(root: Location) -> None:
    _save(root, 1, "old")
    seen = set()
    for _ in _die_at_each_change(root, lambda dying: _save(dying, 2, "new")):
        seen.add(_newest(root))
        _save(root, 2, "again")  # the next start comes to that step, too
        assert _newest(root) == (2, "again")
        assert not [entry.name for entry in root.entries() if entry.name.startswith(".step")]
    assert seen == {(1, "old"), (2, "new")}


def test_a_checkpoint_that_is_removed_is_never_taken_for_whole(root: Location) -> None:
    _save(root, 1, "old")
    _save(root, 2, "new")
    seen = [_newest(root) for _ in _die_at_each_change(root, lambda dying: remove_checkpoint(dying / "step_0000002"))]
    assert seen == [(2, "new"), *[(1, "old")] * (len(seen) - 1)]


def test_a_checkpoint_has_its_manifest_s_time_where_folders_have_none(root: Location) -> None:
    _save(root, 1, "whole")
    (root / "step_0000002" / "foreign").write_text("no manifest")
    whole, foreign = list_checkpoints(root)
    assert whole.written_at is not None and abs(whole.written_at - time.time()) < 86_400
    assert foreign.written_at is None and foreign.problem is not None


def test_a_rename_goes_on_where_its_server_has_failed(root: Location) -> None:
    class Failing(FsspecBackend):
        def __init__(self) -> None:
            super().__init__("memory", "")
            self.files: list[str] = []

        def moved(self) -> None:
            self.files.append("copied")
            if len(self.files) == 2:
                raise ConnectionError("Connection reset by peer")

    (root / "a").make_folder()
    for name in "123":
        (root / "a" / name).write_text(name)
    Location(Store("memory://", Failing, Patience(5, 0.01, 0.01)), "/root/a").rename(root / "b")
    assert [(root / "b" / name).read_text() for name in "123"] == ["1", "2", "3"]
    assert (root / "a").entry() is None


# Servers that are not as they should be


@pytest.mark.sftp
def test_a_server_that_comes_back_is_waited_for(sftp: SftpServer, request: pytest.FixtureRequest) -> None:
    folder = _place(sftp.url, request)
    (folder / "file").write_text("text")
    with (folder / "file").reading() as reader, ThreadPoolExecutor(1) as thread:
        sftp.kill()
        buffer = bytearray(4)
        reading = thread.submit(reader.read_into, 0, memoryview(buffer))
        time.sleep(0.3)  # so that it is asked in vain at first; it has to come through whenever that is
        sftp.start()
        assert reading.result(60) == 4 and bytes(buffer) == b"text"
    sftp.kill()
    short = Location(Store(folder.store.prefix, lambda: FsspecBackend("sftp", _authority(folder)), SHORT), folder.path)
    with pytest.raises(StoreError, match=r"tried for 1 s\): the server does not answer. Is the address right"):
        short.entries()
    sftp.start()
    (folder / "file").remove()


_ASK = """
import sys
from hpc_train.checkpoint.stores.location import locate
from hpc_train.checkpoint.stores.store import Patience
try:
    locate(sys.argv[1], Patience(total_s=0.0)).entries()
except Exception as problem:
    print(problem)
"""


@pytest.mark.sftp
def test_a_server_that_hangs_up_is_told_without_a_stack_of_the_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:
        hung_up = thread.submit(lambda: server.accept()[0].close())
        url = f"sftp://me@127.0.0.1:{server.getsockname()[1]}/runs"
        done = subprocess.run([sys.executable, "-c", _ASK, url], capture_output=True, text=True, timeout=60)
        hung_up.result()
    assert "the server does not answer" in done.stdout and done.stderr == ""


@pytest.mark.sftp
def test_of_a_file_that_met_a_full_disk_nothing_is_sent_when_python_lets_go_of_it(sftp: SftpServer) -> None:
    """Seen: an agent hung as it ended, since paramiko's file sent its rest again and waited for that answer."""
    with small_disk(sftp.data / "full", 1 << 20):
        place = locate(f"{sftp.url}/full/file")
        backend = FsspecBackend("sftp", _authority(place))
        writer = backend.create(place.path)
        writer.write(memoryview(bytes(3 << 20)))
        with pytest.raises(OSError, match="Failure") as problem:
            writer.close()
        writer.abandon()
        assert writer._file.closed
        cause = backend.cause(problem.value)
        assert (cause.text, cause.may_pass) == ("the server has failed and does not say why", False)
        assert "Its disk may be full" in cause.cure


@pytest.mark.sftp
def test_a_key_file_that_is_missing_is_not_taken_for_a_missing_folder(
    sftp: SftpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "sftp", {**sftp.options, "key_filename": "/nowhere/key"})
    with pytest.raises(ConfigError, match=r"a file that its client needs is missing: .*/nowhere/key"):
        locate(sftp.url).entry()


@pytest.mark.sftp
def test_a_host_whose_key_is_not_known_is_refused_at_once(sftp: SftpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "sftp", {**sftp.options, "host_key_policy": "reject"})
    with pytest.raises(StoreError, match="host key is not known here") as refusal:
        locate(sftp.url).entry()
    assert "tried for" not in str(refusal.value)


@pytest.mark.parametrize(
    ("status", "code", "told", "may_pass"),
    [
        (500, "InternalError", "does not answer", True),
        (502, "BadGateway", "does not answer", True),
        (503, "SlowDown", "does not answer", True),
        (503, "ServiceUnavailable", "does not answer", True),
        (429, "TooManyRequests", "does not answer", True),
        (409, "OperationAborted", "does not answer", True),
        (403, "AccessDenied", "no permission", False),
        (400, "ExpiredToken", "credentials", False),
        (403, "InvalidAccessKeyId", "credentials", False),
        (403, "SignatureDoesNotMatch", "credentials", False),
        (403, "RequestTimeTooSkewed", "clocks", False),
        (403, "QuotaExceeded", "no space", False),
        (507, "XMinioStorageFull", "no space", False),
        # An answer to HEAD has its status alone, and s3fs sets no cause there.
        (500, "500", "does not answer", True),
        (502, "502", "does not answer", True),
        (503, "503", "does not answer", True),
        (429, "429", "does not answer", True),
        (403, "403", "no permission", False),
    ],
)
def test_causes_are_known_by_the_server_s_code_though_its_client_hides_it(
    status: int, code: str, told: str, may_pass: bool
) -> None:
    """As s3fs puts them into Python's own."""
    exceptions = pytest.importorskip("botocore.exceptions")
    errors = pytest.importorskip("s3fs.errors")
    words = {"Code": code, "Message": "words of the server's"}
    answer = exceptions.ClientError({"Error": words, "ResponseMetadata": {"HTTPStatusCode": status}}, "Put")
    problem = errors.translate_boto_error(answer, set_cause=not code.isdigit())
    cause = FsspecBackend("s3", "bucket").cause(problem)
    assert (told in cause.text, cause.may_pass) == (True, may_pass), cause


def _authority(place: Location) -> str:
    return place.store.prefix.partition("://")[2]


def test_buckets_and_credentials_that_are_not_there_are_named(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = locate("s3://no-such-bucket/runs")
    with pytest.raises(StoreError, match=r"no folder can be made there\. Is there such a bucket"):
        nowhere.make_folder()
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": s3.address, "key": None, "secret": None})
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreError, match="the credentials are missing or were refused"):
        locate(f"{s3.url}/runs").make_folder()


def test_a_client_that_is_not_installed_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tos://bucket: its client is not installed here: .*tosfs"):
        locate("tos://bucket/runs").entries()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s4://bucket/run", r"no store for s4:// URLs. Known are plain paths, .* such as s3:// and sftp://"),
        ("memory://a/run", "each process's own"),
        ("https://host/run", "https:// can only be read from"),
        ("zip://run", "zip:// can only be read from"),
        ("sftp://me:secret@host/run", r"sftp://me:\.\.\.@host/run: a URL is written to logs"),
        ("s3://bucket", "has no path"),
    ],
)
def test_urls_that_cannot_be_are_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        locate(url)
    assert "secret" not in str(refusal.value)


# A run


@pytest.mark.mpi
def test_a_run_on_an_object_store_goes_on_from_it_bit_for_bit(s3: S3Server, tmp_path: Path) -> None:
    """Node agents write; ranks read; a second start goes on from what the first one saved."""
    write_corpus(tmp_path / "corpus")
    write_config(tmp_path)
    place = [f"checkpoint.folder={s3.url}/runs", "checkpoint.keep=2"]
    for name, stops in (("straight", [6]), ("resumed", [4, 6])):
        for stop in stops:
            words = ["run", tmp_path / "config.yaml", "-n", 2, "--run-dir", tmp_path / name, *place]
            done = hpc_train([*words, f"train.steps={stop}", "optimizer.decay_steps=6"], env=s3.env)
            assert done.returncode == 0, done.stdout + done.stderr
    straight, resumed = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("straight", "resumed"))
    assert len(straight) == 6 and straight == resumed
    for words in (["ckpt", "ls"], ["ckpt", "verify"]):
        done = hpc_train([*words, tmp_path / "resumed"], env=s3.env)
        assert done.returncode == 0 and "step_0000006" in done.stdout, done.stdout + done.stderr
