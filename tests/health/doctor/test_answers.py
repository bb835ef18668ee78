from __future__ import annotations

import sys

import pytest

from hpc_train.health.doctor.answers import Answer, ask, complaint


@pytest.mark.parametrize(
    ("err", "said"),
    [
        (
            "slurmstepd: error: execve(): /nope/python: No such file or directory\n"
            "srun: error: n3: task 0: Exited with exit code 2\n",
            "slurmstepd: error: execve(): /nope/python: No such file or directory",
        ),
        (
            "Abort(67): unsupported PMI version PMIx\n"
            "slurmstepd: error: *** STEP 12.1 ON n1 CANCELLED AT 2026-11-30T01:43:01 ***\n"
            "srun: error: n1: task 0: Exited with exit code 16\n",
            "Abort(67): unsupported PMI version PMIx",
        ),
        ("srun: error: Unable to create step: Invalid generic resource\n", "srun: error: Unable to create step: "),
        ("", "exit code 7, without a word"),
    ],
)
def test_the_cause_is_told_rather_than_what_followed_from_it(err: str, said: str) -> None:
    assert complaint(Answer(7, "", err)).startswith(said)


def test_a_program_that_is_missing_hangs_or_fails_raises_nothing() -> None:
    assert ask(["no-such-program-here"]).err == "no-such-program-here is not on PATH"
    hanging = ask([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.2)
    assert hanging.code is None and "gave no answer in 0.2 s" in hanging.err
    assert ask([sys.executable, "-c", "print('x'); raise SystemExit(4)"]) == Answer(4, "x\n", "")
