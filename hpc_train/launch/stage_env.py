"""launch.stage_env: the Python environment on each node's own disk, against the import storm of many ranks.

1. pack: once for each state of the environment, into one file beside the runs
2. prepare: on each node a folder that is ours alone, with room; which nodes have the environment already?
3. broadcast the file by Slurm's sbcast; without it, one process a node reads it from the shared folder
4. unpack under a temporary name and rename
5. the ranks' Python, and the folders in their variables, are the staged ones
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cluster.mounts import file_system_of, is_shared
from hpc_train.cluster.scratch import user_folder_name
from hpc_train.config import LaunchConfig
from hpc_train.errors import ConfigError, LaunchError
from hpc_train.launch import steps
from hpc_train.launch.ranks import MpirunLauncher, SrunLauncher
from hpc_train.launch.stage_pack import Layout, lay_out, pack, this_interpreter
from hpc_train.launch.templates import read_template

CACHE_FOLDER = "environments"
_MARK = "hpc_train_stage"
_VARIABLES = (
    "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "MPI4PY_LIBMPI",
    "OPAL_PREFIX",
)  # fmt: skip
_OLD_S = 7 * 24 * 3600
"""Packed environments that no job has asked for in this time are removed (assumed: longer than most wall times)."""


@dataclass(frozen=True)
class Staged:
    """python: what ranks are started with. moved: shared folders to the staged ones."""

    python: str
    moved: Mapping[str, str]
    has_base: bool

    def rank_env(self, env: Mapping[str, str]) -> dict[str, str]:
        """The environment of ranks and agents, with staged folders in the place of shared ones."""
        changed = dict(env)
        for variable in _VARIABLES:
            if env.get(variable):
                changed[variable] = ":".join(self._moved(entry) for entry in env[variable].split(":"))
        if self.has_base:
            # The Python's own library, which its program would else look for where it was built for.
            libraries = [f"{Path(self.python).parents[2]}/base/lib", changed.get("LD_LIBRARY_PATH", "")]
            changed["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
        return changed

    def _moved(self, entry: str) -> str:
        for source in sorted(self.moved, key=len, reverse=True):
            if entry == source or entry.startswith(source + "/"):
                return self.moved[source] + entry[len(source) :]
        return entry


def stage_environment(
    nodes: Sequence[str],
    env: Mapping[str, str],
    *,
    cache: Path,
    stage_dir: str | None,
    say: Callable[[str], None],
) -> Staged:
    """Bring the environment of this process to all nodes; blocks until each has it whole.

    Args:
        env: The environment for Slurm's commands, whose PYTHONPATH is staged as well.
        cache: Where packed environments are kept, on a file system that all nodes see.
        stage_dir: A folder on each node's own disk; None: /tmp.

    Raises:
        LaunchError: it cannot be brought to some node, which is named with the reason.
    """
    parent = Path(stage_dir or "/tmp").absolute()
    if is_shared(parent):
        raise LaunchError(
            f"launch.stage_dir={parent} is on {file_system_of(parent)}, which all nodes share, so nothing would be "
            "won. Give a folder on each node's own disk, or in its memory (/dev/shm)"
        )
    start = time.monotonic()
    layout = lay_out(this_interpreter(env))
    name = f"env-{layout.fingerprint()}"
    folder = parent / user_folder_name(os.geteuid())
    script = _Script(nodes, steps.agents_env(env), str(folder), name)
    # The file itself and what comes out of it are there together for a while.
    need_kib = 2 * layout.num_bytes() // 1024
    missing = [node for node, word in script.call("prepare", str(need_kib)).items() if word != "have"]
    staged = _staged(layout, folder / name)
    if not missing:
        say(f"the environment is on all {len(nodes)} nodes already: {folder / name}")
        return staged
    tar = pack(layout, cache)
    packed_s = time.monotonic() - start
    _remove_old(cache, keep=tar)
    way = _broadcast(tar, folder, script)
    script.call("unpack", way.path)
    say(
        f"the environment ({len(layout.files)} files, {layout.num_bytes() / 1e6:.0f} MB) is on {len(nodes)} nodes in "
        f"{folder / name}: found or packed in {packed_s:.1f} s, brought {way.how} and unpacked in "
        f"{time.monotonic() - start - packed_s:.1f} s"
    )
    return staged


def stage_for_ranks(
    launch: LaunchConfig,
    launcher: SrunLauncher | MpirunLauncher,
    nodes: Sequence[str],
    env: Mapping[str, str],
    say: Callable[[str], None],
) -> Staged | None:
    """Stage the environment if the configuration asks for it.

    Raises:
        ConfigError: its settings contradict each other, or have no effect here.
        LaunchError: it cannot be brought to some node.
    """
    if not launch.stage_env:
        if launch.stage_dir:
            raise ConfigError(f"launch.stage_dir={launch.stage_dir} has no effect without launch.stage_env=true")
        return None
    if launch.rank_python:
        raise ConfigError(
            f"launch.rank_python={launch.rank_python} and launch.stage_env=true both say which Python ranks are "
            "started with. Leave one out: an image has its own Python and needs no staging"
        )
    if isinstance(launcher, MpirunLauncher):
        raise ConfigError(
            "launch.stage_env=true has no effect here: this is not inside a Slurm job, so there is one node alone. "
            "Switch it off with `launch.stage_env=false`"
        )
    cache = Path(launch.runs_dir).absolute() / CACHE_FOLDER
    return stage_environment(nodes, env, cache=cache, stage_dir=launch.stage_dir, say=say)


@dataclass(frozen=True)
class _Way:
    path: str
    how: str


class _Script:
    """stage_env.sh as a step of one task a node."""

    def __init__(self, nodes: Sequence[str], env: Mapping[str, str], folder: str, name: str) -> None:
        self.nodes, self.env = nodes, env
        self._text = read_template("stage_env.sh")
        self._where = (folder, name)

    def call(self, function: str, *arguments: str) -> dict[str, str]:
        """Run one of its functions on all nodes; what each said.

        Raises:
            LaunchError: a node failed, or was not heard from.
        """
        command = ["bash", "-c", self._text, "stage_env", function, *self._where, *arguments]
        done = _run(steps.agents_argv(self.nodes, command), self.env)
        answers, faults = {}, []
        for line in done.stdout.splitlines():
            words = line.split(" ", 3)
            if words[0] == _MARK and len(words) > 2:
                answers[words[1]] = words[2]
                if words[2] == "fail":
                    faults.append(f"{words[1]}: {words[3]}")
        if faults or done.returncode or len(answers) < len(self.nodes):
            more = f" and {len(faults) - 3} more nodes" if len(faults) > 3 else ""
            silent = f"{len(self.nodes) - len(answers)} of {len(self.nodes)} nodes did not answer. srun said: "
            why = (
                "; ".join(faults[:3]) + more if faults else silent + (done.stderr.strip() or f"code {done.returncode}")
            )
            raise LaunchError(
                f"launch.stage_env: the environment cannot be brought to the nodes. {why}. Choose another folder by "
                "launch.stage_dir, or leave launch.stage_env out"
            )
        return answers


def _broadcast(tar: Path, folder: Path, script: _Script) -> _Way:
    """Send the file to a place on each node; or say that it is to be read where it is."""
    if shutil.which("sbcast", path=script.env.get("PATH")) is None:
        return _Way(str(tar), "by one reader a node (there is no sbcast)")
    target = f"{folder}/.{tar.name}.{os.getpid()}"
    done = _run(["sbcast", "--force", str(tar), target], script.env)
    if done.returncode == 0:
        return _Way(target, "by sbcast")
    # What was sent in part would fill the disk.
    _run(steps.agents_argv(script.nodes, ["rm", "-f", target]), script.env)
    said = done.stderr.strip().splitlines()[-1:] or [f"code {done.returncode}"]
    return _Way(str(tar), f"by one reader a node (sbcast failed: {said[0]})")


def _run(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            list(argv), env=dict(env), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError as problem:
        raise LaunchError(f"launch.stage_env: {argv[0]} cannot be started: {problem}") from problem


def _staged(layout: Layout, root: Path) -> Staged:
    moved = {source: f"{root}/{name}" for source, name in layout.moved.items()}
    return Staged(f"{root}/env/bin/python", moved, layout.has_base)


def _remove_old(cache: Path, keep: Path) -> None:
    """Packed environments that no job has used for long; a job that reads one has it open and goes on."""
    for path in cache.glob("env-*.tar"):
        try:
            if path != keep and time.time() - path.stat().st_mtime > _OLD_S:
                path.unlink()
        except OSError:
            continue  # another job was quicker, or it is not ours to remove
