"""One task of `hpc-train exec`: look itself up, tell PROGRAM who it is, run it as a child, pass on its end.

It never initialises MPI, so PROGRAM may: what PMI needs stays in the child's environment and open files. Rank
0's task listens on a port before anybody hears of it, and keeps torch's store there until all ranks are done.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from hpc_train import log
from hpc_train.cluster.environment import STORE_IS_HELD_VARIABLE, process_env
from hpc_train.cluster.gloo_interface import address_towards, gloo_interface, told_interfaces
from hpc_train.cluster.network import advertised_address
from hpc_train.cluster.process import UNKNOWN_PROCESS, ProcessFacts, own_process
from hpc_train.cluster.scratch import cache_variables
from hpc_train.cluster.situation import rank_hint
from hpc_train.cluster.slurm import read_step
from hpc_train.errors import HpcTrainError, LaunchError
from hpc_train.launch.children import end_with_parent, start_child
from hpc_train.launch.follow import write_all
from hpc_train.launch.rendezvous import Endpoint, RendezvousClient
from hpc_train.plan.run_files import RANKS_FILE

RENDEZVOUS_PORT = "HPC_TRAIN_RENDEZVOUS_PORT"
RENDEZVOUS_TOKEN = "HPC_TRAIN_RENDEZVOUS_TOKEN"
TIMEOUT = "HPC_TRAIN_TIMEOUT_S"
INTERFACE = "HPC_TRAIN_INTERFACE"
_PRIVATE = (RENDEZVOUS_PORT, RENDEZVOUS_TOKEN, TIMEOUT, INTERFACE)
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LONGEST_OPEN_LINE = 65536


class ProgramFailed(HpcTrainError):
    """PROGRAM ended with a code other than 0, which is also the task's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[assignment]


@dataclass(frozen=True)
class Place:
    """A task's row of the table of ranks, and what it says of the others."""

    rank: int
    host: str
    node_rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    num_nodes: int


def main(arguments: Sequence[str]) -> int:
    """Run PROGRAM as one rank; the driver of `exec` starts this on every slot."""
    end_with_parent()
    env = process_env()
    run_dir = Path(env["HPC_TRAIN_RUN_DIR"])
    host = socket.gethostname()
    place: Place | None = None
    try:
        host, slot = find_slot(env, own_process())
        place = find_place((run_dir / RANKS_FILE).read_text(encoding="utf-8"), host, slot)
        log.prefix_output(place.rank, host)
        return _run_program(list(arguments), env, place)
    except Exception as error:
        return log.report_failure(error, run_dir=run_dir, rank=place.rank if place else None, host=host)


def find_slot(env: Mapping[str, str], process: ProcessFacts = UNKNOWN_PROCESS) -> tuple[str, int]:
    """This task's node and its index there, from srun's or mpirun's variables.

    Raises:
        LaunchError: neither launcher's variables are there.
    """
    hint = rank_hint(env, process)
    step = read_step(env, process)
    if step is not None and hint is not None and hint.source == "srun":
        return step.node_name, step.local_id
    if hint is None or hint.local_rank is None:
        raise LaunchError(
            "this task of hpc-train exec finds neither SLURM_LOCALID nor a local rank of mpirun, so it "
            "cannot "
            "know which rank it is. Start it by `hpc-train exec`"
        )
    return socket.gethostname(), hint.local_rank


def find_place(table: str, host: str, slot: int) -> Place:
    """The row of a host and slot in the text of ranks.tsv.

    Raises:
        LaunchError: there is none.
    """
    header, *lines = table.splitlines()
    columns = {name: index for index, name in enumerate(header.split("\t"))}
    rows = [line.split("\t") for line in lines]
    here = [row for row in rows if row[columns["host"]] == host]
    for row in here:
        if int(row[columns["local_rank"]]) == slot:
            return Place(
                rank=int(row[columns["rank"]]),
                host=host,
                node_rank=int(row[columns["node_rank"]]),
                local_rank=slot,
                world_size=len(rows),
                local_world_size=len(here),
                num_nodes=len({row[columns["host"]] for row in rows}),
            )
    hosts = ", ".join(sorted({row[columns["host"]] for row in rows})[:8])
    raise LaunchError(
        f"no rank is planned for slot {slot} of node {host}; {RANKS_FILE} has {len(here)} ranks there and "
        "the "
        f"hosts {hosts}. srun or mpirun placed the tasks otherwise than planned"
    )


def rank_variables(place: Place, endpoint: Endpoint) -> dict[str, str]:
    """torchrun's variables for one rank."""
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "NODE_RANK": str(place.node_rank),
        "GROUP_RANK": str(place.node_rank),
        "MASTER_ADDR": endpoint.host,
        "MASTER_PORT": str(endpoint.port),
    }


def _run_program(program: list[str], env: Mapping[str, str], place: Place) -> int:
    """Find rank 0's address, start the child, hold the store beside it on rank 0, wait, meet at the end."""
    client = _client(env, place.rank)
    listener, endpoint = _agree_on_endpoint(env, place, client)
    child_env = {name: value for name, value in env.items() if name not in _PRIVATE}
    child_env |= rank_variables(place, endpoint)
    child_env |= _gloo_variables(env, place, endpoint)
    child_env |= cache_variables(env)[0]
    if client is not None and importlib.util.find_spec("torch") is not None:
        # torch's env:// then connects on every rank as a client to the store that this command holds.
        child_env[STORE_IS_HELD_VARIABLE] = "True"
    child = start_child(
        program,
        child_env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        close_fds=False,  # PMI2 reaches the child by a file that the task inherited; ours are not passed
        own="group",
        death_signal=signal.SIGKILL,
    )
    _pass_signals_to(child)
    copiers = _prefix_lines_of(child, place)
    store = StoreHolder(listener, endpoint, child) if listener is not None else None
    code = child.wait()
    with contextlib.suppress(ProcessLookupError):
        # What the program left behind would keep the pipes, and so this task, open.
        os.killpg(child.pid, signal.SIGKILL)
    for copier in copiers:
        copier.join(timeout=5.0)
    if store is not None and store.problem is not None:
        raise LaunchError(f"torch's store on {endpoint.host}:{endpoint.port} could not be started: {store.problem}")
    if code == 0:
        if client is not None:
            client.finish(wait_for_all=store is not None)
        if store is not None:
            store.close()
        return 0
    raise _failure(program[0], code)


def _gloo_variables(env: Mapping[str, str], place: Place, endpoint: Endpoint) -> dict[str, str]:
    """What a program that uses gloo needs on this node where the host name gives no address that others reach."""
    if place.num_nodes < 2 or told_interfaces(env):
        return {}
    try:
        found = gloo_interface(socket.gethostname(), address_towards(endpoint.host))
    except (OSError, LaunchError) as problem:
        log.say(f"warning: if this program uses gloo, it may not be reached: {problem}")
        return {}
    return {} if found is None else found.variables


def _failure(program: str, code: int) -> ProgramFailed:
    if code < 0:
        return ProgramFailed(f"{program} was ended by {signal.Signals(-code).name}", 128 - code)
    return ProgramFailed(f"{program} ended with exit code {code}", code)


def _client(env: Mapping[str, str], rank: int) -> RendezvousClient | None:
    """None where the user preset the address of rank 0."""
    if RENDEZVOUS_PORT not in env:
        return None
    step = read_step(env)
    host = (step.launch_node_address if step is not None else None) or "127.0.0.1"
    deadline = time.monotonic() + float(env[TIMEOUT])
    return RendezvousClient(host, int(env[RENDEZVOUS_PORT]), env[RENDEZVOUS_TOKEN], rank, deadline)


def _agree_on_endpoint(
    env: Mapping[str, str], place: Place, client: RendezvousClient | None
) -> tuple[socket.socket | None, Endpoint]:
    """Where rank 0 listens; on rank 0 also the listening socket, if this command is to hold the store."""
    if client is None:
        return None, Endpoint(env["MASTER_ADDR"], int(env["MASTER_PORT"]))
    if place.rank != 0:
        return None, client.ask()
    host = env.get("MASTER_ADDR") or advertised_address(place.host, env.get(INTERFACE), place.num_nodes)
    listener = socket.create_server((host, int(env.get("MASTER_PORT", "0"))), backlog=4096)
    endpoint = Endpoint(host, listener.getsockname()[1])
    if importlib.util.find_spec("torch") is None:
        log.say(
            "torch is not installed beside hpc-train, so no store is kept on "
            f"{endpoint.host}:{endpoint.port}; "
            "the program's rank 0 has to listen there itself"
        )
        listener.close()
        client.publish(endpoint)
        return None, endpoint
    client.publish(endpoint)
    return listener, endpoint


class StoreHolder:
    """A process that keeps torch's store on our listening socket; if it fails, the program is ended.

    Clients may connect while it still imports torch: they wait in the socket's backlog.
    """

    def __init__(self, listener: socket.socket, endpoint: Endpoint, child: subprocess.Popen[bytes]) -> None:
        self.problem: str | None = None
        self._closed = False
        self._child = child
        descriptor = listener.detach()
        os.set_inheritable(descriptor, True)
        arguments = [endpoint.host, str(endpoint.port), str(descriptor)]
        self._process = start_child(
            [sys.executable, "-m", "hpc_train.comm.store_holder", *arguments],
            process_env(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            close_fds=False,
            own="group",
            death_signal=signal.SIGKILL,
        )
        os.close(descriptor)
        self._watcher = threading.Thread(target=self._watch, name="store", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """End the store; its clients must be gone."""
        self._closed = True
        self._process.kill()
        self._watcher.join()

    def _watch(self) -> None:
        assert self._process.stderr is not None
        said = self._process.stderr.read().decode(errors="replace").strip()
        if self._process.wait() != 0 and not self._closed:
            self.problem = said.splitlines()[-1] if said else f"exit code {self._process.returncode}"
            self._child.terminate()


def _pass_signals_to(child: subprocess.Popen[bytes]) -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    for number in _PASSED_ON:
        signal.signal(number, handle)


def _prefix_lines_of(child: subprocess.Popen[bytes], place: Place) -> list[threading.Thread]:
    label = f" {place.host} r{place.rank} | ".encode()
    threads = [
        threading.Thread(target=_copy_lines, args=(pipe, descriptor, label), daemon=True)
        for pipe, descriptor in ((child.stdout, 1), (child.stderr, 2))
    ]
    for thread in threads:
        thread.start()
    return threads


def _copy_lines(pipe: IO[bytes], descriptor: int, label: bytes) -> None:
    """Whole lines, each in one write with its prefix; of a progress bar's line the last state."""
    while line := pipe.readline(_LONGEST_OPEN_LINE):
        text = line.rstrip(b"\n").removesuffix(b"\r").rpartition(b"\r")[2]
        write_all(descriptor, log.timestamp().encode() + label + text + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
