from __future__ import annotations

import pytest

from hpc_train.cli import main

EMPTY = "is empty; give a value, or leave the option out"


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        *(
            (line.split() + [""], EMPTY)
            for line in (
                "run x --run-dir", "run x --mpi", "run x -t", "run", "submit x --run-dir", "submit x --mpi", "submit",
                "exec --run-dir", "exec --mpi", "exec --interface", "status", "status --runs-dir", "logs", "cancel",
                "cancel 7 --runs-dir", "stacks", "stacks 7 --runs-dir", "shell --command", "shell -J", "doctor -p",
                "doctor --runs-dir", "doctor --hdfs", "doctor --mpi", "doctor",
            )
        ),
        *(
            (["stacks", "7", "--timeout", value], "is not a number of seconds above 0")
            for value in ("0", "-1", "nan", "inf", "x", "1e99")
        ),
        (["exec", "--timeout", "nan"], "is not a number of seconds above 0"),
        (["stacks", "7", "--frames", "-1"], "'-1' is not a number of 0 or more"),
        (["stacks", "7", "--rank", "-1"], "'-1' is not a number of 0 or more"),
        (["logs", "7", "--rank", "-1"], "'-1' is not a number of 0 or more"),
        (["submit", "x", "--chain", "0"], "'0' is not a number of 1 or more"),
    ],
    ids=str,
)  # fmt: skip
def test_values_that_mean_nothing_are_refused(
    words: list[str], refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert refusal in capsys.readouterr().err
