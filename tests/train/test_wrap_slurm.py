"""Ranks behind a wrapper, as in a container: a Python that is there for them alone, and words of a plugin for srun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import metrics, write_config, write_corpus
from tests.train.test_run_slurm import _hpc_train

pytestmark = pytest.mark.timeout(200)

# What a container runtime does: a host name of its own, which nobody resolves, and a file system in which the image's
# folder appears, then the command.
_WRAPPER = """#!/bin/sh
image=$1; shift
exec unshare --uts --mount --propagation private sh -c '
    hostname "$(hostname)-in-image.example.org"
    mount -t tmpfs image /mnt && mkdir /mnt/image && mount --bind "$0" /mnt/image && exec "$@"
' "$image" "$@"
"""


@pytest.mark.slurm
def test_ranks_run_behind_a_wrapper_with_a_python_that_only_they_see(slurm: Any, tmp_path: Path) -> None:
    wrapper = tmp_path / "contain"
    wrapper.write_text(_WRAPPER)
    wrapper.chmod(0o755)
    write_corpus(tmp_path / "corpus")
    launch = {
        "wrap": [str(wrapper), sys.prefix],
        "rank_python": "/mnt/image/bin/python",
        "srun_options": ["--job-name=contained"],
    }
    write_config(tmp_path, launch=launch, steps=2, eval_every=0)
    words = ["run", str(tmp_path / "config.yaml"), "--run-dir", str(tmp_path / "run")]
    result = _hpc_train(slurm, tmp_path, *words, prefix=("salloc", "--quiet", "-N2", "--ntasks-per-node=1"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(metrics(tmp_path / "run")) == 2
    (started,) = [line for line in result.stdout.splitlines() if "starting ranks: " in line]
    assert f"--job-name=contained {wrapper} {sys.prefix} /mnt/image/bin/python -m hpc_train run " in started
    assert not Path("/mnt/image").exists()
    (told,) = [line for line in result.stdout.splitlines() if "gloo takes " in line]
    assert "-in-image.example.org does not resolve on its own node" in told


@pytest.mark.mpi
def test_words_for_srun_are_refused_where_there_is_no_srun(tmp_path: Path) -> None:
    from tests.train.runs import hpc_train

    write_corpus(tmp_path / "corpus")
    write_config(tmp_path, launch={"srun_options": ["--container-image=x"]})
    result = hpc_train(["run", tmp_path / "config.yaml", "-n", "1", "--run-dir", tmp_path / "run"])
    assert result.returncode == 2
    assert "launch.srun_options=['--container-image=x'] have no effect here" in result.stderr
