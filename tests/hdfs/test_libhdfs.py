"""The store through pyarrow and libhdfs: the contract of all stores on a real HDFS, in a process that has the JVM."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.checkpoint.location import locate
from tests.services.hdfs import HdfsCluster, libhdfs_skip_reason

pytestmark = [pytest.mark.hdfs, pytest.mark.timeout(180)]


def test_libhdfs_does_what_all_stores_do(hdfs: HdfsCluster) -> None:
    if reason := libhdfs_skip_reason():
        pytest.skip(reason)
    folder = f"/tests/libhdfs-{os.getpid()}"
    locate(f"{hdfs.url}{folder}/without-room").make_folder()
    hdfs.admin("-setSpaceQuota", "1m", f"{folder}/without-room")
    place = f"lib{hdfs.url}{folder}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/hdfs/libhdfs_contract.py"],
        env={**os.environ, **hdfs.libhdfs_environment(), "HPC_TRAIN_TEST_LIBHDFS": place},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=170,
    )
    told = re.search(r"^(\d+) passed in", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and told and int(told[1]) >= 14, done.stdout[-4000:] + done.stderr[-2000:]
