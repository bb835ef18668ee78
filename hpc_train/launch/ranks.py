"""Starting the ranks of one attempt, with their agents, and seeing them to their end.

The same for a training run and for `exec`: srun inside a Slurm job, mpirun on one machine. Ranks write into
one log file a node; what of it is worth the driver's own output is copied there as it comes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hpc_train.cluster.agent_address import JOB_KEY_VARIABLE
from hpc_train.cluster.allocation import Allocation
from hpc_train.errors import LaunchError
from hpc_train.launch import children, steps
from hpc_train.launch.debug_terminal import DebugTerminal
from hpc_train.launch.follow import FileFollower, PipeCopier, rank_of_line, write_all
from hpc_train.launch.launcher_words import BadEnd, LauncherWords
from hpc_train.plan.run_files import LOGS_FOLDER, write_atomically

SignalHandler = Callable[[int, FrameType | None], None]
HOST_FILE = "hosts.txt"
_AGENTS_END_S = 3.0
"""For agents that have nothing left to do; assumed: they end in milliseconds, and srun tells of it in a second."""
_LOOK_S, _STOPPED_LOOKS = 0.05, 20
"""Looks in a row, of a second, at an agent that is stopped: one that was suspended with all others, this process too,
goes on by then (assumed). Looks and not time, which passes while this process does not run."""
_MOST_FOLLOWED_NODES = 64
"""Above this only rank 0's node is followed, even where all output is wanted (assumed: 1 ms a look and file)."""


@dataclass(frozen=True)
class SrunLauncher:
    """How srun is called. wait_s: how long others may go on after a rank ended well; 0: without limit.

    options: words of the user's or a container plugin's, after all others.
    """

    cpus_per_task: int
    mpi: str
    overlap: bool
    wait_s: int
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class MpirunLauncher:
    """How mpirun is called: its path and the options that this machine needs.

    is_open_mpi: it is known to be Open MPI's, whose words at the end of ranks are known.
    """

    path: str
    options: tuple[str, ...]
    is_open_mpi: bool = False


@dataclass(frozen=True)
class RanksToStart:
    """One attempt. `env` is the ranks' whole environment.

    stop_signal: what the ranks understand as "save and end"; None for programs of which that is not known.
    first_node: where rank 0 is. show_all: copy every rank's lines to the driver's output, not rank 0's alone.
    terminal: of a rank that is debugged. agents_finish_s: how long agents may write checkpoints to their end when the
    ranks have ended.
    """

    run_dir: Path
    allocation: Allocation
    command: tuple[str, ...]
    env: Mapping[str, str]
    launcher: SrunLauncher | MpirunLauncher
    first_node: str
    stop_signal: int | None = None
    show_all: bool = False
    agent_python: str = sys.executable
    terminal: DebugTerminal | None = None
    agents_finish_s: float = 0.0


@dataclass(frozen=True)
class RanksEnd:
    """How the launcher ended: its exit code (negative: the signal that ended it).

    stopped: what `watch` saw. asked: the signal for which the ranks were asked to save and end. forced: the one for
    which they were ended at once. said: the last lines of srun's own standard error, which is not the ranks', and of
    Slurm's daemons. bad_end: what the launcher said of the first tasks that ended badly. is_silent: Open MPI's mpirun
    ended with a code of its own and without a word about any rank, as it does when it gets TERM itself, and ends them.
    """

    code: int
    stopped: str | None = None
    asked: str | None = None
    forced: str | None = None
    said: tuple[str, ...] = ()
    bad_end: BadEnd | None = None
    is_silent: bool = False


def run_ranks(
    start: RanksToStart, say: Callable[[str], None], watch: Callable[[], str | None] = lambda: None
) -> RanksEnd:
    """Start ranks and agents, wait for the ranks, end the agents, and leave no process behind.

    Args:
        say: Gets a line for each thing worth the driver's log.
        watch: Asked every second; a reason means that the ranks must be stopped.
    """
    children.adopt_orphans()
    argv = _launcher_argv(start)
    say(f"starting ranks: {' '.join(argv)}")
    is_srun = isinstance(start.launcher, SrunLauncher)
    words = LauncherWords()
    followers = _follow_logs(start, words) if is_srun else []
    output = None if is_srun else subprocess.PIPE
    errors = subprocess.PIPE if is_srun else subprocess.STDOUT
    child = children.start_child(argv, start.env, stdout=output, stderr=errors)
    listener = threading.Thread(target=_pass_on_errors, args=(child, words), daemon=True)
    listener.start()
    steps_to_end = children.stop_steps(child, is_srun=is_srun, term_saves=start.stop_signal is not None)
    stopper = children.Stopper(child, steps_to_end, start.stop_signal)
    terminal = start.terminal or contextlib.nullcontext()
    with children.signals_go_to(_after_terminal(start.terminal, stopper.handle), start.stop_signal), terminal:
        agents = _start_agents(start, say)
        copier = _copy_output(start, child, words)
        _watch_in_background(child, stopper, watch)
        code = child.wait()
        _end_agents(agents, start.agents_finish_s, stopper, say, is_srun=is_srun)
        if copier is not None:
            copier.join(timeout=5.0)
        listener.join(timeout=5.0)
        for follower in followers:
            follower.finish()
        left = children.end_descendants()
    if left:
        say(f"ended {left} processes that the ranks had left behind")
    said = words.said if is_srun else ()
    is_silent = ends_silently(start.launcher, code, words)
    return RanksEnd(code, stopper.reason, stopper.asked, stopper.forced, said, words.first_bad_end, is_silent)


def ends_silently(launcher: SrunLauncher | MpirunLauncher, code: int, words: LauncherWords) -> bool:
    """As of RanksEnd. What another MPI's mpirun says of ranks that end badly is not known: its silence says nothing."""
    is_open_mpi = isinstance(launcher, MpirunLauncher) and launcher.is_open_mpi
    return is_open_mpi and code == 1 and not words.has_mpirun_spoken


def _after_terminal(terminal: DebugTerminal | None, handle: SignalHandler) -> SignalHandler:
    """Ctrl-C is for the rank that is debugged, as long as it has an effect there."""
    if terminal is None:
        return handle

    def first_to_terminal(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT or not terminal.interrupt():
            handle(number, frame)

    return first_to_terminal


def _pass_on_errors(child: subprocess.Popen[bytes], words: LauncherWords) -> None:
    """Copy what srun itself says on its standard error to ours, and listen to it."""
    if child.stderr is None:
        return
    for line in child.stderr:
        words.hear(line)  # first: it notes when the line came, and writing may wait
        with contextlib.suppress(OSError):
            write_all(2, line)


def node_log(run_dir: Path, node: str) -> Path:
    """Where the ranks of a node write."""
    return run_dir / LOGS_FOLDER / f"{node}.log"


def _launcher_argv(start: RanksToStart) -> list[str]:
    launcher = start.launcher
    if isinstance(launcher, MpirunLauncher):
        return steps.mpirun_argv(
            launcher.path, start.allocation.num_tasks, options=launcher.options, command=start.command
        )
    host_file = None
    if steps.is_uneven(start.allocation):
        host_file = str(start.run_dir / HOST_FILE)
        write_atomically(Path(host_file), steps.host_file_text(start.allocation))
    values = steps.StepValues(
        allocation=start.allocation,
        cpus_per_task=launcher.cpus_per_task,
        mpi=launcher.mpi,
        output=f"{str(start.run_dir).replace('%', '%%')}/logs/%N.log",
        overlap=launcher.overlap,
        host_file=host_file,
        wait_s=launcher.wait_s,
        options=launcher.options,
    )
    return steps.ranks_argv(values, start.command)


def _start_agents(start: RanksToStart, say: Callable[[str], None]) -> subprocess.Popen[bytes] | None:
    """Agents come after the ranks, whose own start takes longer; where there is none, ranks read data by themselves."""
    command = [start.agent_python, "-m", "hpc_train.node_agent", "--run-dir", str(start.run_dir)]
    command += ["--job-key", start.env[JOB_KEY_VARIABLE]]
    nodes = start.allocation.nodes
    if isinstance(start.launcher, MpirunLauncher):
        argv = [*command, "--node", nodes[0]]
    else:
        argv = steps.agents_argv(nodes, command)
    try:
        # The open pipe tells them that this process lives; srun would pass its end on to all of them.
        return children.start_child(argv, steps.agents_env(start.env), stdin=subprocess.PIPE)
    except LaunchError as problem:
        say(f"warning: no node agents: {problem}")
        return None


def _end_agents(
    agents: subprocess.Popen[bytes] | None,
    finish_s: float,
    stopper: children.Stopper,
    say: Callable[[str], None],
    *,
    is_srun: bool,
) -> None:
    """Tell them that the ranks have ended, and wait until they have written what was handed to them."""
    if agents is None:
        return
    assert agents.stdin is not None
    agents.stdin.close()
    begin, is_said, stopped_looks = time.monotonic(), False, 0
    while agents.poll() is None:
        waited_s = time.monotonic() - begin
        stopped_looks = stopped_looks + 1 if not is_srun and children.is_stopped(agents.pid) else 0
        if waited_s > _AGENTS_END_S and stopped_looks >= _STOPPED_LOOKS:
            say(f"the node agent, process {agents.pid}, is stopped and is ended; what it was writing is not saved")
            _end_at_once(agents, say, is_srun=is_srun)
            return
        if waited_s > _AGENTS_END_S + finish_s or (stopper.forced is not None and waited_s > _AGENTS_END_S):
            say("the node agents did not end by themselves and are ended; what they were writing is not saved")
            _end_at_once(agents, say, is_srun=is_srun)
            return
        if waited_s > _AGENTS_END_S and not is_said and not stopped_looks:
            is_said = True
            say(
                f"the ranks have ended, and the node agents write on: waiting for up to {finish_s:g} s "
                "(checkpoint.finish_s); Ctrl-C ends that"
            )
        time.sleep(_LOOK_S)


def _end_at_once(agents: subprocess.Popen[bytes], say: Callable[[str], None], *, is_srun: bool) -> None:
    """Kill them: srun has to do it where there is one, since agents outlive an srun that is killed."""
    for step in children.stop_steps(agents, is_srun=is_srun)[1:]:
        with contextlib.suppress(ProcessLookupError):
            step()
        with contextlib.suppress(subprocess.TimeoutExpired):
            agents.wait(children.GRACE_S)
            return
    say(f"process {agents.pid} of the node agents does not end even so, as where its disk hangs, and is left behind")


def _copy_output(start: RanksToStart, child: subprocess.Popen[bytes], words: LauncherWords) -> PipeCopier | None:
    """Copy mpirun's output, its own words among it, to ours and to the node's log."""
    if child.stdout is None:
        return None
    path = node_log(start.run_dir, start.allocation.nodes[0])
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    return PipeCopier(child.stdout, [1, descriptor], words.hear)


def _follow_logs(start: RanksToStart, words: LauncherWords) -> list[FileFollower]:
    """Copy new lines of the nodes' logs to our output, which in a batch job is the job's log.

    What Slurm's daemon of a node says of the step goes there too, and is listened to.
    """
    nodes = start.allocation.nodes
    shown = nodes if start.show_all and len(nodes) <= _MOST_FOLLOWED_NODES else (start.first_node,)

    def show(line: bytes) -> None:
        if line.startswith(b"slurmstepd"):
            words.hear(line)
        if start.show_all or rank_of_line(line) in (None, 0):
            with contextlib.suppress(OSError):
                write_all(1, line)

    return [FileFollower(node_log(start.run_dir, node), show, from_end=True) for node in shown]


def _watch_in_background(
    child: subprocess.Popen[bytes], stopper: children.Stopper, watch: Callable[[], str | None]
) -> None:
    def look() -> None:
        while child.poll() is None:
            reason = watch()
            if reason is not None:
                stopper.stop(reason)
                return
            time.sleep(1.0)

    threading.Thread(target=look, name="watch", daemon=True).start()
