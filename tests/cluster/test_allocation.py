from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_train.cluster.allocation import (
    allocation_from_job,
    allocation_local,
    gpus_from_scontrol,
    job_without,
    needs_gpus_of_nodes,
)
from hpc_train.cluster.slurm import JobFacts, read_job
from hpc_train.errors import ConfigError, LaunchError
from tests.cluster.recorded import DATA, recorded

RECORDED = recorded()


def job(name: str) -> JobFacts:
    facts = read_job(*RECORDED[name])
    assert facts is not None
    return facts


def plain_job(num_nodes: int = 4, **changes: object) -> JobFacts:
    nodes = tuple(f"n{index}" for index in range(1, num_nodes + 1))
    facts = replace(job("salloc.x"), nodes=nodes, num_nodes=num_nodes, tasks_per_node=(1,) * num_nodes)
    return replace(facts, **changes)  # type: ignore[arg-type]


def test_a_jobs_own_counts_are_taken_as_they_are() -> None:
    found = allocation_from_job(job("batch.0"))
    assert (found.nodes, found.tasks_per_node, found.job_id) == (("n1", "n2"), (2, 2), "22")
    assert found.warnings == ()


def test_a_per_node_list_that_adds_up_to_more_than_the_tasks_is_a_request() -> None:
    """FC-41: 9 tasks, `4(x4)`."""
    found = allocation_from_job(job("batch_9_of_16.0"))
    assert found.tasks_per_node == (3, 2, 2, 2)
    assert "SLURM_NTASKS=9 tasks on 4 nodes" in found.warnings[0] and "16" in found.warnings[0]


def test_one_task_with_two_a_node_asked_says_all_three_numbers() -> None:
    """FC-41: --nodes=1 --ntasks=1 --ntasks-per-node=2"""
    found = allocation_from_job(job("batch_1_of_2.0"))
    assert found.tasks_per_node == (1,)
    assert "SLURM_NTASKS=1 tasks on 1 nodes" in found.warnings[0] and "makes 2" in found.warnings[0]


def test_more_tasks_than_the_per_node_request_allows_are_refused() -> None:
    """FC-41"""
    with pytest.raises(LaunchError, match=r"SLURM_NTASKS=9.*=2 on 4 nodes allows 8"):
        allocation_from_job(plain_job(num_tasks=9, tasks_per_node=None, tasks_per_node_asked=2))


def test_a_count_inherited_from_another_job_is_refused() -> None:
    """FC-24: the submitting step had 4 tasks, the new job has one node and one task."""
    with pytest.raises(LaunchError, match="SLURM_NTASKS=4, but SLURM_TASKS_PER_NODE adds up to 1"):
        allocation_from_job(job("nested.0"))
    assert allocation_from_job(job("nested.0"), num_tasks=1).tasks_per_node == (1,)


def test_excluded_nodes_take_their_ranks_and_gpus_with_them() -> None:
    whole = plain_job(tasks_per_node=(2, 2, 2, 3), num_tasks=9, num_gpus="16", gpus_on_node=4,
                      cpus_per_node=None)  # fmt: skip
    left = job_without(whole, "n[2,4],other")
    found = allocation_from_job(left)
    assert (found.nodes, found.tasks_per_node, found.gpus_per_node) == (("n1", "n3"), (2, 2), (4, 4))
    assert (
        allocation_from_job(
            job_without(plain_job(num_tasks=8, tasks_per_node=None, cpus_per_node=None), "n2")
        ).num_tasks
        == 6
    )
    assert job_without(whole, None) == job_without(whole, "other") == whole


def test_exclusions_that_leave_nothing_or_an_unknown_number_of_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fabric.exclude: The host list 'n\[1-' cannot be read"):
        job_without(plain_job(), "n[1-")
    with pytest.raises(LaunchError, match=r"fabric.exclude=n\[1-4\] leaves none of the job's 4 nodes"):
        job_without(plain_job(), "n[1-4]")
    with pytest.raises(LaunchError, match=r"how many of the 9 ranks go with them is not known. Give their number"):
        job_without(plain_job(num_tasks=9, tasks_per_node=None), "n1")


def test_under_exclusive_the_list_counts_cores_so_gpus_decide() -> None:
    facts = job("batch_exclusive_gpus.0")
    assert (facts.num_tasks, facts.tasks_per_node) == (None, (8, 8))
    assert allocation_from_job(facts).tasks_per_node == (4, 4)
    with pytest.raises(LaunchError, match="SLURM_NTASKS is not set"):
        allocation_from_job(replace(facts, gpus_on_node=None, job_gpus=None))


def test_one_task_a_node_is_taken_where_nothing_else_is_known() -> None:
    assert allocation_from_job(job("salloc.x")).tasks_per_node == (1, 1)


@pytest.mark.parametrize(
    ("num_tasks", "tasks_per_node", "layout"),
    [
        (8, None, (2, 2, 2, 2)),
        (7, None, (2, 2, 2, 1)),
        (4, None, (1, 1, 1, 1)),
        (2, None, (1, 1)),
        (None, 3, (3, 3, 3, 3)),
        (8, 2, (2, 2, 2, 2)),
    ],
)
def test_the_users_numbers_come_first(
    num_tasks: int | None, tasks_per_node: int | None, layout: tuple[int, ...]
) -> None:
    found = allocation_from_job(plain_job(num_tasks=16), num_tasks, tasks_per_node)
    assert found.tasks_per_node == layout
    assert len(found.nodes) == len(found.gpus_per_node) == len(layout)
    assert bool(found.warnings) == (len(layout) < 4)


@pytest.mark.parametrize(("num_tasks", "tasks_per_node"), [(8, 3), (0, None), (None, 0)])
def test_users_numbers_that_contradict_each_other_are_refused(
    num_tasks: int | None, tasks_per_node: int | None
) -> None:
    with pytest.raises(LaunchError):
        allocation_from_job(plain_job(), num_tasks, tasks_per_node)


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({"gpus_per_node": "8"}, (8,) * 4),
        ({"gpus_per_node": "a100:2"}, (2,) * 4),
        ({"gpus_per_node": "a100:2,h100:2"}, (4,) * 4),
        ({"gpus_on_node": 3}, (3,) * 4),
        ({"job_gpus": "0,5"}, (2,) * 4),
        ({"gpus_on_node": 2, "num_gpus": "8"}, (2,) * 4),
        ({}, (0,) * 4),
    ],
)
def test_gpus_of_each_node_come_from_the_request_or_this_node(
    changes: dict[str, object], gpus: tuple[int, ...]
) -> None:
    assert allocation_from_job(plain_job(**changes), num_tasks=32).gpus_per_node == gpus


def test_gpus_asked_for_in_all_are_not_guessed_for_other_nodes() -> None:
    """--gpus=3 on two nodes: two here, one there; `scontrol show job -d` tells."""
    facts = job("batch_total_gpus.0")
    found = allocation_from_job(facts)
    assert found.gpus_per_node == (0, 0) and "SLURM_GPUS=3" in found.warnings[0]
    real = gpus_from_scontrol((DATA / "scontrol_show_job.txt").read_text(), "19", facts.nodes)
    assert real == (2, 1)
    assert allocation_from_job(facts, gpus_per_node=real).tasks_per_node == (2, 1)


@pytest.mark.parametrize(
    ("num_nodes", "changes", "needed"),
    [
        (2, {"num_gpus": "3", "gpus_on_node": 2}, True),
        (2, {"num_gpus": "4", "gpus_on_node": 2}, False),
        (2, {"num_gpus": "a100:4", "job_gpus": "0,1"}, False),
        # Two here of six over three may be 2, 1, 3.
        (3, {"num_gpus": "6", "gpus_on_node": 2}, True),
        # salloc's shell on a login node has none.
        (2, {"num_gpus": "4"}, True),
        (1, {"num_gpus": "4", "gpus_on_node": 3}, False),
        (4, {"gpus_on_node": 2}, False),
        (4, {"num_gpus": "8", "gpus_per_node": "2"}, False),
    ],
)
def test_slurm_is_asked_for_gpus_only_where_the_variables_cannot_tell(
    num_nodes: int, changes: dict[str, object], needed: bool
) -> None:
    assert needs_gpus_of_nodes(plain_job(num_nodes, **changes)) is needed


def test_excluded_nodes_do_not_make_unequal_numbers_look_equal() -> None:
    """2, 1 and 1 GPUs: without n3 the 4 of the job would be 2 on each; n2 alone has not what n1 has."""
    whole = plain_job(3, num_gpus="4", gpus_on_node=2, num_tasks=3, cpus_per_node=None)
    for excluded, gpus in (("n3", (0, 0)), ("n1,n3", (0,))):
        left = job_without(whole, excluded)
        assert needs_gpus_of_nodes(left)
        assert allocation_from_job(left).gpus_per_node == gpus
    assert job_without(job_without(whole, "n3"), "n1").whole == whole


ARRAY = """JobId=21 ArrayJobId=20 ArrayTaskId=1 JobName=x
   NodeList=n[1-2]
   JOB_GRES=gpu:6
     Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:5(IDX:0-4)
     Nodes=n2 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)

JobId=20 ArrayJobId=20 ArrayTaskId=2 JobName=x
   NodeList=n[1-4]
   JOB_GRES=gpu:a100:6,gpu:h100:1
     Nodes=n[1-2] CPU_IDs=0-1 Mem=0 GRES=gpu:a100:2(IDX:0,3)
     Nodes=n3 CPU_IDs=0-1 Mem=0 GRES=gpu:a100:2(IDX:0-1),gpu:h100:1(IDX:2)
     Nodes=n4 CPU_IDs=0-1 Mem=0 GRES=
"""
HETEROGENEOUS = """JobId=30 HetJobId=30 HetJobOffset=0 JobName=x
     Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:3(IDX:0-2)

JobId=31 HetJobId=30 HetJobOffset=1 JobName=x
     Nodes=n2 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)
"""


@pytest.mark.parametrize(
    ("text", "job_id", "nodes", "gpus"),
    [
        (ARRAY, "20", ("n1", "n2", "n3", "n4"), (2, 2, 3, 0)),
        (ARRAY, "20", ("n3", "n1"), (3, 2)),
        (ARRAY, "21", ("n1", "n2"), (5, 1)),
        (ARRAY, "20_1", ("n2",), (1,)),
        (HETEROGENEOUS, "30", ("n1",), (3,)),
        (HETEROGENEOUS, "30+1", ("n2",), (1,)),
    ],
)
def test_gpus_are_those_of_the_job_s_own_record(
    text: str, job_id: str, nodes: tuple[str, ...], gpus: tuple[int, ...]
) -> None:
    assert gpus_from_scontrol(text, job_id, nodes) == gpus


def test_a_job_or_a_node_that_scontrol_does_not_name_is_told() -> None:
    with pytest.raises(LaunchError, match="scontrol does not know job 22"):
        gpus_from_scontrol(ARRAY, "22", ("n1",))
    with pytest.raises(LaunchError, match="scontrol does not say what job 21 has on n3"):
        gpus_from_scontrol(ARRAY, "21", ("n1", "n3"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gpus_per_node": "a100:four"}, "SLURM_GPUS_PER_NODE=a100:four is not a number of GPUs: .* as in 4 or a100:4"),
        ({"gpus_per_node": "a100:2,h100:"}, "'h100:' has ''"),
        ({"gpus_per_node": "9" * 5000}, "is not a number of GPUs"),
        ({"gpus_on_node": 2, "num_gpus": "a100:x"}, "SLURM_GPUS=a100:x is not a number of GPUs"),
    ],
)
def test_a_request_for_gpus_that_is_no_number_is_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(LaunchError, match=named):
        allocation_from_job(plain_job(**changes), num_tasks=4)


def test_gpus_a_node_that_do_not_add_up_to_the_job_s_are_told() -> None:
    found = allocation_from_job(plain_job(gpus_per_node="a100:2", num_gpus="3"), num_tasks=8)
    assert found.gpus_per_node == (2,) * 4
    assert "SLURM_GPUS=3, but SLURM_GPUS_PER_NODE=a100:2 on 4 nodes makes 8" in found.warnings[0]
    assert allocation_from_job(plain_job(gpus_per_node="a100:2", num_gpus="8"), num_tasks=8).warnings == ()


def test_idle_gpus_are_told() -> None:
    found = allocation_from_job(plain_job(gpus_per_node="8"), num_tasks=16)
    assert "n1 (4 ranks, 8 GPUs)" in found.warnings[0]


def test_one_machine_is_an_allocation_of_one_node() -> None:
    found = allocation_local(4, "here")
    assert (found.nodes, found.tasks_per_node, found.job_id, found.num_tasks) == (("here",), (4,), None, 4)
    with pytest.raises(LaunchError):
        allocation_local(0, "here")


def test_a_machine_without_a_job_is_refused_where_it_is_excluded_and_other_nodes_are_told_to_be_none_of_it() -> None:
    for host in ("n7", "n7.centre.example"):
        with pytest.raises(LaunchError, match=r"fabric.exclude=n\[2,7\] names n7.* Start the run in a job"):
            allocation_local(1, host, excluded="n[2,7]")
    (warning,) = allocation_local(1, "here", excluded="n[2,7]").warnings
    assert "has no effect without a job" in warning
    assert allocation_local(1, "here").warnings == ()
    with pytest.raises(ConfigError, match=r"fabric.exclude: The host list"):
        allocation_local(1, "here", excluded="n[2-")
