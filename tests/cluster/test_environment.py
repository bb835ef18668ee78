from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_train.cluster import environment
from hpc_train.cluster.slurm import read_step
from tests.cluster.recorded import recorded
from tests.cluster.test_slurm import step_env


def test_a_jobs_variables_do_not_go_into_a_job_submitted_from_it() -> None:
    """FC-24"""
    kept = {"PATH": "/bin", "HOME": "/home/u", "SLURM_CONF": "/c", "SLURM_CLUSTERS": "big", "NCCL_DEBUG": "INFO"}
    removed = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_CPU_BIND": "x",
        "SLURMD_NODENAME": "n1", "SBATCH_TIMELIMIT": "1", "SRUN_CPUS_PER_TASK": "1", "PMI_RANK": "0",
        "PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0", "OMPI_MCA_ess": "x", "PRTE_MCA_x": "1", "MPI_LOCALRANKID": "0",
        "HPC_TRAIN_RUN_DIR": "/r", "HPC_TRAIN_JOB_KEY": "k", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "n1",
        "TORCHELASTIC_RUN_ID": "x",
    }  # fmt: skip
    assert environment.scrubbed_for_submission({**kept, **removed}) == kept


@pytest.mark.parametrize("name", recorded())
def test_nothing_of_a_recorded_job_survives(name: str) -> None:
    """FC-24"""
    env, _ = recorded()[name]
    assert environment.scrubbed_for_submission(env) == {}


def test_a_login_nodes_own_settings_stay() -> None:
    """A site's Open MPI parameters and a preset master address, where nothing has launched this process."""
    env = {"OMPI_MCA_pml": "ucx", "CUDA_VISIBLE_DEVICES": "0", "MASTER_ADDR": "n1i", "HPC_TRAIN_ROOT": "/opt/hpc_train"}
    assert environment.scrubbed_for_submission(env) == env


def test_a_users_default_account_becomes_a_visible_flag() -> None:
    assert environment.site_defaults({"SBATCH_ACCOUNT": "proj", "SBATCH_QOS": ""}) == {"--account": "proj"}


def test_only_what_is_unset_is_filled_and_each_is_logged() -> None:
    filled, lines = environment.fill_unset({"A": "1", "B": ""}, {"A": "2", "B": "3", "C": "4"})
    assert filled == {"A": "1", "B": "", "C": "4"}
    assert lines == (
        "A=1 (kept; the default would be 2)",
        "B= (kept; the default would be 3)",
        "C=4 (was not set)",
    )


def test_thread_count_follows_slurm_unless_it_is_configured() -> None:
    step = read_step(step_env(SLURM_CPUS_PER_TASK="6"))
    assert environment.training_defaults(step)["OMP_NUM_THREADS"] == "6"
    assert environment.training_defaults(step, num_threads=2)["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in environment.training_defaults(None)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environment.training_defaults(step)
    traced = environment.training_defaults(None, trace_dir=Path("/r/trace"))
    assert traced["TORCH_FR_DUMP_TEMP_FILE"] == "/r/trace/flight_recorder_"


def test_one_rank_with_another_setting_is_found_and_named() -> None:
    """FC-52"""
    usual = {"NCCL_SOCKET_IFNAME": "ib0", "SLURM_PROCID": "0", "PATH": "/bin"}
    ranks = [{**usual, "SLURM_PROCID": str(rank)} for rank in range(3)]
    assert len({environment.relevant_hash(env) for env in ranks}) == 1
    assert environment.differences(ranks) == ()
    del ranks[2]["NCCL_SOCKET_IFNAME"]
    assert len({environment.relevant_hash(env) for env in ranks}) == 2
    assert environment.differences(ranks) == (
        "NCCL_SOCKET_IFNAME differs between ranks: 'ib0' on 2 ranks (0, 1); not set on rank 2",
    )


def test_open_mpi_components_are_named_only_where_nobody_has_chosen_any(tmp_path: Path) -> None:
    assert environment.mpi_cpu_defaults({})["OMPI_MCA_pml"] == "ob1"
    assert environment.mpi_cpu_defaults({"OMPI_MCA_btl": "^openib"}) == {}
    assert environment.mpi_cpu_defaults({}, kind="openmpi5")["OMPI_MCA_btl"] == "self,sm,tcp"
    assert environment.mpi_cpu_defaults({}, kind="openmpi4")["OMPI_MCA_btl"] == "self,vader,tcp"
    assert environment.mpi_cpu_defaults({"OMPI_MCA_mpi_show_mca_params": "1"}) != {}
    files = environment.mpi_param_files({"HOME": str(tmp_path)}, str(tmp_path / "prefix"))
    assert environment.mpi_cpu_defaults({}, files) != {}
    files[1].parent.mkdir()
    files[1].write_text("# pml = cm\n")
    assert environment.mpi_cpu_defaults({}, files) != {}
    files[1].write_text("# site\n pml = ucx\n")
    assert environment.mpi_cpu_defaults({}, files) == {}


def test_the_process_environment_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_VARIABLE", "1")
    env = environment.process_env()
    monkeypatch.delenv("SOME_VARIABLE")
    assert env["SOME_VARIABLE"] == "1" and "SOME_VARIABLE" not in os.environ
