from __future__ import annotations

import pytest

from hpc_train.cluster.process import ProcessFacts
from hpc_train.cluster.slurm import JOB_VARIABLES, STEP_VARIABLES, read_job, read_step
from hpc_train.errors import LaunchError
from tests.cluster.recorded import recorded

RECORDED = recorded()


def step_env(**changes: str | None) -> dict[str, str]:
    env: dict[str, str | None] = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-4]",
        "SLURM_STEP_ID": "3",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "n[3-4]",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "SLURMD_NODENAME": "n4",
    }
    return {name: value for name, value in {**env, **changes}.items() if value is not None}


def test_a_step_on_part_of_the_allocation_is_read_from_step_variables_only() -> None:
    """FC-16: SLURM_NODELIST names all four nodes, the step has two."""
    env, process = RECORDED["step_half.0"]
    assert (env["SLURM_NODELIST"], env["SLURM_JOB_NUM_NODES"]) == ("n[1-4]", "4")
    for facts in (process, ProcessFacts()):
        step = read_step(env, facts)
        assert step is not None
        assert (step.nodes, step.num_tasks, step.rank, step.node_name) == (("n3", "n4"), 2, 0, "n3")
        job = read_job(env, facts)
        assert job is not None
        assert (job.num_nodes, job.num_tasks, job.tasks_per_node) == (4, None, None)


def test_rank_0_need_not_be_on_the_first_node_of_the_list() -> None:
    """FC-17"""
    step = read_step(*RECORDED["step_arbitrary.0"])
    assert step is not None
    assert step.nodes == ("n1", "n3")
    assert (step.rank, step.node_id, step.node_name, step.tasks_on_node) == (0, 1, "n3", 2)


def test_the_local_size_is_this_nodes_and_not_the_first_ones() -> None:
    """FC-04: `2,1` on the second node."""
    step = read_step(step_env())
    assert step is not None
    assert (step.tasks_per_node, step.tasks_on_node) == ((2, 1), 1)


@pytest.mark.parametrize("name", ["nested.0", "nested_same.0"])
@pytest.mark.parametrize("with_process", [True, False])
def test_step_variables_inherited_by_a_submitted_script_are_no_step(name: str, with_process: bool) -> None:
    """FC-24, also where /proc cannot be read."""
    env, process = RECORDED[name]
    assert env["SLURM_STEP_ID"] == "0"
    assert read_step(env, process if with_process else ProcessFacts()) is None


def test_a_stale_step_id_alone_is_no_step() -> None:
    env = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}
    assert read_step(env) is None
    assert read_job(env) is not None


def test_an_salloc_shell_inside_a_step_is_no_step_where_the_process_tree_shows_it() -> None:
    env, process = RECORDED["salloc_in_step.1"]
    assert read_step(env, process) is None
    with pytest.raises(LaunchError, match="SLURM_STEP_NODELIST"):
        read_step(env)


@pytest.mark.parametrize("held_by", [None, "7.3"])
@pytest.mark.parametrize("name", STEP_VARIABLES)
def test_a_step_variable_that_is_missing_is_named(name: str, held_by: str | None) -> None:
    """FC-51: dropped in turn, never a traceback; every rank says so rather than take itself for a script."""
    with pytest.raises(LaunchError, match=name):
        read_step(step_env(**{name: None}), ProcessFacts(held_by))


@pytest.mark.parametrize("name", JOB_VARIABLES)
def test_a_job_variable_that_is_missing_is_named(name: str) -> None:
    """FC-51: an ssh session on an allocated node has a part of them."""
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    del env[name]
    with pytest.raises(LaunchError, match=f"{name} is not"):
        read_job(env)


def test_without_any_variable_there_is_no_job_and_no_step() -> None:
    assert read_job({"SLURM_CONF": "/etc/slurm/slurm.conf"}) is None
    assert read_step({"SLURM_CONF": "/etc/slurm/slurm.conf"}) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, "adds up to 3"),
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID=3"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2"),
        ({"SLURM_LOCALID": "1"}, "SLURM_LOCALID=1"),
        ({"SLURMD_NODENAME": "n1"}, "does not name this node"),
        ({"SLURMD_NODENAME": "n3"}, "is not node 1"),
        ({"SLURM_STEP_NUM_NODES": "3"}, "SLURM_STEP_NUM_NODES=3"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x3)"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"SLURM_STEP_NODELIST": "n[3-4"}, "never closed"),
        ({"SLURM_JOB_NODELIST": "n[1-3]"}, "SLURM_JOB_NODELIST"),
        ({"SLURM_STEPID": "2"}, "another step"),
        ({"SLURM_GTIDS": "0,1"}, "SLURM_GTIDS"),
        ({"SLURM_PROCID": "two"}, "whole number"),
        ({"SLURM_STEP_NUM_TASKS": "9" * 5000}, "whole number"),
        ({"SLURM_JOB_ID": "7; rm"}, "not the number of a job"),
        ({"SLURM_HET_SIZE": "2"}, "heterogeneous"),
    ],
)
def test_a_step_whose_variables_contradict_each_other_is_refused(changes: dict[str, str], named: str) -> None:
    with pytest.raises(LaunchError, match=named):
        read_step(step_env(**changes))


def test_a_heterogeneous_job_is_refused() -> None:
    with pytest.raises(LaunchError, match="SLURM_HET_SIZE=2"):
        read_job({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_HET_SIZE": "2"})


def test_a_job_whose_node_count_and_list_differ_is_refused() -> None:
    with pytest.raises(LaunchError, match="names 2 nodes"):
        read_job({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "3"})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"SLURM_JOB_NODELIST": "n1,n[1-2]"}, "names n1 more than once"),
        ({"SLURM_JOB_ID": "7; rm"}, "SLURM_JOB_ID='7; rm' is not the number of a job"),
        ({"SLURM_JOB_ID": "9" * 5000}, "is not the number of a job"),
        ({"SLURM_NTASKS": "9" * 5000}, "SLURM_NTASKS='9+' is not a whole number"),
        ({"SLURM_TASKS_PER_NODE": "9" * 5000}, "SLURM_TASKS_PER_NODE: The count list '9+' cannot be read"),
        ({"SLURM_TASKS_PER_NODE": "2(x" + "9" * 5000 + ")"}, "SLURM_TASKS_PER_NODE: The count list .* cannot be read"),
    ],
)
def test_a_job_whose_variables_make_no_sense_is_refused(changes: dict[str, str], named: str) -> None:
    with pytest.raises(LaunchError, match=named):
        read_job({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", **changes})


@pytest.mark.parametrize("job_id", ["7", "12_3", "12+1"])
def test_the_forms_of_a_job_s_number_are_taken(job_id: str) -> None:
    job = read_job({"SLURM_JOB_ID": job_id, "SLURM_JOB_NODELIST": "n1"})
    assert job is not None and job.job_id == job_id


@pytest.mark.parametrize(
    ("variables", "requeue_id"),
    [
        ({"SLURM_JOB_ID": "31"}, "31"),
        ({"SLURM_JOB_ID": "30", "SLURM_ARRAY_JOB_ID": "29", "SLURM_ARRAY_TASK_ID": "1"}, "29_1"),
        ({"SLURM_JOB_ID": "29", "SLURM_ARRAY_JOB_ID": "29", "SLURM_ARRAY_TASK_ID": "2"}, "29_2"),
    ],
)
def test_an_array_task_requeues_itself_and_not_the_array(variables: dict[str, str], requeue_id: str) -> None:
    """FC-37"""
    job = read_job({"SLURM_JOB_NODELIST": "n1", **variables})
    assert job is not None
    assert job.requeue_id == requeue_id


def test_a_recorded_array_task_requeues_itself() -> None:
    """FC-37"""
    job = read_job(*RECORDED["array.0"])
    assert job is not None
    assert (job.job_id, job.requeue_id) == ("28", "27_1")


def test_the_counts_of_a_batch_script_are_the_jobs() -> None:
    job = read_job(*RECORDED["batch.0"])
    assert job is not None
    assert (job.nodes, job.num_tasks, job.tasks_per_node) == (("n1", "n2"), 4, (2, 2))


def test_the_interactive_step_of_salloc_has_the_counts_of_the_job() -> None:
    job = read_job(*RECORDED["salloc_interactive.0"])
    assert job is not None
    assert (job.num_tasks, job.tasks_per_node) == (2, (1, 1))
    assert read_step(*RECORDED["salloc_interactive.0"]) is None
