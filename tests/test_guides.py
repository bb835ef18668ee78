"""The commands of the documentation are commands, and those for a recipe pass all checks before a start."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.cli import parse_arguments
from hpc_train.config_read import load_config, recipe_names
from hpc_train.launch import plan_command, profile_command
from hpc_train.launch.checks import check_sizes
from hpc_train.plan.run import mesh_of

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
PROMPT = re.compile(r"^(?:\(job \d+\) )?\$ ")
COMMAND = re.compile(r"^(?:(?:salloc|sudo)\b[^#|]*? |hpc_train_run )?hpc-train (?=[a-z])(.*)$")


def _lines(page: Path) -> Iterator[str]:
    """What is typed: all lines of a code block, or those behind a prompt where it has some."""
    for block in re.findall(r"^```[a-z]*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines()
        typed = [PROMPT.sub("", line) for line in lines if PROMPT.match(line)]
        yield from typed or lines


def _words(line: str) -> list[str]:
    """Without comments, and up to where the command's output goes."""
    without_substitutions = re.sub(r"\$\((?:[^()']|'[^']*')*\)", "PATHS", line)
    lexer = shlex.shlex(without_substitutions, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    ends = [at for at, word in enumerate(words) if word[0] in "<>|&;"]
    return words[: ends[0]] if ends else words


def _commands() -> list[tuple[str, tuple[str, ...]]]:
    found = [
        (page.name, tuple(_words(match[1])))
        for page in PAGES
        for line in _lines(page)
        if (match := COMMAND.match(line)) is not None
    ]
    return list(dict.fromkeys(found))


COMMANDS = _commands()


def test_the_pages_are_read() -> None:
    """Of each kind of command there are some, also over several lines and behind a prompt."""
    words = [words for _, words in COMMANDS]
    assert {each[0] for each in words} >= {"data", "run", "submit", "plan", "profile", "exec", "shell", "ckpt"}
    assert ("run", "config.yaml", "--debug-rank", "2") in words
    assert any("train.micro_batch_size=1" in each for each in words)


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{page} {' '.join(words)}" for page, words in COMMANDS])
def test_a_command_of_the_documentation_passes_what_is_checked_before_a_start(
    page: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    options = parse_arguments(words)
    if getattr(options, "config", None) not in recipe_names():
        return
    config = load_config(options.config, options.overrides)
    if options.command == "run" and options.ranks is not None:
        check_sizes(config, mesh_of(config, options.ranks))
    elif options.command == "plan":
        assert options.batch is not None, "other plans are made whole by tests of their own"
        monkeypatch.setattr(plan_command, "batch_command", lambda *arguments: 0)
        assert plan_command.plan_command(options, lambda config, step: []) == 0
    elif options.command == "profile":
        started: list[Namespace] = []
        monkeypatch.setattr(profile_command, "exec_command", lambda options: started.append(options) or 0)
        assert profile_command.profile_command(options) == 0
        assert started[0].ranks == 2 * config.parallel.tp
