"""Files that a user names for a command to write: one rule for all of them.

- a regular file is replaced whole, or made; where a symlink is named, what it leads to
- a device or FIFO is written through, and stays what it is
- what belongs to a run's folder, or is what the command reads, is refused
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from hpc_train.errors import ConfigError
from hpc_train.plan.run_files import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    LOGS_FOLDER,
    METRICS_FILE,
    PLAN_FILE,
    new_file_mode,
)

_OF_A_RUN = re.compile(
    r"config(\.request)?\.yaml|plan(\.request)?\.json|plan\.txt|ranks\.tsv|hosts\.txt|env\.txt|metrics\.jsonl|"
    r"(outcome|failure)(-\d+)?\.json|(owner|attempts|submitted)\.jsonl?|submit\.sh"
)
"""What commands read in a run's folder, or what tells of the run and is not made again by its name."""
_FOLDERS_OF_A_RUN = (CHECKPOINTS_FOLDER, LOGS_FOLDER, "trace")
_TELLS_A_RUN = (PLAN_FILE, METRICS_FILE, "attempts.jsonl", "owner.json", "plan.request.json")
_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")
"""Names of what is open already, of whatever kind: to replace it would leave its owner with the old one."""


def check_out(name: str | Path, option: str, inputs: Sequence[str | Path] = ()) -> None:
    """Refuse before the work what could not be written or must not be. option: where the user named it.

    inputs: what the command reads.

    Raises:
        ConfigError: it is one of the run's or the inputs, or it cannot be written.
    """
    try:
        _check(Path(name), option, inputs)
    except OSError as error:
        raise _refused(name, option, error) from error


@contextmanager
def open_out(name: str | Path, option: str) -> Iterator[BinaryIO]:
    """The file to write into. A regular one appears whole at the end, and not at all after an error.

    Raises:
        ConfigError: as `check_out`, or in place of what the system says no to meanwhile.
    """
    check_out(name, option)
    try:
        if _is_written_through(Path(name)):
            with open(name, "wb") as file:
                yield file
        else:
            with _replacing(Path(os.path.realpath(name))) as file:
                yield file
    except OSError as error:
        raise _refused(name, option, error) from error


def write_out(name: str | Path, option: str, text: str) -> None:
    """Write a text by the same rule."""
    data = text.encode("utf-8")
    with open_out(name, option) as file:
        file.write(data)


def _check(path: Path, option: str, inputs: Sequence[str | Path]) -> None:
    target = Path(os.path.realpath(path))
    if _belongs_to_run(target):
        raise ConfigError(f"{path} belongs to a run, whose folder is {_run_of(target)}: give another file by {option}")
    if any(os.path.exists(path) and os.path.exists(one) and os.path.samefile(path, one) for one in inputs):
        raise ConfigError(f"{path} is read by this command and would be lost: give another file by {option}")
    if os.path.isdir(path):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    place = path if _is_written_through(path) else target.parent
    os.stat(place)  # says why where it is not there
    if not os.access(place, os.W_OK):
        is_read_only = os.statvfs(place).f_flag & os.ST_RDONLY
        code = errno.EROFS if is_read_only else errno.EACCES
        raise OSError(code, os.strerror(code))


def _is_written_through(path: Path) -> bool:
    if str(path).startswith(_STREAMS):
        return True
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def _belongs_to_run(target: Path) -> bool:
    folder = target.parent
    if _OF_A_RUN.fullmatch(target.name) and (_is_run(folder) or (target.name == CONFIG_FILE and target.is_file())):
        return True
    return any(place.name in _FOLDERS_OF_A_RUN and _is_run(place.parent) for place in target.parents)


def _run_of(target: Path) -> Path:
    return next((place for place in target.parents if _is_run(place)), target.parent)


def _is_run(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in _TELLS_A_RUN)


@contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else new_file_mode()
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name[:200]}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _refused(name: str | Path, option: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{name} cannot be written: {error.strerror or error}. Make room or the folder, or give another file by "
        f"{option}"
    )
