"""A real HDFS on this machine: one name node and two data nodes, each a JVM that a test may kill and start again.

Hadoop is that of HADOOP_HOME, else the classes that env/setup_hadoop.sh has put beside the environment. Everything is
on one address and in one folder; the processes die with us.
"""

from __future__ import annotations

import atexit
import glob
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from tests.ports import unused_ports
from tests.processes import die_with_parent

HADOOP_JARS = Path(sys.prefix) / "opt" / "hadoop"
"""Where env/setup_hadoop.sh puts Hadoop's classes and what they need."""

_NAME_NODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATA_NODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_ADMIN = "org.apache.hadoop.hdfs.tools.DFSAdmin"
_SHELL = "org.apache.hadoop.fs.FsShell"
# Hadoop 2.7 on Java 9 and later looks into these; from Java 24 on its logins do not work at all.
_OPENED = ["lang", "nio", "net", "util", "lang.reflect", "util.concurrent", "io"]
_OLDEST_JAVA, _NEWEST_JAVA = 8, 23
_JVM = ["-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Xshare:auto"]
_START_S = 120.0
_METRICS_PERIOD_S = 1
"""How old a server's account of itself may be; else 10 s."""


def skip_reason() -> str | None:
    """Why no HDFS can run here; None where one can."""
    if find_java() is None:
        return f"no Java {_OLDEST_JAVA} to {_NEWEST_JAVA} found (env/setup_system.sh)"
    if not class_path():
        return f"no Hadoop: HADOOP_HOME is not set, and {HADOOP_JARS} is missing (env/setup_hadoop.sh)"
    try:
        import hdfs_native  # noqa: F401
    except ImportError as problem:
        return f"hdfs-native does not import: {problem}"
    return None


def libhdfs_skip_reason() -> str | None:
    """Why Hadoop's own client cannot be used from Python here; None where it can."""
    if not (_libhdfs_folder() / "libhdfs.so").is_file():
        return f"no libhdfs.so in {_libhdfs_folder()} (env/setup_hadoop.sh)"
    return None if (HADOOP_JARS / "python" / "pyarrow").is_dir() else "no pyarrow (env/setup_hadoop.sh)"


def _libhdfs_folder() -> Path:
    home = os.environ.get("HADOOP_HOME")
    return Path(home) / "lib" / "native" if home else HADOOP_JARS / "native"


@dataclass(frozen=True)
class Java:
    program: str
    release: int


def find_java() -> Java | None:
    """A java that runs Hadoop: that of JAVA_HOME if it does, else the newest fitting one under /usr/lib/jvm."""
    home = os.environ.get("JAVA_HOME")
    for places in ([Path(home)] if home else [], sorted(Path("/usr/lib/jvm").glob("*"))):
        found = [Java(f"{place}/bin/java", release) for place in places if (release := _release(place)) is not None]
        if fitting := [java for java in found if _OLDEST_JAVA <= java.release <= _NEWEST_JAVA]:
            return max(fitting, key=lambda java: java.release)
    return None


def _release(home: Path) -> int | None:
    """The number of a Java release by its folder's own record."""
    try:
        text = (home / "release").read_text()
    except OSError:
        return None
    match = re.search(r'JAVA_VERSION="(?:1\.)?(\d+)', text)
    return int(match[1]) if match and os.access(home / "bin" / "java", os.X_OK) else None


def class_path() -> list[str]:
    """Hadoop's jars, or nothing."""
    home = os.environ.get("HADOOP_HOME")
    if home:
        parts = ["common", "common/lib", "hdfs", "hdfs/lib"]
        return [f"{home}/share/hadoop/{part}/*" for part in parts]
    return [f"{HADOOP_JARS}/*"] if any(HADOOP_JARS.glob("hadoop-hdfs-*.jar")) else []


class HdfsCluster:
    """One HDFS with two copies of each block, in blocks of 4 MiB. Its superuser is the user that runs the tests.

    address, enter: where it serves, and the words before a command that bring it to where that address is its own.
    core, hdfs: further settings of its configuration; None takes one of ours out. java_options: of every process.
    """

    def __init__(
        self,
        num_data_nodes: int = 2,
        address: str = "127.0.0.1",
        enter: Sequence[str] = (),
        *,
        core: Mapping[str, object] | None = None,
        hdfs: Mapping[str, object] | None = None,
        java_options: Sequence[str] = (),
    ) -> None:
        self._num_data_nodes, self._address, self._enter = num_data_nodes, address, list(enter)
        self._core, self._hdfs, self._java_options = core or {}, hdfs or {}, list(java_options)
        java = find_java()
        assert java is not None, "no Java: mark the test `hdfs`"
        self._java = java
        self._ports = unused_ports(2)
        self.folder = Path(tempfile.mkdtemp(prefix="hdfs-"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def authority(self) -> str:
        return f"{self._address}:{self._ports[0]}"

    @property
    def url(self) -> str:
        return f"hdfs://{self.authority}"

    @property
    def http_address(self) -> str:
        return f"{self._address}:{self._ports[1]}"

    @property
    def conf_folder(self) -> Path:
        return self.folder / "conf"

    @property
    def class_path(self) -> str:
        return os.pathsep.join([str(self.conf_folder), str(self.folder / "web"), *class_path()])

    # Life

    def start(self) -> None:
        """Start everything and wait until it serves. Raises RuntimeError with the last words of what did not."""
        atexit.register(self.stop)
        self._write_configuration()
        self.run(_NAME_NODE, "-format", "-nonInteractive", "-force")
        self.start_name_node(wait=False)
        for index in range(self._num_data_nodes):
            self.start_data_node(index)
        self.wait(lambda state: state["NumLiveDataNodes"] == self._num_data_nodes and state["FSState"] == "Operational")

    def stop(self) -> None:
        for name in list(self._processes):
            self._kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self.stop)

    def start_name_node(self, wait: bool = True) -> None:
        self._start("name", _NAME_NODE)
        if wait:
            self.wait(lambda state: state["FSState"] == "Operational" and state["NumLiveDataNodes"] > 0)

    def kill_name_node(self) -> None:
        self._kill("name")

    def start_data_node(self, index: int) -> None:
        options = [f"-Ddfs.datanode.data.dir={self.folder}/data{index}"]
        self._start(f"data{index}", _DATA_NODE, *options)

    def kill_data_node(self, index: int) -> None:
        self._kill(f"data{index}")

    def wait_for_data_nodes(self, count: int | None = None) -> None:
        wanted = self._num_data_nodes if count is None else count
        self.wait(lambda state: state["NumLiveDataNodes"] == wanted and self._data_nodes_answer())

    def wait(self, is_ready: Callable[[dict], bool]) -> None:
        """Until the name node's own account of itself is as wanted."""
        deadline = time.monotonic() + _START_S
        while not self._is(is_ready):
            if time.monotonic() > deadline:
                raise RuntimeError(f"HDFS is not as wanted after {_START_S:.0f} s\n{self.last_words()}")
            time.sleep(0.05)

    def libhdfs_environment(self) -> dict[str, str]:
        """What a process needs to use this HDFS through libhdfs; a JVM in a process takes no patterns of jars."""
        jars = [path for part in self.class_path.split(os.pathsep) for path in sorted(glob.glob(part)) or [part]]
        return {
            "CLASSPATH": os.pathsep.join(jars),
            "JAVA_HOME": str(Path(self._java.program).parents[1]),
            "ARROW_LIBHDFS_DIR": str(_libhdfs_folder()),
            "LIBHDFS_OPTS": " ".join([*_JVM, *self._modules()]),
            "PYTHONPATH": os.pathsep.join([str(HADOOP_JARS / "python"), os.environ.get("PYTHONPATH", "")]),
        }

    # What an administrator does

    def admin(self, *words: str) -> str:
        """`hdfs dfsadmin WORDS`; its output."""
        return self.run(_ADMIN, *words)

    def shell(self, *words: str) -> str:
        """`hdfs dfs WORDS`; its output."""
        return self.run(_SHELL, *words)

    def run(self, main_class: str, *words: str) -> str:
        done = subprocess.run(
            self._command(main_class, *words), capture_output=True, text=True, timeout=_START_S, env=self._environment()
        )
        if done.returncode:
            raise RuntimeError(f"{main_class} {' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    def bytes_sent(self) -> int:
        """What the data nodes have sent to readers since they started."""
        time.sleep(1.5 * _METRICS_PERIOD_S)  # until what was just sent is in what they say
        return sum(self._metric(port, "DataNodeActivity", "BytesRead") for port in self._data_http_ports())

    def replicas(self, path: str) -> list[tuple[Path, ...]]:
        """The files of each block of a file, those of the first data node before those of the second."""
        with urllib.request.urlopen(f"http://{self.http_address}/webhdfs/v1{path}?op=GET_BLOCK_LOCATIONS") as answer:
            blocks = json.load(answer)["LocatedBlocks"]["locatedBlocks"]
        names = [f"blk_{block['block']['blockId']}" for block in blocks]
        return [tuple(sorted(self.folder.glob(f"data*/current/*/current/finalized/**/{name}"))) for name in names]

    def last_words(self) -> str:
        texts = []
        for log in sorted(self.folder.glob("*.log")):
            texts.append(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}")
        return "\n".join(texts)

    # Inside

    def _start(self, name: str, main_class: str, *options: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                self._command(main_class, *options),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                preexec_fn=die_with_parent,
            )

    def _kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def _command(self, main_class: str, *words: str) -> list[str]:
        return [
            *self._enter,
            self._java.program,
            *_JVM,
            *self._modules(),
            *self._java_options,
            "-cp",
            self.class_path,
            main_class,
            *words,
        ]

    def _modules(self) -> list[str]:
        if self._java.release <= 8:
            return []
        opened = [f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in _OPENED]
        opened += ["--add-opens=java.base/sun.nio.ch=ALL-UNNAMED"]
        for kind in ("exports", "opens"):
            for name in ("sun.security.krb5", "sun.security.jgss"):
                opened.append(f"--add-{kind}=java.security.jgss/{name}=ALL-UNNAMED")
        return opened

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "JAVA_TOOL_OPTIONS"}
        return {**kept, "HADOOP_CONF_DIR": str(self.conf_folder)}

    def _is(self, is_ready: Callable[[dict], bool]) -> bool:
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with {process.returncode}\n{self.last_words()}")
        try:
            return is_ready(self._beans(self._ports[1], "Hadoop:service=NameNode,name=FSNamesystemState")[0])
        except (OSError, IndexError, ValueError):
            return False

    def _beans(self, port: int, query: str) -> list[dict]:
        with urllib.request.urlopen(f"http://{self._address}:{port}/jmx?qry={query}", timeout=5) as answer:
            return json.load(answer)["beans"]

    def _data_http_ports(self) -> list[int]:
        live = json.loads(self._beans(self._ports[1], "Hadoop:service=NameNode,name=NameNodeInfo")[0]["LiveNodes"])
        return [int(node["infoAddr"].rpartition(":")[2]) for node in live.values()]

    def _data_nodes_answer(self) -> bool:
        """The name node counts one that was killed for 12 s more; one that is started again has another port."""
        for port in self._data_http_ports():
            with socket.socket() as probe:
                if probe.connect_ex((self._address, port)) != 0:
                    return False
        return True

    def _metric(self, port: int, name: str, key: str) -> int:
        beans = self._beans(port, f"Hadoop:service=DataNode,name={name}*")
        return int(beans[0][key])

    def _write_configuration(self) -> None:
        self.conf_folder.mkdir()
        for app in ("hdfs", "datanode", "static"):
            inside = self.folder / "web" / "webapps" / app / "WEB-INF"
            inside.mkdir(parents=True)
            (inside / "web.xml").write_text("<web-app></web-app>\n")
        name_port, http_port = self._ports
        core = {"fs.defaultFS": self.url, "hadoop.tmp.dir": f"{self.folder}/tmp"}
        hdfs = {
            "dfs.replication": self._num_data_nodes,
            "dfs.blocksize": 4 << 20,
            "dfs.namenode.name.dir": f"{self.folder}/name",
            "dfs.namenode.rpc-address": f"{self._address}:{name_port}",
            "dfs.namenode.http-address": f"{self._address}:{http_port}",
            "dfs.namenode.secondary.http-address": f"{self._address}:0",
            "dfs.datanode.address": f"{self._address}:0",
            "dfs.datanode.ipc.address": f"{self._address}:0",
            "dfs.datanode.http.address": f"{self._address}:0",
            # A dead data node is noticed after ten beats and two looks, here 12 s.
            "dfs.heartbeat.interval": 1,
            "dfs.namenode.heartbeat.recheck-interval": 1000,
            # And one that is silent for 3 s gets no block while another can have it. Without that, Hadoop 2.7 goes on
            # giving blocks to a dead one for ever: the writer's own address is its first choice, and here all have it.
            "dfs.namenode.avoid.write.stale.datanode": "true",
            "dfs.namenode.stale.datanode.interval": 3000,
            "dfs.namenode.safemode.extension": 0,
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.datanode.directoryscan.interval": -1,
            # Else a data node is passed over while it has twice the mean number of connections.
            "dfs.namenode.replication.considerLoad": "false",
            # Java's client looks three times for a block, in windows that grow by this; else for 20 s or so.
            "dfs.client.retry.window.base": 100,
            "dfs.webhdfs.enabled": "true",
            "dfs.permissions.enabled": "true",
        }
        for name, settings in (("core-site.xml", core | self._core), ("hdfs-site.xml", hdfs | self._hdfs)):
            (self.conf_folder / name).write_text(
                _xml({key: value for key, value in settings.items() if value is not None})
            )
        (self.conf_folder / "log4j.properties").write_text(_LOGGING)
        (self.conf_folder / "hadoop-metrics2.properties").write_text(f"*.period={_METRICS_PERIOD_S}\n")


_LOGGING = """\
log4j.rootLogger=WARN, A
log4j.appender.A=org.apache.log4j.ConsoleAppender
log4j.appender.A.layout=org.apache.log4j.PatternLayout
log4j.appender.A.layout.ConversionPattern=%d %p %c{1}: %m%n
"""


def _xml(settings: dict) -> str:
    lines = [
        f"<property><name>{name}</name><value>{escape(str(value))}</value></property>"
        for name, value in settings.items()
        if value is not None
    ]
    return "\n".join(["<configuration>", *lines, "</configuration>", ""])
