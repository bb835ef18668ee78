"""The files of a run folder that more than one part of the package writes or reads, and how they are written whole."""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from hpc_train.errors import CheckpointError
from hpc_train.plan.json_object import check_kind, parse_object

CONFIG_FILE = "config.yaml"
CONFIG_REQUEST_FILE = "config.request.yaml"
"""The configuration that a batch script carries; the driver makes config.yaml from it in the claimed folder."""
PLAN_FILE = "plan.json"
RANKS_FILE = "ranks.tsv"
PLAN_TEXT_FILE = "plan.txt"
PLAN_PAGE_FILE = "plan.html"
OUTCOME_FILE = "outcome.json"
ATTEMPTS_FILE = "attempts.jsonl"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS_FOLDER = "checkpoints"
CHECKPOINTS_NOTE = "elsewhere.json"
"""In the folder of checkpoints, where these lie in another one: which, and the newest step saved there."""
LOGS_FOLDER = "logs"


def is_run_folder(folder: Path) -> bool:
    """Whether it has a file of a run's, begun or not; false also where it may not be read."""
    return any(os.path.isfile(folder / name) for name in (CONFIG_FILE, CONFIG_REQUEST_FILE, ATTEMPTS_FILE))


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old content or the new, whole."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), new_file_mode())
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def append_line(path: Path, line: str) -> None:
    """Add a line to a file, whole or not at all; one process at a time may do so."""
    data = f"{line}\n".encode()
    with path.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            written = file.write(data)
            while written < len(data):
                written += file.write(data[written:])
            os.fsync(file.fileno())
        except OSError:
            if size:
                file.truncate(size)
            else:
                path.unlink()
            raise


def read_json(path: Path, problems: list[str] | None = None) -> dict[str, Any] | None:
    """A JSON object from a file, or None where there is none that can be read.

    problems: gets a sentence where the file is there and is not such an object.
    """
    data = _content(path, problems)
    value = None if data is None else _object(data)
    if data is not None and value is None and problems is not None:
        problems.append(f"{path} is damaged: it holds no JSON object")
    return value


def read_json_lines(
    path: Path, problems: list[str] | None = None, *, is_growing: bool = False, tail_bytes: int | None = None
) -> list[dict[str, Any]]:
    """The JSON objects of a file that has one a line; empty where there is none that can be read.

    Args:
        problems: Gets a sentence where there are lines that are no such object. These are left out.
        is_growing: The end of a last line may be yet to come; it is left out without a word.
        tail_bytes: Only the lines within the last so many bytes; None for all.
    """
    data = _content(path, problems, tail_bytes)
    if data is None:
        return []
    *lines, last = data.split(b"\n")
    if last.strip() and not (is_growing and last.startswith(b"{") and _object(last) is None):
        lines.append(last)
    values = [_object(line) if line.strip() else {} for line in lines]
    wrong = [number for number, value in enumerate(values, start=1) if value is None]
    if wrong and problems is not None:
        first = f"line {wrong[0]}" if tail_bytes is None else "a line near its end"
        more = f" and {len(wrong) - 1} more lines hold" if len(wrong) > 1 else " holds"
        problems.append(f"{path} is damaged: {first}{more} no JSON object")
    return [value for value in values if value]


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value from JSON is a number that a float holds, and no NaN or infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value from JSON is a whole number from 0 to 2**63 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _content(path: Path, problems: list[str] | None, tail_bytes: int | None = None) -> bytes | None:
    try:
        with path.open("rb") as file:
            start = 0 if tail_bytes is None else max(0, os.fstat(file.fileno()).st_size - tail_bytes)
            file.seek(start)
            data = file.read()
            return data.partition(b"\n")[2] if start and b"\n" in data else data
    except FileNotFoundError:
        return None
    except OSError as error:
        if problems is not None:
            problems.append(f"{path} cannot be read: {error.strerror}")
        return None


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_outcome(run_dir: Path, problems: list[str] | None = None) -> dict[str, Any]:
    """How the last attempt ended: outcome, exit_code, reason and what else is noted; empty where it is not known.

    problems: gets a sentence where the file is there and does not say so.
    """
    path = run_dir / OUTCOME_FILE
    outcome = read_json(path, problems)
    if outcome is None:
        return {}
    texts = (outcome.get("outcome"), outcome.get("reason", ""))
    if all(isinstance(text, str) for text in texts) and is_count(outcome.get("exit_code")):
        return outcome
    if problems is not None:
        problems.append(f"{path} is damaged: it does not say outcome, exit_code and reason")
    return {}


@dataclass(frozen=True)
class CheckpointsNote:
    """Where a run's checkpoints lie if not in its run folder, and the newest step that was saved there."""

    folder: str
    newest_step: int | None = None


def write_checkpoints_note(run_dir: Path, note: CheckpointsNote) -> None:
    (run_dir / CHECKPOINTS_FOLDER).mkdir(exist_ok=True)
    write_atomically(run_dir / CHECKPOINTS_FOLDER / CHECKPOINTS_NOTE, json.dumps(asdict(note)) + "\n")


def read_checkpoints_note(run_dir: Path) -> CheckpointsNote | None:
    """What is noted in a run folder; None where the checkpoints lie in it.

    Raises:
        CheckpointError: the note says nothing.
    """
    path = run_dir / CHECKPOINTS_FOLDER / CHECKPOINTS_NOTE
    try:
        tree = parse_object(path.read_text(encoding="utf-8"), {"folder": (str,)})
        check_kind("newest_step", tree.get("newest_step"), (int, None))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as problem:
        raise CheckpointError(
            f"{path}, which says where the run's checkpoints are, cannot be read: {problem}. Write "
            '{"folder": "FOLDER OR URL"} into it'
        ) from problem
    return CheckpointsNote(tree["folder"], tree.get("newest_step"))


def rank_log(run_dir: Path, rank: int) -> Path:
    """Where a rank writes besides its node's log, if observe.rank_logs is set."""
    return run_dir / LOGS_FOLDER / f"rank_{rank:05d}.log"


def new_file_mode() -> int:
    """What a file gets that is made as usual."""
    mask = os.umask(0o022)
    os.umask(mask)
    return 0o666 & ~mask
