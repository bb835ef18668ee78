"""The folder of a run: made once, owned by one live run at a time, kept over restarts.

Whoever starts ranks claims the folder first. `owner.json` says who that is; it is linked into place, so of
two drivers one loses, and a claim whose process or job is gone is taken over. `attempts.jsonl` gets a line
a start.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_train.cluster.agent_address import make_job_key
from hpc_train.errors import ConfigError
from hpc_train.launch.file_errors import reason, room_needed
from hpc_train.log import FAILURE_FILE, timestamp
from hpc_train.plan.run_files import (
    ATTEMPTS_FILE,
    CHECKPOINTS_FOLDER,
    LOGS_FOLDER,
    OUTCOME_FILE,
    append_line,
    is_count,
    read_checkpoints_note,
    read_json,
    read_json_lines,
)

# Told to the ranks: where the run is, and that a driver started them, for the how-manieth time.
RUN_DIR_VARIABLE = "HPC_TRAIN_RUN_DIR"
ATTEMPT_VARIABLE = "HPC_TRAIN_ATTEMPT"

OWNER_FILE = "owner.json"
SUBMIT_FILE = "submit.sh"
REQUEST_FILE = "plan.request.json"

_STEP_FOLDER = re.compile(r"step_\d{7,}")
_MANIFEST_STEP, _MANIFEST_HEAD_BYTES = re.compile(rb'"step": ?(\d+)'), 100
"""Where the manifest of a checkpoint tells its step, behind its version; all of it may have many megabytes."""

_CLAIM_TRIES = 100
"""At 20 ms each; a claim takes a few operations on files, so two seconds are long."""


@dataclass(frozen=True)
class Owner:
    """A driver: its process and, under Slurm, its job (`123`, `120_3` of an array) and the job's restarts.

    secret: a random word in the address of its node agents.
    """

    host: str
    pid: int
    start_ticks: int
    job_id: str | None
    job_restarts: int
    started: str
    secret: str = ""

    @property
    def job_key(self) -> str:
        """What ranks and agents of this start meet by."""
        return make_job_key(self.job_id, self.job_restarts, self.pid, self.secret)

    def describe(self) -> str:
        job = f"Slurm job {self.job_id}, " if self.job_id else ""
        return f"{job}process {self.pid} on {self.host}, since {self.started}"


@dataclass(frozen=True)
class Claim:
    """The folder is ours. `taken_over` is the owner that was found gone, if there was one."""

    run_dir: Path
    owner: Owner
    taken_over: Owner | None

    def begin_attempt(self) -> int:
        """Count one more start, 1 for the first; the previous one's records get its number into their names.

        Raises:
            ConfigError: the earlier ones cannot be counted.
        """
        problems: list[str] = []
        attempt = len(read_attempts(self.run_dir, problems)) + 1
        if problems:
            raise ConfigError(
                f"{problems[0]}, so the starts of this run cannot be counted. Mend the line, or remove it if it is the "
                "last one; or give another folder by --run-dir"
            )
        record = {"attempt": attempt, **asdict(self.owner), "saved_step": newest_saved_step(self.run_dir)}
        append_line(self.run_dir / ATTEMPTS_FILE, json.dumps(record))
        for name in (FAILURE_FILE, OUTCOME_FILE):
            if (self.run_dir / name).exists():
                os.replace(self.run_dir / name, self.run_dir / f"{Path(name).stem}-{attempt - 1}.json")
        return attempt

    def release(self) -> None:
        """Give the folder free; anybody else's claim is left alone."""
        if read_owner(self.run_dir) == self.owner:
            (self.run_dir / OWNER_FILE).unlink(missing_ok=True)


def this_process(host: str, job_id: str | None = None, job_restarts: int = 0) -> Owner:
    """The calling process as an owner."""
    ticks = start_ticks(os.getpid()) or 0
    return Owner(host, os.getpid(), ticks, job_id, job_restarts, timestamp(), secrets.token_hex(8))


def start_ticks(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks since boot; None if there is none with this id.

    With the process id it names one process: ids are used again, also after a reboot.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def is_live(owner: Owner, host: str, job_is_live: Callable[[str], bool | None]) -> bool | None:
    """Whether an owner still runs; None if that cannot be known from here.

    Args:
        host: The node that asks.
        job_is_live: Answers for a Slurm job; None where Slurm cannot be asked.
    """
    if owner.host == host:
        return start_ticks(owner.pid) == owner.start_ticks
    return job_is_live(owner.job_id) if owner.job_id else None


def read_owner(run_dir: Path, problems: list[str] | None = None) -> Owner | None:
    """Who claims the folder, or None.

    problems: gets a sentence where the file is there and does not say so.
    """
    record = read_json(run_dir / OWNER_FILE, problems)
    if record is None:
        return None
    try:
        owner = Owner(**record)
        if _is_owner(owner):
            return owner
    except TypeError:
        pass
    if problems is not None:
        problems.append(f"{run_dir / OWNER_FILE} is damaged: it does not say who owns the run")
    return None


def _is_owner(owner: Owner) -> bool:
    texts = (owner.host, owner.started, owner.secret, "" if owner.job_id is None else owner.job_id)
    numbers = (owner.pid, owner.start_ticks, owner.job_restarts)
    return all(isinstance(text, str) for text in texts) and all(map(is_count, numbers))


def claim(run_dir: Path, owner: Owner, job_is_live: Callable[[str], bool | None]) -> Claim:
    """Make the folder if it is not there and become its owner, or refuse because another live run owns it.

    Raises:
        ConfigError: owned by a live run, or by one that cannot be checked from here; names it and the cure.
    """
    make_folder(run_dir)
    with room_needed(run_dir):
        return Claim(run_dir, owner, _link_owner(run_dir, owner, job_is_live))


def make_folder(run_dir: Path) -> None:
    """The folder with its logs folder; both may be there already."""
    try:
        (run_dir / LOGS_FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigError(f"the run folder {run_dir} cannot be made: {reason(problem)}") from problem
    if not os.access(run_dir, os.W_OK):
        raise ConfigError(f"the run folder {run_dir} is not writable; give another one by --run-dir")


def new_folder(parent: Path, name: str) -> Path:
    """Make `parent/name`, or `parent/name-2` and so on where that is taken, and return it."""
    for number in range(1, 1000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            (folder / LOGS_FOLDER).mkdir()
        except FileExistsError as problem:
            if not parent.is_dir():
                raise ConfigError(f"the run folder {folder} cannot be made: {reason(problem)}") from problem
            continue
        except OSError as problem:
            raise ConfigError(f"the run folder {folder} cannot be made: {reason(problem)}") from problem
        return folder
    raise ConfigError(f"{parent} has a thousand folders named {name}; remove some")


def time_name() -> str:
    """The name of a run that has no job id: 2026-11-29_22-10-03."""
    return time.strftime("%Y-%m-%d_%H-%M-%S")


def read_attempts(run_dir: Path, problems: list[str] | None = None) -> list[dict[str, Any]]:
    """One record for each start of this run, oldest first.

    problems: gets a sentence where the file is damaged; what is damaged is left out.
    """
    return read_json_lines(run_dir / ATTEMPTS_FILE, problems)


def newest_saved_step(run_dir: Path) -> int | None:
    """The highest step with a checkpoint that was committed, sound or not; None if there is none.

    A copy under the name of another step is none: it would be the newest one for good.
    """
    note = read_checkpoints_note(run_dir)
    steps = [] if note is None or note.newest_step is None else [note.newest_step]
    if note is None or "://" not in note.folder:
        # Also where there is a note, which a full disk may have kept from being written.
        folders = (run_dir / CHECKPOINTS_FOLDER if note is None else Path(note.folder)).glob("step_*")
        found = {int(path.name.removeprefix("step_")): path for path in folders if _STEP_FOLDER.fullmatch(path.name)}
        steps += [step for step, path in found.items() if _told_step(path) in (None, step)]
    return max(steps, default=None)


def _told_step(checkpoint: Path) -> int | None:
    """The step that a checkpoint itself tells, in the first words of its manifest; None where they tell none."""
    try:
        with (checkpoint / "manifest.json").open("rb") as file:
            told = _MANIFEST_STEP.search(file.read(_MANIFEST_HEAD_BYTES))
    except OSError:
        return None
    return int(told[1]) if told else None


def num_stalled(run_dir: Path, job_id: str | None) -> int:
    """How many starts of a job, the newest ones in a row, found the checkpoint that is the newest one still.

    Only the first start of each of the job's restarts counts: those that a user made inside a job do not.
    """
    saved = newest_saved_step(run_dir)
    starts: dict[int, dict[str, Any]] = {}
    for attempt in read_attempts(run_dir):
        if attempt.get("job_id") == job_id:
            starts.setdefault(int(attempt.get("job_restarts", 0)), attempt)
    count = 0
    for restart in sorted(starts, reverse=True):
        if starts[restart].get("saved_step") != saved:
            break
        count += 1
    return count


def _link_owner(run_dir: Path, owner: Owner, job_is_live: Callable[[str], bool | None]) -> Owner | None:
    """Put our claim in place; returns the owner that was found gone, if there was one.

    A missing claim is linked, which one can do. A stale one is replaced, without a gap, by whoever linked the
    marker that names it, and only if it is still in place then: nobody else changes it meanwhile.
    """
    path = run_dir / OWNER_FILE
    descriptor, name = tempfile.mkstemp(prefix=f".{OWNER_FILE}.", dir=run_dir)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(owner), file)
        for _ in range(_CLAIM_TRIES):
            if _link(temporary, path):
                return None
            stale = _stale_owner(run_dir, owner, job_is_live)
            if stale is None:
                continue
            marker = run_dir / f".{OWNER_FILE}.replacing.{_digest(stale)}"
            if _link(temporary, marker):
                try:
                    if read_owner(run_dir) == stale:
                        os.replace(temporary, path)
                        return stale
                finally:
                    marker.unlink()
            time.sleep(0.02)
    finally:
        temporary.unlink(missing_ok=True)
    raise ConfigError(
        f"the run folder {run_dir} is being claimed by several runs at once; start one of them. If none is "
        f"running, remove the files {OWNER_FILE} and .{OWNER_FILE}.* in it"
    )


def _stale_owner(run_dir: Path, owner: Owner, job_is_live: Callable[[str], bool | None]) -> Owner | None:
    """The present owner if it is gone, None if the claim is; refuses where the owner is alive or may be."""
    previous = read_owner(run_dir)
    if previous is None:
        return None
    # A job that was requeued, perhaps to another node, owns what it owned before.
    same_job = owner.job_id is not None and previous.job_id == owner.job_id
    requeued = same_job and previous.job_restarts < owner.job_restarts
    live = False if requeued else is_live(previous, owner.host, job_is_live)
    if live is None:
        raise ConfigError(
            f"the run folder {run_dir} is claimed by {previous.describe()}, and whether that still runs cannot be "
            f"seen from {owner.host}. If it does not, remove {run_dir / OWNER_FILE}"
        )
    if live:
        raise ConfigError(
            f"the run folder {run_dir} belongs to a run that is alive: {previous.describe()}. Wait for it, "
            f"stop it by `hpc-train cancel {run_dir}`, or give another folder by --run-dir"
        )
    return previous


def _link(source: Path, target: Path) -> bool:
    """Give a file a second name; false if the name is taken."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    return True


def _digest(owner: Owner) -> str:
    return hashlib.sha256(json.dumps(asdict(owner), sort_keys=True).encode()).hexdigest()[:16]
