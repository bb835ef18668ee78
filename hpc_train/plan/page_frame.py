"""What the pages that draw plans have in common: one HTML file each, which needs no network and no other file."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpc_train.plan.table import Section

_FOLDER = Path(__file__).resolve().parent


def framed_page(name: str, title: str, data: Mapping[str, Any], tables: Iterable[Section], notes: Iterable[str]) -> str:
    """A page.

    Args:
        name: Of the files with its controls and its script, NAME.html and NAME.js.
        data: What the script draws.
        tables: Shown beside the drawing, with the notes.
    """
    summary = [{"title": one.title, "header": one.header, "rows": one.rows} for one in tables]
    document = {**data, "summary": summary, "notes": list(notes)}
    # Inside a script element only a closing tag would end the data early.
    text = json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")
    page = _read("page_frame.html").replace("@CONTROLS@\n", _read(f"{name}.html"))
    before, after = page.replace("@SCRIPT@", _read("page_frame.js") + "\n" + _read(f"{name}.js")).split("@DATA@")
    # Title and data come last, since names in them may look like a place to be filled.
    return before.replace("@TITLE@", html.escape(title)) + text + after


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
