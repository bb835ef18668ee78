from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from hpc_train.cli import build_parser, main, parse_arguments
from hpc_train.launch.slurm_flags import given_flags

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


def _arguments(parser: argparse.ArgumentParser, command: str = "") -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from _arguments(below, f"{command} {name}".strip())
        else:
            yield f"{command} {'/'.join(action.option_strings) or action.dest}", action


def test_every_argument_of_every_command_refuses_an_empty_value() -> None:
    """An unset variable of a script, which would else mean the default, or the current folder."""
    taking = {name: action for name, action in _arguments(build_parser()) if action.nargs != 0 and not action.choices}
    assert {"trace --out", "data build sources", "ckpt convert target", "submit --exclusive", "run config"} <= set(
        taking
    )
    for name, action in taking.items():
        assert callable(action.type), f"{name} takes any text; give it a type, such as arguments.filled"
        with pytest.raises((argparse.ArgumentTypeError, ValueError)):
            action.type("")


@pytest.mark.parametrize("line", ["report x --out", "run tiny -n 2", "submit tiny --exclusive", "ckpt convert a"])
def test_an_empty_value_is_a_usage_error_that_shows_it(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*line.split(), ""])
    assert ended.value.code == 2
    assert "''" in capsys.readouterr().err


def test_a_flag_whose_value_may_be_left_out_is_given_without_one() -> None:
    options = parse_arguments(["submit", "tiny", "--exclusive", "--requeue", "-N", "2"])
    assert given_flags(options) == {"nodes": "2", "exclusive": "", "requeue": ""}
    assert given_flags(parse_arguments(["shell", "--exclusive=user"])) == {"exclusive": "user"}
