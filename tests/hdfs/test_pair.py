"""Checkpoints on a real HDFS of two name nodes, one of which takes over from the other."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpc_train.checkpoint.folders.folder import read_latest, steps_newest_first
from hpc_train.checkpoint.folders.verify import verify
from hpc_train.checkpoint.stores.cause import StoreError
from hpc_train.checkpoint.stores.location import Location, locate
from hpc_train.checkpoint.stores.store import Patience
from hpc_train.errors import CheckpointError
from tests.checkpoint import plain_state
from tests.checkpoint.plain_state import Alone
from tests.node_agents import wait_until
from tests.ranks import mpi_environment
from tests.services.hdfs import libhdfs_skip_reason
from tests.services.hdfs_pair import HdfsPair
from tests.train.runs import write_config, write_corpus

pytestmark = [pytest.mark.hdfs, pytest.mark.timeout(240)]

MIB = 1 << 20
ELEMENTS = 2 * MIB
"""8 MiB of state in blocks of 4 MiB."""
SHORT = Patience(total_s=1.5)
WAIT_S = 120


@pytest.fixture(scope="module")
def pair() -> Iterator[HdfsPair]:
    pair = HdfsPair()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HADOOP_CONF_DIR", str(pair.conf_folder))
        try:
            pair.start()
            yield pair
        finally:
            pair.stop()


@pytest.fixture(params=["hdfs", "webhdfs"])
def folder(pair: HdfsPair, request: pytest.FixtureRequest) -> Location:
    """A new folder, by what a site names the pair."""
    authority = pair.authority if request.param == "hdfs" else pair.http_addresses
    place = locate(f"{request.param}://{authority}/{request.function.__name__[:40]}-{request.param}")
    place.make_folder()
    return place


def test_the_other_name_node_takes_over_from_one_that_is_killed(pair: HdfsPair, folder: Location) -> None:
    plain_state.save(Alone(), folder, 1, ELEMENTS)
    pair.kill_active()
    with pytest.raises(CheckpointError, match=r"does not answer|only a standby name node answered"):
        plain_state.load(Alone(), locate(str(folder), SHORT), ELEMENTS)
    with ThreadPoolExecutor() as pool:
        saved = pool.submit(plain_state.save, Alone(), folder, 2, ELEMENTS)
        time.sleep(0.5)
        pair.activate(pair.standby)
        saved.result(WAIT_S)
    assert plain_state.load(Alone(), folder, ELEMENTS) == 2
    pair.start_standby()


def test_a_file_that_is_being_written_goes_on_at_the_other_name_node(pair: HdfsPair, folder: Location) -> None:
    """As an administrator does it for an update: blocks of both name nodes are in one file."""
    data = os.urandom(10 * MIB)
    with (folder / "file").writing() as writer:
        writer.write(memoryview(data)[: 5 * MIB])
        pair.stand_by()
        pair.activate(pair.standby)
        writer.write(memoryview(data)[5 * MIB :])
    with (folder / "file").reading() as reader:
        buffer = bytearray(len(data))
        assert reader.read_into(0, memoryview(buffer)) == len(data)
    assert buffer == data


def test_a_small_file_is_written_anew_when_its_end_meets_no_active_one(pair: HdfsPair, folder: Location) -> None:
    """Such as `latest`, which a save lost in this moment (seen)."""
    files = [folder / f"{number}" for number in range(40)]
    with ThreadPoolExecutor() as pool:
        written = [pool.submit(file.write_text, file.name) for file in files]
        pair.stand_by()
        pair.activate(pair.standby)
        for one in written:
            one.result(WAIT_S)
    assert [file.read_text() for file in files] == [file.name for file in files]


def test_while_none_is_active_the_cause_is_named_and_waited_for(pair: HdfsPair, folder: Location) -> None:
    pair.stand_by()
    with pytest.raises(StoreError, match="only a standby name node answered"):
        locate(str(folder), SHORT).entries()
    with ThreadPoolExecutor() as pool:
        listed = pool.submit(folder.entries)
        time.sleep(0.5)
        pair.activate(pair.standby)
        assert listed.result(WAIT_S) == []


def test_a_name_node_by_itself_that_stands_by_is_refused_with_the_cure(pair: HdfsPair) -> None:
    alone = locate(f"hdfs://{pair.address_of(pair.standby)}/anywhere", SHORT)
    with pytest.raises(StoreError, match=r"only a standby name node answered.*Use the name of the service"):
        alone.entries()


def test_libhdfs_finds_the_active_one_by_the_service_name(pair: HdfsPair) -> None:
    if reason := libhdfs_skip_reason():
        pytest.skip(reason)
    plain_state.save(Alone(), locate(f"{pair.url}/libhdfs"), 1, ELEMENTS)
    done = subprocess.run(
        [sys.executable, "-m", "hpc_train", "ckpt", "verify", f"lib{pair.url}/libhdfs"],
        env={**os.environ, **pair.libhdfs_environment()},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0 and "step_0000001: sound" in done.stdout, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_run_goes_through_many_takeovers(pair: HdfsPair, tmp_path: Path) -> None:
    """By kills and by hand, at random moments: the run ends well, and its last checkpoints and `latest` are right."""
    write_corpus(tmp_path / "corpus")
    write_config(tmp_path, steps=200)
    run_dir = tmp_path / "test" / "takeovers"
    command = [sys.executable, "-m", "hpc_train", "run", str(tmp_path / "config.yaml"), "-n", "2"]
    command += ["--run-dir", str(run_dir), f"checkpoint.folder={pair.url}/runs", "checkpoint.every=2"]
    command += ["checkpoint.keep=2", "train.eval_every=0"]
    rng, num_takeovers = random.Random(1), 0
    with open(tmp_path / "output", "w+") as output:
        run = subprocess.Popen(
            command, env=mpi_environment(), cwd=tmp_path, text=True, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            wait_until(lambda: run.poll() is not None or (run_dir / "metrics.jsonl").exists(), WAIT_S)
            while run.poll() is None:
                time.sleep(rng.uniform(1.0, 3.0))
                is_killed = rng.random() < 0.5
                if is_killed:
                    pair.kill_active()
                else:
                    pair.stand_by()
                time.sleep(rng.uniform(0.0, 3.0))
                pair.activate(pair.standby)
                if is_killed:
                    pair.start_standby()
                num_takeovers += 1
        finally:
            run.kill()
        output.seek(0)
        told = output.read()
    print(f"{num_takeovers} takeovers")
    assert run.returncode == 0 and num_takeovers >= 10, told[-4000:]
    assert "could not be" not in told
    root = locate(f"{pair.url}/runs/test/takeovers")
    assert read_latest(root) == "step_0000200"
    assert [list(verify(path)) for _, path in steps_newest_first(root)] == [[], []]
