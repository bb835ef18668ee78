"""Checkpoints on a real HDFS, whose servers are killed, filled and locked under them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from hpc_train.checkpoint import command
from hpc_train.checkpoint.convert.convert_hf import convert
from hpc_train.checkpoint.convert.safetensors_files import INDEX_FILE, SINGLE_FILE
from hpc_train.checkpoint.folders.folder import steps_newest_first
from hpc_train.checkpoint.folders.run_location import CLAIM_FILE, open_location, run_location
from hpc_train.checkpoint.format.manifest import MANIFEST_FILE, read_manifest
from hpc_train.checkpoint.stores.backend import Entry
from hpc_train.checkpoint.stores.cause import StoreError
from hpc_train.checkpoint.stores.hdfs_causes import hdfs_cause
from hpc_train.checkpoint.stores.location import Location, locate
from hpc_train.checkpoint.stores.store import Patience
from hpc_train.cli import main
from hpc_train.errors import CheckpointError, ConfigError
from tests.bench import bench_checkpoint_load
from tests.checkpoint import plain_state
from tests.checkpoint.convert.hf_folders import make_hf_folder
from tests.checkpoint.plain_state import Alone
from tests.checkpoint.runs import resume, train_and_save
from tests.checkpoint.saving.kills import kill_in_saves
from tests.checkpoint.stores.store_contract import StoreContract
from tests.ranks import run_ranks
from tests.services.hdfs import HdfsCluster, libhdfs_skip_reason
from tests.worlds import make_world, single_world

pytestmark = [pytest.mark.hdfs, pytest.mark.timeout(180)]

MIB = 1 << 20
ELEMENTS = 2 * MIB
"""8 MiB of state: blocks are of 4 MiB, so that a save has several."""
SHORT = Patience(total_s=1.5)


@pytest.fixture
def folder(hdfs: HdfsCluster, request: pytest.FixtureRequest) -> Iterator[Location]:
    """A new folder, gone afterwards."""
    name = "".join(letter if letter.isalnum() else "_" for letter in request.node.name)[:60]
    place = locate(f"{hdfs.url}/tests/{name}-{os.getpid()}")
    place.make_folder()
    yield place
    place.remove()


class TestNative(StoreContract):
    """Through hdfs-native."""


class TestWeb(StoreContract):
    """Over HTTP."""

    names = StoreContract.names[:-1]

    @pytest.fixture
    def folder(self, hdfs: HdfsCluster, folder: Location) -> Location:
        return locate(f"webhdfs://{hdfs.http_address}{folder.path}")

    def test_names_that_would_go_astray_are_refused(self, folder: Location) -> None:
        for name in ("a+b", "a%20b"):
            with pytest.raises(StoreError, match="go astray"):
                (folder / name).write_text("x")
        assert folder.entries() == []


def _steps(root: Location) -> list[int]:
    return [step for step, _ in steps_newest_first(root)]


def _hidden(root: Location) -> list[str]:
    return [entry.name for entry in root.entries() if entry.name.startswith(".")]


def test_libhdfs_does_what_all_stores_do(hdfs: HdfsCluster) -> None:
    """In a process of its own, which has the JVM."""
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


# Whole runs


def test_a_run_resumed_through_hdfs_equals_one_left_alone_bit_for_bit(folder: Location) -> None:
    straight = run_ranks(train_and_save, 2, str(folder), [2])
    resumed = run_ranks(resume, 2, str(folder))
    for (losses, weights), (step, later, again) in zip(straight, resumed, strict=True):
        assert (step, later) == (2, losses[2:])
        assert torch.equal(weights, again)
    assert [entry.name for entry in folder.entries()] == ["latest", "step_0000002"]


def test_damage_on_hdfs_leads_to_the_older_checkpoint_and_is_kept(
    folder: Location, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        run_ranks(plain_state.save, 2, str(folder), step, ELEMENTS)
    (folder / "step_0000003" / MANIFEST_FILE).remove()
    damaged = folder / "step_0000002" / "__1_0.distcp"
    (box,) = (box for box in read_manifest(damaged.parent).tensors["model.first"].boxes if box.file == damaged.name)
    data = bytearray(read_manifest(damaged.parent).files[damaged.name])
    with damaged.reading() as reader:
        reader.read_into(0, memoryview(data))
    data[box.start + 77] ^= 1
    damaged.remove()
    with damaged.writing() as file:
        file.write(memoryview(data))
    assert run_ranks(plain_state.load, 2, str(folder), ELEMENTS) == [1, 1]
    assert _steps(folder) == [3, 2, 1]
    assert command.verify_command(Namespace(path=str(folder), all=True, timeout=600.0)) == 5
    told = capsys.readouterr().out
    assert "step_0000003: damaged" in told and "step_0000002: damaged" in told and "step_0000001: sound" in told
    assert command.ls_command(Namespace(run=str(folder), json=True, timeout=600.0)) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(item["step"], item["problem"] is None) for item in listed] == [(1, True), (2, False), (3, False)]
    assert listed[1]["path"] == f"{folder}/step_0000002"
    plain_state.save(Alone(), folder, 4, ELEMENTS)
    assert main(["ckpt", "prune", str(folder), "--keep", "1"]) == 0
    told = capsys.readouterr().out
    assert "kept     step_0000004" in told and "removed  step_0000001" in told and _steps(folder) == [4, 3, 2]
    assert "left     step_0000002, which cannot be used: a start has found " in told


def _open(me, folder, run_dir):
    root = run_location(folder, Path(run_dir))
    open_location(root, Path(run_dir), MIB, make_world(me))
    return str(root)


def test_each_run_has_a_folder_of_its_own_and_another_one_is_refused(folder: Location, tmp_path: Path) -> None:
    first, second = tmp_path / "here" / "llama" / "7", tmp_path / "there" / "llama" / "7"
    for run_dir in (first, second):
        run_dir.mkdir(parents=True)
    assert run_ranks(_open, 2, str(folder), str(first)) == [f"{folder}/llama/7"] * 2
    assert run_ranks(_open, 2, str(folder), str(first)) == [f"{folder}/llama/7"] * 2
    assert [entry.name for entry in (folder / "llama" / "7").entries()] == [CLAIM_FILE]
    with pytest.raises(CheckpointError, match=f"holds the checkpoints of the run {first}, not of {second}"):
        run_ranks(_open, 2, str(folder), str(second))
    with pytest.raises(CheckpointError, match=f"this run's checkpoints are in {folder}/llama/7"):
        open_location(run_location(None, first), first, MIB, single_world())


def test_without_permission_a_run_stops_before_its_first_step(folder: Location, tmp_path: Path) -> None:
    run_dir = tmp_path / "llama" / "7"
    run_dir.mkdir(parents=True)
    for url in (str(folder), f"{folder}/deeper"):
        with pytest.raises(CheckpointError, match=r"no permission.*user=stranger"):
            run_ranks(_open, 2, url, str(run_dir), env={"HADOOP_USER_NAME": "stranger"})


# Servers that fail


class _Slow:
    """Runs something in a thread while a test does something to the servers."""

    def __init__(self, act) -> None:
        self.error: BaseException | None = None

        def run() -> None:
            try:
                act()
            except BaseException as problem:
                self.error = problem

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(120)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


def test_safe_mode_is_waited_for_and_named(hdfs: HdfsCluster, folder: Location) -> None:
    plain_state.save(Alone(), folder, 1, ELEMENTS)
    hdfs.admin("-safemode", "enter")
    try:
        impatient = locate(str(folder), SHORT)
        with pytest.raises(CheckpointError, match=r"safe mode.*Wait, or tell the site"):
            plain_state.save(Alone(), impatient, 2, ELEMENTS)
        assert plain_state.load(Alone(), impatient, ELEMENTS) == 1
        waiting = _Slow(lambda: plain_state.save(Alone(), folder, 2, ELEMENTS))
        time.sleep(0.5)
    finally:
        hdfs.admin("-safemode", "leave")
    waiting.join()
    assert plain_state.load(Alone(), folder, ELEMENTS) == 2
    assert _hidden(folder) == []


def test_a_spent_quota_keeps_the_old_checkpoint_and_leaves_nothing_half(hdfs: HdfsCluster, folder: Location) -> None:
    """FC-64 on HDFS: the space quota ends in the middle of a save."""
    run_ranks(plain_state.save, 2, str(folder), 1, ELEMENTS)
    # Two copies of 8 MiB are there; a third of the next save fits.
    hdfs.admin("-setSpaceQuota", str(30 * MIB), folder.path)
    with pytest.raises(CheckpointError, match="the space quota is used up"):
        run_ranks(plain_state.save, 2, str(folder), 2, ELEMENTS)
    assert (_steps(folder), _hidden(folder)) == ([1], [])
    hdfs.admin("-clrSpaceQuota", folder.path)
    run_ranks(plain_state.save, 2, str(folder), 2, ELEMENTS)
    assert run_ranks(plain_state.load, 2, str(folder), ELEMENTS) == [2, 2]


def test_a_data_node_killed_in_the_middle_of_a_file(hdfs: HdfsCluster, folder: Location) -> None:
    """Whatever the client makes of it: a file that was finished is whole, and the save before it stands."""
    plain_state.save(Alone(), folder, 1, ELEMENTS)
    data = os.urandom(MIB)
    finished = False
    try:
        try:
            with (folder / "file").writing() as file:
                for number in range(24):
                    file.write(memoryview(data))
                    if number == 5:
                        hdfs.kill_data_node(0)
            finished = True
        except StoreError:
            pass
        if finished:
            buffer = bytearray(24 * MIB)
            with (folder / "file").reading() as reader:
                assert reader.read_into(0, memoryview(buffer)) == 24 * MIB
            assert bytes(buffer) == 24 * data
        # One data node is left: reads come from it, whatever they try first.
        assert plain_state.load(Alone(), folder, ELEMENTS) == 1
    finally:
        hdfs.start_data_node(0)
        hdfs.wait_for_data_nodes()
    # For a few seconds the name node still sends writers to where the dead one was: a save fails, the next one may not.
    for step in range(2, 60):
        try:
            plain_state.save(Alone(), folder, step, ELEMENTS)
            break
        except CheckpointError:
            assert plain_state.load(Alone(), folder, ELEMENTS) == 1
            time.sleep(1)
    assert plain_state.load(Alone(), folder, ELEMENTS) == step
    assert _hidden(folder) == []


def _flip(file: Path) -> None:
    with open(file, "r+b") as bits:
        bits.seek(77)
        byte = bits.read(1)[0]
        bits.seek(77)
        bits.write(bytes([byte ^ 1]))


def _files_below(root: Location) -> set[tuple[str, Entry]]:
    return {(step.name, file) for step in root.entries() if step.is_folder for file in (root / step.name).entries()}


def _verdicts(told: str) -> list[str]:
    return re.findall(r"^\S*hdfs://\S+/step_\d+: (.*)$", told, re.MULTILINE)


def test_a_block_that_has_rotted_is_passed_over_and_one_whose_data_nodes_are_down_is_not(
    hdfs: HdfsCluster, folder: Location, capsys: pytest.CaptureFixture[str]
) -> None:
    """By flipped bits in step 3, and in step 2 by files of data nodes that were cut short."""
    for step in (1, 2, 3):
        plain_state.save(Alone(), folder, step, ELEMENTS)
    boxes, manifest = folder / "step_0000002" / "__0_0.distcp", folder / "step_0000003" / MANIFEST_FILE
    impatient = locate(str(folder), SHORT)
    web = locate(f"webhdfs://{hdfs.http_address}{folder.path}", SHORT)
    before, (of_manifest,), of_boxes = _files_below(folder), hdfs.replicas(manifest.path), hdfs.replicas(boxes.path)[0]
    _flip(of_manifest[0])
    assert plain_state.load(Alone(), folder, ELEMENTS) == 3, "the other replica is sound"
    unknown = r"step_0000003 cannot be read and may be whole.*ckpt set-aside"
    try:
        hdfs.kill_data_node(1)
        with pytest.raises(StoreError, match=unknown):
            plain_state.load(Alone(), impatient, ELEMENTS)
        hdfs.kill_data_node(0)
        for place in (impatient, web):
            with pytest.raises(StoreError, match=unknown):
                plain_state.load(Alone(), place, ELEMENTS)
    finally:
        hdfs.start_data_node(0)
        hdfs.start_data_node(1)
        hdfs.wait_for_data_nodes()
    assert plain_state.load(Alone(), folder, ELEMENTS) == 3
    _flip(of_manifest[1])
    for file in of_boxes:
        os.truncate(file, 100_000)
    capsys.readouterr()
    assert plain_state.load(Alone(), folder, ELEMENTS) == 1
    said = capsys.readouterr().err
    for path, how in ((manifest, "by their checksums"), (boxes, "as the name node knows")):
        told = rf"{path.parent} skipped: cannot read {path}.*all 2 replicas of its block at byte 0 are corrupt, {how}"
        assert re.search(told, said)
    for path, known in ((boxes, True), (folder / "step_0000001" / "__0_0.distcp", False)):
        rot = web.store.backend().rot(path.path, range(9), hdfs_cause("IncompleteRead"))
        assert (rot is not None and "as the name node knows" in rot) == known
    assert run_ranks(plain_state.load, 2, str(folder), ELEMENTS) == [1, 1]
    assert main(["ckpt", "verify", str(folder), "--all"]) == 5
    assert _verdicts(capsys.readouterr().out) == ["damaged", "damaged", "sound"]
    if libhdfs_skip_reason() is None:
        done = subprocess.run(
            [sys.executable, "-m", "hpc_train", "ckpt", "verify", f"lib{folder}", "--all"],
            env={**os.environ, **hdfs.libhdfs_environment()},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert _verdicts(done.stdout) == ["damaged", "damaged", "sound"], done.stderr[-2000:]
    assert before <= _files_below(folder), "nothing is removed or written anew"


def test_a_name_node_that_comes_back_is_waited_for(hdfs: HdfsCluster, folder: Location) -> None:
    plain_state.save(Alone(), folder, 1, ELEMENTS)
    hdfs.kill_name_node()
    try:
        with pytest.raises(CheckpointError, match="does not answer"):
            plain_state.load(Alone(), locate(str(folder), SHORT), ELEMENTS)
        waiting = _Slow(lambda: plain_state.save(Alone(), folder, 2, ELEMENTS))
    finally:
        hdfs.start_name_node()
        hdfs.wait_for_data_nodes()
    waiting.join()
    assert plain_state.load(Alone(), folder, ELEMENTS) == 2


def test_a_kill_at_any_moment_leaves_the_newest_complete_one(folder: Location) -> None:
    """FC-19, FC-69: what a killed writer left is never taken for whole, nor in the way of the next one."""
    found = kill_in_saves(str(folder), 3, seed=1, num_elements=ELEMENTS, world_size=2)
    assert found[-1] > 0
    plain_state.save(Alone(), folder, found[-1] + 1, ELEMENTS, keep=2)
    assert plain_state.load(Alone(), folder, ELEMENTS) == found[-1] + 1
    assert _hidden(folder) == [] and len(_steps(folder)) <= 2


def test_models_are_converted_from_and_to_hdfs(folder: Location, tmp_path: Path) -> None:
    """There and back again: Hugging Face's files and torch's layout, each read from HDFS and written there."""
    hf = make_hf_folder(tmp_path, "llama")
    (hf / "tokenizer.json").write_text("{}")
    convert(hf, folder / "ours")
    convert(folder / "ours", folder / "one", to="dcp")
    convert(folder / "one", folder / "hf", max_shard_bytes=4000)
    assert {"config.json", INDEX_FILE} <= {entry.name for entry in (folder / "hf").entries()}
    (folder / "one" / MANIFEST_FILE).remove()  # what is left is torch's alone
    model = yaml.safe_load((folder / "one" / "model.yaml").read_text())
    run = {"name": "x", "train": {"steps": 1, "global_batch_size": 1}, "optimizer": {"lr": 0.1}}
    model["data"]["train"] = [{"prefix": "none"}]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**model, **run}))
    convert(folder / "one", folder / "again", config=str(tmp_path / "config.yaml"))
    convert(folder / "again", folder / "hf2")
    assert (folder / "hf2" / SINGLE_FILE).entry().num_bytes == (hf / SINGLE_FILE).stat().st_size
    assert main(["ckpt", "convert", str(folder / "ours"), str(tmp_path / "back")]) == 0
    assert (tmp_path / "back" / SINGLE_FILE).read_bytes() == (hf / SINGLE_FILE).read_bytes()
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    with pytest.raises(ConfigError, match="lies inside a checkpoint"):
        convert(hf, folder / "ours" / "inside")
    assert _hidden(folder) == []


# Loads


def test_state_that_all_ranks_hold_leaves_the_data_nodes_once(hdfs: HdfsCluster, folder: Location) -> None:
    """32 MiB on four ranks: a rank's reads go on to the others."""
    run_ranks(bench_checkpoint_load.save, 4, str(folder), 2)
    before = hdfs.bytes_sent()
    run_ranks(bench_checkpoint_load.load_ours, 4, str(folder), 2)
    assert 32 * MIB <= hdfs.bytes_sent() - before <= 1.05 * 32 * MIB
