"""Devices, network, limits, storage, modules, Python and HDFS: facts in, findings out."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.cluster.binding import Gpu, Machine, Nic
from hpc_train.cluster.mpi_site import MpiLibrary
from hpc_train.cluster.network import Interface
from hpc_train.health.doctor import devices, hdfs, limits, modules, network, python_env, storage
from hpc_train.health.doctor.findings import Finding


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.id: finding.level for finding in findings}


# Devices


def machine(num_gpus: int = 2) -> Machine:
    gpus = tuple(
        Gpu(
            f"0000:{index}1:00.0", index, frozenset(range(8 * index, 8 * index + 8)), f"/sys/devices/pci0000:{index}0/x"
        )
        for index in range(num_gpus)
    )
    nics = tuple(
        Nic(f"mlx5_{index}", f"0000:{index}2:00.0", index, f"/sys/devices/pci0000:{index}0/y", "InfiniBand", True)
        for index in range(num_gpus)
    )
    return Machine(gpus, nics, {})


def test_the_map_gives_each_gpu_its_numa_node_and_nearest_card() -> None:
    header, first, second = devices.map_table(machine())
    assert header.split() == ["gpu", "pci", "numa", "cores", "nic", "nic's", "numa"]
    assert first.split() == ["0", "0000:01:00.0", "0", "0-7", "mlx5_0", "0"]
    assert second.split() == ["1", "0000:11:00.0", "1", "8-15", "mlx5_1", "1"]


@pytest.mark.parametrize(
    ("env", "level", "words"),
    [
        ({}, "ok", "all visible"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "ok", "all 2 GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "note", "1 of 2 GPUs"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "warning", "shows none"),
        ({"SLURM_JOB_ID": "7"}, "note", "was given none"),
    ],
)
def test_gpus_that_the_scheduler_hides_are_counted(env: dict[str, str], level: str, words: str) -> None:
    found = devices.device_findings(machine(), env, range(16), 0, "n1")
    (visible,) = [finding for finding in found if finding.id == "devices.visible"]
    assert visible.level == level and words in visible.found


def test_cores_far_from_a_gpu_are_told() -> None:
    found = devices.device_findings(machine(), {}, range(8), 0, "n1")
    assert "is near GPU 1" in next(finding.found for finding in found if finding.id == "devices.cores")


def test_amd_gpus_are_refused_with_words_where_there_are_no_others() -> None:
    (only,) = devices.device_findings(machine(0), {}, range(8), 4, "n1")
    assert (only.id, only.level) == ("devices.amd", "error")
    assert "4 AMD GPUs and no NVIDIA ones" in only.found and "out of its scope" in only.found
    assert levels(devices.device_findings(machine(), {}, range(16), 4, "n1"))["devices.amd"] == "note"


# Network


def table(**addresses: str | None) -> dict[str, Interface]:
    found = {"lo": Interface("lo", "127.0.0.1", "255.0.0.0", True)}
    for name, address in addresses.items():
        found[name] = Interface(name, address, "255.255.255.0" if address else None, True)
    return found


def test_a_network_of_all_nodes_under_one_name_is_well() -> None:
    tables = {"n1": table(eth0="10.0.0.1"), "n2": table(eth0="10.0.0.2")}
    found = network.common_findings(tables, {"n1": "10.0.0.1", "n2": "10.0.0.2"}, {})
    assert set(levels(found).values()) == {"ok"}
    assert network.from_json(network.as_json(tables["n1"])) == tables["n1"]


def test_names_that_differ_between_nodes_are_told_with_the_setting_that_names_both() -> None:
    """FC-11"""
    tables = {"n1": table(eth0="10.0.0.1"), "n2": table(enp3s0="10.0.0.2")}
    found = network.common_findings(tables, {"n1": "10.0.0.1", "n2": "10.0.0.2"}, {})
    (names,) = [finding for finding in found if finding.id == "network.names"]
    assert names.level == "warning"
    assert "NCCL_SOCKET_IFNAME==enp3s0,eth0" in names.cure


def test_nodes_without_a_common_network_stop_a_run() -> None:
    """FC-11"""
    tables = {"n1": table(eth0="10.0.0.1"), "n2": table(eth0="10.0.9.2")}
    found = network.common_findings(tables, {"n1": "10.0.0.1", "n2": "10.0.9.2"}, {})
    assert levels(found)["network.common"] == "error"


def test_a_name_that_means_loopback_stops_a_run_of_several_nodes_only() -> None:
    """FC-12"""
    one = {"n1": table(eth0="10.0.0.1")}
    assert levels(network.common_findings(one, {"n1": "127.0.1.1"}, {}))["network.rank0"] == "ok"
    two = {**one, "n2": table(eth0="10.0.0.2")}
    found = network.common_findings(two, {"n1": "127.0.1.1", "n2": "127.0.1.1"}, {})
    assert [(finding.level, *finding.hosts) for finding in found[:2]] == [("error", "n1"), ("error", "n2")]
    for address in ("127.0.1.1", "does not resolve: unknown"):
        rank0, other = network.common_findings(two, {"n1": "10.0.0.1", "n2": address}, {})[:2]
        assert (rank0.level, other.level, other.hosts) == ("ok", "error", ("n2",))
        assert "launch.interface, for example to eth0" in other.cure
    named = network.common_findings(two, {"n1": "127.0.1.1", "n2": "127.0.1.1"}, {"launch.interface": "eth0"})
    assert "error" not in levels(named).values()
    by_fabric = network.common_findings(two, {"n1": "10.0.0.1", "n2": "127.0.1.1"}, {}, template="{host}i")
    assert "The host name n2i resolves to 127.0.1.1" in by_fabric[1].found


@pytest.mark.parametrize(
    ("pattern", "level", "words"),
    [
        ("eth0", "ok", "takes eth0"),
        ("ib0", "error", "ib0 here, which 2 nodes cannot use"),
        ("hsn", "error", "matches nothing"),
        ("^docker0", "warning", "takes lo in again"),
        ("eth,ib", "warning", "also matches ib0"),
        ("=eth0", "ok", "takes eth0"),
    ],
)
def test_a_preset_interface_is_matched_as_nccl_does(pattern: str, level: str, words: str) -> None:
    """FC-11: prefixes, exact names, exclusion; ib0 is there without an address."""
    here = table(eth0="10.0.0.1", ib0=None, docker0="172.17.0.1")
    (finding,) = network.own_findings(here, [], {"NCCL_SOCKET_IFNAME": pattern}, "n1", num_nodes=2)
    assert finding.level == level
    assert words in finding.found


@pytest.mark.parametrize(
    ("text", "level", "words"),
    [
        ("mlx5_1", "warning", "mlx5_1 also matches mlx5_10, mlx5_11"),
        ("=mlx5_1", "ok", "takes mlx5_1"),
        ("mlx5_2:1", "ok", "takes mlx5_2"),
        ("mlx5", "ok", "takes mlx5_1, mlx5_2, mlx5_10, mlx5_11"),
        ("^mlx5_1", "warning", "prefixes"),
        ("bnxt", "error", "matches none"),
    ],
)
def test_names_of_cards_are_prefixes_for_nccl(text: str, level: str, words: str) -> None:
    (finding,) = network.hca_findings(text, ["mlx5_1", "mlx5_2", "mlx5_10", "mlx5_11"], "n1")
    assert finding.level == level
    assert words in finding.found
    if text == "^mlx5_1":
        assert finding.cure == "export NCCL_IB_HCA=^=mlx5_1"


# Limits

ROOMY = limits.Limits((None, None), (1 << 20, 1 << 20), (None, None), 64 << 30, "core", False)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, {}),
        ({"memlock": (64 << 10, 64 << 10)}, {"limits.memlock": "error"}),
        ({"memlock": (64 << 20, None)}, {"limits.memlock": "warning"}),
        ({"memlock": (64 << 10, 64 << 10), "locks_freely": True}, {}),
        ({"files": (1024, 1 << 20)}, {"limits.files": "warning"}),
        ({"processes": (100, 100)}, {"limits.processes": "warning"}),
        ({"shm_bytes": 64 << 20}, {"limits.shm": "warning"}),
        ({"shm_bytes": None}, {"limits.shm": "error"}),
    ],
)
def test_limits_that_are_too_low(change: dict, found: dict[str, str]) -> None:
    """FC-86 for /dev/shm."""
    told = levels(limits.limit_findings(replace(ROOMY, **change), "n1", has_rdma=True))
    assert {name: level for name, level in told.items() if level != "ok"} == found


def test_locked_memory_matters_with_rdma_only_and_the_cure_knows_the_hard_limit() -> None:
    low = replace(ROOMY, memlock=(64 << 10, None))
    assert "limits.memlock" not in levels(limits.limit_findings(low, "n1", has_rdma=False))
    (raisable,) = [item for item in limits.limit_findings(low, "n1", has_rdma=True) if item.id == "limits.memlock"]
    assert "ulimit -l unlimited" in raisable.cure
    fixed = replace(ROOMY, memlock=(64 << 10, 64 << 10))
    (hard,) = [item for item in limits.limit_findings(fixed, "n1", has_rdma=True) if item.id == "limits.memlock"]
    assert "ask the site" in hard.cure


def test_the_limits_of_this_process_are_read() -> None:
    assert limits.read_limits().shm_bytes is None or limits.read_limits().shm_bytes >= 0
    assert limits._may_lock_memory("Name:\tx\nCapEff:\t000001ffffffffff\n")
    assert not limits._may_lock_memory("CapEff:\t0000000000000000\n")


# Storage

FOLDER = storage.Folder("run folder", "/scratch/me", "lustre", 1 << 40, 1 << 20)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, {"storage.space": "ok"}),
        ({"free_bytes": 5 << 30}, {"storage.space": "warning"}),
        ({"free_bytes": 1 << 20}, {"storage.space": "error"}),
        ({"free_inodes": 12}, {"storage.inodes": "warning"}),
        ({"free_inodes": None}, {"storage.space": "ok"}),
        ({"problem": "the quota is used up"}, {"storage.write": "error"}),
        ({"purpose": "HOME", "problem": "the quota is used up"}, {"storage.write": "warning"}),
        ({"purpose": "TMPDIR"}, {"storage.space": "ok", "storage.scratch": "warning"}),
        ({"purpose": "TMPDIR", "kind": "tmpfs"}, {"storage.space": "ok", "storage.scratch": "note"}),
        ({"purpose": "TMPDIR", "kind": "ext4"}, {"storage.space": "ok"}),
    ],
)
def test_folders_that_cannot_hold_a_run(change: dict, found: dict[str, str]) -> None:
    """FC-64"""
    assert levels(storage.folder_findings([replace(FOLDER, **change)], "n1")) == found


def test_a_file_system_is_found_by_its_longest_mount_point() -> None:
    mounts = "/dev/sda1 / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\ntmpfs /home/me/mem tmpfs rw 0 0\n"
    kinds = [storage.kind_of(path, mounts) for path in ("/homely", "/home/me", "/home/me/mem/x", "/home/me/memory")]
    assert kinds == ["ext4", "nfs4", "tmpfs", "nfs4"]


def test_a_folder_is_read_by_its_nearest_parent_that_exists(tmp_path: Path) -> None:
    folder = storage.read_folder("run folder", str(tmp_path / "a/b"), trial_write=True, mounts="")
    assert (folder.path, folder.problem) == (str(tmp_path), None)
    assert folder.free_bytes > 0 and not list(tmp_path.iterdir())


QUOTA = """Disk quotas for user me (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
server:/home/me 4900000* 4000000 5000000 1764460000   12345       0       0       0
/dev/sdb1         1000       0       0       0     998    1000    1000       0
"""
LFS_QUOTA = """      /lustre/scratch/with/a/very/long/path
                1048576000       0 1048576000       -  200000       0 1000000       -
"""


def test_quotas_are_read_as_the_tools_print_them() -> None:
    home, disk = storage.parse_quota(QUOTA)
    assert (home.used_bytes, home.limit_bytes, home.limit_files) == (4900000 << 10, 5000000 << 10, None)
    assert (disk.limit_bytes, disk.used_files, disk.limit_files) == (None, 998, 1000)
    (lustre,) = storage.parse_lfs_quota(LFS_QUOTA)
    assert (lustre.where, lustre.used_bytes, lustre.limit_files) == (
        "/lustre/scratch/with/a/very/long/path", 1048576000 << 10, 1000000,
    )  # fmt: skip
    assert storage.parse_quota("Disk quotas for user me (uid 1000): none\n") == []


def test_quotas_that_are_spent_or_nearly_so() -> None:
    found = storage.quota_findings([*storage.parse_quota(QUOTA), *storage.parse_lfs_quota(LFS_QUOTA)], "n1")
    assert [(finding.level, finding.found.partition(":")[0]) for finding in found] == [
        ("warning", "the quota on server"),
        ("warning", "the quota on /dev/sdb1 is nearly spent"),
        ("error", "the quota on /lustre/scratch/with/a/very/long/path is spent"),
    ]
    roomy = storage.Quota("/home", 1, 100, 1, None)
    assert levels(storage.quota_findings([roomy], "n1")) == {"storage.quota": "ok"}


def test_a_run_folder_that_not_all_nodes_see_stops_a_run() -> None:
    """FC-67"""
    (finding,) = storage.shared_findings({"n1": True, "n2": False, "n3": False}, "/tmp/runs")
    assert (finding.level, finding.hosts) == ("error", ("n2", "n3"))
    assert storage.shared_findings({"n1": True}, "/tmp/runs") == []


# Modules

OPEN_MPI_5 = MpiLibrary("openmpi5", Path("/opt/ompi5/lib/libmpi.so.40"), "")


@pytest.mark.parametrize(
    ("loaded", "kind", "found"),
    [
        ("gcc/12:openmpi/5.0.3", "openmpi5", {"modules.loaded": "ok"}),
        ("gcc/12:OpenMPI/4.1.5-GCC-12.2.0", "openmpi5", {"modules.mpi": "warning"}),
        ("mpich/4.2.1", "openmpi5", {"modules.mpi": "warning"}),
        ("cray-mpich/8.1.29", "mpich", {"modules.loaded": "ok"}),
        ("mpi/openmpi-x86_64", "openmpi5", {"modules.loaded": "ok"}),
        ("intel-mpi/2021.9", "openmpi4", {"modules.mpi": "warning"}),
        ("hpcx/2.18", "openmpi4", {"modules.loaded": "ok"}),
        ("cuda/12.4", "openmpi5", {"modules.cuda": "note"}),
        ("", "openmpi5", {"modules.loaded": "ok"}),
    ],
)
def test_an_mpi_module_of_another_brand_than_the_library(loaded: str, kind: str, found: dict[str, str]) -> None:
    """FC-92"""
    library = replace(OPEN_MPI_5, kind=kind)
    assert levels(modules.module_findings({"LOADEDMODULES": loaded}, library, "12.8")) == found


def test_two_mpi_modules_and_conda_beside_a_python_module() -> None:
    env = {
        "LOADEDMODULES": "python/3.11:openmpi/5.0.3:mpich/4.2",
        "CONDA_PREFIX": "/home/me/conda",
        "PYTHONPATH": "/opt/py",
        "LD_LIBRARY_PATH": "/home/me/conda/lib",
    }
    found = modules.module_findings(env, OPEN_MPI_5, None)
    assert len([item for item in found if item.id == "modules.mpi"]) == 2
    assert len([item for item in found if item.id == "modules.conda"]) == 3


def test_another_libmpi_on_the_library_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "libmpi.so.12").write_bytes(b"")
    (finding,) = modules.module_findings({"LD_LIBRARY_PATH": f"/none:{tmp_path}"}, OPEN_MPI_5, None)
    assert finding.id == "modules.library_path"
    assert str(tmp_path / "libmpi.so.12") in finding.found
    own = replace(OPEN_MPI_5, path=tmp_path / "libmpi.so.12")
    assert levels(modules.module_findings({"LD_LIBRARY_PATH": str(tmp_path)}, own, None)) == {"modules.loaded": "ok"}


# Python


def test_this_environment_is_described_without_importing_torch() -> None:
    facts = python_env.read_python()
    assert facts["path"].endswith("hpc_train") and facts["torch"]
    found = python_env.own_python_findings(facts, "n1", has_gpus=False)
    assert levels(found)["python.versions"] == "ok"


def test_a_torch_without_cuda_on_a_node_with_gpus_or_none_at_all_stops_a_run() -> None:
    facts = {**python_env.read_python(), "torch": "2.8.0+cpu", "torch_cuda": None}
    assert levels(python_env.own_python_findings(facts, "n1", has_gpus=True))["python.torch"] == "error"
    assert levels(python_env.own_python_findings({**facts, "torch": None}, "n1", has_gpus=False)) == {
        "python.torch": "error",
        **({} if facts["numba"] else {"python.kernels": "note"}),
    }


def test_versions_and_places_that_differ_between_nodes_are_an_error_on_the_odd_ones() -> None:
    facts = python_env.read_python()
    other = {**facts, "path": "/somewhere/hpc_train"}
    assert python_env.common_python_findings({"n1": facts, "n2": facts}) == []
    (finding,) = python_env.common_python_findings({"n1": facts, "n2": other, "n3": facts})
    assert finding.hosts == ("n2",)
    assert "path differs between nodes: /somewhere/hpc_train here" in finding.found


# HDFS


def configure(folder: Path, core: str, site: str = "") -> dict[str, str]:
    for name, properties in (("core-site.xml", core), ("hdfs-site.xml", site)):
        items = "".join(
            f"<property><name>{key}</name><value>{value}</value></property>"
            for key, _, value in (line.partition("=") for line in properties.split())
        )
        (folder / name).write_text(f"<?xml version='1.0'?><configuration>{items}</configuration>")
    return {"HADOOP_CONF_DIR": str(folder)}


def test_name_nodes_are_found_in_hadoops_own_files(tmp_path: Path) -> None:
    setup = hdfs.find_setup(configure(tmp_path, "fs.defaultFS=hdfs://nn1:9000"))
    assert setup is not None and setup.name_nodes == (("nn1", 9000),)
    setup = hdfs.find_setup(
        configure(
            tmp_path,
            "fs.defaultFS=hdfs://Cluster hadoop.security.authentication=kerberos",
            "dfs.ha.namenodes.Cluster=a,b dfs.namenode.rpc-address.Cluster.a=nn1:8020 "
            "dfs.namenode.rpc-address.Cluster.b=nn2:8020",
        )
    )
    assert setup is not None and setup.kerberos
    assert setup.name_nodes == (("nn1", 8020), ("nn2", 8020))
    setup = hdfs.find_setup({}, "webhdfs://nn3/data")
    assert setup is not None and setup.name_nodes == (("nn3", 9870),)


def test_nothing_is_said_of_hdfs_where_it_is_not_configured(tmp_path: Path) -> None:
    assert hdfs.find_setup({}) is None
    assert hdfs.find_setup(configure(tmp_path, "fs.defaultFS=file:///")) is None
    assert hdfs.hdfs_findings(None, "n1", ticket=lambda: None) == []
    assert levels(hdfs.hdfs_findings(None, "n1", ticket=lambda: None, verbose=True)) == {"hdfs.none": "note"}
    broken = hdfs.find_setup({"HADOOP_CONF_DIR": str(tmp_path / "no")})
    assert levels(hdfs.hdfs_findings(broken, "n1", ticket=lambda: None)) == {"hdfs.configuration": "warning"}


@pytest.mark.parametrize(
    ("answers", "ticket", "found"),
    [
        ((None, None), True, {"hdfs.reach": "ok", "hdfs.ticket": "ok"}),
        ((None, "Connection refused"), True, {"hdfs.reach": "warning", "hdfs.ticket": "ok"}),
        (("timed out", "timed out"), False, {"hdfs.reach": "error", "hdfs.ticket": "error"}),
        ((None, None), None, {"hdfs.reach": "ok", "hdfs.ticket": "warning"}),
    ],
)
def test_name_nodes_and_tickets(answers: tuple, ticket: bool | None, found: dict[str, str]) -> None:
    """FC-71 for the ticket."""
    setup = hdfs.HdfsSetup("x", "hdfs://c", (("a", 1), ("b", 2)), True)
    said = {("a", 1): answers[0], ("b", 2): answers[1]}
    assert levels(hdfs.hdfs_findings(setup, "n1", connect=said.__getitem__, ticket=lambda: ticket)) == found


def test_a_port_on_which_nobody_listens_is_not_reached() -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = ("127.0.0.1", listener.getsockname()[1])
        assert hdfs.reach(address) == os.strerror(111)
        listener.listen()
        assert hdfs.reach(address) is None
