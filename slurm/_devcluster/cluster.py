"""Start, look at, clear and stop a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pwd
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import layout as texts
from . import network
from .layout import LOGIN, Layout, link_name, namespace_prefix
from .machine import (
    BASE,
    NAMESPACES,
    ClusterError,
    kill_in,
    listens,
    namespace_of,
    namespaces,
    run,
    start_time,
)

START_TIMEOUT_S = 60.0
_CANCEL_AGAIN_S = 1.0
SLURMCTLD_PORT = 6817  # Slurm's default
_ENTER = os.path.join(os.path.dirname(os.path.realpath(__file__)), "enter.sh")


@dataclass(frozen=True)
class Daemon:
    """One of our daemons; pid and started (ticks since boot) together name one process."""

    name: str
    host: str
    pid: int
    started: int

    @property
    def alive(self) -> bool:
        return start_time(self.pid) == self.started


class Cluster:
    """A cluster by its name, whether it exists or not.

    `problems` is empty where it runs; `exists` is False where there is nothing of it.
    """

    def __init__(self, name: str) -> None:
        self.name = Layout(name=name).name
        self.state = os.path.join(BASE, name)
        self.layout = Layout(name=name)
        self.daemons: list[Daemon] = []
        self.problems: list[str] = []
        self.pmix = True
        self.exists = self._look()

    @property
    def conf(self) -> str:
        return os.path.join(self.state, "slurm.conf")

    @property
    def running(self) -> bool:
        return self.exists and not self.problems

    def _look(self) -> bool:
        names = namespaces(namespace_prefix(self.name))
        record = os.path.join(self.state, "cluster.json")
        try:
            with open(record) as file:
                saved = json.load(file)
            self.layout = Layout(**saved["layout"])
            self.daemons = [Daemon(**daemon) for daemon in saved["daemons"]]
            self.pmix = saved["pmix"]
        except FileNotFoundError:
            self.problems.append("its record is missing")
            return bool(names) or os.path.exists(f"/sys/class/net/{link_name(self.name)}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.problems.append(f"its record {record} cannot be read ({error})")
            return True
        if not saved["ready"]:
            self.problems.append("its start did not end")
        self.problems += [f"{daemon.name} is not running" for daemon in self.daemons if not daemon.alive]
        for host in (*self.layout.hosts, "switch"):
            if self.layout.namespace(host) not in names:
                self.problems.append(f"namespace {self.layout.namespace(host)} is missing")
        return True

    def require_running(self) -> None:
        """Raises ClusterError, with what to do, where it does not run."""
        again = "" if self.name == Layout().name else f" --name {self.name}"
        if not self.exists:
            raise ClusterError(f"no cluster {self.name} here: start one with `devcluster start{again}`")
        if self.problems:
            raise ClusterError(
                f"cluster {self.name} is broken ({'; '.join(self.problems)}): "
                f"`devcluster start{again}` makes it anew, `devcluster stop{again}` removes it"
            )

    # Start

    def start(self, layout: Layout) -> None:
        """Make a cluster that did not exist; all its nodes are idle on return. Nothing is left on failure."""
        self.layout, self.exists, self.problems = layout, True, []
        os.umask(0o022)  # other users must reach the munge socket and slurm.conf
        try:
            self._write_files()
            network.build(layout)
            self._write_slurm_conf()
            self._start_daemons()
            self._wait_until_idle()
            self._save(ready=True)
        except BaseException as error:
            tail = self._log_tail() if isinstance(error, ClusterError) else ""
            self.remove()
            if tail:
                raise ClusterError(f"{error}\n{tail}") from error
            raise

    def _write_files(self) -> None:
        shutil.rmtree(self.state, ignore_errors=True)
        os.makedirs(BASE, mode=0o755, exist_ok=True)
        for folder in ("", "logs", "munge", "slurmctld", "scratch", "gpu", "nodes"):
            os.makedirs(os.path.join(self.state, folder), mode=0o755, exist_ok=True)
        for node in self.layout.nodes:
            os.makedirs(f"{self.state}/nodes/{node}/spool", mode=0o755)
            os.makedirs(f"{self.state}/nodes/{node}/tmp")
            os.chmod(f"{self.state}/nodes/{node}/tmp", 0o1777)
        for index in range(self.layout.gpus_per_node):
            os.symlink("/dev/null", f"{self.state}/gpu/gpu{index}")  # Slurm wants a device; any will do
        self._save(ready=False)
        self._write("munge/key", os.urandom(128), mode=0o400)
        self._write("hosts", texts.hosts_text(self.layout, socket.gethostname()))
        self._write("topology.conf", texts.topology_text(self.layout))
        if self.layout.gpus_per_node:
            self._write("gres.conf", texts.gres_text(self.layout, self.state))
        if cgroup := texts.cgroup_text(slurm_version()):
            self._write("cgroup.conf", cgroup)

    def _write_slurm_conf(self) -> None:
        self.pmix = self._pmix_loads()
        text = texts.slurm_conf_text(self.layout, self.state, mpi_default="pmix" if self.pmix else "none")
        self._write("slurm.conf", text)

    def _pmix_loads(self) -> bool:
        """Whether srun can load PMIx: where it cannot it ends at once. (`--mpi=list` names it in any case.)"""
        os.makedirs(f"{self.state}/probe")
        self._write("probe/slurm.conf", texts.probe_conf_text(f"{self.state}/munge/socket"))
        environment = {**self._environment(), "SLURM_CONF": f"{self.state}/probe/slurm.conf"}
        command = [*self._on_login_network(), "srun", "--mpi=pmix", "--nodes=1", "true"]
        try:
            asked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=0.3)
        except subprocess.TimeoutExpired:  # it has come to look for a controller, after its plugins
            return True
        return "Invalid MPI type" not in asked.stderr

    def _write(self, path: str, content: str | bytes, mode: int = 0o644) -> None:
        full = os.path.join(self.state, path)
        with open(full + ".new", "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(full + ".new", full)

    def _save(self, *, ready: bool) -> None:
        record = {
            "ready": ready,
            "pmix": self.pmix,
            "layout": dataclasses.asdict(self.layout),
            "daemons": [dataclasses.asdict(daemon) for daemon in self.daemons],
        }
        self._write("cluster.json", json.dumps(record, indent=1) + "\n")

    def _start_daemons(self) -> None:
        munge = os.path.join(self.state, "munge")
        munged = ["munged", "--foreground", "--num-threads=2", f"--key-file={munge}/key"]
        munged += [f"--{what}-file={munge}/{what}" for what in ("pid", "seed")]
        self._start_daemon("munged", LOGIN, [*munged, f"--socket={munge}/socket"])
        self._wait_for(lambda: os.path.exists(f"{munge}/socket"), "munged made no socket")
        self._start_daemon("slurmctld", LOGIN, ["slurmctld", "-D", "-f", self.conf])
        controller = self.daemons[-1].pid
        # Who asks too early asks again after a second.
        self._wait_for(lambda: listens(controller, SLURMCTLD_PORT), "slurmctld opened no port")
        for node in self.layout.nodes:
            self._start_daemon(node, node, ["slurmd", "-D", "-N", node, "-f", self.conf])
        self._save(ready=False)

    def _start_daemon(self, name: str, host: str, command: Sequence[str]) -> None:
        """Start it in host's namespaces. Each program of the chain becomes the next: the pid is its own."""
        enter = ["nsenter", f"--net={NAMESPACES}/{self.layout.namespace(host)}"]
        # Mounts made outside later must be seen, and unmounts above all: a namespace lives as long
        # as any process still sees its mount.
        enter += ["unshare", "--uts", "--mount", "--propagation", "slave", "sh", _ENTER]
        enter += [host, f"{self.state}/hosts", f"{self.state}/scratch"]
        with open(f"{self.state}/logs/{name}.out", "ab") as output:
            process = subprocess.Popen(
                [*enter, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                cwd="/",
                start_new_session=True,
            )
        started = start_time(process.pid)
        self.daemons.append(Daemon(name, host, process.pid, -1 if started is None else started))

    def _on_login_network(self) -> list[str]:
        """Before a command: out of reach of this machine's firewall, and ended with the cluster."""
        return ["nsenter", f"--net={NAMESPACES}/{self.layout.namespace(LOGIN)}"]

    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "SLURM_CONF": self.conf, "LC_ALL": "C"}

    def _wait_for(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready():
            self._require_alive()
            if time.monotonic() > deadline:
                raise ClusterError(f"{what} within {START_TIMEOUT_S:.0f} s")
            time.sleep(0.02)

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            self._require_alive()
            states = self.node_states()
            late = [node for node in self.layout.nodes if states.get(node) != "idle"]
            if not late:
                return
            if time.monotonic() > deadline:
                seen = ", ".join(f"{node} is {states.get(node, 'unknown')}" for node in late)
                raise ClusterError(f"not all nodes came up within {START_TIMEOUT_S:.0f} s: {seen}")
            time.sleep(0.1)

    def _require_alive(self) -> None:
        if dead := [daemon.name for daemon in self.daemons if not daemon.alive]:
            raise ClusterError(f"{', '.join(dead)} ended while the cluster {self.name} was starting")

    def _log_tail(self, num_lines: int = 15) -> str:
        """The end of the logs of the first daemon that died, or of slurmctld."""
        dead = [daemon.name for daemon in self.daemons if not daemon.alive]
        parts = []
        for end in (".out", ".log"):
            path = f"{self.state}/logs/{(dead or ['slurmctld'])[0]}{end}"
            with contextlib.suppress(OSError), open(path, errors="replace") as file:
                if lines := file.read().splitlines()[-num_lines:]:
                    parts += [f"--- the end of {os.path.basename(path)}", *lines]
        return "\n".join(parts)

    # Look

    def node_states(self) -> dict[str, str]:
        """Slurm's state of each node (idle, allocated, down*, ...); none where slurmctld does not answer."""
        command = [
            *self._on_login_network(),
            "timeout",
            "10",
            "sinfo",
            "--noheader",
            "--Node",
            "--partition=main",
            "--format=%N %T",
        ]
        listed = subprocess.run(command, env=self._environment(), capture_output=True, text=True)
        return dict(line.split() for line in listed.stdout.splitlines() if len(line.split()) == 2)

    def report(self) -> dict[str, Any]:
        """All that `status --json` says."""
        report: dict[str, Any] = {
            "name": self.name,
            "status": "running" if self.running else "broken" if self.exists else "none",
            "problems": self.problems if self.exists else [],
        }
        if not self.running:
            return report
        states, links = self.node_states(), network.links(self.layout)
        report |= {
            "conf": self.conf,
            "logs": f"{self.state}/logs",
            "subnet": self.layout.subnet,
            "login": {"host": LOGIN, "address": self.layout.address(LOGIN), "link": links[LOGIN]},
            "pmix": self.pmix,
            "gpus_per_node": self.layout.gpus_per_node,
            "cpus_per_node": self.layout.cpus_per_node,
            "nodes": [
                {
                    "name": node,
                    "address": self.layout.address(node),
                    "leaf": self.layout.leaf_of(node),
                    "link": links[node],
                    "slurm": states.get(node, "unknown"),
                }
                for node in self.layout.nodes
            ],
        }
        return report

    # Run

    def command_on(self, host: str, user: str | None, command: Sequence[str]) -> list[str]:
        """The command that runs command on a host of the cluster, in this folder.

        Raises:
            ClusterError: the host is unknown or its daemon is dead.
        """
        if host not in self.layout.hosts:
            raise ClusterError(f"no host {host} in {self.name}: there are {', '.join(self.layout.hosts)}")
        holder = next((daemon for daemon in self.daemons if daemon.host == host), None)
        if holder is None or not holder.alive:
            raise ClusterError(f"{host} cannot be entered: its daemon is not running")
        enter = ["nsenter", f"--target={holder.pid}", "--net", "--uts", "--mount"]
        enter += ["env", "-C", os.getcwd(), f"SLURM_CONF={self.conf}", f"HOSTNAME={host}"]
        if user is not None:
            account = _account(user)
            enter += [f"HOME={account.pw_dir}", f"USER={user}", f"LOGNAME={user}"]
            enter += ["setpriv", f"--reuid={user}", f"--regid={account.pw_gid}", "--init-groups"]
        return [*enter, *command]

    # End

    def clear(self) -> int:
        """Cancel all jobs, kill what they left on the nodes; how many processes that were.

        Blocks until the nodes are idle, at most START_TIMEOUT_S.
        """
        login = self.command_on(LOGIN, None, [])
        spare = [daemon.pid for daemon in self.daemons]
        inodes = namespaces(namespace_prefix(self.name))
        nodes = {inodes[self.layout.namespace(node)] for node in self.layout.nodes}
        num_killed, begin, cancelled_at = 0, time.monotonic(), -math.inf
        while jobs := run([*login, "squeue", "--noheader", "--format=%A %T %r"]).splitlines():
            now = time.monotonic()
            if now > begin + START_TIMEOUT_S:
                raise ClusterError(f"jobs of {self.name} did not end within {START_TIMEOUT_S:.0f} s: {', '.join(jobs)}")
            # Again and again: whose step was killed before it was cancelled may be back in the queue, for two minutes.
            if now > cancelled_at + _CANCEL_AGAIN_S:
                run([*login, "scancel", "--quiet", *sorted({line.split()[0] for line in jobs})])
                cancelled_at = now
            num_killed += kill_in(nodes, spare=spare)
            time.sleep(0.05)
        num_killed += kill_in(nodes, spare=spare)
        for node in self.layout.nodes:
            self._clear_shared_memory(node)
        return num_killed

    def _clear_shared_memory(self, node: str) -> None:
        """Open MPI leaves its segments in /dev/shm when it is killed."""
        daemon = next(daemon for daemon in self.daemons if daemon.host == node)
        folder = f"/proc/{daemon.pid}/root/dev/shm"
        # Never this machine's own: only a mount that is the node's alone.
        if daemon.alive and os.stat(folder).st_dev != os.stat("/dev/shm").st_dev:
            for name in os.listdir(folder):
                path = os.path.join(folder, name)
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    os.unlink(path)

    def remove(self, *, keep_logs: bool = False) -> None:
        """End all its processes, remove its namespaces, links and folder; whatever of them is there."""
        inodes = set(namespaces(namespace_prefix(self.name)).values())
        if namespace_of("self") in inodes:
            raise ClusterError(f"this shell is inside the cluster {self.name}: stop it from outside")
        kill_in(inodes)
        for daemon in self.daemons:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(daemon.pid, 0)  # ours where we have just started it
        network.remove(self.name)
        if keep_logs and os.path.isdir(f"{self.state}/logs"):
            for entry in os.scandir(self.state):
                if entry.name != "logs":
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path)
                    else:
                        os.unlink(entry.path)
        elif os.path.isdir(self.state):
            shutil.rmtree(self.state)
        with contextlib.suppress(OSError):
            os.rmdir(BASE)  # if this was the last
        self.daemons, self.exists = [], False


def all_names() -> list[str]:
    """The names of all clusters of this machine, broken ones included."""
    found = namespaces(texts.LINK_PREFIX)
    names = {name.split(".")[0][len(texts.LINK_PREFIX) :] for name in found if "." in name}
    with contextlib.suppress(FileNotFoundError):
        names |= {entry for entry in os.listdir(BASE) if os.path.exists(f"{BASE}/{entry}/cluster.json")}
    return sorted(names)


def slurm_version() -> tuple[int, int]:
    """(22, 5) for Slurm 22.05.8, from `slurmd -V`."""
    said = run(["slurmd", "-V"])
    found = re.search(r"(\d+)\.(\d+)", said)
    if not found:
        raise ClusterError(f"`slurmd -V` said {said.strip()!r}, which names no version")
    return int(found[1]), int(found[2])


def _account(user: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(user)
    except KeyError:
        raise ClusterError(f"no user {user} on this machine") from None
