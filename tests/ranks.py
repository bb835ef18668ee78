"""Run a function on several ranks, or a program under mpirun, and end them whatever happens.

`run_ranks` forks its ranks from one server that has torch loaded, so that a rank starts in a tenth of a
second and not in the seconds that `import torch` takes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_pipes
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.processes import die_with_parent, kill_tree

# Loaded once, in the fork server: what nearly every rank needs, and what test modules import.
_PRELOAD = [
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch._dynamo",  # which recomputation imports
    "pytest",
    "hypothesis",
    "hpc_train.train.build",
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOAD)

# Open MPI's components by name: without them each rank spends over a second on looking for networks.
MPI_COMPONENTS = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_coll": "basic,libnbc,tuned,inter,self,sync",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "PRTE_MCA_prte_silence_shared_fs": "1",
}
# A launcher that started the tests must not tell the ranks that they are its own.
_LAUNCHER_PREFIXES = ("SLURM_", "SRUN_", "OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_", "MV2_", "TORCHELASTIC_")
_LAUNCHER_NAMES = frozenset(
    [
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "NODE_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ]
)


@dataclass(frozen=True)
class TestRank:
    """What a function under `run_ranks` is told about itself."""

    __test__ = False

    rank: int
    world_size: int
    backend: str | None
    group_timeout: timedelta


class RankFailed(AssertionError):
    """A rank ended without a result, or ranks did not end in time."""


@dataclass(frozen=True)
class _Job:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    me: TestRank
    folder: str
    env: dict[str, str]
    sys_path: list[str]


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 180.0,
    backend: str | None = "gloo",
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `fn(rank, *args)` on `world_size` ranks, each a process of one thread; returns their results.

    `rank` is a `TestRank`; torch's default process group exists while `fn` runs and is destroyed when all
    ranks are done. The first exception of a rank is raised here, with that rank's traceback as a note, and
    the other ranks are killed.

    Args:
        fn: A function at the top level of a module.
        world_size: Number of ranks.
        args: Passed to each rank; must pickle.
        timeout_s: Time for all of it. Afterwards `RankFailed` has the Python stack of each rank.
        backend: torch.distributed backend, or None for no process group.
        env: Variables set in each rank on top of the server's. (The server has the environment of the
            first call: what a test sets in its own process later is not seen by ranks.)
    """
    if not _num_runs:
        _load_server()
    _num_runs.append(world_size)
    deadline = time.monotonic() + timeout_s
    folder = tempfile.mkdtemp(prefix="ranks-")
    members: list[_Member] = []
    try:
        for rank in range(world_size):
            me = TestRank(rank, world_size, backend, timedelta(seconds=timeout_s))
            members.append(_start(_Job(fn, args, me, folder, dict(env or {}), list(sys.path))))
        results = _collect(members, deadline, timeout_s)
        for member in members:
            member.pipe.send("leave")
        for member in members:
            member.process.join(max(0.1, deadline - time.monotonic()))
        late = [member.rank for member in members if member.process.is_alive()]
        if late:
            raise RankFailed(_stacks(members, f"ranks {late} gave their result but did not leave"))
        return results
    finally:
        for member in members:
            if member.process.is_alive():
                kill_tree(member.process.pid or 0)
            member.process.join(10.0)
            member.process.close()
            member.pipe.close()
        shutil.rmtree(folder, ignore_errors=True)


def _load_server() -> None:
    """Have the fork server load what it shall, which takes minutes on a busy machine, before a time limit counts."""
    process = _context.Process(target=os.getpid, name="first")
    with _server_environment():
        process.start()
    process.join()
    process.close()


def num_rank_runs() -> int:
    """How often ranks have been started in this session."""
    return len(_num_runs)


def stop_server() -> None:
    """End the fork server; the next `run_ranks` starts another."""
    multiprocessing.forkserver._forkserver._stop()
    multiprocessing.resource_tracker._resource_tracker._stop()


_num_runs: list[int] = []


@dataclass
class _Member:
    rank: int
    process: BaseProcess
    pipe: Connection
    stack_file: Path

    def has_shown_stack(self) -> bool:
        """Or has ended: faulthandler ends it with the frame that all else was called from."""
        return not self.process.is_alive() or (
            self.stack_file.exists() and "in _rank_main\n" in self.stack_file.read_text()
        )


def _start(job: _Job) -> _Member:
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_rank_main, args=(job, theirs), name=f"rank {job.me.rank}")
    with _server_environment():
        process.start()
    theirs.close()
    return _Member(job.me.rank, process, ours, _stack_file(job.folder, job.me.rank))


@contextlib.contextmanager
def _server_environment() -> Any:
    """The environment in which the fork server starts: one thread a rank, no launcher's variables."""
    saved = dict(os.environ)
    try:
        for name in saved:
            if name in _LAUNCHER_NAMES or name.startswith(_LAUNCHER_PREFIXES):
                del os.environ[name]
        os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def _collect(members: Sequence[_Member], deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {member.pipe: member for member in members}
    while waiting:
        ready = wait_for_pipes(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            left = sorted(member.rank for member in waiting.values())
            raise RankFailed(_stacks(members, f"ranks {left} of {len(members)} did not end within {timeout_s:g} s"))
        for pipe in ready:
            assert isinstance(pipe, Connection)
            member = waiting.pop(pipe)
            try:
                error, note, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                member.process.join(5.0)
                raise RankFailed(
                    f"rank {member.rank} ended without a result, exit code {member.process.exitcode}"
                ) from None
            if note:
                error = RankFailed(note) if error is None else error
                error.add_note(note)
                raise error
            results[member.rank] = value
    return [results[rank] for rank in range(len(members))]


def _stacks(members: Sequence[_Member], problem: str) -> str:
    """`problem`, then the Python stack of each rank, which faulthandler writes when signalled."""
    for member in members:
        if member.process.is_alive() and member.process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 5.0
    while not all(member.has_shown_stack() for member in members) and time.monotonic() < deadline:
        time.sleep(0.05)
    lines = [problem]
    for member in members:
        stack = member.stack_file.read_text() if member.stack_file.exists() else ""
        state = "" if member.process.is_alive() else f" (ended, exit code {member.process.exitcode})"
        lines.append(f"--- rank {member.rank}{state}\n{stack or 'no stack: it has not come to Python code yet'}")
    return "\n".join(lines)


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack.{rank}"


def _rank_main(job: _Job, pipe: Connection) -> None:
    """A rank's life: join, call, report, wait for the others, leave."""
    die_with_parent()
    # SIGUSR1 is registered before anything can hang, so that a time-out always has a stack to show.
    stack_file = open(_stack_file(job.folder, job.me.rank), "w")  # noqa: SIM115 - open as long as the rank lives
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    os.environ.update(job.env)
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    gc.freeze()  # what torch's import made is left out of collections, which else take 0.3 to 1 s each
    try:
        if job.me.backend is not None:
            torch.distributed.init_process_group(
                job.me.backend,
                store=torch.distributed.FileStore(str(Path(job.folder) / "store"), job.me.world_size),
                rank=job.me.rank,
                world_size=job.me.world_size,
                timeout=job.me.group_timeout,
            )
        answer = (None, "", job.fn(job.me, *job.args))
        message = pickle.dumps(answer)
    except BaseException as error:
        message = _failure(error, job.me)
    pipe.send_bytes(message)
    # The group stays until every rank is done: gloo aborts the peers of a rank that leaves early. A rank
    # that failed waits here too, to be killed, so that its own error is the first that is seen.
    with contextlib.suppress(EOFError):
        pipe.recv()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _failure(error: BaseException, me: TestRank) -> bytes:
    note = f"on rank {me.rank} of {me.world_size}:\n{''.join(traceback.format_exception(error))}"
    try:
        message = pickle.dumps((error, note, None))
        pickle.loads(message)
        return message
    except Exception:
        return pickle.dumps((None, note, None))


def mpirun() -> str | None:
    """The mpirun beside this Python, else the one on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def mpi_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for ranks under mpirun: no other launcher's variables, one thread, quick start."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_NAMES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    ours.update(MPI_COMPONENTS)
    ours.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONUNBUFFERED="1", PYTHONFAULTHANDLER="1")
    ours.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    ours["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), ours.get("PYTHONPATH")]))
    ours.update(env or {})
    return ours


_ROOT = Path(__file__).resolve().parent.parent


def run_mpi(
    script_or_args: str | Path | Sequence[str | Path],
    num_ranks: int,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 180.0,
    cwd: str | Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a Python script, or `python` with these arguments, on `num_ranks` ranks under mpirun.

    Returns its exit code, stdout and stderr, whatever the code. A run that takes longer is killed as a
    whole, and `RankFailed` has what it printed.
    """
    args = [script_or_args] if isinstance(script_or_args, str | Path) else list(script_or_args)
    launcher = mpirun()
    assert launcher is not None, "no mpirun: mark the test `mpi`"
    command = [launcher, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(num_ranks)]
    command += [sys.executable, *map(str, args)]
    return run_tree(command, env=mpi_environment(env), timeout_s=timeout_s, cwd=cwd)


def run_tree(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    timeout_s: float,
    cwd: str | Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with text output that on time-out kills all that the command started."""
    # Files, not pipes: a left-over grandchild that holds a pipe open would make us wait for it.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True
        )
        late = False
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            if process.returncode is None:
                kill_tree(process.pid)
                process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
        if late:
            printed = f"--- stdout\n{texts[0]}\n--- stderr\n{texts[1]}"
            raise RankFailed(f"{' '.join(command)}: killed after {timeout_s:g} s\n{printed}")
        return subprocess.CompletedProcess(list(command), process.returncode, *texts)
