from __future__ import annotations

from itertools import combinations

import pytest

from hpc_train.cluster.process import ProcessFacts
from hpc_train.cluster.situation import (
    ELASTIC_VARIABLES,
    Situation,
    elastic_ranks,
    find_situation,
    rank_hint,
    read_elastic,
)
from hpc_train.errors import LaunchError
from tests.cluster.recorded import recorded
from tests.cluster.test_slurm import step_env

RECORDED = recorded()
SITUATIONS = {
    "step": Situation.STEP_TASK,
    "batch": Situation.BATCH_SHELL,
    "array": Situation.BATCH_SHELL,
    "nested": Situation.BATCH_SHELL,
    "salloc": Situation.ALLOC_SHELL,
    "salloc_interactive_step": Situation.STEP_TASK,
    "pty_shell": Situation.ALLOC_SHELL,
    "pty_inner": Situation.STEP_TASK,
    "mpirun": Situation.MPI_TASK,
}
# The process tree alone tells these.
NEED_PROCESS = {"salloc_in_step.1", "pty_shell.0"}


def _expected(name: str) -> Situation:
    return SITUATIONS[max((key for key in SITUATIONS if name.startswith(key)), key=len)]


@pytest.mark.parametrize("name", RECORDED)
def test_each_recorded_start_is_recognised(name: str) -> None:
    """FC-01, FC-02, FC-16, FC-24"""
    env, process = RECORDED[name]
    assert find_situation(env, process).situation is _expected(name)
    if name not in NEED_PROCESS:
        assert find_situation(env).situation is _expected(name)


def test_an_allocation_with_a_task_count_but_no_rank_is_not_launched() -> None:
    """FC-01"""
    env = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_JOB_NODELIST": "n1"}
    found = find_situation(env)
    assert found.situation is Situation.ALLOC_SHELL
    assert "SLURM_JOB_ID=7 is set but there is no step" in found.reason
    assert rank_hint(env) is None


def test_a_batch_script_is_not_rank_0_of_its_job() -> None:
    """FC-02"""
    env = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
        "SLURM_TASKS_PER_NODE": "1(x2)",
    }
    found = find_situation(env)
    assert found.situation is Situation.BATCH_SHELL
    assert found.reason == "SLURM_JOB_ID=7 is set but there is no step: this is a batch script, so srun is started"
    assert rank_hint(env) is None


def test_a_script_with_only_a_stale_step_id_is_a_batch_script() -> None:
    """FC-24, the last row of the launch table."""
    env = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}
    assert find_situation(env).situation is Situation.BATCH_SHELL


def test_the_shell_of_srun_pty_starts_its_ranks_with_overlap() -> None:
    env, process = RECORDED["pty_shell.0"]
    found = find_situation(env, process)
    assert found.overlap and "srun --pty" in found.reason
    assert not find_situation(*RECORDED["salloc.x"]).overlap


def test_a_machine_without_launchers_is_a_laptop() -> None:
    assert find_situation({}).situation is Situation.LAPTOP
    presets = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500", "WORLD_SIZE": "4"}
    assert find_situation(presets).situation is Situation.LAPTOP


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


def test_torchrun_inside_one_task_a_node_is_elastic() -> None:
    """FC-26: PROCID 1 of 2 tasks, RANK 5 of 8."""
    env = step_env(
        SLURM_PROCID="1",
        SLURM_STEP_NUM_TASKS="2",
        SLURM_STEP_TASKS_PER_NODE="1(x2)",
        **TORCHRUN,
    )
    assert find_situation(env).situation is Situation.ELASTIC
    assert (elastic_ranks(env).rank, elastic_ranks(env).world_size) == (5, 8)


@pytest.mark.parametrize("size", range(6))
def test_each_set_of_elastic_variables_has_one_answer(size: int) -> None:
    """FC-26: RANK or LOCAL_RANK claims, then all five must be there; the others alone are presets."""
    for names in combinations(ELASTIC_VARIABLES, size):
        env = {name: TORCHRUN[name] for name in names}
        if "RANK" not in names and "LOCAL_RANK" not in names:
            assert find_situation(env).situation is Situation.LAPTOP
        elif size == 5:
            assert find_situation(env).situation is Situation.ELASTIC
        else:
            missing = next(name for name in ELASTIC_VARIABLES if name not in names)
            with pytest.raises(LaunchError, match=f"{missing}.* is not"):
                find_situation(env)


def test_elastic_variables_that_repeat_the_step_are_no_launcher_unless_torchruns_own_are_there() -> None:
    """A container hook exports srun's ranks under these names."""
    env = step_env(RANK="2", WORLD_SIZE="3", LOCAL_RANK="0", MASTER_ADDR="n3", MASTER_PORT="29500")
    assert find_situation(env).situation is Situation.STEP_TASK
    assert find_situation({**env, "TORCHELASTIC_RUN_ID": "x"}).situation is Situation.ELASTIC
    assert find_situation({**env, "TORCHELASTIC_USE_AGENT_STORE": "True"}).situation is Situation.ELASTIC


@pytest.mark.parametrize(
    "changes",
    [
        {"RANK": "8"},
        {"RANK": "x"},
        {"LOCAL_RANK": "6"},
        {"MASTER_PORT": "0"},
        {"MASTER_PORT": "70000"},
        {"LOCAL_WORLD_SIZE": "1"},
        {"LOCAL_WORLD_SIZE": "9"},
    ],
)
def test_impossible_elastic_variables_are_refused(changes: dict[str, str]) -> None:
    """FC-26"""
    with pytest.raises(LaunchError):
        read_elastic({**TORCHRUN, **changes})


def test_elastic_ranks_must_be_there_when_asked_for() -> None:
    with pytest.raises(LaunchError, match="torchrun"):
        elastic_ranks({"MASTER_ADDR": "n1"})
    assert elastic_ranks({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}).local_world_size == 4


@pytest.mark.parametrize(
    ("env", "hint"),
    [
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            (1, 4, 1, "mpirun"),
        ),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}, (3, 4, 0, "mpiexec")),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4, None, "mpiexec")),
        (
            {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "1"},
            (1, 2, 1, "mpirun"),
        ),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0"}, (1, 2, 0, "flux run")),
        ({"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1"}, None),
        ({"PMIX_RANK": "1"}, None),
    ],
)
def test_mpi_launchers_are_recognised_and_give_a_rank_to_check(
    env: dict[str, str], hint: tuple[object, ...] | None
) -> None:
    assert find_situation(env).situation is Situation.MPI_TASK
    assert rank_hint(env) == hint


@pytest.mark.parametrize(
    "env",
    [
        {"OMPI_COMM_WORLD_RANK": "1"},
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"PMI_RANK": "1"},
        {"PMI_RANK": "4", "PMI_SIZE": "4"},
        {"PMI_RANK": "x", "PMI_SIZE": "4"},
    ],
)
def test_half_an_mpi_launcher_is_refused(env: dict[str, str]) -> None:
    """FC-26"""
    with pytest.raises(LaunchError):
        find_situation(env)


def test_the_rank_to_check_mpi_against_is_the_steps_under_srun() -> None:
    """FC-09: with pmi2, PMI_RANK is there too, and an MPI of another kind does not see it."""
    env, process = RECORDED["step_pmi2.1"]
    assert "PMI_RANK" in env
    assert rank_hint(env, process) == (1, 3, 1, "srun")


def test_the_rank_to_check_mpi_against_is_mpiruns_where_slurm_runs_its_daemons() -> None:
    env, process = RECORDED["mpirun.0"]
    assert env["SLURM_STEP_NUM_TASKS"] == "2"
    hint = rank_hint(env, process)
    assert hint is not None and (hint.size, hint.source) == (4, "mpirun")


def test_pmi_variables_of_the_step_that_submitted_a_script_are_not_its_own() -> None:
    """FC-24"""
    env, process = RECORDED["nested.0"]
    assert (env["PMI_JOBID"], env["SLURM_JOB_ID"]) == ("33.0", "35")
    assert rank_hint(env, process) is None and rank_hint(env) is None
    pmix = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.6.0", "SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n1"}
    assert find_situation({**pmix, "SLURM_PROCID": "0"}).situation is Situation.BATCH_SHELL


@pytest.mark.parametrize("name", [*step_env()])
def test_a_dropped_variable_gives_one_answer_or_a_refusal_and_never_a_traceback(name: str) -> None:
    """FC-51"""
    for process in (ProcessFacts(), ProcessFacts("7.3"), ProcessFacts("7.batch")):
        try:
            find_situation(step_env(**{name: None}), process)
            rank_hint(step_env(**{name: None}), process)
        except LaunchError as error:
            assert name in str(error)
