from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.config import LaunchConfig
from hpc_train.launch.stop_times import stop_variables, warning_times
from tests.launch.fakes import FakeCommands

LOW = "PartitionName=low AllowGroups=ALL GraceTime=5 Hidden=NO PreemptMode=REQUEUE State=UP\n"


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    fakes = FakeCommands(tmp_path / "bin")
    monkeypatch.setenv("PATH", fakes.path)
    return fakes


@pytest.mark.parametrize(
    ("flag", "seconds"),
    [("USR2@300", 300.0), ("B:USR2@120", 120.0), ("RB:12@90", 90.0), ("USR2", None), ("TERM@x", None)],
)
def test_the_signal_that_was_asked_for_has_its_warning_time(tmp_path: Path, flag: str, seconds: float | None) -> None:
    (tmp_path / "plan.request.json").write_text(json.dumps({"slurm": {"signal": flag}}))
    assert warning_times({}, tmp_path) == ({} if seconds is None else {f"--signal={flag}": seconds})


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (LOW, {"a preemption in partition low (GraceTime)": 5.0}),
        (LOW.replace("GraceTime=5", "GraceTime=0"), {}),
        (LOW.replace("REQUEUE", "OFF"), {}),
        ("", {}),
    ],
)
def test_a_partition_whose_jobs_can_be_preempted_says_how_long_before(
    tmp_path: Path, fakes: FakeCommands, answer: str, expected: dict[str, float]
) -> None:
    fakes.add("scontrol", answer)
    assert warning_times({"SLURM_JOB_PARTITION": "low"}, tmp_path) == expected


def test_a_site_without_scontrol_gives_no_warning_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert warning_times({"SLURM_JOB_PARTITION": "low"}, tmp_path) == {}


def test_outside_of_a_job_the_end_is_the_user_s_own_limit(tmp_path: Path) -> None:
    variables = stop_variables(LaunchConfig(stop_signal="USR1"), {}, None, tmp_path, 1234.4)
    assert variables == {"HPC_TRAIN_STOP_SIGNAL": "USR1", "HPC_TRAIN_END_TIME": "1234"}
    assert "HPC_TRAIN_END_TIME" not in stop_variables(LaunchConfig(), {}, None, tmp_path, None)
