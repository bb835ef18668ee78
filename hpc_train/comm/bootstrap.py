"""From a started process to a rank of a World. Never a silent world of one.

1. who am I: the launcher's facts (one scope), MPI's, or torchrun's variables; they are compared
2. which rank: by the plan, from this process's node and slot; without a plan the launcher's order
3. `join`: which device, where to meet, torch's process group
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, get_args

from hpc_train import log
from hpc_train.cluster.environment import process_env
from hpc_train.cluster.gloo_interface import address_towards
from hpc_train.cluster.network import is_loopback
from hpc_train.cluster.process import ProcessFacts, own_process
from hpc_train.cluster.situation import RankHint, Situation, elastic_ranks, find_situation, rank_hint
from hpc_train.comm.control import Control, MpiControl, SingleControl, TorchControl
from hpc_train.comm.join import (
    Identity,
    Rendezvous,
    backend_of,
    bound_to,
    choose_device,
    join,
    set_device,
    tell_gloo,
    timeout_of,
)
from hpc_train.comm.layout import Layout, agree_on_layout, keep_order, plan_layout
from hpc_train.comm.mpi import check_pmi, check_world, library_version, load_mpi
from hpc_train.comm.world import World
from hpc_train.errors import ExitCode, HpcTrainError, LaunchError
from hpc_train.plan.run import Plan

# About what `import torch` takes on an idle machine (measured: 2 s), during which no rank was seen inside MPI_Init.
_LEAVE_MPI_INIT_S = 2.0

Source = Literal["auto", "mpi", "env", "single"]


def bootstrap(
    source: Source = "auto",
    *,
    plan: Plan | None = None,
    layout: Layout | None = None,
    rendezvous: Rendezvous | None = None,
    device: Literal["auto", "cpu"] = "auto",
) -> World:
    """Make this process a rank of the job that was started, and return what it is. Collective over all ranks.

    Args:
        source: "mpi" (srun or mpirun), "env" (torchrun's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT),
            "single" (this process alone, on purpose), or "auto": torchrun's variables if they are complete,
            else MPI if a launcher started this process; otherwise refused.
        plan: who is which rank; the hash is compared over all ranks. Without one the launcher's order holds.
        layout: the mesh; the ranks are placed on the fabric together, and `World.plan` says who became which. Under
            torchrun's variables ranks stay as they are. Not beside `plan`.
        rendezvous: time limit and address of the meeting point; the defaults of Rendezvous if left out.
        device: "cpu" leaves GPUs alone.

    Raises:
        ValueError: arguments that it does not take.
        LaunchError: this process is a rank already; the sources contradict each other, MPI cannot be used, nodes cannot
            reach each other, ranks ask for different layouts.
        ConfigError: the layout does not fit the ranks or the nodes.
    """
    _check_arguments(source, plan, layout, device)
    env = process_env()
    rendezvous = rendezvous or Rendezvous()
    process = own_process()
    _leave_at_once_on_uncaught_errors(env, process)
    chosen = _choose_source(env, process) if source == "auto" else source
    if chosen == "single":
        _refuse_other_ranks(rank_hint(env, process))
        return _bootstrap_single(plan, layout, rendezvous, device)
    if chosen == "env":
        return _bootstrap_env(env, layout, rendezvous, device)
    return _bootstrap_mpi(env, process, plan or layout, rendezvous, device)


def _check_arguments(source: str, plan: Plan | None, layout: Layout | None, device: str) -> None:
    """Refuse what would be taken for something else, before anything is bound or waited for."""
    if source not in get_args(Source):
        raise ValueError(f"bootstrap knows no source {source!r}; it takes {', '.join(get_args(Source))}")
    if device not in ("auto", "cpu"):
        raise ValueError(f"bootstrap knows no device {device!r}; it takes auto (a GPU where there is one) and cpu")
    if plan is not None and layout is not None:
        raise ValueError("bootstrap takes a plan or a layout to make one of, not both")
    if layout is not None and not isinstance(layout, Layout):
        raise ValueError(f"bootstrap takes a layout such as Layout(tp=2), not {layout!r}")
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        raise LaunchError(
            "this process is in a process group already: bootstrap was called before, or the script made a group "
            "itself. Use the World of the first call, or close it first (World.close())."
        )


def _leave_at_once_on_uncaught_errors(env: Mapping[str, str], process: ProcessFacts) -> None:
    """An error that nobody catches ends this process without MPI_Finalize, which would wait for the others.

    Its exit code is that of the table, and an error that all ranks share is printed by one of them. An interactive
    interpreter is left alone.
    """
    before, stderr = sys.excepthook, sys.stderr
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return

    def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # torch's hook, which comes first, collects what this one writes, to print it after it: never.
        sys.stderr = stderr
        shared_by = getattr(error, "reporter", None)
        if not isinstance(error, HpcTrainError) or shared_by is None:
            before(kind, error, trace)
        else:
            hint = rank_hint(env, process)  # an error with a reporter comes after this was found sound
            if hint is None or hint.rank == shared_by:
                log.say(f"error (rank {shared_by} on {socket.gethostname()}): {error}", sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(error.exit_code) if isinstance(error, HpcTrainError) else int(ExitCode.INTERNAL))

    sys.excepthook = leave


def _choose_source(env: Mapping[str, str], process: ProcessFacts) -> Source:
    found = find_situation(env, process)
    if found.situation is Situation.ELASTIC:
        return "env"
    if found.situation in (Situation.STEP_TASK, Situation.MPI_TASK):
        return "mpi"
    raise LaunchError(
        f"this process is no rank of a started job ({found.reason}). Start it with `hpc-train exec -n N -- PROGRAM`, "
        'srun or mpirun; or ask for one process with bootstrap(source="single").'
    )


def _refuse_other_ranks(hint: RankHint | None) -> None:
    if hint is not None and hint.size > 1:
        raise LaunchError(
            f'source="single" was asked for, but {hint.source} started {hint.size} tasks, and each would train '
            'alone. Use source="mpi", or start one task.'
        )


def _bootstrap_single(
    plan: Plan | None, layout: Layout | None, rendezvous: Rendezvous, device: Literal["auto", "cpu"]
) -> World:
    identity = Identity.single()
    if layout is not None:
        plan = keep_order(layout, [(identity.node, 0)], 0)
    return replace(join(identity, SingleControl(), None, rendezvous, device, "single"), plan=plan)


def _bootstrap_mpi(
    env: Mapping[str, str],
    process: ProcessFacts,
    wanted: Plan | Layout | None,
    rendezvous: Rendezvous,
    device: Literal["auto", "cpu"],
) -> World:
    with _termination_deferred():
        hint = rank_hint(env, process)
        check_pmi(env, hint)
        communicator = load_mpi()
        if hint is None and communicator.Get_size() == 1:
            raise LaunchError(
                'source="mpi" was asked for, and no launcher started this process, so it would be a world of one. '
                'Start it with srun or mpirun, or ask for one process with bootstrap(source="single").'
            )
        check_world(communicator.Get_rank(), communicator.Get_size(), hint, library_version())
        _let_all_leave_mpi_init(communicator.Get_size())
        control: Control = MpiControl(communicator)
        # The plan calls a node by Slurm's name for it where Slurm named it, else by its host name.
        node = env.get("SLURMD_NODENAME") or socket.gethostname()
        slots = _slots(control.all_gather([node, hint.local_rank if hint else None]))
        agree_on_layout(control, wanted if isinstance(wanted, Layout) else None)
        plan = plan_layout(control, wanted, slots, env) if isinstance(wanted, Layout) else wanted
        identity = _identify(control, slots, plan)
    ordered = communicator.Split(0, identity.rank)
    control = MpiControl(ordered)
    return replace(join(identity, control, ordered, rendezvous, device, "mpi"), plan=plan)


def _let_all_leave_mpi_init(num_ranks: int) -> None:
    """Import torch, which is needed anyway, before the first MPI message; wait as long where it is there already.

    In Open MPI 5.0 a message that reaches a rank which has not quite left MPI_Init is a segmentation fault
    (open-mpi/ompi#12495; 1 of 60 starts of 8 ranks here under load). Can go when that is mended.
    """
    if num_ranks > 1 and "torch.distributed" in sys.modules and "Open MPI v5.0" in library_version():
        time.sleep(_LEAVE_MPI_INIT_S)
    import torch.distributed as _  # noqa: F401


def _slots(told: list[list[Any]]) -> list[tuple[str, int]]:
    """(node, index on the node) by the launcher's rank; where the launcher does not tell the index, by that order."""
    counts: dict[str, int] = {}
    slots = []
    for node, slot in told:
        before = counts.setdefault(node, 0)
        counts[node] += 1
        slots.append((node, before if slot is None else slot))
    return slots


def _identify(control: Control, slots: list[tuple[str, int]], plan: Plan | None) -> Identity:
    """Ranks of this process from all processes' slots, by the plan or in the launcher's order. Collective."""
    nodes = [node for node, _ in slots]
    node, slot = slots[control.rank]
    order = list(dict.fromkeys(nodes))
    rank, error = control.rank, None
    if plan is not None:
        try:
            rank = _planned_rank(control, plan, node, slot)
            order = list(plan.nodes)
        except LaunchError as problem:
            error = problem
    control.agree(error, node)
    return Identity(
        rank=rank,
        world_size=control.size,
        local_rank=slot,
        local_world_size=nodes.count(node),
        node_rank=order.index(node),
        num_nodes=len(order),
        node=node,
    )


def _planned_rank(control: Control, plan: Plan, node: str, slot: int) -> int:
    """This process's rank in a plan that all ranks hold alike; every error is raised after both exchanges."""
    hashes = control.all_gather(plan.hash)
    if len(set(hashes)) > 1:
        odd = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
        raise LaunchError(
            f"the ranks hold different plans: {plan.hash[:12]} here, and ranks {odd[:8]} differ from rank 0. Every "
            "node must see the same run folder; check that it is on a shared file system."
        )
    if plan.world_size != control.size:
        raise LaunchError(
            f"the plan is for {plan.world_size} ranks, but {control.size} were started. Start with hpc-train run, "
            "which plans and starts the same number."
        )
    return plan.lookup(node, slot)


def _bootstrap_env(
    env: Mapping[str, str], layout: Layout | None, rendezvous: Rendezvous, device: Literal["auto", "cpu"]
) -> World:
    """From torchrun's variables; the group is made by them, and then all facts are exchanged over it."""
    import torch.distributed as dist

    ranks = elastic_ranks(env)
    chosen = choose_device(env, ranks.local_rank, ranks.local_world_size, device)
    backend = backend_of(chosen)
    set_device(chosen)
    if backend == "gloo" and ranks.world_size > (ranks.local_world_size or ranks.world_size):
        _tell_gloo_on_several_nodes(env, ranks.rank)
    dist.init_process_group(backend, init_method="env://", timeout=timeout_of(rendezvous), device_id=bound_to(chosen))
    if (dist.get_rank(), dist.get_world_size()) != (ranks.rank, ranks.world_size):
        raise LaunchError(
            f"RANK={ranks.rank} and WORLD_SIZE={ranks.world_size} do not agree with torch's process group, rank "
            f"{dist.get_rank()} of {dist.get_world_size()}. Unset them, or start with torchrun alone."
        )
    control = TorchControl(ranks.rank, ranks.world_size, chosen)
    node = socket.gethostname()
    slots = [(name, index) for name, index in control.all_gather([node, ranks.local_rank])]
    nodes = [name for name, _ in slots]
    plan, error = None, None
    agree_on_layout(control, layout)
    try:
        plan = None if layout is None else keep_order(layout, slots, ranks.rank)
    except HpcTrainError as problem:
        error = problem
    control.agree(error, node)
    order = list(dict.fromkeys(nodes))
    return World(
        rank=ranks.rank,
        world_size=ranks.world_size,
        local_rank=ranks.local_rank,
        local_world_size=nodes.count(node),
        node_rank=order.index(node),
        num_nodes=len(order),
        node=node,
        device=chosen,
        backend=backend,
        control=control,
        mpi=None,
        source="env",
        plan=plan,
    )


def _tell_gloo_on_several_nodes(env: Mapping[str, str], rank: int) -> None:
    """By the way to MASTER_ADDR; where that is loopback, all these nodes are one machine."""
    try:
        address = address_towards(env["MASTER_ADDR"])
    except OSError:
        return  # torch says so itself, and tries until its time is over
    if not is_loopback(address):
        tell_gloo(env, address, rank)


@contextmanager
def _termination_deferred() -> Iterator[None]:
    """Hold SIGTERM back while MPI is checked, so that a mismatch ends with its own code on every rank.

    The first rank that refuses makes srun terminate the others, which are about to find the same. The wait is
    bounded: without an answer from MPI the signal is let through after a few seconds by the kernel's KILL.
    """
    received: list[int] = []
    try:
        before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    except ValueError:  # not the main thread: the caller's signals are its own
        yield
        return
    completed = False
    try:
        yield
        completed = True
    finally:
        if completed:
            signal.signal(signal.SIGTERM, before)
            if received:
                signal.raise_signal(signal.SIGTERM)
