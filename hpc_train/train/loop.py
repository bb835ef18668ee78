"""The training loop: an event a line."""

from __future__ import annotations

import gc
import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.copies.lineage import Lineage, forget_lineage, note_lineage
from hpc_train.checkpoint.copies.local_folder import folder_of_run
from hpc_train.checkpoint.copies.local_saves import LocalCopies, LocalFolder
from hpc_train.checkpoint.folders.attempt import ATTEMPT_VALUE, attempt_of
from hpc_train.checkpoint.folders.find import model_of_values
from hpc_train.checkpoint.folders.run_location import run_location
from hpc_train.checkpoint.folders.ticket import TicketWatch
from hpc_train.checkpoint.format.model_function import require_function
from hpc_train.checkpoint.format.model_tensors import ModelSpec
from hpc_train.checkpoint.loading.load import Loaded
from hpc_train.checkpoint.saving.saver import Saver
from hpc_train.checkpoint.stores.location import Location
from hpc_train.cluster.agent_address import read_job_key, this_node
from hpc_train.cluster.agent_wait import AgentLimits
from hpc_train.cluster.environment import process_env
from hpc_train.cluster.network import advertised_address
from hpc_train.comm.world import World
from hpc_train.config import Config
from hpc_train.data.batch_source import Batches
from hpc_train.data.feed import Feed
from hpc_train.data.loader import Batch
from hpc_train.errors import DataError, HpcTrainError, LaunchError
from hpc_train.log import say, warn
from hpc_train.plan.batch_pieces import PieceBatch
from hpc_train.plan.cost import mfu
from hpc_train.plan.peer_copies import COPY_HOLDERS
from hpc_train.record import NOT_RECORDED, Kind, Recorder, quotient
from hpc_train.train.metrics import Metrics
from hpc_train.train.optimizer import learning_rate
from hpc_train.train.state import plain_values, state_pieces
from hpc_train.train.step import StepResult, Trainer
from hpc_train.train.stop import StopMark, describe_reasons


@dataclass
class Run:
    """What the loop works with; `step` is the last one that was completed."""

    config: Config
    world: World
    run_dir: Path
    trainer: Trainer
    feed: Feed
    metrics: Metrics | None
    peak_flops: float | None
    recorder: Recorder = NOT_RECORDED
    step: int = 0
    skipped_steps: int = 0
    stop: StopMark = field(default_factory=StopMark)
    checkpoints: Location = field(init=False)
    attempt: str = field(init=False)
    copies: LocalCopies | None = field(init=False)
    saver: Saver = field(init=False)
    ticket: TicketWatch = field(init=False)

    def __post_init__(self) -> None:
        self.checkpoints = run_location(self.config.checkpoint.folder, self.run_dir)
        env = process_env()
        job_key = read_job_key(env)
        agent = None if job_key is None else (job_key, this_node(env))
        # Without a driver each rank has another one; only rank 0's is told to anybody.
        self.attempt = attempt_of(job_key or secrets.token_hex(8))
        self.copies = _local_copies(self.config, self.run_dir, self.world, attempt_of(job_key or ""))
        self.saver = Saver(
            self.config.checkpoint, self.checkpoints, self.run_dir, self.world, agent,
            lambda seconds: self.stop.completed_save(seconds), self.copies,
            AgentLimits.within(self.config.launch.timeout_s),
        )  # fmt: skip
        self.ticket = TicketWatch(self.checkpoints, self.world)


def _local_copies(config: Config, run_dir: Path, world: World, attempt: str) -> LocalCopies | None:
    """What checkpoint.local asks for; None where it is left out. Collective over all ranks.

    attempt: this start of the run, where a driver has begun it; else there are no agents, and no copies.
    """
    local = config.checkpoint.local
    if local is None:
        return None
    launch = config.launch
    holders = world.plan.further.get(COPY_HOLDERS, ()) if world.plan is not None else ()
    assert len(holders) == (world.num_nodes if world.num_nodes > 1 else 0), "the plan says who keeps whose copy"

    def address() -> str:
        template = launch.address_template
        return advertised_address(world.node, launch.interface, world.num_nodes, template=template)

    folder, error = run_dir, None
    try:
        folder = folder_of_run(local.path, run_dir, process_env())
    except HpcTrainError as problem:
        error = problem
    world.agree(error)
    return LocalCopies(world, local, LocalFolder(folder, attempt), holders, address, config.checkpoint.finish_s)


@dataclass(frozen=True)
class Ended:
    """How the steps of a start ended well.

    stopped_by: why before the last step; None: all are taken. is_saved: false if the save of the step it was stopped
    after failed and checkpoint.on_error=continue. failed_saves: on rank 0, what is to be said of saves that failed.
    """

    step: int
    stopped_by: str | None
    is_saved: bool
    failed_saves: str | None


def train(run: Run) -> Ended:
    """Take the steps that are left. Collective over all ranks.

    Raises:
        HpcTrainError: too many steps in a row, or all, without finite numbers; a failed save, which with
            checkpoint.on_error=continue is the last one of all steps.
        DataError: they had no supervised token.
    """
    config, first_step = run.config, run.step + 1
    skipped_in_a_row, num_supervised = 0, 0
    _compare_first_plan(run)
    with _collection_at_fixed_steps():
        while run.step < config.train.steps:
            begin = time.perf_counter()
            run.step += 1
            lr = learning_rate(run.step, config.optimizer, config.train.steps)
            with run.recorder.step(run.step):
                batches = _micro_batches(run)
                result = run.trainer.step(run.step, batches, lr, lambda: _stop_wanted(run), _next_plan(run))
            stopping = result.stop_wanted and run.step < config.train.steps
            record = _record(run, result, lr, time.perf_counter() - begin)
            skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
            run.skipped_steps += result.skipped
            num_supervised += result.num_supervised
            evaluates = config.train.eval_every and _is_due(run.step, config.train.eval_every, config.train.steps)
            if evaluates and result.has_same_plan:
                record["eval_loss"] = evaluate(run)
            if run.metrics is not None:
                run.metrics.write(record)
            if skipped_in_a_row >= config.train.max_skipped_steps:
                raise _nothing_learnt(run, skipped_in_a_row, num_supervised)
            run.stop.completed_step(time.perf_counter() - begin)
            run.saver.look()
            last_step = config.train.steps if config.checkpoint.at_end else 0
            if stopping or _is_due(run.step, config.checkpoint.every, last_step):
                is_saved = save(run, must_last=stopping or run.step == config.train.steps)
            elif run.saver.is_copy_due(run.step):
                copy_locally(run)
            if not result.has_same_plan:
                raise _different_plans(f"step {run.step + 1}")
            if stopping:
                run.trainer.finish()
                stopped_by = describe_reasons(run.world.control.all_gather(run.stop.reason))
                return Ended(run.step, stopped_by, is_saved, run.saver.failed_saves)
            if run.step == first_step:
                _check_handlers(run)
                run.saver.open(state_pieces(run.trainer, counted=True))
            if run.step % config.train.gc_every == 0:
                gc.collect()
        run.trainer.finish()
        run.saver.finish()
        if run.skipped_steps == run.step:
            raise _nothing_learnt(run, run.step, num_supervised if first_step == 1 else None)
    return Ended(run.step, None, True, run.saver.failed_saves)


def _check_handlers(run: Run) -> None:
    """Say on which ranks a library has taken a signal that should stop the run. Collective over all ranks."""
    replaced = run.world.control.all_gather(run.stop.replaced())
    names = sorted({name for of_rank in replaced for name in of_rank})
    if names and run.world.rank == 0:
        count = sum(1 for of_rank in replaced if of_rank)
        warn(
            f"{' and '.join(names)} is handled by another library on {count} ranks, so it will not stop the run with "
            "a save. Choose another one by launch.stop_signal"
        )


def evaluate(run: Run) -> float:
    """Mean held-out loss, nats per supervised token; the same rows at each call. Collective over all ranks.

    Raises:
        LaunchError: ranks planned a held-out step differently; before they meet in its rings.
    """
    return run.trainer.evaluate(_heldout(run))


def _heldout(run: Run) -> Iterator[Batches]:
    """The held-out steps. Those whose sequences ranks share are compared before they are taken, the end too."""
    parts = run.feed.heldout()
    if run.config.parallel.hdp is None:
        yield from (part.batches for part in parts)
        return
    for number in itertools.count():
        part = next(parts, None)
        compared = run.world.control.compare("the end" if part is None else part.digest.hex(), "")
        if compared.num_different:
            raise _different_plans(f"held-out step {number}")
        if part is None:
            return
        yield part.batches


def _micro_batches(run: Run) -> Iterator[Batch | PieceBatch]:
    """This rank's part of the plan of the step that has begun."""
    return run.feed.micro_batches(run.step)


def _stop_wanted(run: Run) -> bool:
    """On this rank: it was told to stop, or a save failed while training went on."""
    return run.stop.wanted(run.saver.is_writing) or run.saver.has_failed


def _next_plan(run: Run) -> Callable[[], bytes] | None:
    """What tells the digest of the next step's batch plan; None where steps are rows, whose plan is arithmetic."""
    return None if run.config.parallel.hdp is None else lambda: run.feed.plan_ahead(run.step + 1)


def _compare_first_plan(run: Run) -> None:
    """Refuse to begin a step whose rings not all ranks know of. Collective over all ranks."""
    first_plan = _next_plan(run)
    if first_plan is not None and run.step < run.config.train.steps:
        compared = run.world.control.compare(first_plan().hex(), "")
        if compared.num_different:
            raise _different_plans(f"step {run.step + 1}")


def _different_plans(step: str) -> LaunchError:
    """For all ranks to raise alike."""
    error = LaunchError(
        f"ranks planned {step} differently, and would wait for each other in its rings. All nodes must see the same "
        "datasets, configuration and profile, and run the same version"
    )
    error.reporter = 0
    return error


def restore(run: Run, loaded: Loaded) -> None:
    """Go on behind a checkpoint whose tensors `load_newest` has put in place. Collective over all ranks.

    Raises:
        CheckpointError: on every rank: they were trained as another model.
    """
    _compare_model(run, loaded)
    run.step = loaded.step
    if run.copies is not None:
        run.copies.loaded(loaded.local_tokens, loaded.local_twice, loaded.store_step)
    run.saver.loaded(loaded.store_step)
    run.skipped_steps = int(loaded.values["skipped_steps"])
    run.trainer.optimizer.num_updates = int(loaded.values["num_updates"])
    changes = run.feed.restore(loaded.values["loader"])
    run.trainer.publish_parameters()
    if run.world.rank == 0:
        say(f"resumed from {loaded.path} at step {loaded.step}")
        for change in changes:
            warn(f"the blend changed (data.allow_changed_blend=true): {change}")


def _compare_model(run: Run, loaded: Loaded) -> None:
    error = None
    if run.world.rank == 0:
        try:
            there = model_of_values(loaded.values, loaded.path)
            here = ModelSpec(run.config.model, run.config.data.seq_len)
            if there is not None:
                for change in require_function(loaded.path, there, here, run.config.checkpoint.allow_changed_model):
                    say(f"{change} (checkpoint.allow_changed_model)")
        except HpcTrainError as problem:
            error = problem
    run.world.agree(error)


def note_copies(run: Run, loaded: Loaded | None) -> None:
    """Have only copies count that belong to what this start goes on from. Collective over all ranks.

    Raises:
        CheckpointError: on every rank: the store does not take the note.
    """
    error = None
    if run.world.rank == 0:
        try:
            if run.copies is None:
                forget_lineage(run.checkpoints)
            else:
                tokens = () if loaded is None else loaded.local_tokens
                note_lineage(run.checkpoints, Lineage(run.copies.folder.attempt, tokens))
        except HpcTrainError as problem:
            error = problem
    run.world.agree(error)


def begin_from(run: Run, source: str) -> None:
    """Take the weights of another run or of a converted model, and nothing else of it. Collective over all ranks."""
    from hpc_train.checkpoint.loading.init_from import load_weights

    spec = ModelSpec(run.config.model, run.config.data.seq_len)
    allowed, limits = run.config.checkpoint.allow_changed_model, AgentLimits.within(run.config.launch.timeout_s)
    path = load_weights(source, state_pieces(run.trainer), spec, run.world, allowed, limits)
    run.trainer.publish_parameters()
    if run.world.rank == 0:
        say(f"begins with the weights of {path}")


def save(run: Run, *, must_last: bool) -> bool:
    """Save a checkpoint of the step just completed, true if that went well. Collective over all ranks.

    must_last: wait until it is committed.

    Raises:
        CheckpointError: it did not, or the one before did not, unless checkpoint.on_error=continue.
    """
    run.ticket.look()
    with run.recorder.segment("save", Kind.SAVE):
        return run.saver.save(run.step, state_pieces(run.trainer, counted=True), _values(run), must_last=must_last)


def copy_locally(run: Run) -> None:
    """Copy the step just completed to the nodes' own disks, unless these are busy. Collective over all ranks.

    Raises:
        CheckpointError: the save before failed, unless checkpoint.on_error=continue.
    """
    with run.recorder.segment("save", Kind.SAVE):
        run.saver.copy_locally(run.step, state_pieces(run.trainer, counted=True), _values(run))


def _values(run: Run) -> dict[str, Any]:
    values = plain_values(run.trainer, run.feed.state(), run.skipped_steps)
    # Not how it was launched: launch.env may hold secrets, and checkpoints are passed on.
    values["config"] = run.config.model_dump(mode="json", exclude={"launch"})
    values["plan"] = run.world.plan.seats() if run.world.plan is not None else None
    values[ATTEMPT_VALUE] = run.attempt
    return values


def _record(run: Run, result: StepResult, lr: float, seconds: float) -> dict[str, Any]:
    tokens_per_s = quotient(result.num_tokens, seconds)
    config = run.config
    length = round(result.mean_length) or config.data.seq_len
    utilisation = None
    if tokens_per_s is not None and run.peak_flops is not None:
        utilisation = mfu(tokens_per_s, config.model, length, run.peak_flops)
    return {
        "step": run.step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": lr,
        "tokens": result.num_tokens,
        "supervised_tokens": result.num_supervised,
        "step_time_s": seconds,
        "tokens_per_s": tokens_per_s,
        "mfu": utilisation,
        "skipped": result.skipped,
    }


def _is_due(step: int, every: int, last_step: int) -> bool:
    """At every multiple of `every`, and at `last_step`; `every` 0 leaves only the last, and last_step 0 none there."""
    return (every > 0 and step % every == 0) or step == last_step


def _nothing_learnt(run: Run, count: int, num_supervised: int | None) -> HpcTrainError:
    """For all ranks to raise alike. num_supervised: tokens of these steps; None: not all were of this start."""
    last = "" if count == run.step else " The last checkpoint of use is from before."
    error: HpcTrainError
    if num_supervised != 0:
        error = HpcTrainError(
            f"{count} steps in a row up to step {run.step} gave no finite loss and gradient norm, or no supervised "
            "token, and were skipped. Lower optimizer.lr, look at the data, or raise train.max_skipped_steps." + last
        )
    else:
        error = DataError(
            f"{count} steps in a row up to step {run.step} had no supervised token, so nothing was learnt. A token is "
            "supervised if it follows another one in its document's row and its loss mask, if there is one, says so: "
            "look at these by `hpc-train data show`, or give a larger data.seq_len." + last
        )
    error.reporter = 0
    return error


@contextmanager
def _collection_at_fixed_steps() -> Iterator[None]:
    """Python's garbage collector off but where the loop calls it: at random it delays one rank and all wait."""
    gc.collect()
    gc.freeze()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
