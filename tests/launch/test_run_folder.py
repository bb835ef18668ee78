from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.errors import ConfigError
from hpc_train.launch import run_folder
from hpc_train.launch.run_folder import Claim, Owner, claim, this_process
from tests.launch.configs import write_config


def never_asked(job_id: str) -> bool:
    raise AssertionError(f"Slurm was asked for job {job_id}")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A live process of this machine that is not us."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


def owner_of(child: subprocess.Popen[bytes]) -> Owner:
    ticks = run_folder.start_ticks(child.pid)
    assert ticks is not None
    return Owner("here", child.pid, ticks, None, 0, "a while ago")


def test_a_new_folder_is_claimed_and_released(tmp_path: Path) -> None:
    held = claim(tmp_path / "runs" / "a", this_process("here"), never_asked)
    assert run_folder.read_owner(held.run_dir) == held.owner
    assert (held.run_dir / "logs").is_dir()
    held.release()
    assert run_folder.read_owner(held.run_dir) is None
    assert not [path for path in held.run_dir.iterdir() if path.name.startswith(".")]


def test_a_folder_of_a_live_process_is_refused_by_its_name(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    claim(tmp_path, owner_of(sleeper), never_asked)
    with pytest.raises(ConfigError, match=rf"is alive: process {sleeper.pid} on here.*--run-dir"):
        claim(tmp_path, this_process("here"), never_asked)


def test_a_folder_of_a_process_that_is_gone_is_taken_over(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    owner = owner_of(sleeper)
    claim(tmp_path, owner, never_asked)
    sleeper.kill()
    sleeper.wait()
    held = claim(tmp_path, this_process("here"), never_asked)
    assert held.taken_over == owner


def test_a_process_with_the_same_id_but_another_start_is_another_process(tmp_path: Path) -> None:
    ours = this_process("here")
    stale = dataclasses.replace(ours, start_ticks=ours.start_ticks - 1)
    claim(tmp_path, stale, never_asked)
    assert claim(tmp_path, ours, never_asked).taken_over == stale


@pytest.mark.parametrize(("answer", "words"), [(True, "is alive: Slurm job 7"), (None, "cannot be seen from here")])
def test_a_folder_of_a_job_elsewhere_is_refused_unless_slurm_says_it_is_gone(
    tmp_path: Path, answer: bool | None, words: str
) -> None:
    claim(tmp_path, Owner("n5", 1, 1, "7", 0, "then"), never_asked)
    with pytest.raises(ConfigError, match=words):
        claim(tmp_path, this_process("here", "8"), lambda job: answer)
    assert claim(tmp_path, this_process("here", "8"), lambda job: False).taken_over is not None


def test_a_requeued_job_comes_back_to_its_folder_although_slurm_says_that_it_runs(tmp_path: Path) -> None:
    claim(tmp_path, Owner("n5", 1, 1, "7", 0, "then"), never_asked)
    assert claim(tmp_path, this_process("n6", "7", 1), lambda job: True).taken_over is not None


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_that_claim_at_once_one_wins(tmp_path: Path, stale: bool) -> None:
    """Over and over, as a race is lost only now and then."""
    gone = Owner("here", 999999999, 1, None, 0, "then")
    ours = this_process("here")
    for attempt in range(30):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        if stale:
            (folder / "owner.json").write_text(json.dumps(dataclasses.asdict(gone)))
        outcomes: list[Claim | ConfigError] = []
        start = threading.Barrier(8)

        def compete(number: int, folder: Path, outcomes: list[Claim | ConfigError], start: threading.Barrier) -> None:
            start.wait()
            try:
                outcomes.append(claim(folder, dataclasses.replace(ours, started=f"competitor {number}"), never_asked))
            except ConfigError as error:
                outcomes.append(error)

        threads = [threading.Thread(target=compete, args=(number, folder, outcomes, start)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        won = [outcome for outcome in outcomes if isinstance(outcome, Claim)]
        assert len(outcomes) == 8
        assert len(won) == 1
        assert run_folder.read_owner(folder) == won[0].owner
        assert sorted(path.name for path in folder.iterdir()) == ["logs", "owner.json"]


def test_each_attempt_is_counted_and_the_records_of_the_last_one_are_kept(tmp_path: Path) -> None:
    held = claim(tmp_path, this_process("here"), never_asked)
    assert held.begin_attempt() == 1
    (tmp_path / "failure.json").write_text('{"rank": 3}')
    (tmp_path / "outcome.json").write_text("{}")
    assert held.begin_attempt() == 2
    assert json.loads((tmp_path / "failure-1.json").read_text()) == {"rank": 3}
    assert (tmp_path / "outcome-1.json").exists()
    assert not (tmp_path / "failure.json").exists()
    assert [attempt["attempt"] for attempt in run_folder.read_attempts(tmp_path)] == [1, 2]


def test_a_start_that_does_not_fit_on_the_disk_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for a disk on which a part of a line still fits."""
    program = (
        "import sys; from hpc_train.launch.run_folder import *; from hpc_train.launch.file_errors import room_needed; "
        "from pathlib import Path; import resource\n"
        "held = claim(Path(sys.argv[1]), this_process('here'), None)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))\n"
        "try:\n"
        "    with room_needed(held.run_dir):\n"
        "        for _ in range(5): print(held.begin_attempt())\n"
        "except ConfigError as problem: print(problem)\n"
        "held.release()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    *starts, refusal = done.stdout.splitlines()
    assert "cannot be written: File too large. Make room" in refusal
    assert starts == ["1", "2"]
    assert [attempt["attempt"] for attempt in run_folder.read_attempts(tmp_path)] == [1, 2]
    assert (tmp_path / "attempts.jsonl").read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("kibibytes", ["0", "1"])
def test_a_run_on_a_full_disk_ends_with_words_and_leaves_no_half_written_files(tmp_path: Path, kibibytes: str) -> None:
    """With 0 nothing can be written, with 1 the claim and the first line."""
    words = [sys.executable, "-m", "hpc_train", "run", str(write_config(tmp_path)), "-n", "1"]
    limited = ["bash", "-c", 'ulimit -f "$1"; shift; "$@"', "-", kibibytes, *words]
    done = subprocess.run(limited, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "cannot be written: File too large. Make room" in done.stderr
    (folder,) = (tmp_path / "runs/little").iterdir()
    left = {path.name for path in folder.iterdir()}
    assert not {name for name in left if name.startswith(".")}
    assert left == {"logs"} if kibibytes == "0" else "owner.json" not in left


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path) -> None:
    """FC-21"""
    first, second = (run_folder.new_folder(tmp_path / "runs", "2026-11-29_10-00-00") for _ in range(2))
    assert second.name == "2026-11-29_10-00-00-2" != first.name


def test_a_folder_that_is_there_already_is_no_error(tmp_path: Path) -> None:
    """FC-21"""
    run_folder.make_folder(tmp_path / "a")
    run_folder.make_folder(tmp_path / "a")
    assert (tmp_path / "a" / "logs").is_dir()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        run_folder.make_folder(tmp_path / "file" / "run")
