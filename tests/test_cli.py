from __future__ import annotations

import subprocess
import sys

import pytest

from hpc_train.cli import main, split_at_dashes

COMMANDS = ["data", "doctor", "run", "submit", "exec", "status", "logs", "cancel", "ckpt", "report"]


@pytest.mark.parametrize("words", [[], *[[command] for command in COMMANDS]])
def test_help_starts_without_heavy_imports(words: list[str]) -> None:
    heavy = ["pydantic", "numpy", "yaml", "torch", "mpi4py", "asyncio"]
    code = f"""
import sys
from hpc_train.cli import main
try:
    main({[*words, "--help"]!r})
except SystemExit as end:
    assert end.code == 0
found = [name for name in {heavy!r} if name in sys.modules]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["run"],
        ["run", "a.yaml", "--run-di", "x"],
        ["status", "--", "x"],
        ["run", "a.yaml", "-n", "x"],
    ],
)
def test_usage_errors_end_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_errors_are_one_message_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no-such-file.yaml", "-n", "2"]) == 2
    assert capsys.readouterr().err.startswith("hpc-train: error: no-such-file.yaml is neither a file nor a recipe")


def test_a_program_for_exec_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exec", "-n", "2"]) == 2
    assert "no program is given" in capsys.readouterr().err


def test_all_behind_the_first_double_dash_is_left_alone() -> None:
    assert split_at_dashes(["exec", "-n", "2", "--", "a", "--", "-n"]) == (["exec", "-n", "2"], ["a", "--", "-n"])
    assert split_at_dashes(["status"]) == (["status"], None)


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("hpc-train 0.")


def test_a_number_of_ranks_that_is_none_is_a_usage_error() -> None:
    for number in ("0", "-1", "two"):
        with pytest.raises(SystemExit) as caught:
            main(["run", "tiny", "-n", number])
        assert caught.value.code == 2


def test_a_reader_that_has_enough_is_no_failure() -> None:
    command = f"set -o pipefail; {sys.executable} -m hpc_train run tiny --print-config | true; echo code $?"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "code 0\n"
    assert "Traceback" not in done.stderr
