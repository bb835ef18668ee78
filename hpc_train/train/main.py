"""One rank of a training run, from start to exit code.

1. join the others (MPI, plan, device, process group)
2. check everything that can be wrong, on all ranks, before any collective of the training
3. build model, parameters, optimizer and loader
4. resume from the newest sound checkpoint
5. train
6. leave together, after all steps or, when told to stop or short of time, after a save
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hpc_train import log
from hpc_train.cluster.agent_address import read_job_key, this_node
from hpc_train.cluster.agent_greeting import Greeting
from hpc_train.cluster.agent_wait import AgentLimits
from hpc_train.cluster.environment import (
    END_TIME_VARIABLE,
    RENDEZVOUS_VARIABLE,
    STOP_SIGNAL_VARIABLE,
    WARNING_TIMES_VARIABLE,
    process_env,
)
from hpc_train.cluster.process import own_process
from hpc_train.cluster.situation import rank_hint
from hpc_train.cluster.stack_dump import answer_stack_requests
from hpc_train.comm.lost_peer import says_lost_peer
from hpc_train.errors import ConfigError, ExitCode, HpcTrainError, LaunchError
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.parameters import num_parameters
from hpc_train.plan.run import Plan
from hpc_train.plan.run_files import (
    CONFIG_FILE,
    OUTCOME_FILE,
    PLAN_FILE,
    rank_log,
    write_atomically,
)
from hpc_train.train.stop import StopMark

if TYPE_CHECKING:
    from hpc_train.comm.join import Rendezvous
    from hpc_train.comm.world import World
    from hpc_train.config import Config
    from hpc_train.train.debugger import Debugger
    from hpc_train.train.loop import Ended, Run

_PATIENCE_S = 20.0
"""How long a network file system may take to show the plan to another node (assumed; NFS caches up to 60 s of
attributes, but the folder was not looked at before)."""


def run_rank(run_dir: Path) -> NoReturn:
    """Be one rank of the run in `run_dir`, and end this process with its exit code.

    It never returns. After a failure there is no farewell of MPI's or torch's: the others are not listening. After
    success there is, but Python's own tear-down is left out: with torch loaded it takes seconds on a busy node.
    """
    gc.disable()  # until all is imported: looking through what stays costs a second of a start
    host = socket.gethostname()
    env = process_env()
    launched: int | None = (
        None  # the launcher's number: errors before the ranks are connected name their reporter by it
    )
    rank: int | None = None  # the planned one
    greeting: Greeting | None = None
    # First of all: a job may be told to stop while its ranks still import.
    stop = StopMark((signal.SIGTERM, signal.Signals[f"SIG{env.get(STOP_SIGNAL_VARIABLE, 'USR2')}"]))
    stop.install()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C, which srun passes on: an end at once, without a save
    try:
        node = env.get("SLURMD_NODENAME") or host
        hint = rank_hint(env, own_process())
        rank = launched = hint.rank if hint else None
        if rank is not None:
            log.prefix_output(rank, host)
        plan = Plan.from_json(_read(run_dir / PLAN_FILE))
        if hint is not None and hint.local_rank is not None:
            with suppress(LaunchError):  # refused later, on all ranks at once
                rank = plan.lookup(node, hint.local_rank)
                log.prefix_output(rank, host)
        if rank is not None:
            greeting = Greeting(read_job_key(env), this_node(env), rank)
        answer_stack_requests(run_dir, rank, node)
        code = _run(run_dir, plan, stop)
        _say_goodbye(greeting)
    except BaseException as error:
        _say_goodbye(greeting)
        code = _leave_behind(error, run_dir, launched, rank, host)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _say_goodbye(greeting: Greeting | None) -> None:
    """From here on the agent takes the end of this process for its own."""
    if greeting is not None:
        greeting.goodbye()


def _leave_behind(error: BaseException, run_dir: Path, launched: int | None, rank: int | None, host: str) -> int:
    """Report an error, once if all ranks share it, and give the exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the first rank that leaves has the others terminated
    shared_by = getattr(error, "reporter", None)
    if isinstance(error, HpcTrainError) and shared_by not in (None, _rank_of(error, launched)):
        log.wait_for_failure(run_dir)  # let the reporter's message and record come first
        return int(error.exit_code)
    kind = log.FailureKind.FOLLOWS if says_lost_peer(error) else log.FailureKind.OWN
    return log.report_failure(error, run_dir=run_dir, rank=_rank_of(error, rank), host=host, kind=kind)


def _rank_of(error: BaseException, otherwise: int | None) -> int | None:
    """The rank in the world where that stood when the error was raised."""
    in_world = getattr(error, "rank", None)
    return otherwise if in_world is None else in_world


def _run(run_dir: Path, plan: Plan, stop: StopMark) -> int:
    from hpc_train.comm.bootstrap import bootstrap
    from hpc_train.comm.mpi import finalize_mpi
    from hpc_train.train.debugger import attach_debugger

    world = bootstrap("mpi", plan=plan, rendezvous=_rendezvous(process_env()))
    log.prefix_output(world.rank, world.node)
    if world.rank == 0:
        log.say(f"{world.world_size} ranks on {world.num_nodes} nodes are connected over {world.backend}")
    try:
        from hpc_train.config_read import load_config

        with attach_debugger(process_env(), world.rank) as debugger:
            ended = _train(run_dir, load_config(run_dir / CONFIG_FILE), plan.mesh, world, stop, debugger)
        code = ExitCode.DONE
        if world.rank == 0 and (ended.stopped_by or ended.failed_saves):
            code = _write_outcome(run_dir, ended)
        world.close()
        finalize_mpi()
    except BaseException as error:
        out_of_memory = _out_of_memory(error)
        if out_of_memory is None:
            error.rank = world.rank  # type: ignore[attr-defined]
            raise
        out_of_memory.rank = world.rank  # type: ignore[attr-defined]
        raise out_of_memory from error
    return int(code)


def _out_of_memory(error: BaseException) -> ConfigError | None:
    """In words what torch says of memory that is not there; None for any other error."""
    if not isinstance(error, RuntimeError) or not re.search(r"can't allocate memory|out of memory", str(error)):
        return None
    first_line = str(error).splitlines()[0]
    return ConfigError(
        f"the memory of this rank's device does not hold what the configuration asks for ({first_line}). Lower "
        "train.micro_batch_size, data.seq_len or the model's size; with several documents in a row, attention needs a "
        "mask of seq_len x seq_len bytes for each sequence of a micro-batch."
    )


def _train(run_dir: Path, config: Config, mesh: Mesh, world: World, stop: StopMark, debugger: Debugger) -> Ended:
    from hpc_train.checkpoint.loading.load import load_newest
    from hpc_train.comm.bind import bind_rank, report_environment
    from hpc_train.train import loop
    from hpc_train.train.build import build_run
    from hpc_train.train.recording import start_recorder

    gc.freeze()  # what modules hold stays, and later collections need not look at it
    gc.enable()
    if config.observe.rank_logs:
        log.copy_output(rank_log(run_dir, world.rank))
    report_environment(world)
    bind_rank(world, config.launch.bind, config.launch.num_threads)
    run = build_run(run_dir, config, mesh, world, start_recorder(run_dir, config.observe, world))
    run.stop = stop
    if world.rank == 0:
        env = process_env()
        end_time = env.get(END_TIME_VARIABLE)
        warning_times = json.loads(env.get(WARNING_TIMES_VARIABLE, "{}"))
        stop.set_limit(float(end_time) if end_time else None, config.launch.stop_before_s, warning_times)
    limits = AgentLimits.within(config.launch.timeout_s)
    _open_checkpoints(run, limits)
    loaded = None
    if config.checkpoint.resume:
        local = run.copies.folder if run.copies is not None else None
        loaded = load_newest(run.checkpoints, loop.state_pieces(run.trainer), world, local, limits)
        if loaded is not None:
            loop.restore(run, loaded)
    loop.note_copies(run, loaded)
    if loaded is None and config.checkpoint.init_from is not None:
        loop.begin_from(run, config.checkpoint.init_from)
    if run.metrics is not None:
        run.metrics.forget_after(run.step)
    if world.rank == 0:
        log.say(f"starting at step {run.step + 1} of {config.train.steps}")
    debugger.stop_here()
    try:
        ended = loop.train(run)
    finally:
        run.feed.close()
        run.saver.close()
        run.recorder.close()
    if run.metrics is not None:
        run.metrics.close()
    return ended


def _write_outcome(run_dir: Path, ended: Ended) -> ExitCode:
    """Why the run stops although its ranks end well, and which saves failed; the driver reads it.

    Gives the exit code of this process, which says that it stops where that cannot be written: behind the last barrier
    nobody is harmed by the launcher's ending the others for it.
    """
    outcome, code, reason = "done", ExitCode.DONE, "all ranks ended well"
    if ended.stopped_by is not None:
        saved = "saved" if ended.is_saved else "not saved, so that the last complete checkpoint stands"
        outcome, code = "interrupted", ExitCode.REQUEUE
        reason = f"stopped after step {ended.step}, which is {saved}: {ended.stopped_by}"
    if ended.failed_saves is not None:
        reason = f"{reason}; {ended.failed_saves}"
    log.say(reason)
    record = {"outcome": outcome, "exit_code": int(code), "reason": reason}
    try:
        write_atomically(run_dir / OUTCOME_FILE, json.dumps(record, indent=1) + "\n")
    except OSError as problem:
        log.try_to_say(f"warning: {run_dir / OUTCOME_FILE} could not be written ({problem.strerror or problem})")
        return code
    return ExitCode.DONE


def _open_checkpoints(run: Run, limits: AgentLimits) -> None:
    """Refuse at the start what would fail at the first save."""
    from hpc_train.checkpoint.folders.run_location import open_location
    from hpc_train.checkpoint.folders.ticket import look_at_tickets
    from hpc_train.train.state import state_bytes

    num_bytes = state_bytes(run.trainer, num_parameters(run.config.model, run.config.data.seq_len))
    resume = run.config.checkpoint.resume
    open_location(run.checkpoints, run.run_dir, num_bytes, run.world, run.attempt, resume=resume, limits=limits)
    end_time = process_env().get(END_TIME_VARIABLE)
    look_at_tickets(run.checkpoints, run.world, float(end_time) if end_time else None)


def _rendezvous(env: Mapping[str, str]) -> Rendezvous:
    """How to meet, told by the driver.

    The whole configuration is read once all are connected: its check costs 0.3 s a rank (measured; it is pydantic's
    import), and on a busy node the ranks would wait for each other that much longer.
    """
    from hpc_train.comm.join import Rendezvous

    return Rendezvous(**json.loads(env[RENDEZVOUS_VARIABLE]))


def _read(path: Path) -> str:
    """A file that the driver wrote; another node may see it a little later."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{path} cannot be read on {socket.gethostname()}: {error}. The run folder must be on a file "
                    "system that all nodes share; choose one with launch.runs_dir."
                ) from error
            time.sleep(0.2)
