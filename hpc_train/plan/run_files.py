"""The files of a run folder that more than one part of the package writes or reads, and how they are written whole."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.yaml"
PLAN_FILE = "plan.json"
RANKS_FILE = "ranks.tsv"
PLAN_TEXT_FILE = "plan.txt"
PLAN_PAGE_FILE = "plan.html"
OUTCOME_FILE = "outcome.json"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS_FOLDER = "checkpoints"
CHECKPOINTS_NOTE = "elsewhere.json"
"""In the folder of checkpoints, where these lie in another one: which, and the newest step saved there."""
LOGS_FOLDER = "logs"


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old content or the new, whole."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o666 & ~_umask())
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


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file, or None where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True)
class CheckpointsNote:
    """Where a run's checkpoints lie if not in its run folder, and the newest step that was saved there."""

    folder: str
    newest_step: int | None = None


def write_checkpoints_note(run_dir: Path, note: CheckpointsNote) -> None:
    (run_dir / CHECKPOINTS_FOLDER).mkdir(exist_ok=True)
    write_atomically(run_dir / CHECKPOINTS_FOLDER / CHECKPOINTS_NOTE, json.dumps(asdict(note)) + "\n")


def read_checkpoints_note(run_dir: Path) -> CheckpointsNote | None:
    """What is noted in a run folder; None where the checkpoints lie in it."""
    tree = read_json(run_dir / CHECKPOINTS_FOLDER / CHECKPOINTS_NOTE)
    return None if tree is None else CheckpointsNote(str(tree["folder"]), tree.get("newest_step"))


def rank_log(run_dir: Path, rank: int) -> Path:
    """Where a rank writes besides its node's log, if observe.rank_logs is set."""
    return run_dir / LOGS_FOLDER / f"rank_{rank:05d}.log"


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
