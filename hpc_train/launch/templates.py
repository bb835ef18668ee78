"""The readable templates of the slurm/ folder, and filling them in."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_FOLDERS = (_PACKAGE / "_share" / "slurm", _PACKAGE.parent / "slurm")
"""Where the wheel puts the folder, and where a source tree has it."""


def read_template(name: str) -> str:
    """The text of a template by its file name."""
    return template_path(name).read_text(encoding="utf-8")


def template_path(name: str) -> Path:
    """Where a file of the slurm/ folder is."""
    for folder in _FOLDERS:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{name} is in none of {', '.join(map(str, _FOLDERS))}: the installation is incomplete")


def fill_template(text: str, values: Mapping[str, str]) -> str:
    """Replace each @NAME@ by its value; text inside values is never looked at again.

    Raises:
        KeyError: the template has a name without a value.
    """
    return re.sub(r"@([A-Z_]+)@", lambda match: values[match.group(1)], text)


if __name__ == "__main__":
    # For batch scripts of users, which source requeue.sh from the installation.
    print(template_path(sys.argv[1]))
