"""Checkpoints on HDFS over HTTP: WebHDFS of the name and data nodes, or an HttpFS gateway. Needs no further package.

webhdfs://HOST:PORT is plain, swebhdfs:// is TLS; several name nodes are written HOST:PORT,HOST:PORT. The user is USER
in webhdfs://USER@HOST, else HADOOP_USER_NAME, else the one that runs this. Sites with Kerberos are refused: they want
hdfs://.
"""

from __future__ import annotations

import http.client
import json
import os
import pwd
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from hpc_train.checkpoint.stores.backend import Backend, BackendReader, BackendWriter, Buffer, Entry
from hpc_train.checkpoint.stores.cause import Cause, StoreError
from hpc_train.checkpoint.stores.hdfs_causes import hdfs_cause
from hpc_train.checkpoint.stores.hdfs_replicas import blocks_of_json, reported_rot
from hpc_train.errors import ConfigError

# cited: hdfs-default.xml of Hadoop 3, dfs.namenode.http-address and https-address.
_PORTS = {"webhdfs": 9870, "swebhdfs": 9871}
_TIMEOUT_S = 60.0
"""Of one answer (assumed: a data node that syncs a block under load)."""
_PIECE_BYTES = 16 << 20
"""Read by one request (assumed: the cost of its two connections is lost in it)."""


class WebHdfsError(Exception):
    """A refusal: the name and message of Hadoop's exception, or the status."""


class WebHdfsBackend(Backend):
    def __init__(self, scheme: str, authority: str, env: Mapping[str, str]) -> None:
        user, _, hosts = authority.rpartition("@")
        self._is_secure = scheme == "swebhdfs"
        self._user = user or env.get("HADOOP_USER_NAME") or pwd.getpwuid(os.getuid()).pw_name
        named = [host for host in hosts.split(",") if host]
        self._name_nodes = tuple(host if ":" in host else f"{host}:{_PORTS[scheme]}" for host in named)
        self._answered = 0
        if not self._name_nodes:
            raise ConfigError(f"{scheme}:// needs a host, such as {scheme}://nn1:{_PORTS[scheme]}/user/me")

    def entry(self, path: str) -> Entry | None:
        try:
            return _entry(self._ask("GET", path, "GETFILESTATUS")["FileStatus"], path)
        except FileNotFoundError:
            return None

    def entries(self, path: str) -> list[Entry]:
        listed = self._ask("GET", path, "LISTSTATUS")["FileStatuses"]["FileStatus"]
        return [_entry(status, status["pathSuffix"]) for status in listed]

    def make_folder(self, path: str) -> None:
        if not self._ask("PUT", path, "MKDIRS")["boolean"]:
            raise WebHdfsError(f"MKDIRS {path} was answered with false")

    def rename(self, source: str, target: str) -> None:
        # With this option it is the newer rename, which never goes into an existing folder.
        answer = self._ask("PUT", source, "RENAME", destination=target, renameoptions="NONE")
        if answer.get("boolean") is False:
            raise WebHdfsError(f"RENAME {source} to {target} was answered with false")

    def replace(self, source: str, target: str) -> None:
        answer = self._ask("PUT", source, "RENAME", destination=target, renameoptions="OVERWRITE")
        if answer.get("boolean") is False:  # a gateway that does not know the option
            self.remove(target)
            self.rename(source, target)

    def remove(self, path: str) -> None:
        self._ask("DELETE", path, "DELETE", recursive="true")

    def open_read(self, path: str) -> BackendReader:
        found = self.entry(path)
        if found is None:
            raise FileNotFoundError(path)
        return _WebReader(self, path, found.num_bytes)

    def create(self, path: str) -> BackendWriter:
        if "+" in path or "%" in path:
            # Seen with Hadoop 2.7: the data node decodes the path of its URL a second time.
            raise StoreError(f"{path}: names with + or % go astray over webhdfs://; use hdfs://, or another name")
        if self.entry(path) is not None:
            raise FileExistsError(path)
        status, headers, body = self._request("PUT", self._query(path, "CREATE", overwrite="false"))
        if status not in (200, 201, 307):
            raise _refusal(status, body, path)
        # HttpFS takes the data itself, and says so by a redirect to itself as well.
        return _WebWriter(self.connect, headers["Location"], path)

    def flush_folder(self, path: str) -> None:
        """The name node has written each change to its journal before it answers."""

    def free_bytes(self, path: str) -> int | None:
        return None

    def cause(self, problem: Exception) -> Cause:
        return hdfs_cause(f"{type(problem).__name__}: {problem}")

    def rot(self, path: str, span: range, cause: Cause) -> str | None:
        if not cause.is_of_file:
            return None
        # The client of the data node that was asked has reported what it found.
        try:
            status = self._ask("GET", path, "GETFILESTATUS")["FileStatus"]
            located = self._ask("GET", path, "GET_BLOCK_LOCATIONS")
            blocks = blocks_of_json(located, is_striped="ecBit" in status)
            return reported_rot(blocks, int(status["replication"]))
        except (WebHdfsError, http.client.HTTPException, OSError, KeyError, TypeError, ValueError):
            return None  # an outage, or a gateway that does not tell of blocks

    def read(self, path: str, start: int, num_bytes: int) -> bytes:
        """A range of a file, from the data node that the name node sends us to."""
        status, headers, body = self._request("GET", self._query(path, "OPEN", offset=start, length=num_bytes))
        if status == 307:
            status, _, body = self._fetch("GET", headers["Location"])
        if status != 200:
            raise _refusal(status, body, path)
        return body

    def connect(self, address: str) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        return kind(address, timeout=_TIMEOUT_S)

    def _query(self, path: str, operation: str, **parameters: Any) -> str:
        words = urlencode({"op": operation, "user.name": self._user, **parameters})
        return f"/webhdfs/v1{quote(path)}?{words}"

    def _ask(self, method: str, path: str, operation: str, **parameters: Any) -> dict[str, Any]:
        status, _, body = self._request(method, self._query(path, operation, **parameters))
        if status != 200:
            raise _refusal(status, body, path)
        answer: dict[str, Any] = json.loads(body) if body else {}
        return answer

    def _request(self, method: str, query: str) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Ask the name nodes in turn, from the last one that answered on, until one is neither standby nor silent."""
        scheme = "https" if self._is_secure else "http"
        count, first = len(self._name_nodes), self._answered
        # Each request has an order of its own: several threads ask at once.
        for number in [*range(first, count), *range(first)]:
            is_last = (number + 1) % count == first
            try:
                answer = self._fetch(method, f"{scheme}://{self._name_nodes[number]}{query}")
                if is_last or answer[0] != 403 or b"StandbyException" not in answer[2]:
                    self._answered = number
                    return answer
            except OSError:
                if is_last:
                    raise
        raise AssertionError("there is a name node")

    def _fetch(self, method: str, url: str) -> tuple[int, http.client.HTTPMessage, bytes]:
        address, query = _split(url)
        connection = self.connect(address)
        try:
            connection.request(method, query)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()


class _WebReader(BackendReader):
    def __init__(self, backend: WebHdfsBackend, path: str, num_bytes: int) -> None:
        self._backend, self._path, self._num_bytes = backend, path, num_bytes

    def read_into(self, start: int, buffer: Buffer) -> int:
        wanted = max(0, min(len(buffer), self._num_bytes - start))
        for at in range(0, wanted, _PIECE_BYTES):
            count = min(_PIECE_BYTES, wanted - at)
            data = self._backend.read(self._path, start + at, count)
            if len(data) != count:
                raise WebHdfsError(f"unexpected end: {len(data)} of {count} bytes at {start + at} came")
            buffer[at : at + count] = data
        return wanted

    def close(self) -> None:
        """Nothing is held open."""


class _WebWriter(BackendWriter):
    """One request whose body is sent in chunks as it comes."""

    def __init__(self, connect: Any, url: str, path: str) -> None:
        address, query = _split(url)
        self._path = path
        self._connection: http.client.HTTPConnection = connect(address)
        self._connection.putrequest("PUT", query)
        self._connection.putheader("Content-Type", "application/octet-stream")
        self._connection.putheader("Transfer-Encoding", "chunked")
        self._connection.endheaders()

    def write(self, data: Buffer) -> None:
        if len(data) == 0:
            return  # an empty chunk would be the end
        try:
            self._connection.send(b"%x\r\n" % len(data))
            self._connection.send(data)
            self._connection.send(b"\r\n")
        except OSError:
            self._finish()  # says why, if the data node has said it
            raise

    def close(self) -> None:
        self._connection.send(b"0\r\n\r\n")
        self._finish()

    def abandon(self) -> None:
        self._connection.close()

    def _finish(self) -> None:
        try:
            answer = self._connection.getresponse()
            status, body = answer.status, answer.read()
        finally:
            self._connection.close()
        if status not in (200, 201):
            raise _refusal(status, body, self._path)


def _refusal(status: int, body: bytes, path: str) -> Exception:
    if status == 401:
        return WebHdfsError("Kerberos is asked for (SPNEGO), which webhdfs:// does not speak here; use hdfs://")
    try:
        told = json.loads(body)["RemoteException"]
        name, message = str(told.get("javaClassName") or told["exception"]), str(told.get("message"))
    except (ValueError, KeyError, TypeError):
        return WebHdfsError(f"HTTP status {status} {http.client.responses.get(status, '')}: {body[:200]!r}")
    if name.endswith("FileNotFoundException"):
        return FileNotFoundError(path)
    if name.endswith("FileAlreadyExistsException"):
        return FileExistsError(path)
    return WebHdfsError(f"{name}: {message}")


def _split(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.netloc, f"{parts.path}?{parts.query}"


def _entry(status: Mapping[str, Any], path: str) -> Entry:
    is_folder = status["type"] == "DIRECTORY"
    name = path.rstrip("/").rpartition("/")[2]
    return Entry(name, is_folder, 0 if is_folder else int(status["length"]), status["modificationTime"] / 1000)
