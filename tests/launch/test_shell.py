"""`shell` with a fake salloc that grants a job of this machine, and with a real terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_train.cluster.slurm import read_job
from hpc_train.launch.salloc import _signals_passed_on
from hpc_train.launch.shell import salloc_options
from hpc_train.launch.shell_start import greeting
from tests.launch.configs import write_config
from tests.launch.fakes import FakeCommands

SALLOC = """\
#!/bin/bash
# Notes its options, then runs the command as a job of two nodes.
printf '%s\\n' "$0" > {notes}
env > {notes}.env
while [[ $1 == -* ]]; do printf '%s\\n' "$1" >> {notes}; shift; done
export SLURM_JOB_ID=77 SLURM_JOB_NODELIST=n[1-2] SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=4 SLURM_TASKS_PER_NODE='2(x2)'
# Of a command that a signal ended the real one says 0 as well.
exec {python} -c 'import subprocess, sys; sys.exit(max(0, subprocess.call(sys.argv[1:])))' "$@"
"""


@pytest.fixture
def fake_slurm(tmp_path: Path) -> FakeCommands:
    fake = FakeCommands(tmp_path / "bin")
    fake.add("squeue")
    (fake.folder / "salloc").write_text(SALLOC.format(notes=tmp_path / "salloc.notes", python=sys.executable))
    (fake.folder / "salloc").chmod(0o755)
    return fake


def environment(fake: FakeCommands, home: Path, **more: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SALLOC_", "SBATCH_"))}
    return {**ours, "PATH": fake.path, "HOME": str(home), "TMPDIR": str(home), "SHELL": "/bin/bash", **more}


def shell(env: dict[str, str], *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpc_train", "shell", *words]
    return subprocess.run(command, env=env, input=text, capture_output=True, text=True, timeout=60)


def test_a_command_runs_with_ours_first_on_path_and_its_exit_code_is_passed_on(
    fake_slurm: FakeCommands, tmp_path: Path
) -> None:
    env = environment(
        fake_slurm, tmp_path, SALLOC_PARTITION="debug", SBATCH_ACCOUNT="me", SLURM_NTASKS="99", HPC_TRAIN_RUN_DIR="/old"
    )
    say = 'hpc-train --version; type -p python; echo "job $SLURM_JOB_ID $SLURM_NTASKS run ${HPC_TRAIN_RUN_DIR-none}"'
    done = shell(env, "-N", "2", "-q", "fast", "--exclusive", "--command", f"{say}; exit 7", "--", "--immediate=60")
    assert done.returncode == 7
    version, python, job = done.stdout.splitlines()
    assert version.startswith("hpc-train ")
    assert Path(python).parent == Path(sys.executable).parent
    assert job == "job 77 4 run none"
    noted = (tmp_path / "salloc.notes").read_text().splitlines()[1:]
    assert sorted(noted[:-1]) == ["--account=me", "--exclusive", "--nodes=2", "--partition=debug", "--qos=fast"]
    assert noted[-1] == "--immediate=60"
    assert "SLURM_NTASKS=99" not in (tmp_path / "salloc.notes.env").read_text()
    assert "hpc-train: job 77: 2 nodes (n1, n2), 4 ranks, without a time limit\n" in done.stderr
    assert not list(tmp_path.glob("hpc_train_shell_*"))


def test_lines_from_standard_input_run_in_one_shell(fake_slurm: FakeCommands, tmp_path: Path) -> None:
    done = shell(environment(fake_slurm, tmp_path), "-n4", text="x=5\nfalse\necho x=$x\nexit 3\n")
    assert (done.returncode, done.stdout) == (3, "x=5\n")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("kill -9 $$", 137),
        ("kill -TERM $$", 143),
        ("kill -INT $$", 130),
        ("python -c 'import os; os.kill(os.getpid(), 9)'", 137),
        ("exit 255", 255),
        ("true", 0),
    ],
)
@pytest.mark.parametrize("typed", [True, False])
def test_a_command_that_a_signal_ends_has_a_code_above_128(
    fake_slurm: FakeCommands, tmp_path: Path, line: str, code: int, typed: bool
) -> None:
    """salloc says 0 then, as the fake one does."""
    env = environment(fake_slurm, tmp_path)
    done = shell(env, "-N", "1", "--command", line) if typed else shell(env, "-N", "1", text=line + "\n")
    assert done.returncode == code, done.stderr
    assert not list(tmp_path.glob("hpc_train_s*"))


@pytest.mark.parametrize("code", [1, 255])
@pytest.mark.parametrize("command", ["shell", "doctor"])
def test_a_salloc_that_refuses_gives_a_code_of_ours(
    fake_slurm: FakeCommands, tmp_path: Path, command: str, code: int
) -> None:
    fake_slurm.add("salloc", err="salloc: error: invalid partition specified: gold\n", code=code)
    fake_slurm.add("srun")
    words = [sys.executable, "-m", "hpc_train", command, "-N", "1", "-p", "gold"]
    done = subprocess.run(
        words, env=environment(fake_slurm, tmp_path), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 3
    assert "salloc: error: invalid partition specified: gold\n" in done.stderr
    assert f"hpc-train: error: salloc started nothing and ended with exit code {code}" in done.stderr
    assert not list(tmp_path.glob("hpc_train_salloc_*"))


def test_a_term_while_salloc_waits_is_passed_on_to_it(fake_slurm: FakeCommands, tmp_path: Path) -> None:
    (fake_slurm.folder / "salloc").write_text(
        "#!/bin/bash\ntrap 'echo revoked; exit 1' TERM\necho waiting\nread -r _\n"
    )
    words = [sys.executable, "-m", "hpc_train", "shell", "-N", "1"]
    env = environment(fake_slurm, tmp_path)
    with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None and waiting.stdout.readline() == "waiting\n"
        waiting.terminate()
        assert waiting.stdout.readline() == "revoked\n"
        assert waiting.wait(timeout=20) == 3


def test_a_term_that_comes_before_salloc_is_started_is_passed_on_to_it() -> None:
    """Else this process would end, and salloc wait in the queue for nobody."""
    with _signals_passed_on() as pass_on_to:
        signal.raise_signal(signal.SIGTERM)
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as child:
            pass_on_to(child)
            assert child.wait(timeout=20) == -signal.SIGTERM


def test_modules_of_a_configuration_are_loaded_and_one_that_fails_ends_a_script(
    fake_slurm: FakeCommands, tmp_path: Path
) -> None:
    config = write_config(tmp_path, launch={"modules": ["gcc/12", "a b"]})
    env = environment(fake_slurm, tmp_path)
    env["BASH_FUNC_module%%"] = '() { loaded="$loaded<$2>"; export loaded; }'
    done = shell(env, "-N", "1", "--command", "echo $loaded", str(config))
    assert (done.returncode, done.stdout) == (0, "<gcc/12><a b>\n"), done.stderr
    env["BASH_FUNC_module%%"] = "() { return 1; }"
    done = shell(env, str(config), "-N", "1", "--command", "echo not reached")
    assert (done.returncode, done.stdout) == (3, "")
    assert "the module gcc/12 cannot be loaded" in done.stderr


def test_without_salloc_it_says_what_to_type_instead(tmp_path: Path) -> None:
    env = environment(FakeCommands(tmp_path / "bin"), tmp_path, PATH=str(tmp_path / "bin"))
    done = shell(env, "-N", "1")
    assert done.returncode == 3
    assert "salloc is not on PATH" in done.stderr
    assert "hpc-train run CONFIG -n RANKS" in done.stderr


def test_inside_a_job_it_refuses_and_behind_one_that_has_ended_it_does_not(
    fake_slurm: FakeCommands, tmp_path: Path
) -> None:
    env = environment(fake_slurm, tmp_path, SLURM_JOB_ID="12")
    fake_slurm.add("squeue", "12|RUNNING|x|1:00|2:00|n1\n")
    done = shell(env, "-N", "1", "--command", "true")
    assert done.returncode == 3
    assert "this is inside job 12 already: type `hpc-train run CONFIG` here" in done.stderr
    fake_slurm.add("squeue")
    assert shell(env, "-N", "1", "--command", "true").returncode == 0


@pytest.mark.parametrize("flag", ["--array=1-3", "--requeue"])
def test_flags_that_salloc_does_not_have_are_refused(flag: str, tmp_path: Path) -> None:
    done = shell(environment(FakeCommands(tmp_path / "bin"), tmp_path), flag)
    assert done.returncode == 2
    assert f"unrecognized arguments: {flag}" in done.stderr


def test_a_shell_on_a_terminal_has_the_users_start_file_our_path_and_a_prompt(
    fake_slurm: FakeCommands, tmp_path: Path
) -> None:
    (tmp_path / ".bashrc").write_text("export PATH=/from/bashrc:$PATH\nalias hello='echo my alias'\nPS1='$ '\n")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "hpc_train", "shell", "-N", "2"],
        env=environment(fake_slurm, tmp_path, TERM="dumb"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""
    typed = [b"hello\n", b"echo path=${PATH%%:*}\n", b"exit 5\n"]
    deadline = time.monotonic() + 40
    while process.poll() is None and time.monotonic() < deadline:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                seen += os.read(ours, 4096)
            except OSError:
                break
        if typed and seen.endswith(b"(job 77) $ "):
            os.write(ours, typed.pop(0))
            seen += b"\n"
    os.close(ours)
    text = seen.decode()
    assert process.wait(timeout=10) == 5, text
    assert "my alias" in text
    assert f"path={Path(sys.executable).parent}" in text
    assert "`exit` gives the nodes back" in text


def test_the_greeting_says_until_when_and_who_counts_the_ranks() -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-20]", "SLURM_JOB_NUM_NODES": "20"}
    job = read_job({**env, "SLURM_TASKS_PER_NODE": "8(x20)"})
    assert job is not None
    (line,) = greeting(job, 1_000_000_000, 1_000_000_000 - 3599, is_typed=False)
    assert line.startswith("job 7: 20 nodes (n1, n2, n3, n4, n5, n6, n7, n8 and 12 more), the number of ranks is yours")
    assert line.endswith("in 59 minutes")


def test_what_follows_dashes_comes_behind_our_flags() -> None:
    assert salloc_options({"nodes": "2", "exclusive": ""}, ["--quiet", "-H"]) == [
        "--nodes=2", "--exclusive", "--quiet", "-H",
    ]  # fmt: skip
