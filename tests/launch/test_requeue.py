"""The generated batch script, run by bash with a stand-in for the driver and fake Slurm commands."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.launch.batch_script import BatchValues, batch_script
from hpc_train.launch.templates import read_template
from tests.launch.fakes import FakeCommands
from tests.launch.test_batch_script import VALUES

# Ends with the code in the file `code`, or, if there is none, with 10 after USR2; what it caught stands in the file
# `caught`. It takes a while to set its handlers, as every Python does, and as long as there is a file `held` at least.
DRIVER = """\
#!{python} -SE
import os, signal, sys, time
here = os.path.dirname(sys.argv[0])
code = os.path.join(here, "code")
if os.path.exists(code):
    sys.exit(int(open(code).read()))
open(os.path.join(here, "started"), "w")
time.sleep(0.6)
while os.path.exists(os.path.join(here, "held")):
    time.sleep(0.02)
caught = []
def catch(number, frame):
    caught.append(signal.Signals(number).name[3:])
    with open(os.path.join(here, "caught"), "a") as file:
        file.write(caught[-1] + "\\n")
for name in ("TERM", "HUP", "INT", "USR1", "USR2"):
    signal.signal(getattr(signal, "SIG" + name), catch)
open(os.path.join(here, "ready"), "w")
end = time.monotonic() + 20
while "USR2" not in caught and time.monotonic() < end:
    time.sleep(0.02)
time.sleep(0.3)
print("saved", flush=True)
sys.exit(10)
"""


class BatchJob:
    """Runs the script as a job would, in a folder whose name has a space."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fakes = FakeCommands(folder / "bin")
        self.fakes.add("squeue", "RUNNING None\n")
        self.fakes.add("scontrol")
        self.driver = folder / "the driver"
        self.driver.write_text(DRIVER.format(python=sys.executable))
        self.driver.chmod(0o755)
        self.values = replace(VALUES, runs_dir=str(folder / "the runs"), python=str(self.driver))

    def start(self, values: BatchValues | None = None, **env: str) -> subprocess.Popen[str]:
        script = self.folder / "slurm_script"
        script.write_text(batch_script(values or self.values))
        settings = {"PATH": self.fakes.path, "SLURM_JOB_ID": "31", "HPC_TRAIN_PATIENCE_S": "0", **env}
        return subprocess.Popen(
            ["bash", str(script)], env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, code: int, values: BatchValues | None = None, **env: str) -> int:
        """The script's own exit code after a driver that ends with `code`."""
        (self.folder / "code").write_text(str(code))
        job = self.start(values, **env)
        job.communicate(timeout=30)
        return job.returncode

    def log(self, name: str = "31") -> str:
        return (self.folder / "the runs" / "llama-7b" / name / "logs" / "job.log").read_text()

    @property
    def requeued(self) -> list[Any]:
        return [call["argv"] for call in self.fakes.calls("scontrol")]

    def caught(self) -> list[str]:
        path = self.folder / "caught"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def job(tmp_path: Path) -> BatchJob:
    folder = tmp_path / "it's here"
    folder.mkdir()
    return BatchJob(folder)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


@pytest.mark.parametrize("name", ["USR2", "USR1", "HUP"])
def test_a_signal_to_the_shell_reaches_the_driver_and_the_shell_waits_for_its_end(job: BatchJob, name: str) -> None:
    """FC-27"""
    running = job.start()
    wait_for(job.folder / "ready")
    running.send_signal(signal.Signals[f"SIG{name}"])
    if name != "USR2":
        wait_for(job.folder / "caught")
        running.send_signal(signal.SIGUSR2)
    running.communicate(timeout=30)
    assert running.returncode == 10
    assert job.caught() == ([name] if name == "USR2" else [name, "USR2"])
    assert "saved" in job.log()
    assert job.requeued == [["requeue", "31"]]


@pytest.mark.parametrize("when", ["before the driver", "while the driver starts"])
def test_a_signal_that_comes_too_early_is_kept_for_the_driver(job: BatchJob, when: str) -> None:
    values = job.values
    if when == "before the driver":
        # A module that takes its time.
        values = replace(values, modules=("slow/1.0",))
        profile = 'module() { : >"$MARK"; sleep 0.5; }; export -f module; exec bash "$0"'
        script = job.folder / "slurm_script"
        script.write_text(batch_script(values))
        mark = job.folder / "loading"
        running = subprocess.Popen(
            ["bash", "-c", profile, str(script)],
            env={"PATH": job.fakes.path, "SLURM_JOB_ID": "31", "MARK": str(mark)},
            stdout=subprocess.PIPE,
        )
        wait_for(mark)
    else:
        running = job.start()
        wait_for(job.folder / "started")
    running.send_signal(signal.SIGUSR2)
    running.communicate(timeout=30)
    assert running.returncode == 10
    assert job.caught() == ["USR2"]


def test_the_script_keeps_the_code_of_a_driver_that_a_signal_ended(job: BatchJob) -> None:
    """A second signal while the shell waits, and an end by TERM of a driver that has no handler yet."""
    (job.folder / "held").touch()
    running = job.start()
    wait_for(job.folder / "started")
    running.send_signal(signal.SIGUSR1)
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=30)
    assert running.returncode == 128 + signal.SIGTERM
    assert job.requeued == []


@pytest.mark.parametrize(
    ("code", "policy", "requeues"),
    [
        *((code, policy, 0) for code in (0, 2, 3, 4, 5, 11, 12, 127) for policy in ("interrupted", "failed")),
        (10, "interrupted", 1),
        (10, "failed", 1),
        (10, "never", 0),
        (10, "chain", 0),
        (1, "interrupted", 0),
        (1, "failed", 1),
        (1, "chain", 0),
        (137, "interrupted", 0),
        (137, "failed", 1),
    ],
)
def test_only_what_another_start_can_help_is_requeued(job: BatchJob, code: int, policy: str, requeues: int) -> None:
    """FC-36"""
    assert job.run(code, replace(job.values, requeue=policy)) == code
    assert len(job.requeued) == requeues
    log = job.log()
    assert ("goes back into the queue: restart 1 of 100" in log) == bool(requeues)
    assert ("is not put back into the queue" in log) == (code == 10 and not requeues)


@pytest.mark.parametrize(("restarts", "requeues"), [("2", 1), ("3", 0), ("4", 0)])
def test_requeues_are_bounded_by_the_job_s_own_count(job: BatchJob, restarts: str, requeues: int) -> None:
    """FC-36"""
    values = replace(job.values, max_requeues=3)
    assert job.run(10, values, SLURM_RESTART_COUNT=restarts) == 10
    assert len(job.requeued) == requeues
    if not requeues:
        assert f"it was {restarts} times already, and launch.max_requeues=3. To go on: hpc-train submit" in job.log()


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"SLURM_JOB_ID": "28"}, "28"),
        ({"SLURM_JOB_ID": "30", "SLURM_ARRAY_JOB_ID": "29", "SLURM_ARRAY_TASK_ID": "1"}, "29_1"),
        ({"SLURM_JOB_ID": "29", "SLURM_ARRAY_JOB_ID": "29", "SLURM_ARRAY_TASK_ID": "2"}, "29_2"),
        ({"SLURM_JOB_ID": "29", "SLURM_ARRAY_JOB_ID": "29", "SLURM_ARRAY_TASK_ID": "0"}, "29_0"),
    ],
)
def test_a_task_of_an_array_requeues_itself_alone(job: BatchJob, env: dict[str, str], name: str) -> None:
    """FC-37"""
    assert job.run(10, **env) == 10
    assert job.requeued == [["requeue", name]]
    assert job.fakes.calls("squeue")[0]["argv"] == ["--noheader", "--jobs", name, "--format", "%T %r"]
    assert f"job {name} goes back into the queue" in job.log(name)


@pytest.mark.parametrize(("state", "words"), [("COMPLETING None", "COMPLETING None"), ("", "it has left the queue")])
def test_a_job_that_slurm_ends_is_not_requeued_against_the_user_s_will(job: BatchJob, state: str, words: str) -> None:
    job.fakes.add("squeue", f"{state}\n")
    assert job.run(10) == 10
    assert job.requeued == []
    assert f"Slurm itself is ending it ({words})" in job.log()


def test_a_job_at_its_time_limit_is_requeued_though_slurm_ends_it(job: BatchJob) -> None:
    job.fakes.add("squeue", "COMPLETING TimeLimit\n")
    assert job.run(10) == 10
    assert job.requeued == [["requeue", "31"]]


def test_a_queue_that_gives_no_answer_is_asked_again_and_then_the_job_is_left_alone(job: BatchJob) -> None:
    job.fakes.add("squeue", err="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    assert job.run(10) == 10
    assert len(job.fakes.calls("squeue")) == 2
    assert job.requeued == []
    assert "squeue does not say whether it is being cancelled" in job.log()


def test_a_refusal_is_shown_with_slurm_s_words_and_what_to_do(job: BatchJob) -> None:
    job.fakes.add("scontrol", err="Requested operation is presently disabled for job 31\n", code=1)
    assert job.run(10) == 10
    assert "presently disabled for job 31" in job.log()
    assert "Slurm refused; --no-requeue forbids it" in job.log()
    folder = f"{job.values.runs_dir}/llama-7b/31".replace(" ", "\\ ").replace("'", "\\'")
    assert f"To go on: hpc-train submit ... --run-dir {folder}, or --chain K" in job.log()


def only_these(folder: Path, *names: str) -> str:
    """A PATH without Slurm."""
    folder.mkdir()
    for name in (
        *names,
        "bash",
        "dirname",
        "mkdir",
        "mktemp",
        "cp",
        "cat",
        "chmod",
        "mv",
        "rm",
        "stat",
        "sed",
        "sleep",
    ):
        (folder / name).symlink_to(f"/bin/{name}" if Path(f"/bin/{name}").exists() else f"/usr/bin/{name}")
    return str(folder)


def test_without_scontrol_the_code_is_left_for_a_script_outside(job: BatchJob, tmp_path: Path) -> None:
    assert job.run(10, PATH=only_these(tmp_path / "few")) == 10
    assert "scontrol is not on PATH, as in most containers" in job.log()


OUTSIDE = """\
set -eu
. "$1"
hpc_train_catch
code=0
hpc_train_run sh -c "$2" || code=$?
hpc_train_requeue "$code"
exit "$code"
"""


def outcome(code: int) -> str:
    return json.dumps({"outcome": "interrupted", "exit_code": code, "reason": 'it said "exit_code": 4,'}, indent=1)


@pytest.mark.parametrize(
    ("program", "before", "code"),
    [
        # A container's own code, or none: the file that the driver in it wrote is what counts.
        ('cp "$NEW" "$HPC_TRAIN_RUN_DIR/outcome.json"; exit 255', None, 10),
        ('cp "$NEW" "$HPC_TRAIN_RUN_DIR/outcome.json"; exit 0', 12, 10),
        # An earlier start's file says nothing, so a container that never starts is not requeued for ever.
        ("exit 255", 10, 255),
        ("exit 0", 10, 0),
        ('rm "$HPC_TRAIN_RUN_DIR/outcome.json"; exit 255', 10, 255),
        # A code of ours was not lost.
        ('cp "$NEW" "$HPC_TRAIN_RUN_DIR/outcome.json"; exit 12', None, 12),
    ],
)
def test_a_script_around_a_container_finds_a_lost_code_in_the_run_folder(
    job: BatchJob, tmp_path: Path, program: str, before: int | None, code: int
) -> None:
    functions, run_dir, new = tmp_path / "requeue.sh", tmp_path / "run dir", tmp_path / "new"
    functions.write_text(read_template("requeue.sh"))
    run_dir.mkdir()
    new.write_text(outcome(10))
    if before is not None:
        (run_dir / "outcome.json").write_text(outcome(before))
    done = subprocess.run(
        ["bash", "-c", OUTSIDE, "bash", str(functions), program],
        env={"PATH": job.fakes.path, "SLURM_JOB_ID": "31", "HPC_TRAIN_RUN_DIR": str(run_dir), "NEW": str(new)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert len(job.requeued) == (code == 10)


def test_a_script_of_one_s_own_finds_the_functions_in_the_installation(job: BatchJob) -> None:
    script = OUTSIDE.replace('"$1"', '"$("$1" -m hpc_train.launch.templates requeue.sh)"')
    done = subprocess.run(
        ["bash", "-c", script, "bash", sys.executable, "exit 10"],
        env={"PATH": job.fakes.path, "SLURM_JOB_ID": "31", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (10, "")
    assert job.requeued == [["requeue", "31"]]


def test_a_starter_that_requeues_by_itself_gets_a_file_instead(job: BatchJob, tmp_path: Path) -> None:
    mark = tmp_path / "please requeue"
    assert job.run(12, HPC_TRAIN_REQUEUE_FILE=str(mark)) == 12
    assert not mark.exists()
    assert job.run(10, HPC_TRAIN_REQUEUE_FILE=str(mark)) == 10
    assert mark.exists()
    assert job.requeued == []


def test_a_folder_that_the_script_cannot_make_is_said_and_nothing_is_left_beside_it(job: BatchJob) -> None:
    (job.folder / "afile").write_text("")
    values = replace(job.values, run_dir=str(job.folder / "afile"))
    before = sorted(job.folder.iterdir())
    running = job.start(values, new=str(job.folder / "bin"))
    text, _ = running.communicate(timeout=30)
    assert running.returncode == 3
    assert f"hpc-train: error: {job.folder}/afile cannot be written" in text
    assert sorted(path for path in job.folder.iterdir() if path.name != "slurm_script") == before
