"""Many kills of ranks and servers at random moments on a real HDFS."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpc_train.checkpoint.folders.verify import verify
from hpc_train.checkpoint.saving.node_writer import CheckpointService
from hpc_train.checkpoint.stores.cause import StoreError
from hpc_train.checkpoint.stores.location import Location, locate
from hpc_train.checkpoint.stores.store import Patience
from hpc_train.errors import CheckpointError
from tests.agents import served
from tests.checkpoint import plain_state
from tests.checkpoint.plain_state import Alone
from tests.checkpoint.saving.agent_kills import kill_around_agents
from tests.checkpoint.saving.kills import kill_in_saves
from tests.checkpoint.saving.node_ranks import NodeRank
from tests.checkpoint.saving.writers import Save, Writer, saves
from tests.node_agents import wait_until
from tests.ranks import TestRank, run_ranks
from tests.services.hdfs import HdfsCluster, libhdfs_skip_reason

pytestmark = [pytest.mark.hdfs, pytest.mark.long, pytest.mark.timeout(1200)]

ELEMENTS = 2 << 20
TIMES = 20
"""Of kills of servers, half of them of the name node."""


def test_a_hundred_kills_of_ranks(hdfs: HdfsCluster) -> None:
    place = f"{hdfs.url}/kills/ranks-{os.getpid()}"
    found = kill_in_saves(place, 100, seed=100, num_elements=ELEMENTS, world_size=2)
    print(f"100 kills, {len(set(found))} of them after a further complete save, the newest at step {found[-1]}")
    assert found[-1] > 0
    locate(place).remove()


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("writer", ["rank", "agent"])
def test_kills_of_servers_while_steps_are_saved(hdfs: HdfsCluster, tmp_path: Path, writer: Writer) -> None:
    """Data nodes in turn, and the name node as often, while one rank saves: what is committed is whole, and stays."""
    place = locate(f"{hdfs.url}/kills/servers-{writer}-{os.getpid()}")
    with saves(writer, place, tmp_path, ELEMENTS) as save:
        _kill_servers(hdfs, place, save)
    place.remove()


def _kill_servers(hdfs: HdfsCluster, place: Location, save: Save) -> None:
    chance, failed = random.Random(1), []
    saved, is_over = [0], threading.Event()

    def save_all() -> None:
        while not is_over.is_set():
            step = saved[-1] + len(failed) + 1
            try:
                save(step)
                saved.append(step)
            except Exception as problem:
                failed.append(f"step {step}: {problem}")

    saver = threading.Thread(target=save_all)
    saver.start()
    try:
        for number in range(TIMES):
            time.sleep(0.2 + chance.random())
            count = len(saved) + len(failed)
            if number % 2:
                hdfs.kill_name_node()
                hdfs.start_name_node()
            else:
                hdfs.kill_data_node(number // 2 % 2)
                time.sleep(chance.random())
                hdfs.start_data_node(number // 2 % 2)
            hdfs.wait_for_data_nodes()
            # Else the next kill would meet a save that waits after this one.
            wait_until(lambda count=count: len(saved) + len(failed) > count, 300.0)
            newest = saved[-1]
            step = plain_state.load(Alone(), place, ELEMENTS)
            assert (step or 0) >= newest
    finally:
        is_over.set()
        saver.join(180)
    print(f"{TIMES} kills of servers, {len(saved) - 1} saves went well, {len(failed)} failed: {failed}")
    assert not saver.is_alive() and len(saved) > TIMES // 2
    step = saved[-1] + len(failed) + 1
    save(step)
    assert plain_state.load(Alone(), place, ELEMENTS) == step


def _load_again_and_again(me: TestRank, place: str, times: int) -> list[str]:
    """What came of each load: its step, every number of it compared, or the kind of error."""
    found = []
    for _ in range(times):
        try:
            found.append(str(plain_state.load(me, locate(place, Patience(total_s=20.0)), 4 * ELEMENTS)))
        except CheckpointError:
            found.append("refused")
    return found


def test_kills_of_data_nodes_while_ranks_load(hdfs: HdfsCluster) -> None:
    """One of two data nodes dies again and again: a load is right, or ends on all ranks alike."""
    place, chance = f"{hdfs.url}/kills/loads-{os.getpid()}", random.Random(2)
    plain_state.save(Alone(), place, 1, 4 * ELEMENTS)
    num_kills = 0
    with ThreadPoolExecutor(1) as pool:
        loads = pool.submit(run_ranks, _load_again_and_again, 3, place, 40, timeout_s=900.0)
        # Servers are started by this thread: they end with the one that has started them.
        while not loads.done():
            time.sleep(0.5 * chance.random())
            hdfs.kill_data_node(num_kills % 2)
            time.sleep(chance.random())
            hdfs.start_data_node(num_kills % 2)
            hdfs.wait_for_data_nodes()
            num_kills += 1
        first, *others = loads.result()
    print(f"{num_kills} kills of data nodes in 40 loads by 3 ranks: {first.count('1')} right, the others refused")
    assert num_kills
    assert all(found == first for found in others)
    assert first.count("1") > 0
    locate(place).remove()


def test_kills_around_node_agents(hdfs: HdfsCluster) -> None:
    place = f"{hdfs.url}/kills/agents-{os.getpid()}"
    found = kill_around_agents(place, 45, seed=45, num_elements=ELEMENTS, world_size=2)
    print(f"{dict(found.kinds)} killed, the newest at step {found.steps[-1]}, {found.rescued} rescued by the agent")
    assert found.steps[-1] > 0
    locate(place).remove()


def test_saves_in_whose_middle_a_data_node_dies_are_committed(hdfs: HdfsCluster) -> None:
    """A file that the store loses is written again, from the copy, under another name."""
    place, log = locate(f"{hdfs.url}/kills/files-{os.getpid()}"), []
    num_bytes = 12 << 20
    with served([CheckpointService(log.append)]) as agent:
        more = {"num_bytes": num_bytes, "bytes_per_s": 8 << 20, "keep": 1}
        ranks = [NodeRank(agent, str(place), rank, 2, **more) for rank in range(2)]
        for step in range(1, 7):
            token = f"0a{step}"
            for rank in ranks:
                assert rank.begin(token, step) == {"busy": None, "failed": None}
            for rank in ranks:
                rank.take(token, step)
            time.sleep(0.4 * step)
            hdfs.kill_data_node(step % 2)
            assert ranks[0].wait(token, commit=True)["failed"] is None, log
            assert list(verify(place / f"step_{step:07d}")) == []
            hdfs.start_data_node(step % 2)
            hdfs.wait_for_data_nodes()
    again = [line for line in log if "is written again under another name" in line]
    print(f"6 data nodes killed in the middle of saves, {len(again)} files written again: {again}")
    wait_until(lambda: [entry.name for entry in place.entries()] == ["latest", "step_0000006"])
    place.remove()


_WRITE = """
import os, sys
from hpc_train.checkpoint.stores.location import locate
with locate(sys.argv[1]).writing() as file:
    file.write(memoryview(bytes(14 << 20)))
os._exit(0)  # a JVM's threads are not waited for
"""


def test_libhdfs_goes_round_a_dead_data_node_that_the_name_node_takes_for_alive() -> None:
    """As by default for 10.5 minutes. hdfs-native does not, whichever of a block's two nodes it is."""
    if reason := libhdfs_skip_reason():
        pytest.skip(reason)
    default = {"dfs.namenode.avoid.write.stale.datanode": "false", "dfs.namenode.heartbeat.recheck-interval": 300_000}
    hdfs = HdfsCluster(hdfs=default)
    try:
        hdfs.start()
        folder = locate(f"{hdfs.url}/dead")
        folder.make_folder()
        hdfs.kill_data_node(1)
        for number in range(6):
            with pytest.raises(StoreError, match=r"for 10\.5 minutes"):
                (folder / f"native-{number}").write_text("lost")
        begin = time.monotonic()
        words = [sys.executable, "-c", _WRITE, f"libhdfs://{hdfs.authority}/dead/java"]
        subprocess.run(words, env={**os.environ, **hdfs.libhdfs_environment()}, timeout=120, check=True)
        print(f"libhdfs wrote 14 MiB in {time.monotonic() - begin:.1f} s with its start")
        found = (folder / "java").entry()
        assert found is not None and found.num_bytes == 14 << 20
    finally:
        hdfs.stop()
