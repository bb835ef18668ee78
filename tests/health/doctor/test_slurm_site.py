"""Recorded answers of Slurm 22.05, and the same with single values changed."""

from __future__ import annotations

import pytest

from hpc_train.health.doctor.answers import Answer
from hpc_train.health.doctor.findings import Finding
from hpc_train.health.doctor.slurm_site import (
    SlurmFacts,
    config_findings,
    parse_config,
    parse_partitions,
    slurm_findings,
)

CONFIG = """\
Configuration data as of 2026-11-30T01:18:25
GresTypes               = gpu
JobRequeue              = 1
KillWait                = 30 sec
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
ProctrackType           = proctrack/cgroup
TaskPlugin              = task/affinity,task/cgroup

Cgroup Support Configuration:
ConstrainCores          = yes
ConstrainDevices        = yes

Slurmctld(primary) at login is UP
"""
PARTITIONS = """\
PartitionName=main AllowGroups=ALL Default=YES DefaultTime=NONE GraceTime=0 MaxTime=UNLIMITED PreemptMode=OFF State=UP
PartitionName=low AllowGroups=ALL Default=NO DefaultTime=01:00:00 GraceTime=5 MaxTime=08:00:00 PreemptMode=REQUEUE \
State=UP
"""
MPI_LIST = "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions available: pmix_v4\n"


def good(text: str) -> Answer:
    return Answer(0, text, "")


def facts(job: Answer | None = None, **changes: Answer) -> SlurmFacts:
    answers = {
        "version": good("slurm-wlm 22.05.8\n"),
        "ping": good("Slurmctld(primary) at login is UP\n"),
        "config": good(CONFIG),
        "partitions": good(PARTITIONS),
        "mpi": good(MPI_LIST),
        "sbatch": good("x"),
        "salloc": good("x"),
        "squeue": good("x"),
    }
    return SlurmFacts({**answers, **changes}, job)


def by_id(findings: list[Finding], name: str) -> list[Finding]:
    return [finding for finding in findings if finding.id == name]


def test_a_healthy_site_has_no_warning_but_of_preemption() -> None:
    findings = slurm_findings(facts(), {}, in_job=False)
    assert {finding.id for finding in findings if finding.level in ("warning", "error")} == {"slurm.preemption"}
    assert "22.05.8" in by_id(findings, "slurm.version")[0].found
    assert "pmix, none, pmi2, pmix_v4" in by_id(findings, "slurm.version")[0].found


def test_time_to_save_before_preemption_is_told_in_seconds() -> None:
    (finding,) = by_id(slurm_findings(facts(), {}, in_job=False), "slurm.preemption")
    assert "partition low" in finding.found and "35 s to save" in finding.found
    longer = facts(partitions=good(PARTITIONS.replace("GraceTime=5", "GraceTime=300")))
    (finding,) = by_id(slurm_findings(longer, {}, in_job=False), "slurm.preemption")
    assert finding.level == "note" and "330 s to save" in finding.found
    off = facts(config=good(CONFIG.replace("preempt/partition_prio", "preempt/none")))
    assert not by_id(slurm_findings(off, {}, in_job=False), "slurm.preemption")


def test_a_partition_that_cancels_says_that_jobs_do_not_come_back() -> None:
    cancels = facts(partitions=good(PARTITIONS.replace("PreemptMode=REQUEUE", "PreemptMode=CANCEL")))
    (finding,) = by_id(slurm_findings(cancels, {}, in_job=False), "slurm.preemption")
    assert "not put back into the queue" in finding.found


def test_in_a_job_only_its_own_partition_is_spoken_of() -> None:
    job = good("JobId=7 JobState=RUNNING Requeue=1 NodeList=n[1-2]\n")
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_PARTITION": "main"}
    findings = slurm_findings(facts(job), env, in_job=True)
    assert not by_id(findings, "slurm.preemption")
    assert [finding.found for finding in by_id(findings, "slurm.time")] == [
        "partition main: time limit none by default, unlimited at most"
    ]


@pytest.mark.parametrize(
    "answer",
    [
        Answer(1, "", "slurm_load_jobs error: Invalid job id specified\n"),
        good("JobId=7 JobState=COMPLETED Requeue=1\n"),
        good("JobId=7 JobState=TIMEOUT Requeue=1\n"),
    ],
)
def test_variables_of_a_job_that_has_ended_are_an_error(answer: Answer) -> None:
    findings = slurm_findings(facts(answer), {"SLURM_JOB_ID": "7"}, in_job=True)
    (finding,) = by_id(findings, "slurm.stale")
    assert finding.level == "error"
    assert "unset" in finding.cure


def test_a_job_that_may_not_be_requeued_is_told() -> None:
    job = good("JobId=7 JobState=RUNNING Requeue=0 NodeList=n1\n")
    findings = slurm_findings(facts(job), {"SLURM_JOB_ID": "7"}, in_job=True)
    assert "--chain" in by_id(findings, "slurm.requeue")[0].cure
    never = config_findings(parse_config(CONFIG.replace("JobRequeue              = 1", "JobRequeue = 0")))
    assert by_id(never, "slurm.requeue")


def test_a_controller_that_is_away_stops_a_run() -> None:
    away = facts(ping=good("Slurmctld(primary) at login is DOWN\n"))
    (finding,) = by_id(slurm_findings(away, {}, in_job=False), "slurm.controller")
    assert finding.level == "error" and "is DOWN" in finding.found


def test_commands_that_hang_are_no_laptop() -> None:
    hanging = SlurmFacts(dict.fromkeys(facts().answers, Answer(None, "", "srun gave no answer in 10 s")))
    found = slurm_findings(hanging, {}, in_job=False)
    assert [finding.level for finding in by_id(found, "slurm.controller")] == ["error"]


def test_commands_without_a_cluster_are_a_laptop() -> None:
    nowhere = Answer(1, "", "scontrol: fatal: Could not establish a configuration source\n")
    (finding,) = slurm_findings(facts(ping=nowhere), {}, in_job=False)
    assert (finding.id, finding.level) == ("slurm.none", "note")
    missing = Answer(None, "", "scontrol is not on PATH")
    nothing = SlurmFacts(dict.fromkeys(facts().answers, missing))
    assert slurm_findings(nothing, {}, in_job=False)[0].id == "slurm.none"
    (finding,) = slurm_findings(nothing, {"SLURM_JOB_ID": "7"}, in_job=True)
    assert (finding.id, finding.level) == ("slurm.commands", "error")


def test_a_missing_command_is_named() -> None:
    without = facts(salloc=Answer(None, "", "salloc is not on PATH"))
    (finding,) = by_id(slurm_findings(without, {}, in_job=False), "slurm.commands")
    assert "salloc is not on PATH" in finding.found


def test_confinement_of_tasks_is_read_from_the_configuration() -> None:
    (confined,) = by_id(config_findings(parse_config(CONFIG)), "slurm.cgroups")
    assert confined.level == "ok"
    for change in (
        ("ConstrainDevices        = yes", "ConstrainDevices = no"),
        ("task/affinity,task/cgroup", "task/none"),
    ):
        (open_one,) = by_id(config_findings(parse_config(CONFIG.replace(*change))), "slurm.cgroups")
        assert open_one.level == "note" and "CUDA_VISIBLE_DEVICES" in open_one.found


def test_partitions_are_read_with_all_their_fields() -> None:
    main, low = parse_partitions(PARTITIONS)
    assert (main["PartitionName"], main["MaxTime"], low["GraceTime"], low["State"]) == ("main", "UNLIMITED", "5", "UP")
    assert parse_partitions("No partitions in the system\n") == []
