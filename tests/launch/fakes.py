"""Fake Slurm commands on a temporary PATH: each notes how it was called and answers as it is told."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

_PROGRAM = """\
#!{python} -S
import json, os, sys
name = os.path.basename(sys.argv[0])
folder = os.path.dirname(os.path.abspath(sys.argv[0]))
with open(os.path.join(folder, name + ".answer")) as file:
    answer = json.load(file)
call = {{"argv": sys.argv[1:], "env": dict(os.environ), "input": sys.stdin.read() if answer["reads"] else ""}}
with open(os.path.join(folder, name + ".calls"), "a") as file:
    file.write(json.dumps(call) + "\\n")
sys.stdout.write(answer["out"])
sys.stderr.write(answer["err"])
sys.exit(answer["code"])
"""


class FakeCommands:
    """A folder of fakes; put `path` in front of PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    @property
    def path(self) -> str:
        return f"{self.folder}{os.pathsep}{os.environ['PATH']}"

    def add(self, name: str, out: str = "", *, err: str = "", code: int = 0, reads: bool = False) -> None:
        """Make or change a fake. reads: it takes what is on its standard input."""
        answer = {"out": out, "err": err, "code": code, "reads": reads}
        (self.folder / f"{name}.answer").write_text(json.dumps(answer))
        program = self.folder / name
        program.write_text(_PROGRAM.format(python=sys.executable))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def calls(self, name: str) -> list[dict[str, Any]]:
        """How it was called so far: argv, env and input of each call."""
        path = self.folder / f"{name}.calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
