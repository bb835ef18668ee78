from __future__ import annotations

import argparse

import pytest

from hpc_train.errors import ConfigError
from hpc_train.launch.slurm_flags import FLAGS, SlurmFlag, add_slurm_flags, given_flags, verbatim_value, world_size_of


def parse(*words: str) -> dict[str, str]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_slurm_flags(parser)
    return given_flags(parser.parse_args(words))


def test_short_and_long_forms_and_flags_without_a_value_are_taken() -> None:
    flags = parse("-N", "4", "--ntasks-per-node=8", "-p", "gpu", "--exclusive", "--no-requeue", "-t", "1-0")
    assert flags == {
        "nodes": "4", "ntasks-per-node": "8", "time": "1-0", "partition": "gpu", "exclusive": "", "no-requeue": "",
    }  # fmt: skip
    assert parse("--exclusive=user")["exclusive"] == "user"


@pytest.mark.parametrize("word", ["--ntasks-per-nod=2", "--part=gpu", "--exclus"])
def test_abbreviations_are_refused(word: str) -> None:
    with pytest.raises(SystemExit):
        parse(word)


@pytest.mark.parametrize(
    "flag", [flag for flag in FLAGS if flag.metavar and not flag.optional], ids=lambda flag: flag.long
)
@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_value_is_refused(flag: SlurmFlag, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Written into a script, `#SBATCH --comment` would take the next line for its value."""
    for words in (
        [f"--{flag.long}={value}"],
        [f"--{flag.long}", value],
        *([[flag.short, value]] if flag.short else []),
    ):
        with pytest.raises(SystemExit):
            parse(*words)
        assert "is empty; give a value, or leave the option out" in capsys.readouterr().err


def test_no_flag_is_in_the_table_twice() -> None:
    names = [flag.long for flag in FLAGS] + [flag.short for flag in FLAGS if flag.short]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("flags", "ranks", "added"),
    [
        ({"ntasks": "6"}, 6, {}),
        ({"nodes": "2", "ntasks-per-node": "4"}, 8, {}),
        ({"nodes": "2-4", "ntasks": "6"}, 6, {}),
        ({"nodes": "2-2", "ntasks-per-node": "4"}, 8, {}),
        ({"nodes": "2", "gpus-per-node": "4"}, 8, {"ntasks-per-node": "4"}),
        ({"nodes": "2", "gpus-per-node": "a100:4"}, 8, {"ntasks-per-node": "4"}),
        ({"gpus": "a100:2,h100:6"}, 8, {"ntasks": "8"}),
        ({"nodes": "2", "ntasks-per-node": "4", "gpus-per-node": "8"}, 8, {}),
    ],
)
def test_the_number_of_ranks_follows_from_the_flags(flags: dict[str, str], ranks: int, added: dict[str, str]) -> None:
    assert world_size_of(flags) == (ranks, {**flags, **added})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "number of ranks is not given.*no Slurm flags"),
        ({"nodes": "2"}, "number of ranks is not given.*--nodes=2"),
        ({"nodes": "2-4", "ntasks-per-node": "2"}, "number of ranks is not given"),
        ({"nodes": "2", "ntasks-per-node": "4", "ntasks": "9"}, "--ntasks=9 is not --nodes=2 times.*which is 8"),
        ({"ntasks": "0"}, "--ntasks=0 is not a number"),
        ({"ntasks": "four"}, "--ntasks=four is not a number"),
        ({"nodes": "x", "ntasks": "4"}, "--nodes=x is not a number"),
        ({"nodes": "1", "gpus-per-node": "a100"}, "'a100' is not a number of GPUs"),
    ],
)
def test_flags_that_leave_the_number_of_ranks_open_are_refused(flags: dict[str, str], words: str) -> None:
    """FC-41"""
    with pytest.raises(ConfigError, match=words):
        world_size_of(flags)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ((), None),
        (("--nice=5",), None),
        (("-A", "me"), None),
        (("--array=0-1",), "0-1"),
        (("--array", "0-1"), "0-1"),
        (("-a", "0-1"), "0-1"),
        (("-a0-1", "-a3"), "3"),
        (("--array",), ""),
    ],
)
def test_a_flag_behind_dashes_is_found_in_each_of_its_forms(words: tuple[str, ...], value: str | None) -> None:
    assert verbatim_value(words, "array", "-a") == value
