"""JSON objects of known keys, read with words for what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Kinds = tuple[type | None, ...]
"""What a value may be; None: null."""
_NAMES = {
    dict: "an object",
    list: "a list",
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def parse_object(text: str, kinds: Mapping[str, Kinds] | None = None) -> dict[str, Any]:
    """The object that a text is, with all of some keys, each of a kind that it may be. Others are kept as they are.

    Raises:
        ValueError: it is not, with the key.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"it is {_name(value)}, and not a JSON object")
    for key, allowed in (kinds or {}).items():
        if key not in value:
            raise ValueError(f"it lacks the key {key!r}")
        check_kind(key, value[key], allowed)
    return value


def check_kind(key: str, value: Any, allowed: Kinds) -> None:
    """Refuse a value of another kind; a whole number is a number, true and false are none.

    Raises:
        ValueError: with the key.
    """
    kind = None if value is None else type(value)
    if kind not in allowed and not (kind is int and float in allowed):
        wanted = " or ".join("null" if one is None else _NAMES[one] for one in allowed)
        raise ValueError(f"its key {key!r} is {_name(value)}, and not {wanted}")


def _name(value: Any) -> str:
    return "null" if value is None else _NAMES[type(value)]
