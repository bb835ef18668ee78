"""Stores: what all must do, on the local file system; retries, causes and URLs, on a file system made to fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_train.checkpoint.stores.backend import BackendReader, BackendWriter
from hpc_train.checkpoint.stores.cause import StoreError, is_outage
from hpc_train.checkpoint.stores.hdfs_causes import hdfs_cause
from hpc_train.checkpoint.stores.local_store import LocalBackend
from hpc_train.checkpoint.stores.location import Location, locate
from hpc_train.checkpoint.stores.store import Patience, Store
from hpc_train.checkpoint.stores.webhdfs_store import WebHdfsBackend
from hpc_train.errors import ConfigError
from tests.checkpoint.stores.store_contract import StoreContract


class TestLocal(StoreContract):
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Location:
        return locate(tmp_path)


class TestFileUrl(StoreContract):
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Location:
        return locate(f"file://{tmp_path}")


class _Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now, self.pauses = 0.0, []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)

    def patience(self, total_s: float = 10.0) -> Patience:
        return Patience(total_s, 0.5, 4.0, lambda: self.now, self.sleep)


class _Failing(LocalBackend):
    """A local file system whose calls fail as told: problems by name of the call, used up one by one."""

    def __init__(self, problems: dict[str, list[BaseException]]) -> None:
        self.problems = problems
        self.calls: list[str] = []

    def _meet(self, name: str) -> None:
        self.calls.append(name)
        if self.problems.get(name):
            raise self.problems[name].pop(0)

    def open_read(self, path: str) -> BackendReader:
        self._meet("open_read")
        real, meet = super().open_read(path), self._meet

        class Reader(BackendReader):
            def read_into(self, start: int, buffer: memoryview) -> int:
                meet("read_into")
                return real.read_into(start, buffer)

            def close(self) -> None:
                real.close()

        return Reader()

    def create(self, path: str) -> BackendWriter:
        self._meet("create")
        real, meet = super().create(path), self._meet

        class Writer(BackendWriter):
            def write(self, data: memoryview) -> None:
                meet("write")
                real.write(data)

            def close(self) -> None:
                meet("close")
                real.close()

            def abandon(self) -> None:
                real.abandon()

        return Writer()

    def rename(self, source: str, target: str) -> None:
        """Carried out, and its answer lost."""
        super().rename(source, target)
        self._meet("rename")

    def replace(self, source: str, target: str) -> None:
        super().replace(source, target)
        self._meet("replace")


def _failing(folder: Path, total_s: float = 10.0, **problems: list[BaseException]) -> tuple[Location, _Failing, _Clock]:
    backend, clock = _Failing(problems), _Clock()
    return Location(Store("", lambda: backend, clock.patience(total_s)), str(folder)), backend, clock


def _stale() -> OSError:
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_a_stale_handle_is_opened_anew_and_read_again(tmp_path: Path) -> None:
    """FC-74: twice stale, then read; a stale handle that stays is refused by name."""
    (tmp_path / "file").write_text("text")
    folder, backend, clock = _failing(tmp_path, read_into=[_stale(), _stale()])
    assert (folder / "file").read_text() == "text"
    assert backend.calls.count("open_read") == 3 and clock.pauses == [0.5, 1.0]
    folder, backend, clock = _failing(tmp_path, read_into=[_stale() for _ in range(99)])
    with pytest.raises(StoreError, match="stale") as error:
        (folder / "file").read_text()
    assert is_outage(error.value) and clock.now <= 10.0


def test_waiting_ends_at_its_limit_with_the_cause_in_words(tmp_path: Path) -> None:
    refused = [OSError(errno.ETIMEDOUT, "timed out") for _ in range(99)]
    folder, _, clock = _failing(tmp_path, total_s=10.0, create=refused)
    with pytest.raises(StoreError, match=r"cannot write .*/file \(tried for .* s\): the file server does not answer"):
        (folder / "file").write_text("x")
    assert clock.pauses == [0.5, 1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space is left"),
        (errno.EDQUOT, "the quota is used up"),
        (errno.EROFS, "mounted read-only"),
        (errno.EACCES, "no permission"),
    ],
)
def test_what_waiting_does_not_mend_fails_at_once(tmp_path: Path, number: int, words: str) -> None:
    for call in ("create", "write", "close"):
        folder, _, clock = _failing(tmp_path, **{call: [OSError(number, os.strerror(number))]})
        with pytest.raises(StoreError, match=words) as error:
            (folder / call).write_text("x")
        assert os.strerror(number) in str(error.value) and not is_outage(error.value)
        assert clock.pauses == []


def test_a_lease_that_another_writer_holds_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FC-69: as after a writer that was killed."""
    monkeypatch.setattr(_Failing, "cause", lambda backend, problem: hdfs_cause(f"{type(problem).__name__}: {problem}"))
    words = "org.apache.hadoop.hdfs.protocol.AlreadyBeingCreatedException: failed to create file /f for client_1"
    folder, _, clock = _failing(tmp_path, create=[OSError(words) for _ in range(3)])
    (folder / "file").write_text("x")
    assert (folder / "file").read_text() == "x" and clock.pauses == [0.5, 1.0, 2.0]
    folder, _, clock = _failing(tmp_path, create=[OSError(words) for _ in range(99)])
    with pytest.raises(StoreError, match="another writer still holds the file's lease"):
        (folder / "other").write_text("x")
    assert clock.now <= 10.0


def test_a_client_that_panics_has_failed(tmp_path: Path) -> None:
    """pyo3 raises it as no Exception."""
    panic = type("PanicException", (BaseException,), {})
    for call in ("create", "write", "close", "open_read", "read_into"):
        folder, _, clock = _failing(tmp_path, **{call: [panic("called `Option::unwrap()` on a `None` value")]})
        (tmp_path / "there").write_text("x")
        with pytest.raises(StoreError, match=r"the client has panicked: called `Option::unwrap\(\)`"):
            (folder / call).write_text("x") if call in ("create", "write", "close") else (folder / "there").read_text()
        assert clock.pauses == []


def test_a_failed_write_is_not_tried_again(tmp_path: Path) -> None:
    """FC-69: an error at the end of a file is a failed file."""
    folder, backend, _ = _failing(tmp_path, close=[_stale()])
    with pytest.raises(StoreError, match="cannot finish"), (folder / "file").writing() as file:
        file.write(memoryview(b"x"))
    assert backend.calls == ["create", "write", "close"]


@pytest.mark.parametrize("call", ["write", "close"])
def test_a_small_file_whose_write_failed_is_written_anew(tmp_path: Path, call: str) -> None:
    """As between two name nodes, of which one takes over: what had come of it is never in the way, or left."""
    folder, backend, clock = _failing(tmp_path, **{call: [_stale(), _stale()]})
    (folder / "file").write_text("text")
    assert (folder / "file").read_text() == "text" and clock.pauses == [0.5, 1.0]
    for problem, count in ((_stale, 10), (lambda: OSError(errno.ENOSPC, "full"), 1)):
        folder, backend, _ = _failing(tmp_path / "more", 30.0, **{call: [problem() for _ in range(99)]})
        folder.make_folder()
        with pytest.raises(StoreError, match=r"stale|no space"):
            (folder / "file").write_text("text")
        assert backend.calls.count(call) == count
        (folder / "file").remove()
    with pytest.raises(FileExistsError):
        (locate(tmp_path) / "file").write_text("other")


def test_a_folder_that_could_not_be_removed_whole_has_lost_its_name_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: LocalBackend, path: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(LocalBackend, "remove", refused)
    (tmp_path / "folder").mkdir()
    root = locate(tmp_path)
    with pytest.raises(StoreError, match=r"cannot remove .*doomed: no permission"):
        (root / "folder").discard(root / "doomed")
    assert [entry.name for entry in root.entries()] == ["doomed"]


def test_a_change_whose_answer_was_lost_counts_as_done(tmp_path: Path) -> None:
    for call in ("rename", "replace"):
        folder, backend, _ = _failing(tmp_path, **{call: [_stale()]})
        (folder / "source").write_text(call)
        getattr(folder / "source", call)(folder / "target")
        assert (folder / "target").read_text() == call and (folder / "source").entry() is None
        assert backend.calls.count(call) == 1
        (folder / "target").remove()


def test_a_rename_that_went_into_a_folder_is_not_taken_for_done(tmp_path: Path) -> None:
    """An old-style HDFS rename, where another process makes the target in the same moment."""

    class Raced(LocalBackend):
        def rename(self, source: str, target: str) -> None:
            os.mkdir(target)
            os.rename(source, os.path.join(target, os.path.basename(source)))

    folder = Location(Store("", Raced), str(tmp_path))
    (folder / "new").make_folder()
    with pytest.raises(StoreError, match="is another run writing there"):
        (folder / "new").rename(folder / "final")


@pytest.mark.parametrize(
    ("words", "told", "may_pass"),
    [
        ("RPC error: org.apache.hadoop.hdfs.server.namenode.SafeModeException: Cannot create file", "safe mode", True),
        ("RemoteException: org.apache.hadoop.ipc.StandbyException: Operation category READ", "standby", True),
        ("org.apache.hadoop.ipc.RetriableException: Namenode is in startup mode", "starting", True),
        ("OSError: Connection refused (os error 111)", "does not answer", True),
        ("OSError: RPC listener disconnected", "does not answer", True),
        ("OSError: Failed to complete file in time", "no data node holds", True),
        ("RuntimeError: Block writer is closed", "no data node holds", True),
        ("org.apache.hadoop.hdfs.protocol.AlreadyBeingCreatedException: failed to create", "lease", True),
        ("org.apache.hadoop.hdfs.protocol.RecoveryInProgressException: Failed to APPEND", "lease", True),
        ("org.apache.hadoop.hdfs.server.namenode.LeaseExpiredException: No lease on /f", "removed", False),
        ("org.apache.hadoop.security.AccessControlException: Permission denied: user=a", "no permission", False),
        ("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException: The DiskSpace quota", "space quota", False),
        ("org.apache.hadoop.hdfs.protocol.NSQuotaExceededException: The NameSpace quota", "quota of names", False),
        ("java.io.IOException: File /f could only be replicated to 0 nodes", "no data node took", False),
        (
            "IOException: File /f could only be replicated to 0 nodes instead of minReplication (=1).  There are "
            "0 datanode(s) running and no node(s) are excluded in this operation.",
            "no data node has reported",
            True,
        ),
        ("GSSAPIError: GSS_S_CREDENTIALS_EXPIRED", "has run out", True),
        ('RuntimeError: GSSAPIError(12, 0, "The referenced context has expired")', "has run out", True),
        ('GSSAPIError("Unspecified GSS failure.  Minor code may provide more: Ticket expired")', "has run out", True),
        ("GSSException: No valid credentials provided (Mechanism level: Ticket expired (32))", "has run out", True),
        ("GSSException: No valid credentials provided (Failed to find any Kerberos tgt)", "no Kerberos ticket", False),
        ("GSSAPIError: GSS_S_NO_CRED: No Kerberos credentials available", "no Kerberos ticket", False),
        (
            "GssError: GSSAPI, gss_init_sec_context: Server HTTP/n@SITE not found in Kerberos database",
            "by this name",
            False,
        ),
        (
            "WebHdfsError: HTTP status 403: GSSException: Failure (Mechanism level: Clock skew too great (37))",
            "clocks",
            False,
        ),
        ("GssError: Cannot contact any KDC for realm 'SITE'", "no Kerberos server", True),
        ('GssError: Cannot find KDC for realm "SITE"', "not set up for Kerberos", False),
        ("GssError: no libgssapi_krb5.so.2 here: cannot open shared object", "not set up for Kerberos", False),
        ("WebHdfsError: HTTP status 403: GSSException: Defective token detected", "was refused", False),
        ("WebHdfsError: HTTP status 401 Unauthorized: Authentication required", "did not take", False),
        ("GSSAPIError: GSS_S_BAD_MIC", "Kerberos or the delegation token was refused", False),
        ("org.apache.hadoop.security.token.SecretManager$InvalidToken: token is expired", "Kerberos", False),
        ("OSError: failed to lookup address information: Name or service not known", "not known here", False),
        ("BlockMissingException: Could not obtain block: file=/user/me/release/x", "no data node holds", True),
        ("IncompleteRead: IncompleteRead(2023396 bytes read, 2170908 more expected)", "no data node holds", True),
        (
            "org.apache.hadoop.security.AccessControlException: Permission denied: user=a, access=WRITE, "
            'inode="/user/SASL/Kerberos/release/lease recovery":b:c:drwxr-xr-x',
            "no permission",
            False,
        ),
        ("java.io.IOException: lease recovery is in progress. Try again later.", "lease", True),
        (
            "AccessControlException: SIMPLE authentication is not enabled.  Available:[TOKEN, KERBEROS]",
            "no Kerberos ticket",
            False,
        ),
        ("AccessControlException: Client cannot authenticate via:[TOKEN, KERBEROS]", "no Kerberos ticket", False),
        ('RuntimeError: InvalidArgument("No NameNode hosts found")', "nor a service that is configured here", False),
        ("org.apache.hadoop.fs.ParentNotDirectoryException: /f is not a directory", "a file stands where", False),
        ("something nobody has seen", "HDFS refused", False),
    ],
)
def test_causes_of_hdfs_by_the_names_of_its_exceptions(words: str, told: str, may_pass: bool) -> None:
    cause = hdfs_cause(words)
    assert told in cause.text and cause.may_pass == may_pass


def test_threads_that_ask_name_nodes_at_once_do_not_turn_each_other_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is on standby; while it answers one request, another one goes through both."""
    backend = WebHdfsBackend("webhdfs", "me@one:1,two:2", {})
    asked: list[str] = []

    def fetch(method: str, address: str, query: str) -> tuple[int, Any, bytes]:
        asked.append(address)
        if len(asked) == 1:
            backend.make_folder("/another")
        return (403, None, b"StandbyException") if address == "one:1" else (200, None, b'{"boolean": true}')

    monkeypatch.setattr(backend, "_fetch", fetch)
    backend.make_folder("/folder")
    assert asked.count("two:2") == 2 and len(asked) == 4
    backend.make_folder("/next")
    assert asked[4] == "two:2" and len(asked) == 5, "the one that answered last is asked first"


@pytest.mark.parametrize(
    ("text", "shown", "path"),
    [
        ("runs/llama", "runs/llama", "runs/llama"),
        ("/scratch/a b", "/scratch/a b", "/scratch/a b"),
        ("file:///scratch/x/", "/scratch/x", "/scratch/x"),
        ("file://localhost/scratch/x", "/scratch/x", "/scratch/x"),
        ("file:/scratch/x", "/scratch/x", "/scratch/x"),
        ("hdfs://nn1:8020/user/me", "hdfs://nn1:8020/user/me", "/user/me"),
        ("HDFS://Service/user/me/", "hdfs://Service/user/me", "/user/me"),
        ("hdfs:///user/me", "hdfs:///user/me", "/user/me"),
        ("hdfs:/user/me", "hdfs:///user/me", "/user/me"),
    ],
)
def test_urls_and_paths_name_places(text: str, shown: str, path: str) -> None:
    place = locate(text)
    assert (str(place), place.path) == (shown, path)
    assert str(place / "step") == f"{shown}/step" and (place / "step").name == "step"
    assert (place / "step").parent == place
    assert (place.local is None) == shown.startswith("hdfs")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hdsf://nn/run", r"no store for hdsf://"),
        ("hdfs://nn1:8020", r"has no path; write hdfs://nn1:8020/some/folder"),
        ("hdfs://nn1:8020/", r"has no path"),
        ("", "an empty path names no place"),
        ("file://node7/scratch", r"names the host node7"),
    ],
)
def test_wrong_urls_are_refused_with_what_would_be_right(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        locate(text)


def test_text_that_only_looks_like_a_url_is_a_path() -> None:
    assert locate(Path("hdfs:/x")).local == Path("hdfs:/x")
    assert locate("a:b").local == Path("a:b")


def test_no_connection_before_a_call_and_one_of_its_own_after_a_fork(tmp_path: Path) -> None:
    made: list[int] = []

    def connect() -> LocalBackend:
        made.append(os.getpid())
        return LocalBackend()

    folder = Location(Store("", connect), str(tmp_path))
    assert made == []
    look: Callable[[], object] = folder.entry
    look()
    look()
    assert made == [os.getpid()]
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        look()
        os.write(write, b"new" if made[-1] == os.getpid() else b"old")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 3) == b"new"
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(
    ("left_s", "told", "may_pass"),
    [(None, "no Kerberos ticket", False), (0, "has run out", True), (60, "was refused", False)],
)
def test_a_client_that_keeps_kerberos_words_to_itself(
    left_s: int | None, told: str, may_pass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpc_train.checkpoint.stores import hdfs_native_store

    monkeypatch.setattr(hdfs_native_store, "ticket_left_s", lambda: left_s)
    backend = hdfs_native_store.HdfsNativeBackend("localhost:1", {})
    words = "GSSAPIError(GssMajorCodes(GSS_S_BAD_MECH), 0, 'Unspecified GSS failure.  Minor code may provide more')"
    cause = backend.cause(RuntimeError(words))
    assert told in cause.text and cause.may_pass == may_pass
    assert "was refused" in backend.cause(RuntimeError("InvalidToken: token is expired")).text
