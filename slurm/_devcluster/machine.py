"""This machine: what is installed, the folder where clusters live, processes and their namespaces."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

BASE = "/var/lib/hpc_train-devcluster"  # not /run: it is often mounted noexec, and batch scripts run here
LOCK = "/run/hpc_train-devcluster.lock"
NAMESPACES = "/run/netns"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_PACKAGES = {
    # Debian's Slurm loads libpmix.so by the name that only the -dev package has (seen on Debian 12).
    "slurm-wlm libpmix-dev": ("slurmctld", "slurmd", "srun", "sinfo", "scancel"),
    "munge": ("munged",),
    "iproute2": ("ip", "tc"),
    "util-linux": ("nsenter", "unshare", "setpriv", "mount"),
    "hostname": ("hostname",),
}


class ClusterError(Exception):
    """Something that the user can act on; the command ends with code 3."""


def add_system_path() -> None:
    """Find what lies in the sbin folders, which are not on everybody's PATH."""
    have = os.environ.get("PATH", "").split(":")
    os.environ["PATH"] = ":".join([*have, *(folder for folder in SYSTEM_PATH.split(":") if folder not in have)])


def require_machine() -> None:
    """Raises ClusterError, with the cure, where this machine or this user cannot run a cluster."""
    if sys.platform != "linux":
        raise ClusterError("a cluster needs Linux (network namespaces): use a Linux machine or container")
    add_system_path()
    if problems := what_is_lacking(shutil.which, is_root=os.geteuid() == 0):
        raise ClusterError("cannot run a cluster here: " + "; and ".join(problems))


def what_is_lacking(which: Callable[[str], str | None], *, is_root: bool) -> list[str]:
    """What stands against a cluster, each with its cure; which finds a program."""
    lacking = {
        packages: missing
        for packages, programs in _PACKAGES.items()
        if (missing := [program for program in programs if not which(program)])
    }
    problems = []
    if lacking:
        missing = ", ".join(program for programs in lacking.values() for program in programs)
        problems.append(f"{missing} not found; as root: apt-get install -y {' '.join(lacking)}")
    if not is_root:
        problems.append("not root, and namespaces and Slurm's daemons need it: run this command with sudo")
    return problems


def check_namespaces() -> None:
    """Raises ClusterError where root may not make namespaces or a bridge, as in most containers."""
    trial = "ip link add dc-trial type bridge && mount -t tmpfs none /mnt && hostname dc-trial"
    done = subprocess.run(["unshare", "--net", "--uts", "--mount", "sh", "-c", trial], capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(
            f"cannot make namespaces here ({done.stderr.strip()}): in a container, start it with --privileged"
        )


def run(command: Sequence[str], *, text: str | None = None) -> str:
    """The command's output. Raises ClusterError with its own message when it fails."""
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or "no message"
        raise ClusterError(f"`{' '.join(command)}` ended with code {done.returncode}: {said}")
    return done.stdout


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold the lock of this machine's clusters: two starts would take the same free subnet."""
    descriptor = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("devcluster: waiting for another devcluster command to end", file=sys.stderr)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot; with its pid it names one process for ever.

    None where it has gone, a zombie included.
    """
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def namespaces(prefix: str) -> dict[str, int]:
    """The named network namespaces that begin with prefix, and the inode of each."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(NAMESPACES)):
            if name.startswith(prefix):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    found[name] = os.stat(f"{NAMESPACES}/{name}").st_ino
    return found


def namespace_of(pid: int | str) -> int | None:
    """The inode of a process's network namespace; None where it has gone."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def listens(pid: int, port: int) -> bool:
    """Whether something in a process's network namespace waits for TCP connections at port."""
    sockets = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/net/{table}") as lines:
            sockets += [line.split() for line in lines]
    return any(fields[1].endswith(f":{port:04X}") and fields[3] == "0A" for fields in sockets)


def processes_in(inodes: set[int]) -> list[int]:
    """All living processes in these network namespaces."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if namespace_of(pid) in inodes and start_time(pid) is not None]


def kill_in(inodes: set[int], *, spare: Sequence[int] = (), timeout_s: float = 10.0) -> int:
    """Kill every process in these network namespaces but those to spare; how many were killed.

    A process cannot leave its namespace without root's help, so none escapes; those born while we
    look are found in the next round. A pid that now belongs to another process is never hit: the
    namespace is read again once a pidfd holds the process.

    Raises:
        ClusterError: some are still there after timeout_s.
    """
    inodes = inodes - {namespace_of("self"), namespace_of(1)}
    killed = set()
    deadline = time.monotonic() + timeout_s
    while left := [pid for pid in processes_in(inodes) if pid not in spare]:
        if time.monotonic() > deadline:
            raise ClusterError(f"processes {left} do not end on KILL: see /proc/PID/stack")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                try:
                    if namespace_of(pid) in inodes:
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                        killed.add(pid)
                finally:
                    os.close(descriptor)
        time.sleep(0.02)
    return len(killed)
