"""Private folders on a node's own disk: nothing is written to the home folder, and nobody else's is trusted.

A folder with a predictable name in /tmp may have been made by another user, who would then choose what code we
load from it. So each is ours, of mode 0700, and no link; or it is not used.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hpc_train.errors import LaunchError

CACHE_VARIABLES = {
    "CUDA_CACHE_PATH": "cuda",
    "CUPY_CACHE_DIR": "cupy",
    "MPLCONFIGDIR": "matplotlib",
    "NUMBA_CACHE_DIR": "numba",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "XDG_CACHE_HOME": "cache",
}
"""Where libraries keep compiled code, which would else lie in $HOME (quota, inodes, a slow file system) or beside
their sources (read-only)."""


def user_folder_name(uid: int) -> str:
    """The name of our folder among those of other users."""
    return f"hpc_train-{uid}"


def private_folder(path: Path) -> Path:
    """Make `path`, or check that it is ours alone.

    Raises:
        LaunchError: it belongs to somebody else, is a link or a file, or cannot be made.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as problem:
        raise LaunchError(f"{path} cannot be made: {problem.strerror}") from problem
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise LaunchError(f"{path} is no folder, so somebody else may have put it there; it is not used")
    if found.st_uid != os.geteuid():
        raise LaunchError(f"{path} belongs to the user with number {found.st_uid}, so it is not trusted")
    if stat.S_IMODE(found.st_mode) & 0o077:
        # Ours, but others could have written to it until now; what is in it cannot be told from theirs.
        raise LaunchError(f"{path} can be entered by others (mode {stat.S_IMODE(found.st_mode):o}): remove it")
    return path


def cache_variables(env: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """The cache variables that this process shall set, and a line for the log if not all is as it should be.

    A variable that the user set stays. One that is unset, or that our modulefile set, gets a folder below
    TMPDIR or /tmp of this node, made and checked here.
    """
    name = user_folder_name(os.geteuid())
    ours = {key for key in CACHE_VARIABLES if not env.get(key) or Path(env[key]).parent.name == name}
    if not ours:
        return {}, None
    from_module = {Path(env[key]).parent for key in ours if env.get(key)}
    parent = next(iter(from_module)) if len(from_module) == 1 else Path(env.get("TMPDIR") or "/tmp") / name
    note = None
    try:
        private_folder(parent)
    except LaunchError as problem:
        parent = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        note = f"{problem}; caches of compiled code go to {parent}"
    return {key: str(parent / CACHE_VARIABLES[key]) for key in sorted(ours)}, note


def use_private_caches() -> str | None:
    """Set the cache variables of this process, before libraries read them; a line for the log if need be."""
    variables, note = cache_variables(os.environ)
    os.environ.update(variables)
    return note
