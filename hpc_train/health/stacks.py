"""Python stacks of the ranks on one node, without harming them: `python -m hpc_train.health.stacks --run-dir DIR`.

1. find this run's processes: by the file that each rank opened for this, and by what the node's agent knows
2. ask all that can answer, by a signal for which they have a handler; nobody else gets a signal
3. look from outside, by py-spy, at those that do not answer
4. name the ranks of this node that have no process any more
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_train.cluster.agent_address import ask_agent
from hpc_train.cluster.environment import process_env
from hpc_train.cluster.stack_dump import (
    STACK_SIGNAL,
    Frame,
    StackFile,
    ThreadStack,
    catches_signal,
    emptied,
    find_stack_files,
    parse_stacks,
    process_state,
    read_answer,
    read_environment,
    read_stack_file,
    status_field,
)
from hpc_train.plan.run_files import RANKS_FILE

MARK = "@hpc_train.stacks"
_LINE_CHARACTERS = 512
"""srun keeps lines of this length whole when several nodes write at once."""
_PY_SPY_S = 10.0
_STATES = {
    "T": "it is stopped, as by SIGSTOP or Ctrl-Z (`kill -CONT` lets it go on)",
    "t": "it is held by a debugger or tracer",
    "D": "it waits inside the kernel, most often for a file system or a device",
    "Z": "it has ended, and its parent has not noticed yet",
    "R": "it runs",
    "S": "it sleeps",
}


@dataclass(frozen=True)
class RankStacks:
    """What was learnt of one rank; threads is empty where nothing was. rank None: the process does not tell.

    problem: why it did not answer by itself. source: "rank" (its own answer), "py-spy", or None.
    """

    rank: int | None
    node: str
    pid: int | None
    problem: str | None
    source: str | None
    threads: tuple[ThreadStack, ...]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RankStacks:
        threads = tuple(
            ThreadStack(thread["is_main"], tuple(Frame(**frame) for frame in thread["frames"]))
            for thread in values["threads"]
        )
        return cls(**{**values, "threads": threads})


def collect(run_dir: Path, node: str, job_key: str | None, *, timeout_s: float = 3.0) -> list[RankStacks]:
    """The stacks of all ranks of a run on this node, by rank.

    Args:
        node: This node's name in the plan.
        job_key: That of the node's agent; None if it is not known.
        timeout_s: How long a rank may take to answer.
    """
    known = _agent_ranks(job_key, node)
    files = find_stack_files(run_dir, node)
    rank_of = {entry["pid"]: entry["rank"] for entry in known if entry["gone"] is None}
    found = []
    for file, problem, threads in _ask(files, timeout_s):
        rank = rank_of.pop(file.pid, file.rank)
        found.append(_described(rank, node, file.pid, problem, threads))
    for rank, pid in _exec_programs(run_dir, node).items():
        threads, why_not = _look_from_outside(pid)
        problem = None if threads else f"a program of `exec` is not made to answer{why_not}"
        found.append(RankStacks(rank, node, pid, problem, "py-spy" if threads else None, threads))
    gone = {entry["rank"]: entry["gone"] for entry in known if entry["gone"] is not None}
    for rank in sorted(_planned_ranks(run_dir, node) - {stacks.rank for stacks in found}):
        when = f"its process is gone since {gone[rank]}" if rank in gone else "there is no process of it on this node"
        found.append(RankStacks(rank, node, None, when, None, ()))
    return sorted(found, key=lambda stacks: (stacks.rank is None, stacks.rank))


def _described(
    rank: int | None, node: str, pid: int, problem: str | None, threads: tuple[ThreadStack, ...]
) -> RankStacks:
    if problem is None:
        return RankStacks(rank, node, pid, None, "rank", threads)
    threads, why_not = _look_from_outside(pid)
    return RankStacks(rank, node, pid, f"{problem}{why_not}", "py-spy" if threads else None, threads)


def _exec_programs(run_dir: Path, node: str) -> dict[int, int]:
    """Rank to process of the programs that `exec` has started on this node, by the variables that it gave them."""
    folder = os.path.realpath(run_dir)
    ranks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            env = read_environment(int(entry.name))
            given = env.get("HPC_TRAIN_RUN_DIR"), env.get("SLURMD_NODENAME", node)
            if (
                env.get("RANK", "").isdecimal()
                and given[0]
                and (os.path.realpath(given[0]), given[1]) == (folder, node)
            ):
                ranks[int(entry.name)] = int(env["RANK"])
    # What a program starts inherits its variables.
    return {rank: pid for pid, rank in ranks.items() if ranks.get(int(status_field(pid, "PPid") or 0)) != rank}


def _agent_ranks(job_key: str | None, node: str) -> list[dict[str, Any]]:
    answer = ask_agent(job_key, node, {"say": "status"}) if job_key else None
    return list(answer.get("ranks", [])) if answer else []


def _planned_ranks(run_dir: Path, node: str) -> set[int]:
    try:
        rows = (run_dir / RANKS_FILE).read_text(encoding="utf-8").splitlines()[1:]
    except OSError:
        return set()
    columns = [row.split("\t") for row in rows]
    return {int(row[0]) for row in columns if len(row) > 1 and row[1] == node}


def _ask(
    files: Sequence[StackFile], timeout_s: float
) -> Iterator[tuple[StackFile, str | None, tuple[ThreadStack, ...]]]:
    """Ask all at once; for each: why there is no answer, or the answer."""
    with contextlib.ExitStack() as opened:
        descriptors: dict[StackFile, int] = {}
        for file in files:
            problem = None
            try:
                descriptors[file] = opened.enter_context(emptied(file))
                problem = _send(file)
            except BlockingIOError:
                problem = "somebody else asks it at this moment"
            except OSError as error:
                problem = f"it cannot be asked: {error.strerror}"
            if problem is not None:
                descriptors.pop(file, None)
                yield file, problem, ()
        deadline = time.monotonic() + timeout_s
        seen: dict[StackFile, str] = {}
        while descriptors and time.monotonic() < deadline:
            time.sleep(0.05)
            for file, descriptor in list(descriptors.items()):
                text = read_answer(file, descriptor)
                threads = parse_stacks(text, file.main_thread)
                # Python writes the main thread last.
                if text and text == seen.get(file) and threads and threads[0].is_main and threads[0].frames:
                    del descriptors[file]
                    yield file, None, threads
                seen[file] = text
        for file in descriptors:
            yield file, f"it did not answer in {timeout_s:g} s: {_state(file.pid)}", ()


def _send(file: StackFile) -> str | None:
    """Signal the process if it is still the one that opened the file, runs, and has a handler; else say why not."""
    process = os.pidfd_open(file.pid)
    try:
        if read_stack_file(file.pid) != file:
            return "its process is gone"
        if process_state(file.pid) in ("T", "t", "Z"):
            return _state(file.pid)
        if not catches_signal(file.pid, STACK_SIGNAL):
            return f"it has no handler for signal {int(STACK_SIGNAL)} any more"
        signal.pidfd_send_signal(process, STACK_SIGNAL)
    finally:
        os.close(process)
    return None


def _state(pid: int) -> str:
    state = process_state(pid)
    return "its process is gone" if state is None else _STATES.get(state, f"its state is {state}")


def _look_from_outside(pid: int) -> tuple[tuple[ThreadStack, ...], str]:
    """Stacks by py-spy, which reads the memory of a process without stopping it; or a remark why there are none."""
    folder = Path(sys.executable).parent
    py_spy = str(folder / "py-spy") if os.access(folder / "py-spy", os.X_OK) else shutil.which("py-spy")
    if py_spy is None:
        return (), "; py-spy, which could look from outside, is not installed (pip install 'hpc_train[debug]')"
    command = [py_spy, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PY_SPY_S, check=False
        )
        if done.returncode != 0:
            return (), f"; py-spy: {(done.stderr.strip().splitlines() or ['no reason given'])[0]}"
        return _py_spy_threads(json.loads(done.stdout), pid), ""
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as problem:
        return (), f"; py-spy gave nothing: {problem}"


def _py_spy_threads(threads: Sequence[Mapping[str, Any]], pid: int) -> tuple[ThreadStack, ...]:
    stacks = []
    for thread in threads:
        # faulthandler gives a function's name without its class; equal stacks must compare equal.
        frames = [
            Frame(frame["filename"], frame["line"], frame["name"].rpartition(".")[2]) for frame in thread["frames"]
        ]
        stacks.append(ThreadStack(thread["os_thread_id"] == pid, tuple(frames)))
    return tuple(sorted(stacks, key=lambda stack: not stack.is_main))


def to_lines(node: str, found: Sequence[RankStacks]) -> list[str]:
    """Lines that may be mixed with those of other nodes: mark, node, number, how many, and a piece of packed JSON."""
    packed = base64.b64encode(zlib.compress(json.dumps([asdict(stacks) for stacks in found]).encode())).decode()
    pieces = [packed[start : start + _LINE_CHARACTERS] for start in range(0, len(packed), _LINE_CHARACTERS)]
    return [f"{MARK} {node} {number} {len(pieces)} {piece}" for number, piece in enumerate(pieces)]


def from_lines(lines: Sequence[str]) -> dict[str, list[RankStacks]]:
    """Node to what it said; a node whose lines are not all there is left out, and other lines are ignored."""
    pieces: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    for line in lines:
        words = line.split()
        if len(words) == 5 and words[0] == MARK:
            pieces.setdefault(words[1], {})[int(words[2])] = words[4]
            counts[words[1]] = int(words[3])
    found = {}
    for node, parts in pieces.items():
        if len(parts) == counts[node]:
            packed = base64.b64decode("".join(part for _, part in sorted(parts.items())))
            found[node] = [RankStacks.from_dict(values) for values in json.loads(zlib.decompress(packed))]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect on this node and print for `hpc-train stacks`, which starts this on every node."""
    parser = argparse.ArgumentParser(prog="hpc_train.health.stacks", allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--job-key")
    parser.add_argument("--timeout", type=float, default=3.0)
    options = parser.parse_args(arguments)
    node = process_env().get("SLURMD_NODENAME") or socket.gethostname()
    found = collect(options.run_dir, node, options.job_key, timeout_s=options.timeout)
    print("\n".join(to_lines(node, found)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
