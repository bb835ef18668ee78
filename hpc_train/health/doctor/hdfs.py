"""HDFS where it is configured: which name nodes there are, whether they can be reached, and the Kerberos ticket."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

from hpc_train.health.doctor.answers import ask
from hpc_train.health.doctor.findings import Finding

# cited: hdfs-default.xml and core-default.xml of Hadoop 3: fs.defaultFS without a port means 8020; HTTP is 9870.
_RPC_PORT, _HTTP_PORT, _HTTPS_PORT = 8020, 9870, 9871
_CONNECT_S = 3.0


@dataclass(frozen=True)
class HdfsSetup:
    """Where HDFS is. source: what said so; name_nodes: (host, port); problem: why that is not known."""

    source: str
    url: str
    name_nodes: tuple[tuple[str, int], ...]
    kerberos: bool
    problem: str | None = None


def find_setup(env: Mapping[str, str], url: str | None = None) -> HdfsSetup | None:
    """What --hdfs or Hadoop's configuration says; None where nothing is configured."""
    folder = _configuration_folder(env)
    settings = read_settings(folder) if folder is not None else {}
    kerberos = settings.get("hadoop.security.authentication", "").lower() == "kerberos"
    source = "--hdfs" if url else f"{folder}/core-site.xml"
    url = url or settings.get("fs.defaultFS") or settings.get("fs.default.name")
    if not url or urlsplit(url).scheme not in ("hdfs", "libhdfs", "webhdfs", "swebhdfs"):
        if env.get("HADOOP_CONF_DIR") and not settings:
            problem = f"HADOOP_CONF_DIR={env['HADOOP_CONF_DIR']} holds no readable core-site.xml"
            return HdfsSetup(source, "", (), kerberos, problem)
        return None
    return HdfsSetup(source, url, _name_nodes(url, settings), kerberos)


def read_settings(folder: Path) -> dict[str, str]:
    """All properties of core-site.xml and hdfs-site.xml."""
    found = {}
    for name in ("core-site.xml", "hdfs-site.xml"):
        try:
            root = ElementTree.parse(folder / name).getroot()
        except (OSError, ElementTree.ParseError):
            continue
        for item in root.iter("property"):
            key, value = item.findtext("name"), item.findtext("value")
            if key:
                found[key.strip()] = (value or "").strip()
    return found


def reach(address: tuple[str, int]) -> str | None:
    """Connect to a name node; None where that works, else why it does not."""
    try:
        with socket.create_connection(address, timeout=_CONNECT_S):
            return None
    except OSError as problem:
        return problem.strerror or str(problem) or type(problem).__name__


def has_ticket(env: Mapping[str, str]) -> bool | None:
    """Whether the ticket cache holds a ticket that has not run out; None where klist is not installed."""
    answer = ask(["klist", "-s"], env=env, timeout_s=5)
    return None if answer.code is None else answer.is_good


def hdfs_findings(
    setup: HdfsSetup | None,
    host: str,
    *,
    connect: Callable[[tuple[str, int]], str | None] = reach,
    ticket: Callable[[], bool | None],
    verbose: bool = False,
) -> list[Finding]:
    """Reachability from one host. An active name node cannot be told from a standby one by connecting."""
    hosts = (host,)
    if setup is None:
        told = "HDFS is not configured (no HADOOP_CONF_DIR, no --hdfs)"
        return [Finding("hdfs.none", "note", told, hosts=hosts)] if verbose else []
    if setup.problem:
        cure = "load the site's Hadoop module, or correct HADOOP_CONF_DIR"
        return [Finding("hdfs.configuration", "warning", setup.problem, cure, hosts)]
    with ThreadPoolExecutor(max(1, len(setup.name_nodes))) as pool:
        answers = dict(zip(setup.name_nodes, pool.map(connect, setup.name_nodes), strict=True))
    told = ", ".join(f"{name}:{port} {why or 'answers'}" for (name, port), why in answers.items())
    if all(answers.values()):
        cure = "ask the site whether compute nodes may reach HDFS, and by which address; then --hdfs URL"
        found = [Finding("hdfs.reach", "error", f"{setup.url} ({setup.source}) cannot be reached: {told}", cure, hosts)]
    elif any(answers.values()):
        cure = "tell the site: after a failover to it nothing could be read"
        found = [Finding("hdfs.reach", "warning", f"{setup.url}: {told}", cure, hosts)]
    else:
        found = [Finding("hdfs.reach", "ok", f"{setup.url} ({setup.source}): {told}", hosts=hosts)]
    if setup.kerberos:
        found.append(_ticket_finding(ticket(), hosts))
    return found


def _ticket_finding(valid: bool | None, hosts: tuple[str, ...]) -> Finding:
    if valid:
        return Finding("hdfs.ticket", "ok", "a Kerberos ticket is there", hosts=hosts)
    if valid is None:
        told = "HDFS asks for Kerberos, and klist is not installed, so the ticket cannot be looked at"
        return Finding("hdfs.ticket", "warning", told, "ask the site for its Kerberos tools on this node", hosts)
    told = "HDFS asks for Kerberos, and there is no valid ticket here"
    cure = "`kinit`, with KRB5CCNAME in a folder that the nodes see; or a keytab, for runs longer than a ticket"
    return Finding("hdfs.ticket", "error", told, cure, hosts)


def _configuration_folder(env: Mapping[str, str]) -> Path | None:
    if env.get("HADOOP_CONF_DIR"):
        return Path(env["HADOOP_CONF_DIR"])
    if env.get("HADOOP_HOME"):
        return Path(env["HADOOP_HOME"]) / "etc/hadoop"
    return None


def _name_nodes(url: str, settings: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    """The addresses behind a URL: itself, or those of a name service with several name nodes."""
    parts = urlsplit(url)
    service = parts.hostname or ""
    # urlsplit lowers the case of hosts; names of services keep theirs.
    name = parts.netloc.rpartition("@")[2].partition(":")[0]
    if ids := settings.get(f"dfs.ha.namenodes.{name}"):
        texts = [settings.get(f"dfs.namenode.rpc-address.{name}.{item.strip()}", "") for item in ids.split(",")]
        return tuple(_address(text, _RPC_PORT) for text in texts if text)
    default = {"hdfs": _RPC_PORT, "libhdfs": _RPC_PORT, "webhdfs": _HTTP_PORT, "swebhdfs": _HTTPS_PORT}[parts.scheme]
    return ((service, parts.port or default),) if service else ()


def _address(text: str, default: int) -> tuple[str, int]:
    host, _, port = text.partition(":")
    return host, int(port) if port.isdecimal() else default
