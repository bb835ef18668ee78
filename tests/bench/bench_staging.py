"""How often the shared folder is opened while 64 processes start, from a staged environment and from the shared one.

Makes a small environment (hpc_train, NumPy, what they need, and the Python below it), starts a real Slurm cluster of 8
nodes on this machine (root), and counts every open below the environment and of the packed file (inotify). Prints JSON.

    python -m tests.bench.bench_staging [--nodes 8] [--per-node 8]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.services.centre import copy_python, link_packages, needed_packages
from tests.services.open_counter import OpenCounter

ROOT = Path(__file__).parents[2]
IMPORTS = "import hpc_train.config, numpy, yaml"

STAGE = """
import json, os, sys
from pathlib import Path
from hpc_train.launch.stage_env import stage_environment
nodes = sys.argv[3].split(",")
staged = stage_environment(nodes, dict(os.environ), cache=Path(sys.argv[1]), stage_dir=sys.argv[2], say=print)
print(json.dumps([staged.python, staged.rank_env({"PYTHONPATH": os.environ["PYTHONPATH"]})]))
"""


@dataclass(frozen=True)
class SmallEnvironment:
    """root has all: the Python, a venv on it, a source tree on PYTHONPATH; shared: what jobs would read."""

    root: Path
    python: Path
    source: Path
    cache: Path

    @property
    def env(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.source), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

    @property
    def shared(self) -> list[Path]:
        return [self.root / "python", self.root / "venv", self.source, self.cache]


def make_environment(root: Path, *packages: str) -> SmallEnvironment:
    """Hard links where the file system allows it."""
    base = copy_python(root / "python")
    subprocess.run([base, "-m", "venv", "--without-pip", root / "venv"], check=True)
    release = f"python{sys.version_info.major}.{sys.version_info.minor}"
    link_packages(
        root / "venv/lib" / release / "site-packages", needed_packages("numpy", "pydantic", "pyyaml", *packages)
    )
    source = root / "source"
    unwanted = shutil.ignore_patterns("*.egg-info")
    shutil.copytree(ROOT / "hpc_train", source / "hpc_train", ignore=unwanted)
    shutil.copytree(ROOT / "slurm", source / "slurm", ignore=unwanted)
    cache = root / "cache"
    cache.mkdir()
    return SmallEnvironment(root, root / "venv/bin/python", source, cache)


def stage(slurm: Any, small: SmallEnvironment, nodes: list[str], stage_dir: Path, *, path: str | None = None) -> Any:
    """Stage it from within a job; the lines it said, the Python and the variables for ranks."""
    argv = ["salloc", "--quiet", f"--nodelist={','.join(nodes)}", f"-N{len(nodes)}", "--ntasks-per-node=1"]
    words = ["-c", STAGE, str(small.cache), str(stage_dir), ",".join(nodes)]
    # By env, since the way into the cluster adds folders to PATH.
    program = [*(["env", f"PATH={path}"] if path else []), str(small.python)]
    return slurm.run([*argv, *program, *words], timeout=110, env=small.env)


def start_processes(slurm: Any, python: str, env: dict[str, str], nodes: int, per_node: int) -> int:
    """Start processes that import and leave; how many started well."""
    code = f"{IMPORTS}; print('started', hpc_train.__file__)"
    argv = ["srun", f"-N{nodes}", f"-n{nodes * per_node}", f"--ntasks-per-node={per_node}", "--mpi=none"]
    done = slurm.run([*argv, python, "-c", code], timeout=110, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return int(done.stdout.count("started "))


def main() -> None:
    from tests.services.slurm_cluster import SlurmCluster

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--per-node", type=int, default=8)
    options = parser.parse_args()
    figures: dict[str, Any] = {"processes": options.nodes * options.per_node, "nodes": options.nodes}
    with tempfile.TemporaryDirectory() as folder, SlurmCluster(f"test-{os.getpid()}", options.nodes) as slurm:
        small = make_environment(Path(folder))
        # Compiles what the source tree has; and what else a first start does.
        start_processes(slurm, str(small.python), small.env, 1, 1)
        with OpenCounter(small.shared) as counter:
            begin = time.monotonic()
            start_processes(slurm, str(small.python), small.env, options.nodes, options.per_node)
        figures["shared"] = {"opens": counter.total, "seconds": round(time.monotonic() - begin, 1)}
        figures["shared"]["counted_all"] = not counter.overflowed
        # Each node of the cluster has a /dev/shm of its own, so this is a disk of each node's own.
        packed = stage(slurm, small, [slurm.nodes[0]], Path("/dev/shm"))
        slurm.kill_leftovers()
        with OpenCounter([small.cache]) as counter:
            done = stage(slurm, small, list(slurm.nodes), Path("/dev/shm"))
        figures["said"] = [packed.stdout.splitlines()[0], done.stdout.splitlines()[0]]
        python, env = json.loads(done.stdout.splitlines()[-1])
        figures["staging"] = {"opens of the packed file": counter.total}
        with OpenCounter(small.shared) as counter:
            begin = time.monotonic()
            start_processes(slurm, python, {**small.env, **env}, options.nodes, options.per_node)
        figures["staged"] = {"opens": counter.total, "seconds": round(time.monotonic() - begin, 1)}
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
