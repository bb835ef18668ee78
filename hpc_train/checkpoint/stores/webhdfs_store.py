"""Checkpoints on HDFS over HTTP: WebHDFS of the name and data nodes, or an HttpFS gateway. Needs no further package.

webhdfs://HOST:PORT is plain, swebhdfs:// is TLS; several name nodes are written HOST:PORT,HOST:PORT. The user is that
of the Kerberos ticket where the site asks for one; else USER in webhdfs://USER@HOST, HADOOP_USER_NAME, or the one that
runs this.
"""

from __future__ import annotations

import http.client
import json
import os
import pwd
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from hpc_train.checkpoint.stores.backend import Backend, BackendReader, BackendWriter, Buffer, Entry
from hpc_train.checkpoint.stores.cause import Cause, StoreError
from hpc_train.checkpoint.stores.hdfs_causes import hdfs_cause
from hpc_train.checkpoint.stores.hdfs_replicas import blocks_of_json, reported_rot
from hpc_train.checkpoint.stores.spnego import GssError, Negotiation, is_asked_for
from hpc_train.errors import ConfigError

# cited: hdfs-default.xml of Hadoop 3, dfs.namenode.http-address and https-address.
_PORTS = {"webhdfs": 9870, "swebhdfs": 9871}
_TIMEOUT_S = 60.0
"""Of one answer (assumed: a data node that syncs a block under load)."""
_PIECE_BYTES = 16 << 20
"""Read by one request (assumed: the cost of its two connections is lost in it)."""
_COOKIE = "hadoop.auth"
"""cited: Hadoop's AuthenticatedURL. Who has it needs no ticket for as long as it lasts, by default 10 h."""

_Answer = tuple[int, http.client.HTTPMessage, bytes]


class WebHdfsError(Exception):
    """A refusal: the name and message of Hadoop's exception, or the status."""


class WebHdfsBackend(Backend):
    def __init__(self, scheme: str, authority: str, env: Mapping[str, str]) -> None:
        user, _, hosts = authority.rpartition("@")
        self._is_secure = scheme == "swebhdfs"
        self._is_user_named = bool(user)
        self._user = user or env.get("HADOOP_USER_NAME") or pwd.getpwuid(os.getuid()).pw_name
        named = [host for host in hosts.split(",") if host]
        self._name_nodes = tuple(host if ":" in host else f"{host}:{_PORTS[scheme]}" for host in named)
        self._answered = 0
        self._cookies: dict[str, str] = {}
        """By the address that gave it."""
        self._token: str | None = None
        """By which data nodes know us on a site with Kerberos."""
        self._is_by_ticket = False
        """Whether a server has asked for a ticket: Hadoop then refuses another word on who the user is."""
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
        status, headers, body = self._redirect("PUT", path, "CREATE", overwrite="false")
        if status not in (200, 201, 307):
            raise _refusal(status, body, path)
        # HttpFS takes the data itself, and says so by a redirect to itself as well.
        address, query = _split(headers["Location"])
        return _WebWriter(self.connect(address), query, self._cookie(address), path)

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
        except (WebHdfsError, GssError, http.client.HTTPException, OSError, KeyError, TypeError, ValueError):
            return None  # an outage, or a gateway that does not tell of blocks

    def read(self, path: str, start: int, num_bytes: int) -> bytes:
        """A range of a file, from the data node that the name node sends us to."""
        status, headers, body = self._redirect("GET", path, "OPEN", offset=start, length=num_bytes)
        if status == 307:  # to a data node, which knows us by a token in the address
            status, headers, body = self._fetch("GET", *_split(headers["Location"]))
        if status != 200:
            raise _refusal(status, body, path)
        return body

    def connect(self, address: str) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        return kind(address, timeout=_TIMEOUT_S)

    def _query(self, path: str, parameters: Mapping[str, Any]) -> str:
        user = {} if self._is_by_ticket and not self._is_user_named else {"user.name": self._user}
        return f"/webhdfs/v1{quote(path)}?{urlencode({**parameters, **user})}"

    def _ask(self, method: str, path: str, operation: str, **parameters: Any) -> dict[str, Any]:
        status, _, body = self._request(method, path, operation, **parameters)
        if status != 200:
            raise _refusal(status, body, path)
        answer: dict[str, Any] = json.loads(body) if body else {}
        return answer

    def _redirect(self, method: str, path: str, operation: str, **parameters: Any) -> _Answer:
        """Ask where the bytes are; on a site with Kerberos with the token of the last such answer.

        Else the name node makes and journals a new token, good for a day by default, for each piece that is read.
        """
        token = self._token
        answer = self._request(method, path, operation, **parameters, **({"delegation": token} if token else {}))
        if token and answer[0] in (401, 403):  # it may have ended
            self._token = None
            answer = self._request(method, path, operation, **parameters)
        given = parse_qs(urlsplit(answer[1].get("Location", "")).query).get("delegation")
        self._token = given[0] if given else self._token
        return answer

    def _request(self, method: str, path: str, operation: str, **parameters: Any) -> _Answer:
        """Ask the name nodes in turn, from the last one that answered on, until one is neither standby nor silent."""
        words = {"op": operation, **parameters}
        count, first = len(self._name_nodes), self._answered
        # Each request has an order of its own: several threads ask at once.
        for number in [*range(first, count), *range(first)]:
            is_last = (number + 1) % count == first
            try:
                answer = self._ask_as_user(method, self._name_nodes[number], path, words)
                if is_last or answer[0] != 403 or b"StandbyException" not in answer[2]:
                    self._answered = number
                    return answer
            except OSError:
                if is_last:
                    raise
        raise AssertionError("there is a name node")

    def _ask_as_user(self, method: str, address: str, path: str, words: Mapping[str, Any]) -> _Answer:
        """Ask one name node; with a ticket where it wants one, and no cookie that it gave is good any more."""
        answer = self._fetch(method, address, self._query(path, words))
        if answer[0] != 401 or not is_asked_for(_challenges(answer)):
            return answer
        self._is_by_ticket = True
        with Negotiation(urlsplit(f"//{address}").hostname or "") as negotiation:
            answer = self._fetch(method, address, self._query(path, words), negotiation.claim())
            try:
                negotiation.check(_challenges(answer))
            except GssError:
                self._cookies.pop(address, None)  # of nobody that we know
                raise
        return answer

    def _fetch(self, method: str, address: str, query: str, authorization: str | None = None) -> _Answer:
        headers = self._cookie(address) if authorization is None else {"Authorization": authorization}
        connection = self.connect(address)
        try:
            connection.request(method, query, headers=headers)
            answer = connection.getresponse()
            self._keep_cookie(address, answer.headers)
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def _cookie(self, address: str) -> dict[str, str]:
        value = self._cookies.get(address)
        return {} if value is None else {"Cookie": f"{_COOKIE}={value}"}

    def _keep_cookie(self, address: str, headers: http.client.HTTPMessage) -> None:
        for given in headers.get_all("Set-Cookie", []):
            name, _, value = given.partition(";")[0].partition("=")
            if name.strip() != _COOKIE:
                continue
            if value.strip('" '):
                self._cookies[address] = value
            else:  # so a server takes it back
                self._cookies.pop(address, None)


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

    def __init__(
        self, connection: http.client.HTTPConnection, query: str, headers: Mapping[str, str], path: str
    ) -> None:
        self._path, self._connection = path, connection
        self._connection.putrequest("PUT", query)
        for name, value in headers.items():
            self._connection.putheader(name, value)
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
    try:
        told = json.loads(body)["RemoteException"]
        name, message = str(told.get("javaClassName") or told["exception"]), str(told.get("message"))
    except (ValueError, KeyError, TypeError):
        page = re.search(rb"<title>(.*?)</title>", body, re.DOTALL)
        words = (page[1] if page else body).decode(errors="replace")
        return WebHdfsError(f"HTTP status {status} {http.client.responses.get(status, '')}: {words[:300]}")
    if name.endswith("FileNotFoundException"):
        return FileNotFoundError(path)
    if name.endswith("FileAlreadyExistsException"):
        return FileExistsError(path)
    return WebHdfsError(f"{name}: {message}")


def _challenges(answer: _Answer) -> list[str]:
    challenges: list[str] = answer[1].get_all("WWW-Authenticate", [])
    return challenges


def _split(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.netloc, f"{parts.path}?{parts.query}"


def _entry(status: Mapping[str, Any], path: str) -> Entry:
    is_folder = status["type"] == "DIRECTORY"
    name = path.rstrip("/").rpartition("/")[2]
    return Entry(name, is_folder, 0 if is_folder else int(status["length"]), status["modificationTime"] / 1000)
