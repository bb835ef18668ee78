"""Where the checkpoints of a run go: found, claimed and tried out before the first step. Needs no torch."""

from __future__ import annotations

import json
import shlex
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hpc_train.checkpoint.folders.attempt import begin_attempt, require_attempt
from hpc_train.checkpoint.folders.folder import newest_step, steps_newest_first
from hpc_train.checkpoint.stores.bounded import bounded
from hpc_train.checkpoint.stores.caller import Bound
from hpc_train.checkpoint.stores.cause import StoreError
from hpc_train.checkpoint.stores.location import Location, locate
from hpc_train.checkpoint.stores.visible import wait_for_folder
from hpc_train.cluster.agent_wait import USUAL_LIMITS, AgentLimits
from hpc_train.cluster.size_words import two_sizes
from hpc_train.comm.world import World
from hpc_train.errors import CheckpointError, HpcTrainError
from hpc_train.log import warn
from hpc_train.plan.run_files import (
    ATTEMPTS_FILE,
    CHECKPOINTS_FOLDER,
    CHECKPOINTS_NOTE,
    CheckpointsNote,
    is_count,
    read_checkpoints_note,
    read_json_lines,
    write_checkpoints_note,
)

CLAIM_FILE = "run.json"
"""In a folder of checkpoints that lies outside its run folder: which run folder that is."""
_TRIAL_BYTES = 1 << 20


def run_location(folder: str | None, run_dir: Path) -> Location:
    """The folder of a run's checkpoints: below `folder` (checkpoint.folder), or in the run folder.

    Below `folder` each run has its own, by the last two names of its run folder, which are the run's name and id.
    """
    if folder is None:
        return locate(run_dir / CHECKPOINTS_FOLDER)
    whole = run_dir.resolve()
    return locate(folder) / whole.parent.name / whole.name


def open_location(
    root: Location,
    run_dir: Path,
    num_bytes: int,
    world: World,
    attempt: str | None = None,
    *,
    resume: bool = True,
    limits: AgentLimits = USUAL_LIMITS,
) -> None:
    """Make `root`, the folder of a run's checkpoints, and see that all ranks can use it. Collective over all ranks.

    Rank 0 makes and claims it, writes a trial file, so that a lack of permission, quota or connection stops the run
    now and not at its first save, and asks for `num_bytes` of space where the store tells its space.

    attempt: this start of the run; agents of earlier ones leave the folder alone from here on. resume: the run goes
    on from what is there; else nothing may be. limits: how long a store is waited for in which nothing moves; the first
    rank of a node says so.

    Raises:
        HpcTrainError: on every rank: it belongs to another run, holds checkpoints that are not gone on from, or none
            although the run has saved some, cannot be written, lacks space, does not answer, or is not seen by all
            ranks; the client of its URL is not installed.
    """
    bound = Bound(limits.save_s, tell=warn if world.local_rank == 0 else None)

    def problem_of(act: Callable[[], None], what: str) -> Exception | None:
        try:
            bounded(root, act, what, bound)
        except Exception as problem:
            return _in_words(problem, root)
        return None

    def take() -> None:
        if resume:
            _require_saved(root, run_dir)
        else:
            _require_empty(root)
        prepare(root, run_dir, num_bytes, attempt)

    world.agree(problem_of(take, f"taking the folder of checkpoints on {world.node}") if world.rank == 0 else None)
    world.agree(problem_of(lambda: wait_for_folder(root), f"looking for the folder of checkpoints on {world.node}"))


def _in_words(problem: Exception, root: Location) -> Exception:
    """What the system refuses is the user's to mend, and raised by all ranks alike."""
    if not isinstance(problem, OSError) or isinstance(problem, HpcTrainError):
        return problem
    error = CheckpointError(f"{root} cannot be used for checkpoints: {type(problem).__name__}: {problem}")
    error.__cause__ = problem
    return error


def prepare(root: Location, run_dir: Path, num_bytes: int, attempt: str | None = None) -> None:
    """What rank 0 does in `open_location`.

    A store may have no way to create a file only where there is none, so two starts in one moment may both have found
    nobody there. Each looks again behind its attempt: who has written `attempt` last, and may save, owns the folder.
    """
    _require_same_place(root, run_dir)
    root.make_folder()
    if is_elsewhere(root, run_dir):
        _claim(root, run_dir.resolve())
    _require_space(root, num_bytes)
    _try_writing(root)
    if attempt is not None:
        begin_attempt(root, attempt)
        if is_elsewhere(root, run_dir):
            _claim(root, run_dir.resolve())
        require_attempt(root, attempt)
    if is_elsewhere(root, run_dir):
        write_checkpoints_note(run_dir, CheckpointsNote(str(root), newest_step(root)))


def note_saved(root: Location, run_dir: Path, step: int) -> None:
    """Tell the run folder of a save, if the checkpoints lie elsewhere: its driver sees no store."""
    if is_elsewhere(root, run_dir):
        write_checkpoints_note(run_dir, CheckpointsNote(str(root), step))


def is_elsewhere(root: Location, run_dir: Path) -> bool:
    """Whether a run's checkpoints lie outside its folder, which is then told of each."""
    return root != run_location(None, run_dir)


def _require_same_place(root: Location, run_dir: Path) -> None:
    """A run whose checkpoints lie in one folder does not start anew in another one unseen."""
    note = read_checkpoints_note(run_dir)
    inside = run_location(None, run_dir)
    there = note.folder if note is not None else str(inside) if any(steps_newest_first(inside)) else None
    if there is not None and there != str(root):
        raise CheckpointError(
            f"this run's checkpoints are in {there}, and with this checkpoint.folder they would be in {root}. Leave "
            "the setting as it was, or move them there by hand"
            + (f" and remove {run_dir / CHECKPOINTS_FOLDER / CHECKPOINTS_NOTE}" if note is not None else "")
        )


def _require_empty(root: Location) -> None:
    """A run that begins anew among checkpoints of higher steps would have its own removed as the older ones."""
    names = [path.name for _, path in steps_newest_first(root)]
    if names:
        raise CheckpointError(
            f"checkpoint.resume=false begins anew, but {root} holds {', '.join(names[:5])}"
            f"{' and more' if len(names) > 5 else ''}, of which the highest step counts as the newest. Choose a new "
            "run folder (--run-dir), remove them, or leave checkpoint.resume=false out to go on from them"
        )


def _require_saved(root: Location, run_dir: Path) -> None:
    """A run that has saved does not start anew unseen because its folder is not mounted, or was removed."""
    _require_same_place(root, run_dir)
    if any(steps_newest_first(root)):
        return
    told = _recorded_save(run_dir)
    if told is not None:
        step, record = told
        raise CheckpointError(
            f"this run has saved step {step}, as {record} says, but {root} holds no checkpoint now, so it would start "
            "anew. If that is on a file system that is not mounted, mount it; if the checkpoints were moved, move them "
            "back, or name their folder by checkpoint.folder; to begin anew on purpose, set checkpoint.resume=false, "
            "or give another run folder (--run-dir)"
        )


def _recorded_save(run_dir: Path) -> tuple[int, Path] | None:
    """The step that the run folder last heard to be saved, and which of its files says so."""
    note = read_checkpoints_note(run_dir)
    if note is not None and note.newest_step is not None:
        return note.newest_step, run_dir / CHECKPOINTS_FOLDER / CHECKPOINTS_NOTE
    for attempt in reversed(read_json_lines(run_dir / ATTEMPTS_FILE)):
        if is_count(attempt.get("saved_step")):
            return attempt["saved_step"], run_dir / ATTEMPTS_FILE
    return None


def _claim(root: Location, run_dir: Path) -> None:
    """Refuse a folder that belongs to another run: the two would remove each other's checkpoints."""
    claim = root / CLAIM_FILE
    with suppress(FileExistsError):
        claim.write_text(json.dumps({"run_dir": str(run_dir)}) + "\n")
        return
    try:
        owner = json.loads(claim.read_text())["run_dir"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{claim} cannot be read, so it is not known which run's checkpoints these are. If they are this run's, "
            "remove that file; else choose another checkpoint.folder"
        ) from None
    if owner != str(run_dir):
        raise CheckpointError(
            f"{root} holds the checkpoints of the run {owner}, not of {run_dir}. Choose another checkpoint.folder or "
            "run name; to begin from those weights, set checkpoint.init_from. If that run has moved here, remove "
            f"{claim}"
        )


def _require_space(root: Location, num_bytes: int) -> None:
    free = root.store.free_bytes(root.path)
    if free is not None and free < num_bytes:
        needed, there = two_sizes(num_bytes, free)
        steps = [step for step, _ in steps_newest_first(root)]
        cure = "Free some space, or choose another checkpoint.folder for a new run"
        if len(steps) > 1:
            cure = (
                f"{len(steps)} checkpoints of this run are there: `hpc-train ckpt prune {shlex.quote(str(root))} "
                f"--keep 1` removes all but the newest one that is sound. Or free space elsewhere"
            )
        raise CheckpointError(f"one checkpoint needs {needed}, but {root} has {there} free. {cure}")


def _try_writing(root: Location) -> None:
    trial = root / f".trial.tmp-{uuid.uuid4().hex}"
    try:
        with trial.writing() as file:
            file.write(memoryview(bytes(_TRIAL_BYTES)))
    except StoreError as problem:
        raise CheckpointError(f"checkpoints cannot be written to {root}: {problem}") from problem
    finally:
        with suppress(StoreError):
            trial.remove()
