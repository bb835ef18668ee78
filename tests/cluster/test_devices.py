from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.cluster.devices import (
    choose_device,
    count_amd_gpus,
    gres_total,
    parse_gres,
    refuse_amd_only,
    visible_devices,
)
from hpc_train.errors import LaunchError


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("GPU-aa11,GPU-bb22", 2),
        ("MIG-cc33", 1),
        ("MIG-GPU-aa/1/0", 1),
        ("0,1,2,3,4,6", 6),
        ("0, 1", 2),
        ("", 0),
        ("-1", 0),
        ("0,1,-1,3", 2),
        ("0,1,x,3", 2),
        ("NoDevFiles", 0),
        ("0,GPU-aa11", 1),
        ("1,1", 0),
    ],
)
def test_visible_devices_are_counted_and_never_converted(text: str, count: int) -> None:
    """FC-42"""
    visible = visible_devices({"CUDA_VISIBLE_DEVICES": text})
    assert visible is not None and len(visible) == count


def test_the_index_of_a_device_is_its_position_and_not_its_number() -> None:
    """FC-42: the sixth entry is physical device 6."""
    env = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,6"}
    assert choose_device(env, 5, 6).index == 5
    assert visible_devices({}) is None


def test_with_all_devices_visible_each_task_takes_its_own() -> None:
    choices = [choose_device({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, local, 4) for local in range(4)]
    assert [choice.index for choice in choices] == [0, 1, 2, 3]
    assert {(choice.mode, choice.warning) for choice in choices} == {("all visible", None)}


def test_one_visible_device_a_task_is_warned_of_once() -> None:
    """FC-06: 4 local ranks, each sees one GPU."""
    choices = [choose_device({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "4"}, i, 4) for i in range(4)]
    assert [choice.index for choice in choices] == [0, 0, 0, 0]
    assert {choice.mode for choice in choices} == {"one per task"}
    assert [choice.warning is not None for choice in choices] == [True, False, False, False]
    assert "--gpu-bind=none" in (choices[0].warning or "")


def test_one_rank_with_one_device_is_no_matter() -> None:
    assert choose_device({"CUDA_VISIBLE_DEVICES": "0"}, 0, 1).warning is None


@pytest.mark.parametrize(
    "env", [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "1"}]
)
def test_fewer_devices_than_tasks_are_refused_with_both_numbers(env: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match=r"4 tasks on this node, but [12] GPUs"):
        choose_device(env, 0, 4)


def test_what_the_driver_counts_wins_over_the_list() -> None:
    with pytest.raises(LaunchError, match="but 2 GPUs"):
        choose_device({"CUDA_VISIBLE_DEVICES": "0,1,2,9"}, 0, 4, num_visible=2)


def test_no_device_means_the_cpu() -> None:
    for env in ({}, {"CUDA_VISIBLE_DEVICES": ""}):
        assert choose_device(env, 1, 4).mode == "cpu"
        assert choose_device(env, 1, 4, num_visible=0).index is None


def test_a_lost_device_list_inside_a_job_takes_the_jobs_gpus_with_a_warning() -> None:
    """FC-51: in an ssh session all GPUs of the node are visible, also other people's."""
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "2,3"}
    choices = [choose_device(env, local, 2, num_visible=8) for local in range(2)]
    assert [choice.index for choice in choices] == [2, 3]
    assert "SLURM_JOB_GPUS=2,3" in (choices[0].warning or "") and choices[1].warning is None
    with pytest.raises(LaunchError, match="SLURM_JOB_GPUS=2,3"):
        choose_device(env, 0, 4, num_visible=8)


def test_gpus_confined_by_cgroup_need_no_list() -> None:
    assert choose_device({"SLURM_STEP_GPUS": "4,5"}, 1, 2, num_visible=2).index == 1


@pytest.mark.parametrize(
    ("text", "counts", "total"),
    [
        ("gpu:a100:4", {"a100": 4}, 4),
        ("gpu:4(S:0-1)", {"": 4}, 4),
        ("gpu:1g.10gb:28(S:0-1)", {"1g.10gb": 28}, 28),
        ("gpu:turing:1,gpu:ampere:3", {"turing": 1, "ampere": 3}, 4),
        ("gpu", {"": 1}, 1),
        ("gpu:a100", {"a100": 1}, 1),
        ("(null)", {}, 0),
        ("", {}, 0),
        ("gres/gpu:a100=4,gres/gpu=4", {"a100": 4, "": 4}, 4),
        ("cpu=8,mem=4G,node=1,gres/gpu=2", {"": 2}, 2),
        ("gpu:a100:4(IDX:0,2-3),nic:2", {"a100": 4}, 4),
        ("gres:gpu:3", {"": 3}, 3),
        ("gpu:0(IDX:)", {"": 0}, 0),
    ],
)
def test_gres_texts_give_counts_by_type_and_one_total(text: str, counts: dict[str, int], total: int) -> None:
    """FC-54"""
    assert parse_gres(text) == counts
    assert gres_total(parse_gres(text)) == total


def make_pci_device(root: Path, address: str, vendor: str, kind: str) -> None:
    folder = root / "bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


def test_amd_accelerators_without_nvidia_gpus_are_refused_with_words(tmp_path: Path) -> None:
    make_pci_device(tmp_path, "0000:01:00.0", "0x1002", "0x038000")
    make_pci_device(tmp_path, "0000:02:00.0", "0x1002", "0x120000")
    make_pci_device(tmp_path, "0000:03:00.0", "0x8086", "0x038000")
    assert count_amd_gpus(tmp_path) == 2
    with pytest.raises(LaunchError, match=r"2 AMD GPUs and no NVIDIA ones.*out of its scope") as caught:
        refuse_amd_only(0, tmp_path)
    assert caught.value.exit_code == 3
    refuse_amd_only(8, tmp_path)


def test_the_graphics_of_a_laptop_is_no_accelerator(tmp_path: Path) -> None:
    make_pci_device(tmp_path, "0000:01:00.0", "0x1002", "0x030000")
    assert count_amd_gpus(tmp_path) == 0
    refuse_amd_only(0, tmp_path)
    assert count_amd_gpus(tmp_path / "nowhere") == 0
