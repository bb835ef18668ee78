"""Words for what a file system refuses."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc_train.errors import ConfigError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


def reason(problem: OSError) -> str:
    """Which file, where that is known, and why."""
    name = problem.filename2 or problem.filename
    return f"{name}: {problem.strerror}" if name else str(problem.strerror or problem)


@contextmanager
def room_needed(folder: Path) -> Iterator[None]:
    """A file system that is full, or that is only read, is the user's to mend.

    Raises:
        ConfigError: in place of an error of the system that says so. Other errors are left as they are.
    """
    try:
        yield
    except OSError as problem:
        if problem.errno not in _NO_ROOM:
            raise
        raise ConfigError(
            f"the run folder {folder} cannot be written: {reason(problem)}. Make room (`df -h`, `quota`), or give "
            "another folder by --run-dir"
        ) from problem
