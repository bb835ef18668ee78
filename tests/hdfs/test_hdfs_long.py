"""Many kills of ranks and servers at random moments on a real HDFS."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest

from hpc_train.checkpoint.location import locate
from tests.checkpoint import plain_state
from tests.checkpoint.kills import kill_in_saves
from tests.checkpoint.plain_state import Alone
from tests.services.hdfs import HdfsCluster

pytestmark = [pytest.mark.hdfs, pytest.mark.long, pytest.mark.timeout(1200)]

ELEMENTS = 2 << 20


def test_a_hundred_kills_of_ranks(hdfs: HdfsCluster) -> None:
    place = f"{hdfs.url}/kills/ranks-{os.getpid()}"
    found = kill_in_saves(place, 100, seed=100, num_elements=ELEMENTS, world_size=2)
    print(f"100 kills, {len(set(found))} of them after a further complete save, the newest at step {found[-1]}")
    assert found[-1] > 0
    locate(place).remove()


def test_kills_of_servers_while_steps_are_saved(hdfs: HdfsCluster) -> None:
    """Data nodes in turn, and the name node, while one process saves: what is committed is whole, and stays."""
    place = locate(f"{hdfs.url}/kills/servers-{os.getpid()}")
    chance, failed = random.Random(1), []
    saved, is_over = [0], threading.Event()

    def save_all() -> None:
        while not is_over.is_set():
            step = saved[-1] + len(failed) + 1
            try:
                plain_state.save(Alone(), place, step, ELEMENTS, keep=2)
                saved.append(step)
            except Exception as problem:
                failed.append(f"step {step}: {problem}")

    saver = threading.Thread(target=save_all)
    saver.start()
    try:
        for number in range(12):
            time.sleep(0.2 + chance.random())
            if number % 4 == 3:
                hdfs.kill_name_node()
                hdfs.start_name_node()
            else:
                hdfs.kill_data_node(number % 2)
                time.sleep(chance.random())
                hdfs.start_data_node(number % 2)
            hdfs.wait_for_data_nodes()
            newest = saved[-1]
            step = plain_state.load(Alone(), place, ELEMENTS)
            assert (step or 0) >= newest
    finally:
        is_over.set()
        saver.join(180)
    print(f"12 kills of servers, {len(saved) - 1} saves went well, {len(failed)} failed: {failed}")
    assert not saver.is_alive()
    plain_state.save(Alone(), place, saved[-1] + len(failed) + 1, ELEMENTS, keep=2)
    place.remove()
