from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.cli import main
from hpc_train.launch.run_folder import claim, this_process
from hpc_train.launch.submitted_jobs import SubmittedJob, submitted_jobs
from tests.launch.configs import write_config
from tests.launch.fakes import FakeCommands

TWO_BY_TWO = ("-N", "2", "--ntasks-per-node", "2")
BAD_SECONDS = ("", "x", "-5", "60@70", "65536", "6.5", " 6")


@pytest.fixture
def slurm_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    fakes = FakeCommands(tmp_path / "bin")
    fakes.add("sbatch", "4711\n", reads=True)
    fakes.add("squeue", "")
    monkeypatch.setenv("PATH", fakes.path)
    monkeypatch.delenv("HPC_TRAIN_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    return fakes


def test_a_submission_gives_sbatch_the_script_and_makes_the_same_folder_as_the_job_would(
    tmp_path: Path, slurm_fakes: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    assert main(["submit", str(config), "train.steps=5", *TWO_BY_TWO, "--", "--nice=5"]) == 0
    call = slurm_fakes.calls("sbatch")[0]
    folder = tmp_path / "runs" / "little" / "4711"
    assert call["argv"] == ["--parsable", "--nice=5"]
    assert capsys.readouterr().out == f"submitted job 4711, run folder {folder}\n"
    assert (folder / "submit.sh").read_text() == call["input"]
    assert "#SBATCH --ntasks-per-node=2" in call["input"]
    assert (folder / "config.yaml").read_text() == (folder / "config.request.yaml").read_text()
    assert "steps: 5" in (folder / "config.yaml").read_text()
    assert json.loads((folder / "plan.request.json").read_text())["axes"] == {"pp": 1, "dp": 4, "cp": 1, "tp": 1}
    assert [path.name for path in folder.parent.iterdir()] == ["4711"]


def test_what_ties_the_environment_to_a_running_job_is_not_passed_to_sbatch(
    tmp_path: Path, slurm_fakes: FakeCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FC-24"""
    inherited = {
        "SLURM_JOB_ID": "3", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_CPU_BIND": "mask_cpu:0x1",
        "SLURM_CPUS_PER_TASK": "1", "SLURM_MEM_PER_CPU": "100", "SBATCH_TIMELIMIT": "1", "PMI_RANK": "0",
        "PMIX_RANK": "0", "SLURM_NTASKS": "9",
    }  # fmt: skip
    for name, value in {**inherited, "SLURM_CONF": "/etc/slurm/slurm.conf", "MY_SETTING": "kept"}.items():
        monkeypatch.setenv(name, value)
    assert main(["submit", str(write_config(tmp_path)), *TWO_BY_TWO]) == 0
    seen = slurm_fakes.calls("sbatch")[0]["env"]
    assert not set(inherited) & set(seen)
    assert seen["SLURM_CONF"] == "/etc/slurm/slurm.conf"
    assert seen["MY_SETTING"] == "kept"


def test_defaults_that_a_user_keeps_in_variables_become_flags_that_the_script_shows(
    tmp_path: Path, slurm_fakes: FakeCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "physics")
    monkeypatch.setenv("SBATCH_PARTITION", "slow")
    assert main(["submit", str(write_config(tmp_path)), *TWO_BY_TWO, "-p", "fast"]) == 0
    script = slurm_fakes.calls("sbatch")[0]["input"]
    assert "#SBATCH --account=physics" in script
    assert "#SBATCH --partition=fast" in script


def test_parsable_prints_the_job_id_alone(
    tmp_path: Path, slurm_fakes: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm_fakes.add("sbatch", "4711;the-cluster\n", reads=True)
    assert main(["submit", str(write_config(tmp_path)), *TWO_BY_TWO, "--parsable"]) == 0
    assert capsys.readouterr().out == "4711\n"


def test_a_dry_run_prints_the_script_and_touches_nothing(
    tmp_path: Path, slurm_fakes: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", str(write_config(tmp_path)), *TWO_BY_TWO, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --job-name=little\n")
    assert slurm_fakes.calls("sbatch") == []
    assert not (tmp_path / "runs").exists()


def test_an_array_gets_a_folder_a_task_which_only_the_tasks_can_make(
    tmp_path: Path, slurm_fakes: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", str(write_config(tmp_path)), "-n", "4", "--array=0-3"]) == 0
    assert "slurm-%A_%a.out" in slurm_fakes.calls("sbatch")[0]["input"]
    assert "4711_TASK for each task" in capsys.readouterr().out
    assert list((tmp_path / "runs" / "little").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "directive", "policy"),
    [
        ((), ["#SBATCH --requeue"], "interrupted"),
        (("launch.requeue=failed",), ["#SBATCH --requeue"], "failed"),
        (("--requeue",), ["#SBATCH --requeue"], "interrupted"),
        (("--no-requeue",), ["#SBATCH --no-requeue"], "interrupted"),
        (("launch.requeue=never",), [], "never"),
        (("--chain", "2"), [], "chain"),
    ],
)
def test_a_job_may_be_requeued_unless_that_is_not_wanted(
    words: tuple[str, ...], directive: list[str], policy: str, tmp_path: Path, slurm_fakes: FakeCommands
) -> None:
    assert main(["submit", str(write_config(tmp_path)), "-n", "4", *words]) == 0
    for call in slurm_fakes.calls("sbatch"):
        assert [line for line in call["input"].splitlines() if line.endswith("requeue")] == directive
        assert f"\nHPC_TRAIN_REQUEUE={policy}\n" in call["input"]


@pytest.mark.parametrize("signal", ["USR2@60", "B:USR2@60", "B:SIGUSR2", "12@60", "TERM@60", "RB:USR2@60"])
def test_a_warning_signal_that_the_ranks_understand_is_taken(
    signal: str, tmp_path: Path, slurm_fakes: FakeCommands
) -> None:
    assert main(["submit", str(write_config(tmp_path)), "-n", "4", f"--signal={signal}"]) == 0
    assert f"#SBATCH --signal={signal}\n" in slurm_fakes.calls("sbatch")[0]["input"]


def test_a_chain_is_jobs_of_one_name_in_the_folder_of_the_first(tmp_path: Path, slurm_fakes: FakeCommands) -> None:
    assert main(["submit", str(write_config(tmp_path)), "-n", "4", "-d", "afterok:1", "--chain", "3"]) == 0
    scripts = [call["input"] for call in slurm_fakes.calls("sbatch")]
    names = {line for script in scripts for line in script.splitlines() if "--job-name" in line}
    assert len(names) == 1
    assert "#SBATCH --dependency=afterok:1\n" in scripts[0]
    for later in scripts[1:]:
        assert "#SBATCH --dependency=afterok:1,singleton\n" in later
        assert f"run_dir={tmp_path}/runs/little/4711\n" in later


@pytest.mark.parametrize(
    ("words", "names"), [((), "little"), (("-J", "mine"), "mine"), (("-J", "mine", "--", "-Jtheirs"), "theirs")]
)
def test_the_jobs_of_a_folder_that_has_not_their_number_are_noted_in_it(
    words: tuple[str, ...], names: str, tmp_path: Path, slurm_fakes: FakeCommands
) -> None:
    for job in ("4711", "4712"):
        slurm_fakes.add("sbatch", f"{job}\n", reads=True)
        assert main(["submit", str(write_config(tmp_path)), "-n", "4", "--run-dir", "mine", *words]) == 0
    assert submitted_jobs(tmp_path / "mine") == [SubmittedJob(job, names) for job in ("4711", "4712")]
    assert main(["submit", str(write_config(tmp_path)), "-n", "4", *words]) == 0
    assert submitted_jobs(tmp_path / "runs/little/4712") == []


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "number of ranks is not given"),
        (("-n", "3"), 2, "3"),
        (("-n", "4", "--chain", "2", "--array=0-1"), 2, "exclude each other"),
        (("-n", "4", "--chain", "2", "--", "-a0-1"), 2, "exclude each other"),
        (("-n", "4", "--chain", "2", "--requeue"), 2, "--chain and --requeue exclude each other"),
        (("-n", "4", "--run-dir", "mine", "--array=0-1"), 2, "--run-dir and --array exclude each other"),
        (("-n", "4", "--follow", "--dry-run", "--array=0-1"), 2, "--follow and --array exclude each other"),
        (("-n", "4", "train.step=1"), 2, "did you mean steps"),
        (("-n", "4", "data.train=[{prefix: nowhere/corpus}]"), 4, "nowhere/corpus.idx: no such file"),
        (("-n", "4", "parallel.dp=8"), 2, "4 missing"),
        (("-n", "4", "--signal=B:USR1@60"), 2, "Write --signal=B:USR2@SECONDS"),
        (("-n", "4", "--signal=10"), 2, "Write --signal=USR2@SECONDS"),
        (("-n", "4", "--signal=NOSUCH@60"), 2, "names no signal"),
        *((("-n", "4", f"--signal=USR2@{end}"), 2, "Write --signal=USR2@SECONDS") for end in BAD_SECONDS),
        (("-n", "4", "--signal=X:USR2@60"), 2, "before the colon stands B, R or both"),
    ],
)
def test_what_cannot_work_is_refused_before_sbatch(
    words: tuple[str, ...],
    code: int,
    message: str,
    tmp_path: Path,
    slurm_fakes: FakeCommands,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["submit", str(write_config(tmp_path)), *words]) == code
    assert message in capsys.readouterr().err
    assert slurm_fakes.calls("sbatch") == []


@pytest.mark.parametrize("words", [("--signal=USR1@60",), ("--signal", "USR1@60"), ("--signal=USR2@",)])
def test_a_signal_behind_dashes_is_the_user_s_own_and_warned_of(
    words: tuple[str, ...], tmp_path: Path, slurm_fakes: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", str(write_config(tmp_path)), "-n", "4", "--", *words]) == 0
    assert "warning: passed on to sbatch as it is, though --signal=" in capsys.readouterr().err
    assert slurm_fakes.calls("sbatch")[0]["argv"] == ["--parsable", *words]


def test_a_folder_of_the_environment_and_an_array_exclude_each_other_too(
    tmp_path: Path, slurm_fakes: FakeCommands, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPC_TRAIN_RUN_DIR", str(tmp_path / "mine"))
    assert main(["submit", str(write_config(tmp_path)), "-n", "4", "--array=0-1"]) == 2
    assert f"HPC_TRAIN_RUN_DIR={tmp_path}/mine and --array exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("afile", "a file of that name is in the way"),
        ("dangling", "a file of that name is in the way"),
        ("afile/below", "/afile: File exists"),
        ("/proc/xx", "the run folder /proc/xx cannot be made"),
    ],
)
@pytest.mark.parametrize("via", ["sbatch", "submitit"])
def test_a_run_folder_that_cannot_be_made_is_refused_before_sbatch(
    folder: str, words: str, via: str, tmp_path: Path, slurm_fakes: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    (tmp_path / "afile").write_text("mine\n")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(tmp_path.iterdir())
    assert main(["submit", str(config), "-n", "4", "--run-dir", folder, "--via", via]) == 2
    assert words in capsys.readouterr().err
    assert slurm_fakes.calls("sbatch") == []
    assert sorted(path for path in tmp_path.iterdir() if path.name != "runs") == before


def test_a_file_system_that_takes_no_files_is_noticed_before_sbatch(tmp_path: Path, slurm_fakes: FakeCommands) -> None:
    """A limit on the size of files stands for one that is full."""
    config = write_config(tmp_path)
    words = [sys.executable, "-m", "hpc_train", "submit", str(config), "-n", "4"]
    limited = ["bash", "-c", 'ulimit -f 0; "$@"', "-", *words]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"a run folder in {tmp_path}/runs/little cannot be made: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert slurm_fakes.calls("sbatch") == []
    assert list((tmp_path / "runs/little").iterdir()) == []


@pytest.mark.parametrize("via", ["sbatch", "submitit"])
def test_what_goes_wrong_after_sbatch_names_the_job_that_waits(
    via: str, tmp_path: Path, slurm_fakes: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    (tmp_path / "runs" / "little").mkdir(parents=True)
    (tmp_path / "runs" / "little" / "4711").write_text("in the way\n")
    assert main(["submit", str(config), "-n", "4", "--via", via]) == 3
    error = capsys.readouterr().err
    assert f"{tmp_path}/runs/little/4711: Not a directory" in error
    assert "Submitted before this: job 4711, and `scancel 4711` ends that" in error
    assert not list((tmp_path / "runs" / "little").glob("*.new.*"))


def test_a_chain_that_slurm_takes_only_a_part_of_names_that_part(
    tmp_path: Path, slurm_fakes: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    program = slurm_fakes.folder / "sbatch"
    program.write_text(
        "#!/bin/bash\ngrep -q singleton && { echo QOSMaxSubmitJobPerUserLimit >&2; exit 1; }\necho 4711\n"
    )
    assert main(["submit", str(write_config(tmp_path)), "-n", "4", "--chain", "3"]) == 3
    error = capsys.readouterr().err
    assert "QOSMaxSubmitJobPerUserLimit" in error
    assert "Submitted before this: job 4711" in error


def test_sbatch_s_own_words_are_shown_when_it_refuses(
    tmp_path: Path, slurm_fakes: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm_fakes.add("sbatch", err="sbatch: error: invalid partition specified: gold\n", code=1, reads=True)
    assert main(["submit", str(write_config(tmp_path)), "-n", "4", "-p", "gold"]) == 3
    assert "invalid partition specified: gold" in capsys.readouterr().err


def test_without_slurm_submit_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", str(write_config(tmp_path)), "-n", "4"]) == 3
    assert "sbatch is not on PATH" in capsys.readouterr().err


def test_a_folder_in_use_is_refused_unless_the_job_waits_for_its_turn(
    tmp_path: Path, slurm_fakes: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    slurm_fakes.add("squeue", "12|RUNNING|little|1:00|1:00:00|n5\n")
    claim(folder, dataclasses.replace(this_process("n5", "12"), pid=1), lambda job: None)
    words = ["submit", str(write_config(tmp_path)), "-n", "4", "--run-dir", str(folder)]
    assert main(words) == 2
    assert "--dependency=afterany:12" in capsys.readouterr().err
    assert main([*words, "-d", "afterany:12"]) == 0


def test_a_job_that_was_quicker_keeps_its_folder(tmp_path: Path, slurm_fakes: FakeCommands) -> None:
    """FC-21"""
    folder = tmp_path / "runs" / "little" / "4711"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "job.log").write_text("already at work\n")
    assert main(["submit", str(write_config(tmp_path)), "-n", "4"]) == 0
    assert [path.name for path in folder.iterdir()] == ["logs"]
    assert [path.name for path in folder.parent.iterdir()] == ["4711"]


def test_the_script_of_a_submission_runs_with_the_interpreter_of_the_submission(
    tmp_path: Path, slurm_fakes: FakeCommands
) -> None:
    assert main(["submit", str(write_config(tmp_path)), "-n", "4"]) == 0
    script = slurm_fakes.calls("sbatch")[0]["input"]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert f"hpc_train_run {sys.executable} -m hpc_train run" in script
