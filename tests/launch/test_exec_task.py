from __future__ import annotations

import socket

import pytest

from hpc_train.cluster.allocation import Allocation
from hpc_train.errors import LaunchError
from hpc_train.launch.exec_task import Place, find_place, find_slot, rank_variables
from hpc_train.launch.rendezvous import Endpoint
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.run import plan_mesh

TABLE = plan_mesh(Mesh.fill(7), Allocation(("n1", "n2", "n3"), (4, 2, 1), (0, 0, 0), "7", "a test")).ranks_tsv()
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "4,2,1",
    "SLURMD_NODENAME": "n2",
}


def test_a_task_finds_itself_by_its_node_and_its_index_there() -> None:
    """FC-04: the local size is that of this node, not of the first."""
    assert find_place(TABLE, "n2", 1) == Place(
        rank=5, host="n2", node_rank=1, local_rank=1, world_size=7, local_world_size=2, num_nodes=3
    )


def test_a_task_that_was_not_planned_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"slot 2 of node n2.*has 2 ranks there"):
        find_place(TABLE, "n2", 2)
    with pytest.raises(LaunchError, match=r"slot 0 of node n9.*the hosts n1, n2, n3"):
        find_place(TABLE, "n9", 0)


def test_the_slot_is_read_from_srun_or_from_mpirun() -> None:
    assert find_slot(STEP) == ("n2", 1)
    mpirun = {
        "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    }  # fmt: skip
    assert find_slot(mpirun) == (socket.gethostname(), 3)
    with pytest.raises(LaunchError, match="neither SLURM_LOCALID nor a local rank"):
        find_slot({})


def test_the_variables_are_those_of_torchrun() -> None:
    variables = rank_variables(find_place(TABLE, "n3", 0), Endpoint("10.0.0.1", 1234))
    assert variables == {
        "RANK": "6", "LOCAL_RANK": "0", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "2",
        "GROUP_RANK": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234",
    }  # fmt: skip
