"""Checkpoints: exact to the bit, never half, read by torch's own tools, and without a pickle."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from hpc_train.checkpoint.folders import folder
from hpc_train.checkpoint.folders.folder import create_temporary, prune, sound_checkpoints
from hpc_train.checkpoint.format.manifest import MANIFEST_FILE, read_manifest
from hpc_train.checkpoint.loading.load import load_newest
from hpc_train.checkpoint.saving import save
from hpc_train.checkpoint.saving.save import save_checkpoint
from hpc_train.checkpoint.stores import local_store
from hpc_train.checkpoint.stores.cause import StoreError
from hpc_train.checkpoint.stores.location import locate
from hpc_train.errors import CheckpointError
from hpc_train.train.state import state_pieces
from tests.checkpoint import plain_state
from tests.checkpoint.plain_state import Alone
from tests.checkpoint.runs import resume, train_and_save
from tests.ranks import run_ranks
from tests.train.trainers import TREES, make_config, make_trainer
from tests.worlds import make_world


@pytest.mark.parametrize(("world_size", "dtype"), [(1, torch.float32), (3, torch.float32), (2, torch.bfloat16)])
def test_a_resumed_run_equals_one_left_alone_bit_for_bit(tmp_path, world_size, dtype):
    straight = run_ranks(train_and_save, world_size, str(tmp_path), [2], dtype)
    resumed = run_ranks(resume, world_size, str(tmp_path), dtype)
    for (losses, weights), (step, later, again) in zip(straight, resumed, strict=True):
        assert (step, later) == (2, losses[2:])
        assert torch.equal(weights, again)


def test_another_number_of_ranks_reads_the_same_state(tmp_path):
    losses, _ = run_ranks(train_and_save, 3, str(tmp_path), [2])[0]
    for _, later, _ in run_ranks(resume, 2, str(tmp_path)):
        assert later == pytest.approx(losses[2:], rel=1e-5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # said by torch when it reads on one process
def test_torch_reads_what_we_wrote(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    _, weights = run_ranks(train_and_save, 2, str(tmp_path), [4])[0]
    path = tmp_path / "step_0000004"
    dcp_to_torch_save(path, tmp_path / "single.pt")
    whole = torch.load(tmp_path / "single.pt", weights_only=True)
    trainer = make_trainer(Alone(), make_config(TREES["llama"]))
    by_place = {p.name: weights[p.start : p.stop].view(p.shape) for p in trainer.parameters[0].layout.parameters}
    state = {f"model.{name}": torch.empty_like(tensor) for name, tensor in by_place.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    found = _flatten(whole)
    for name, tensor in by_place.items():
        assert torch.equal(state[f"model.{name}"], tensor)
        assert torch.equal(found[f"model.{name}"], tensor)


def _flatten(tree, prefix=""):
    flat = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= _flatten(value, name + ".") if isinstance(value, dict) else {name: value}
    return flat


def test_loading_unpickles_nothing(tmp_path, monkeypatch):
    run_ranks(train_and_save, 1, str(tmp_path), [4])
    (tmp_path / "step_0000004" / ".metadata").write_bytes(b"x" * (tmp_path / "step_0000004/.metadata").stat().st_size)

    def refuse(*_args, **_kwargs):
        raise AssertionError("a pickle was loaded")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert resume(Alone(), str(tmp_path))[0] == 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Two checkpoints of two ranks, for copies."""
    root = tmp_path_factory.mktemp("saved")
    run_ranks(train_and_save, 2, str(root), [1, 2], torch.float32, 2)
    return root


@pytest.fixture
def two_checkpoints(saved, tmp_path) -> Path:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path


def _target(root: Path) -> list[int]:
    return [answer[0] for answer in run_ranks(resume, 2, str(root), torch.float32, 2)]


def _target_alone(root: Path) -> int:
    """The same on one rank, which reads all files."""
    return resume(Alone(), str(root), torch.float32, 0)[0]


def test_damage_that_one_rank_sees_makes_all_ranks_take_the_older_one(two_checkpoints):
    """FC-66: the bytes of rank 1's part are damaged, and rank 0, which does not read them, falls back too."""
    assert _target(two_checkpoints) == [2, 2]
    path = two_checkpoints / "step_0000002" / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert _target(two_checkpoints) == [1, 1]


def test_any_damage_to_the_newest_leads_to_the_older_one(two_checkpoints):
    """FC-19, FC-66: truncated, missing or changed files, or no manifest; never a crash."""
    newest = two_checkpoints / "step_0000002"
    pristine = two_checkpoints / "pristine"
    shutil.copytree(newest, pristine)
    assert _target_alone(two_checkpoints) == 2
    for name in [path.name for path in pristine.iterdir()]:
        if name == ".metadata":
            continue
        for damage in ("truncate", "remove", "flip"):
            shutil.rmtree(newest)
            shutil.copytree(pristine, newest)
            path = newest / name
            if damage == "truncate":
                path.write_bytes(path.read_bytes()[:-7])
            elif damage == "remove":
                path.unlink()
            else:
                data = bytearray(path.read_bytes())
                middle = data.index(b'"crc32":[') + 9 if name == MANIFEST_FILE else len(data) // 2
                data[middle] ^= 1
                path.write_bytes(data)
            if damage == "flip" and name != MANIFEST_FILE and not _hits_payload(pristine, name, middle):
                continue
            assert _target_alone(two_checkpoints) == 1, (name, damage)


def _hits_payload(path: Path, name: str, place: int) -> bool:
    boxes = [box for tensor in read_manifest(path).tensors.values() for box in tensor.boxes if box.file == name]
    return any(box.start <= place < box.start + box.num_bytes for box in boxes)


def test_a_shard_of_another_step_is_noticed(two_checkpoints):
    """FC-66: one shard belongs to another step."""
    shutil.copy(two_checkpoints / "step_0000001/__1_0.distcp", two_checkpoints / "step_0000002/__1_0.distcp")
    assert _target(two_checkpoints) == [1, 1]


def test_only_damaged_checkpoints_are_an_error_and_are_left_alone(two_checkpoints):
    for step in (1, 2):
        (two_checkpoints / f"step_{step:07d}" / MANIFEST_FILE).unlink()
    with pytest.raises(CheckpointError, match="none can be read"):
        run_ranks(resume, 2, str(two_checkpoints))
    assert (two_checkpoints / "step_0000001").is_dir()


def test_no_checkpoint_at_all_is_a_fresh_start(tmp_path):
    assert run_ranks(resume, 2, str(tmp_path)) == [None, None]
    (tmp_path / ".step_0000007.tmp-00ff").mkdir()
    assert run_ranks(resume, 2, str(tmp_path)) == [None, None]


def test_latest_names_the_newest_committed_checkpoint(two_checkpoints):
    assert (two_checkpoints / "latest").read_text() == "step_0000002\n"


def _resume_other_model(me, root):
    trainer = make_trainer(me, make_config(TREES["gpt"]))
    load_newest(Path(root), state_pieces(trainer), make_world(me))


def test_a_checkpoint_of_another_model_is_refused_with_the_first_difference(two_checkpoints):
    with pytest.raises(
        CheckpointError, match=r"another model: .*model\.embedding|another model: it has no tensor model\."
    ):
        run_ranks(_resume_other_model, 2, str(two_checkpoints))


def _save_with_failing_write(me, root, failing_rank, number):
    trainer, world = make_trainer(me, make_config(TREES["llama"])), make_world(me)
    save_checkpoint(Path(root), 1, state_pieces(trainer), {"num_updates": 0}, world, keep=0)
    if me.rank == failing_rank:
        real = save._write_pieces

        def fail(*args):
            real(*args)
            raise OSError(number, os.strerror(number))

        save._write_pieces = fail
    try:
        save_checkpoint(Path(root), 2, state_pieces(trainer), {"num_updates": 0}, world, keep=1)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_on_one_rank_keeps_the_old_checkpoint_and_leaves_nothing_half(tmp_path, number):
    """FC-64: no space or over quota on rank 1 only."""
    answers = run_ranks(_save_with_failing_write, 2, str(tmp_path), 1, number)
    assert all(os.strerror(number) in answer for answer in answers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_0000001"]


def _crash_between(root: Path, crash_at: int) -> None:
    """Save twice with keep=1 in this process, stopping dead before the nth file system change of the second save."""
    trainer = make_trainer(Alone(), make_config(TREES["llama"]))
    world = make_world(Alone())
    save_checkpoint(root, 1, state_pieces(trainer), {"num_updates": 0}, world, keep=1)
    calls = 0

    class Crash(BaseException):
        pass

    def counted(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == crash_at:
                raise Crash
            return real(*args, **kwargs)

        return call

    changes = [
        (local_store.os, "rename"),
        (local_store.os, "replace"),
        (local_store.os, "fsync"),
        (local_store.shutil, "rmtree"),
    ]
    originals = [(module, name, getattr(module, name)) for module, name in changes]
    try:
        for module, name, real in originals:
            setattr(module, name, counted(real))
        save_checkpoint(root, 2, state_pieces(trainer), {"num_updates": 0}, world, keep=1)
    except Crash:
        pass
    finally:
        for module, name, real in originals:
            setattr(module, name, real)


@pytest.mark.parametrize("crash_at", range(1, 12))
def test_a_crash_at_any_point_of_a_save_leaves_a_sound_checkpoint(tmp_path, crash_at):
    """FC-62: keep=1 never removes the only complete one, and `latest` never names an incomplete one."""
    _crash_between(tmp_path, crash_at)
    found = [path.local for path, _ in sound_checkpoints(locate(tmp_path))]
    assert found
    latest = (tmp_path / "latest").read_text().strip()
    if (tmp_path / latest).exists():
        assert tmp_path / latest in found
    assert resume(Alone(), str(tmp_path), last=3)[0] in (1, 2)


def test_a_folder_that_is_removed_loses_its_name_first(tmp_path, monkeypatch):
    """An agent of an earlier start may be about to commit it: by then it is whole, or not there under its name."""
    leftover = tmp_path / ".step_0000001.tmp-0123"
    leftover.mkdir()
    names = []
    real = local_store.shutil.rmtree

    def rmtree(path):
        names.append(Path(path).name)
        assert not leftover.exists()
        real(path)

    monkeypatch.setattr(local_store.shutil, "rmtree", rmtree)
    temporary = create_temporary(locate(tmp_path), 2)
    assert len(names) == 1 and names[0].startswith(".step_0000001.tmp-")
    assert [path.name for path in tmp_path.iterdir()] == [temporary.name]


def test_a_save_whose_rename_is_done_stands_whatever_comes_behind_it(tmp_path, monkeypatch, capsys):
    def refused(root, name):
        raise StoreError("the quota is used up")

    monkeypatch.setattr(folder, "write_latest", refused)
    assert plain_state.save(Alone(), tmp_path, 3, 8192) == str(tmp_path / "step_0000003")
    assert "is saved, but" in capsys.readouterr().err
    assert plain_state.load(Alone(), tmp_path, 8192) == 3


def test_pruning_counts_sound_checkpoints_only(two_checkpoints):
    """FC-62: an unfinished newer folder must not push out the good one."""
    (two_checkpoints / "step_0000003").mkdir()
    prune(locate(two_checkpoints), 3, keep=1)
    assert sorted(path.name for path in two_checkpoints.iterdir()) == ["latest", "step_0000002", "step_0000003"]


def _save_where_rank_1_sees_another_disk(me, root):
    trainer, world = make_trainer(me, make_config(TREES["llama"])), make_world(me)
    if me.rank == 1:
        real = save.wait_for_folder
        save.wait_for_folder = lambda path: real(locate(Path(root) / "other" / path.name), patience_s=0.2)
    with pytest.raises(CheckpointError, match="must be on a file system that all nodes share"):
        save_checkpoint(Path(root) / "own", 1, state_pieces(trainer), {"num_updates": 0}, world, keep=0)


def test_a_folder_on_node_local_disk_is_noticed_at_the_first_save(tmp_path):
    """FC-67: the other node does not see what rank 0 made."""
    run_ranks(_save_where_rank_1_sees_another_disk, 2, str(tmp_path))
    assert [path.name for path in (tmp_path / "own").iterdir()] == []
