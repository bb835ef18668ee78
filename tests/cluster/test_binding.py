from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.cluster.binding import (
    Machine,
    affinity_warning,
    format_cpu_list,
    format_table,
    granted_cpus,
    nearest_nic,
    parse_cpu_list,
    plan_bindings,
    read_machine,
)


def fake_sys(root: Path, gpus: list[tuple[str, int]], nics: dict[str, tuple[str, int, str]]) -> Path:
    """Write a sysfs of two NUMA nodes of 8 cores. gpus: (bridge/address, numa); nics: (the same, numa, "
    "state)."""
    for numa, cpus in enumerate(["0-7", "8-15"]):
        folder = root / f"devices/system/node/node{numa}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    listing = root / "bus/pci/devices"
    listing.mkdir(parents=True)

    def device(place: str, numa: int, vendor: str, kind: str) -> Path:
        folder = root / "devices" / place
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "class").write_text(kind + "\n")
        (folder / "numa_node").write_text(f"{numa}\n")
        (folder / "local_cpulist").write_text("0-15\n")
        (listing / folder.name).symlink_to(folder)
        return folder

    for place, numa in gpus:
        device(place, numa, "0x10de", "0x030200")
    for name, (place, numa, state) in nics.items():
        folder = device(place, numa, "0x15b3", "0x020700")
        port = root / "class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "link_layer").write_text("InfiniBand\n")
        (root / "class/infiniband" / name / "device").symlink_to(folder)
    device("pci0000:00/0000:00:1f.0", 0, "0x8086", "0x060100")
    return root


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Four GPUs, a card under the same switch as each; a management card that is down and a lone one."""
    gpus = [
        ("pci0000:10/0000:10:01.0/0000:11:00.0", 0),
        ("pci0000:20/0000:20:01.0/0000:21:00.0", 0),
        ("pci0000:80/0000:80:01.0/0000:81:00.0", 1),
        ("pci0000:90/0000:90:01.0/0000:91:00.0", 1),
    ]
    nics = {
        "mlx5_10": ("pci0000:10/0000:10:01.0/0000:12:00.0", 0, "4: ACTIVE"),
        "mlx5_2": ("pci0000:20/0000:20:01.0/0000:22:00.0", 0, "4: ACTIVE"),
        "mlx5_3": ("pci0000:80/0000:80:01.0/0000:82:00.0", 1, "4: ACTIVE"),
        "mlx5_4": ("pci0000:90/0000:90:01.0/0000:92:00.0", 1, "1: DOWN"),
        "mlx5_5": ("pci0000:a0/0000:a0:01.0/0000:a1:00.0", 1, "4: ACTIVE"),
    }
    return read_machine(fake_sys(tmp_path, gpus, nics))


def test_gpus_and_cards_are_read_from_sysfs(machine: Machine) -> None:
    assert [gpu.pci for gpu in machine.gpus] == ["0000:11:00.0", "0000:21:00.0", "0000:81:00.0", "0000:91:00.0"]
    assert [nic.name for nic in machine.nics] == ["mlx5_2", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_10"]
    assert [gpu.numa for gpu in machine.gpus] == [0, 0, 1, 1]
    assert machine.nics[0].link_layer == "InfiniBand"


def test_each_gpu_gets_the_active_card_of_its_own_switch(machine: Machine) -> None:
    names = [nic.name if (nic := nearest_nic(machine, index)) else None for index in range(4)]
    # The last one's own card is down: one of its NUMA node is taken instead.
    assert names == ["mlx5_10", "mlx5_2", "mlx5_3", "mlx5_3"]


def test_gpus_that_are_equally_near_to_several_cards_take_them_in_turn(tmp_path: Path) -> None:
    gpus = [(f"pci0000:10/0000:10:0{index}.0/0000:1{index}:00.0", 0) for index in (1, 2)]
    nics = {f"mlx5_{index}": (f"pci0000:40/0000:40:0{index}.0/0000:4{index}:00.0", 0, "4: ACTIVE") for index in (1, 2)}
    machine = read_machine(fake_sys(tmp_path, gpus, nics))
    names = [nic.name if (nic := nearest_nic(machine, index)) else None for index in range(2)]
    assert names == ["mlx5_1", "mlx5_2"]


def test_a_rank_gets_the_granted_cores_of_its_gpus_numa_node(machine: Machine) -> None:
    granted = frozenset(range(4, 12))
    plan = plan_bindings(machine, [granted] * 4, [0, 1, 2, 3])
    assert [format_cpu_list(binding.cpus) for binding in plan] == ["4-7", "4-7", "8-11", "8-11"]
    assert all(binding.cpus <= granted for binding in plan)


def test_a_rank_whose_cores_are_all_far_from_its_gpu_keeps_them_and_says_so(machine: Machine) -> None:
    (binding,) = plan_bindings(machine, [{8, 9}], [0])
    assert binding.cpus == {8, 9} and binding.note == "no granted core is near the GPU"


def test_ranks_without_gpus_share_the_granted_cores_evenly() -> None:
    machine = Machine((), (), {0: frozenset(range(8))})
    plan = plan_bindings(machine, [frozenset(range(1, 8))] * 3, [None] * 3)
    assert [format_cpu_list(binding.cpus) for binding in plan] == ["1-2", "3-4", "5-7"]
    assert {binding.numa for binding in plan} == {0}


def test_cores_that_slurm_gave_each_rank_are_not_split_again() -> None:
    machine = Machine((), (), {})
    plan = plan_bindings(machine, [{0, 1}, {2, 3}], [None, None])
    assert [binding.cpus for binding in plan] == [{0, 1}, {2, 3}]


def test_more_ranks_than_cores_share_them_and_say_so() -> None:
    plan = plan_bindings(Machine((), (), {}), [{0, 1}] * 3, [None] * 3)
    assert all(binding.cpus <= {0, 1} and binding.cpus for binding in plan)
    assert {binding.note for binding in plan} == {"more ranks than granted cores"}
    assert len({binding.cpus for binding in plan}) == 1


def test_a_machine_without_sysfs_or_with_numa_minus_one_is_read_without_error(tmp_path: Path) -> None:
    assert read_machine(tmp_path / "nowhere") == Machine((), (), {})
    machine = read_machine(fake_sys(tmp_path, [("pci0000:10/0000:11:00.0", -1)], {}))
    assert machine.gpus[0].numa is None and machine.gpus[0].cpus == frozenset(range(16))
    (binding,) = plan_bindings(machine, [{3}], [0])
    assert (binding.cpus, binding.nic, binding.numa) == ({3}, None, None)


def test_the_table_has_a_line_a_rank(machine: Machine) -> None:
    plan = plan_bindings(machine, [range(16)] * 2, [0, 2])
    assert format_table(plan, "n7", ranks=[14, 15]).splitlines() == [
        "rank  host  local  gpu  pci           numa  cores  nic      note",
        "14    n7    0      0    0000:11:00.0  0     0-7    mlx5_10",
        "15    n7    1      2    0000:81:00.0  1     8-15   mlx5_3",
    ]


@pytest.mark.parametrize(("text", "cpus"), [("0-3,8", {0, 1, 2, 3, 8}), ("", set()), ("5\n", {5})])
def test_core_lists_are_read_and_written_as_the_kernel_does(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus
    assert format_cpu_list(cpus) == text.strip()


@pytest.mark.parametrize(
    ("granted", "cpus_per_task", "num_workers", "numbers"),
    [
        ({3}, 8, 6, ("1 cores", "6", "SLURM_CPUS_PER_TASK=8")),
        ({3}, None, 6, ("1 cores", "6", "not set")),
        ({3}, 8, 0, ("1 cores", "SLURM_CPUS_PER_TASK=8")),
        (range(4), 4, 6, ("4 cores", "6", "7")),
    ],
)
def test_too_few_cores_are_warned_of_with_all_numbers(
    granted: set[int], cpus_per_task: int | None, num_workers: int, numbers: tuple[str, ...]
) -> None:
    """FC-07: affinity 1, workers 6."""
    warning = affinity_warning(granted, cpus_per_task, num_workers)
    assert warning is not None
    assert all(number in warning for number in numbers)


def test_enough_cores_are_no_matter() -> None:
    """FC-07"""
    assert affinity_warning(range(8), 8, 6) is None
    assert affinity_warning({0}, 1, 0) is None
    assert granted_cpus()
