"""Checkpoints on any other file system that fsspec has a client for: `s3://bucket/path`, `sftp://me@host/path`, ...

Credentials, addresses and options come from where each client looks for them, and from fsspec's own configuration (its
files, and variables such as FSSPEC_S3_ENDPOINT_URL); never from the URL.

Of most of these nobody can rely on a rename: object stores have none. There a folder gets its name by copies within the
store, `LAST_FILE` last, and loses it the other way round. A reader sees a whole checkpoint or one without its manifest.
"""

from __future__ import annotations

import errno
import logging
import posixpath
import re
import threading
from contextlib import suppress
from datetime import datetime
from typing import Any

from hpc_train.checkpoint.stores.backend import LAST_FILE, Backend, BackendReader, BackendWriter, Buffer, Entry
from hpc_train.checkpoint.stores.cause import Cause
from hpc_train.checkpoint.stores.local_store import cause_of_number
from hpc_train.errors import ConfigError

_RENAMING = ("sftp", "ssh", "smb", "ftp")
"""Whose servers rename a folder in one step (cited: posix-rename@openssh.com, SMB2 FileRenameInformation, RFC 959)."""
_READ_ONLY = ("http", "https", "data", "git", "github", "zip", "tar", "libarchive", "reference")
"""Whose clients write no file or list no folder (cited: fsspec's reference of its implementations)."""
_FOLDER_MARK = ".hpc_train-folder"
"""An empty object that makes a folder exist before there is anything in it."""
_PART_BYTES = 64 << 20
"""Sent at once (assumed: a store takes 10,000 parts of a file, so 640 GB)."""
_REMOVED_AT_ONCE = 1000
"""cited: what S3 removes by one request; between two of them the store is seen to get on."""
_CHANGED = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
"""What clients call the time of the last change."""
_NO_CREDENTIALS = Cause(
    "the credentials are missing or were refused",
    False,
    "Give them where the client of this kind of store looks for them, on every node (of s3://, ~/.aws or "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; of sftp://, ~/.ssh or an agent).",
)
_NO_ANSWER = Cause(
    "the server does not answer",
    True,
    "Is the address right, and may this node reach it? Compute nodes often have no way out.",
)
# In this order, by the words of a failure as class and message.
_CAUSES: list[tuple[str, Cause]] = [
    (
        r"NoCredentials|InvalidAccessKey|SignatureDoesNotMatch|ExpiredToken|Authentication|Unauthorized|\b401\b"
        r"|PasswordRequired|[Uu]nable to locate credentials|not a valid .*private key",
        _NO_CREDENTIALS,
    ),
    (
        r"BadHostKey|No hostkey|not found in known_hosts",
        Cause(
            "the server's host key is not known here, or another one",
            False,
            "Is it the right server? Then have its key in ~/.ssh/known_hosts, on every node.",
        ),
    ),
    (
        r"RequestTimeTooSkewed",
        Cause("the clocks of this node and of the server differ", False, "Have the site set them (NTP)."),
    ),
    (
        r"NotImplementedError|MethodNotAllowed|[Rr]ead-only",
        Cause("this store does not take that", False, "It can be read only, or its client is too old."),
    ),
    (
        r"[Qq]uota|QuotaExceeded|[Nn]o space left|InsufficientStorage|EntityTooLarge|StorageFull|HTTP 507",
        Cause("no space is left, or the quota is used up", False, "Remove old files, or choose another folder."),
    ),
    (
        r"[Tt]ime(d)? ?out|Timeout|SlowDown|TooManyRequests|InternalError|ServiceUnavailable|\b(50[0234]|429)\b"
        r"|OperationAborted|BadGateway"
        r"|[Cc]onnection|[Cc]onnect call|EOFError|[Ss]ocket (is )?closed|SSHException|Server connection dropped"
        r"|unreachable|[Bb]roken pipe|[Tt]emporary failure",
        _NO_ANSWER,
    ),
    (
        r"UnknownHost|Name or service not known|gaierror|[Cc]ould not resolve",
        Cause("the server's host is not known here", False, "Correct the URL, or the client's configuration."),
    ),
    (
        r"^OSError: Failure",  # cited: SSH_FX_FAILURE, all that a server of SFTP says of a full disk
        Cause(
            "the server has failed and does not say why",
            False,
            "Its disk may be full, or the quota used up: remove old files, or choose another folder.",
        ),
    ),
]
_BUSY = (errno.EBUSY, errno.EREMOTEIO)
"""What s3fs makes of SlowDown, ServiceUnavailable and InternalError (read in its errors.py)."""
_NO_PERMISSION = Cause("no permission", False, "Choose a folder that this user may write, or have that changed.")
_NOTHING_THERE = Cause("no folder can be made there", False, "Is there such a bucket or share? It is not made here.")
_OTHER = Cause("the store refused", False, "Look at its words:")

# It prints its stack for what it raises as well, such as a server that hangs up.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


def require_client(scheme: str, url: str) -> None:
    """Imports nothing but fsspec, which torch brings with it.

    Raises:
        ConfigError: fsspec has no client of that kind, or one that cannot hold checkpoints; credentials in the URL.
    """
    from fsspec.registry import known_implementations

    if scheme not in known_implementations:
        raise ConfigError(
            f"{url}: there is no store for {scheme}:// URLs. Known are plain paths, file://, hdfs://, libhdfs://, "
            "webhdfs://, swebhdfs://, and what fsspec has a client for, such as s3:// and sftp://."
        )
    if scheme in _READ_ONLY:
        raise ConfigError(f"{url}: {scheme}:// can only be read from, so it can hold no checkpoints")
    if scheme == "memory":
        raise ConfigError(f"{url}: memory:// is each process's own, so no other one would see its checkpoints")
    if re.match(r"[^/]*:/*[^/@]*:[^/]*@", url):
        hidden = re.sub(r":[^/:@]*@", ":...@", url)
        raise ConfigError(
            f"{hidden}: a URL is written to logs and files, so it may hold no password. Give it where the client looks "
            "for it, or in fsspec's configuration"
        )


class FsspecBackend(Backend):
    """One file system of fsspec. Its clients keep listings, so theirs is turned off.

    A client that asks its server in the thread of who calls it is asked by one thread at a time: of two that ask
    paramiko's at once, one may take the other's answer, which waits for it forever (seen: a save by two ranks).
    """

    def __init__(self, scheme: str, authority: str) -> None:
        self._prefix = f"{scheme}://{authority}"
        self.has_rename = scheme in _RENAMING
        self._fs: Any = None

    def entry(self, path: str) -> Entry | None:
        try:
            return _entry(self._client().info(self._place(path)))
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            return None

    def entries(self, path: str) -> list[Entry]:
        place = self._place(path)
        listed = self._client().ls(place, detail=True)
        if not listed and self.entry(path) is None:
            raise FileNotFoundError(path)
        if len(listed) == 1 and _is_same(listed[0]["name"], place) and listed[0]["type"] != "directory":
            raise NotADirectoryError(errno.ENOTDIR, "a file and no folder", path)
        found = (_entry(item) for item in listed if not _is_same(item["name"], place))
        return [entry for entry in found if entry.name != _FOLDER_MARK]

    def make_folder(self, path: str) -> None:
        found = self.entry(path)
        if found is not None:
            if not found.is_folder:
                raise NotADirectoryError(errno.ENOTDIR, "a file stands there", path)
        elif self.has_rename:
            self._client().makedirs(self._place(path), exist_ok=True)
        else:
            self._client().pipe_file(self._place(posixpath.join(path, _FOLDER_MARK)), b"")

    def rename(self, source: str, target: str) -> None:
        if self.has_rename:
            self._client().mv(self._place(source), self._place(target))
            return
        fs, place, aim = self._client(), self._place(source), self._place(target)
        for name in self._files(place):
            fs.cp_file(name, aim + name[len(place) :])
            self.moved()
        self._remove_files(self._files(place)[::-1])

    def replace(self, source: str, target: str) -> None:
        self.rename(source, target)

    def remove(self, path: str) -> None:
        place, fs = self._place(path), self._client()
        with suppress(FileNotFoundError):
            if fs.info(place)["type"] != "directory":
                fs.rm_file(place)
                return
            self._remove_files(self._files(place)[::-1])
            if fs.exists(place):  # where folders are more than a part of names
                fs.rm(place, recursive=True)

    def open_read(self, path: str) -> BackendReader:
        fs, place = self._client(), self._place(path)
        found = fs.info(place)
        if found["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, "a folder and no file", path)
        return _Ranges(fs, place, int(found["size"])) if fs.async_impl else _Handle(fs, place)

    def create(self, path: str) -> BackendWriter:
        if self.entry(path) is not None:
            raise FileExistsError(path)
        fs, place = self._client(), self._place(path)
        return _Writer(fs, place, fs.open(place, "wb", block_size=_PART_BYTES))

    def flush_folder(self, path: str) -> None:
        """A server has done what it has answered."""

    def free_bytes(self, path: str) -> int | None:
        return None

    def cause(self, problem: Exception) -> Cause:
        cause = _cause(problem)
        if cause.may_pass:
            self._fs = None  # connected anew: of some clients none works again that has lost its server
        return cause

    def _client(self) -> Any:
        if (found := self._fs) is None:
            from fsspec.core import url_to_fs

            # What renames keeps no listings, and takes the option for one of its connection.
            no_listings = {} if self.has_rename else {"use_listings_cache": False}
            try:
                fs, _ = url_to_fs(f"{self._prefix}/", skip_instance_cache=True, **no_listings)
            except ImportError as problem:
                raise ConfigError(f"{self._prefix}: its client is not installed here: {problem}") from problem
            except FileNotFoundError as problem:  # else it would be taken for a file of the store
                raise ConfigError(f"{self._prefix}: a file that its client needs is missing: {problem}") from problem
            found = self._fs = fs if fs.async_impl else _InTurn(fs, threading.Lock())
        return found

    def _place(self, path: str) -> str:
        return str(self._client()._strip_protocol(self._prefix + path)).rstrip("/")

    def _files(self, place: str) -> list[str]:
        """A file itself, or all files below a folder, those last by which it is taken for whole: torch's is hidden."""
        names: list[str] = self._client().find(place)
        ends = [(name, posixpath.basename(name)) for name in names]
        return [name for name, end in sorted(ends, key=lambda item: (item[1] == LAST_FILE, item[1][:1] == ".", item))]

    def _remove_files(self, names: list[str]) -> None:
        """The first by itself: with it the folder is what it was no more."""
        fs = self._client()
        for batch in (names[:1], *(names[at : at + _REMOVED_AT_ONCE] for at in range(1, len(names), _REMOVED_AT_ONCE))):
            if batch:
                fs.rm(batch)
                self.moved()


class _InTurn:
    """A client, and the files that it opens, for several threads: their calls come one behind the other."""

    def __init__(self, inner: Any, turn: threading.Lock) -> None:
        vars(self).update(_inner=inner, _turn=turn)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **named: Any) -> Any:
            with self._turn:
                answer = found(*args, **named)
            return _InTurn(answer, self._turn) if name == "open" else answer

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)


class _Ranges(BackendReader):
    """Of a client that asks for each range by itself."""

    def __init__(self, fs: Any, place: str, num_bytes: int) -> None:
        self._fs, self._place, self._num_bytes = fs, place, num_bytes

    def read_into(self, start: int, buffer: Buffer) -> int:
        count = max(0, min(len(buffer), self._num_bytes - start))
        if count:
            data = self._fs.cat_file(self._place, start=start, end=start + count)
            if len(data) != count:
                raise EOFError(f"{len(data)} of {count} bytes at {start} came")
            buffer[:count] = data
        return count

    def close(self) -> None:
        """Nothing is held open."""


class _Handle(BackendReader):
    """Of a client that holds a file open."""

    def __init__(self, fs: Any, place: str) -> None:
        self._file = fs.open(place, "rb")

    def read_into(self, start: int, buffer: Buffer) -> int:
        self._file.seek(start)
        filled = 0
        while filled < len(buffer) and (data := self._file.read(len(buffer) - filled)):
            buffer[filled : filled + len(data)] = data
            filled += len(data)
        return filled

    def close(self) -> None:
        self._file.close()


class _Writer(BackendWriter):
    def __init__(self, fs: Any, place: str, file: Any) -> None:
        self._fs, self._place, self._file = fs, place, file
        self._num_bytes = 0

    def write(self, data: Buffer) -> None:
        self._file.write(data)
        self._num_bytes += len(data)

    def close(self) -> None:
        """Some clients drop what a server says of the last bytes, so that the file's size is asked for."""
        self._file.close()
        found = int(self._fs.info(self._place)["size"])
        if found != self._num_bytes:
            raise OSError(errno.EIO, f"the store has {found} of {self._num_bytes} bytes", self._place)

    def abandon(self) -> None:
        with suppress(Exception):
            self._file.discard()  # of an object nothing is there yet
        with suppress(Exception):
            if hasattr(self._file, "discard"):
                self._file.closed = True  # else it would be sent when Python lets go of it
            else:
                if (rest := getattr(self._file, "_wbuffer", None)) is not None:
                    # paramiko's would send it, now and when Python lets go, and waits forever then (an agent hung).
                    rest.truncate(0)
                self._file.close()


def _cause(problem: Exception) -> Cause:
    words = f"{type(problem).__name__}: {problem}{_answer(problem)}"
    told = next((cause for pattern, cause in _CAUSES if re.search(pattern, words)), None)
    if told is None and isinstance(problem, PermissionError):
        return _NO_PERMISSION
    if isinstance(problem, FileNotFoundError):
        return _NOTHING_THERE
    if told is None and isinstance(problem, OSError) and problem.errno in _BUSY:
        return _NO_ANSWER
    return told or cause_of_number(problem) or _OTHER


def _answer(problem: BaseException) -> str:
    """The server's own code and status where a client of S3 has put its words in their place."""
    behind = problem.__cause__ or problem.__context__
    response = getattr(behind, "response", None)
    if not isinstance(response, dict):
        return ""
    code, status = (response.get(part, {}) for part in ("Error", "ResponseMetadata"))
    return f" [{code.get('Code')}, HTTP {status.get('HTTPStatusCode')}]"


def _is_same(name: str, place: str) -> bool:
    return name.strip("/") == place.strip("/")


def _entry(found: dict[str, Any]) -> Entry:
    is_folder = found["type"] == "directory"
    changed = next((found[key] for key in _CHANGED if found.get(key) is not None), 0.0)
    at = changed.timestamp() if isinstance(changed, datetime) else float(changed)
    name = posixpath.basename(str(found["name"]).rstrip("/"))
    return Entry(name, is_folder, 0 if is_folder else int(found["size"] or 0), at)
