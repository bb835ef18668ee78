"""`submit --via submitit`: what it gives to sbatch, and submitit itself in a job with fake Slurm commands."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cli import main
from hpc_train.errors import ConfigError
from hpc_train.launch.slurm_flags import array_indexes
from tests.launch.configs import write_config
from tests.launch.fakes import FakeCommands
from tests.launch.test_batch_script import AWKWARD
from tests.launch.test_requeue import BatchJob, wait_for

FLAGS = ("-N", "2", "--ntasks-per-node", "2", "--comment", 'it\'s "mine"', "--via", "submitit")


@pytest.fixture
def slurm_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    fakes = FakeCommands(tmp_path / "bin")
    fakes.add("sbatch", "4711;the-cluster\n")
    for name in ("squeue", "srun"):
        fakes.add(name)
    monkeypatch.setenv("PATH", fakes.path)
    monkeypatch.delenv("HPC_TRAIN_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    return fakes


def folder_of(submission: dict[str, Any]) -> Path:
    return Path(submission["argv"][-1]).parent


def test_submitit_gives_sbatch_the_same_flags_and_runs_the_same_script(
    tmp_path: Path, slurm_fakes: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config(tmp_path))
    assert main(["submit", config, *FLAGS, "--parsable", "--", "--nice=5", "--mail-user", "me and you"]) == 0
    assert capsys.readouterr().out == "4711\n"
    call = slurm_fakes.calls("sbatch")[0]
    assert call["argv"][:4] == ["--parsable", "--nice=5", "--mail-user", "me and you"]
    folder = folder_of(call)
    assert folder.parent == tmp_path / "runs" / "little"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "4711_submitted.pkl").is_file()
    sent = (folder / "4711_submission.sh").read_text()
    script = (folder / "submit.sh").read_text()
    assert (folder.parent / "4711" / "submit.sh").read_text() == script

    def flags(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith("#SBATCH")]

    assert flags(sent) == flags(script)
    assert "#SBATCH --comment='it'\"'\"'s \"mine\"'" in flags(sent)
    capsys.readouterr()
    assert main(["submit", config, *FLAGS, "--dry-run", "--", "--nice=5"]) == 0
    assert capsys.readouterr().out == sent.replace(folder.name, "submitit-RANDOM")


def test_what_ties_the_environment_to_a_running_job_is_not_passed_to_sbatch_by_submitit(
    tmp_path: Path, slurm_fakes: FakeCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FC-24"""
    inherited = {"SLURM_JOB_ID": "3", "SLURM_CPU_BIND": "mask_cpu:0x1", "SBATCH_TIMELIMIT": "1", "PMIX_RANK": "0"}
    for name, value in {**inherited, "SLURM_CONF": "/etc/slurm/slurm.conf", "MY_SETTING": "kept"}.items():
        monkeypatch.setenv(name, value)
    assert main(["submit", str(write_config(tmp_path)), *FLAGS]) == 0
    seen = slurm_fakes.calls("sbatch")[0]["env"]
    assert not set(inherited) & set(seen)
    assert (seen["SLURM_CONF"], seen["MY_SETTING"]) == ("/etc/slurm/slurm.conf", "kept")


def test_each_task_of_an_array_finds_a_pickle(tmp_path: Path, slurm_fakes: FakeCommands) -> None:
    assert main(["submit", str(write_config(tmp_path)), *FLAGS, "--array=1,4-8:2%2"]) == 0
    folder = folder_of(slurm_fakes.calls("sbatch")[0])
    pickle = (folder / "4711_submitted.pkl").read_bytes()
    tasks = sorted(path.name for path in folder.glob("4711_[0-9]*_submitted.pkl"))
    assert tasks == [f"4711_{task}_submitted.pkl" for task in (1, 4, 6, 8)]
    assert all((folder / name).read_bytes() == pickle for name in tasks)


def test_a_chain_through_submitit_is_jobs_of_one_run_folder(tmp_path: Path, slurm_fakes: FakeCommands) -> None:
    assert main(["submit", str(write_config(tmp_path)), *FLAGS, "--chain", "2"]) == 0
    first, second = (folder_of(call) for call in slurm_fakes.calls("sbatch"))
    assert first != second
    assert "--dependency" not in (first / "4711_submission.sh").read_text()
    assert "#SBATCH --dependency=singleton\n" in (second / "4711_submission.sh").read_text()
    assert f"run_dir={tmp_path}/runs/little/4711\n" in (second / "submit.sh").read_text()
    assert "HPC_TRAIN_REQUEUE=chain\n" in (second / "submit.sh").read_text()


def test_submitit_is_not_imported_where_it_is_not_used(tmp_path: Path) -> None:
    program = "import sys; from hpc_train.cli import main; main(sys.argv[1:]); sys.exit('submitit' in sys.modules)"
    words = ["submit", str(write_config(tmp_path)), "-n", "4", "--dry-run"]
    subprocess.run([sys.executable, "-c", program, *words], stdout=subprocess.DEVNULL, check=True)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--", "--array=0-1"), 2, "give --array before `--`"),
        (("--array=a-b",), 2, "--array=a-b is no list of indexes"),
        (("launch.runs_dir=100%all",), 2, "submitit takes %a in"),
        ((), 3, "invalid partition specified: gold"),
    ],
)
def test_what_submitit_cannot_do_or_sbatch_refuses_is_said(
    words: tuple[str, ...],
    code: int,
    message: str,
    tmp_path: Path,
    slurm_fakes: FakeCommands,
    capsys: pytest.CaptureFixture[str],
) -> None:
    slurm_fakes.add("sbatch", err="sbatch: error: invalid partition specified: gold\n", code=1)
    assert main(["submit", str(write_config(tmp_path)), *FLAGS, *words]) == code
    assert message in capsys.readouterr().err


def test_without_slurm_submitit_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", str(write_config(tmp_path)), *FLAGS]) == 3
    assert "sbatch is not on PATH" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "indexes"),
    [("0-3", [0, 1, 2, 3]), ("7", [7]), ("1,3,5-9:2%4", [1, 3, 5, 7, 9]), ("0-15:4", [0, 4, 8, 12])],
)
def test_the_indexes_of_an_array_are_read_as_slurm_reads_them(text: str, indexes: list[int]) -> None:
    assert array_indexes(text) == indexes


@pytest.mark.parametrize("text", ["", "1-", "-3", "0-4:0", "1;2", "[0-3]"])
def test_what_is_no_list_of_indexes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no list of indexes"):
        array_indexes(text)


class SubmititJob:
    """A job as submitit left it for Slurm, with the stand-in driver of BatchJob in it."""

    def __init__(self, batch: BatchJob, *, array: bool = False) -> None:
        from hpc_train.launch import via_submitit

        self.batch = batch
        runs = Path(batch.values.runs_dir, "llama-7b")
        runs.mkdir(parents=True)
        flags = {"comment": AWKWARD.flags["comment"], **({"array": "1-2"} if array else {})}
        via_submitit.submit(replace(batch.values, flags=flags), {"PATH": batch.fakes.path})
        (self.folder,) = runs.glob("submitit-*")

    def start(self, code: int | None, **env: str) -> subprocess.Popen[str]:
        if code is not None:
            (self.batch.folder / "code").write_text(str(code))
        settings = {
            "PATH": self.batch.fakes.path,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "SLURM_JOB_ID": "31",
            "HPC_TRAIN_PATIENCE_S": "0",
        }
        return subprocess.Popen(
            ["bash", str(self.folder / "31_submission.sh")],
            env={**settings, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, code: int, **env: str) -> tuple[int, str]:
        job = self.start(code, **env)
        out = job.communicate(timeout=60)[0]
        return job.returncode, out


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BatchJob:
    folder = tmp_path / "it's here"
    folder.mkdir()
    batch = BatchJob(folder)
    batch.fakes.add("sbatch", "31\n")
    batch.fakes.add("srun")
    monkeypatch.setenv("PATH", batch.fakes.path)
    return batch


def test_a_run_that_is_interrupted_by_itself_is_requeued_by_submitit_alone(batch: BatchJob) -> None:
    job = SubmititJob(batch)
    before = (job.folder / "31_submitted.pkl").stat()
    code, out = job.run(10)
    assert batch.requeued == [["requeue", "31"]], out
    assert code == 255
    assert "job 31 goes back into the queue" in batch.log()
    assert not os.path.samestat((job.folder / "31_submitted.pkl").stat(), before)
    # The next start finds the new pickle, and is not told to requeue by what the first one left.
    code, out = job.run(0, SLURM_RESTART_COUNT="1")
    assert code == 0, out
    assert len(batch.requeued) == 1
    assert (job.folder / "31_0_result.pkl").exists()


@pytest.mark.parametrize("name", ["USR2", "TERM"])
def test_a_signal_to_submitit_reaches_the_driver_which_saves_before_the_requeue(batch: BatchJob, name: str) -> None:
    """FC-27: with exec the batch shell is submitit, so this is what --signal=B: does."""
    job = SubmititJob(batch)
    running = job.start(None)
    wait_for(batch.folder / "ready")
    running.send_signal(signal.Signals[f"SIG{name}"])
    if name != "USR2":
        deadline = time.monotonic() + 20
        while batch.caught() != [name]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        running.send_signal(signal.SIGUSR2)
    out = running.communicate(timeout=60)[0]
    assert batch.caught() == ([name] if name == "USR2" else [name, "USR2"]), out
    assert "saved" in batch.log()
    assert batch.requeued == [["requeue", "31"]]


@pytest.mark.parametrize(("task", "job_id"), [("1", "30"), ("2", "31")])
def test_a_task_of_an_array_is_requeued_by_submitit_under_its_own_name(batch: BatchJob, task: str, job_id: str) -> None:
    """FC-37"""
    job = SubmititJob(batch, array=True)
    env = {"SLURM_JOB_ID": job_id, "SLURM_ARRAY_JOB_ID": "31", "SLURM_ARRAY_TASK_ID": task}
    job.run(10, **env)
    assert batch.requeued == [["requeue", f"31_{task}"]]
    assert not (job.folder / f"31_{task}_submitted.pkl").is_symlink()
    assert (job.folder / f"31_{3 - int(task)}_submitted.pkl").is_symlink()


@pytest.mark.parametrize(
    ("code", "env", "state"),
    [
        (12, {}, "RUNNING None"),
        (10, {}, "COMPLETING None"),
    ],
)
def test_what_the_script_does_not_requeue_submitit_does_not_either_and_the_code_is_kept(
    batch: BatchJob, code: int, env: dict[str, str], state: str
) -> None:
    """FC-36"""
    batch.fakes.add("squeue", f"{state}\n")
    job = SubmititJob(batch)
    ended, out = job.run(code, **env)
    assert (ended, batch.requeued) == (code, []), out


def test_a_signal_to_a_run_that_is_not_to_come_back_ends_it_with_the_script_s_code(batch: BatchJob) -> None:
    job = SubmititJob(batch)
    running = job.start(None, SLURM_RESTART_COUNT="100")
    wait_for(batch.folder / "ready")
    running.send_signal(signal.SIGUSR2)
    out = running.communicate(timeout=60)[0]
    assert (running.returncode, batch.requeued) == (10, []), out


@pytest.mark.parametrize("by_signal", [False, True])
def test_a_refusal_to_submitit_is_told_in_the_job_s_log(batch: BatchJob, by_signal: bool) -> None:
    batch.fakes.add("scontrol", err="Requested operation is presently disabled\n", code=1)
    job = SubmititJob(batch)
    running = job.start(None if by_signal else 10)
    if by_signal:
        wait_for(batch.folder / "ready")
        running.send_signal(signal.SIGUSR2)
    out = running.communicate(timeout=60)[0]
    assert running.returncode == 10, out
    assert len(batch.requeued) == 1
    assert "submitit could not put the job back into the queue" in batch.log()
    assert "To go on: hpc-train submit ... --run-dir" in batch.log()
