"""What is wrong with a configuration, in words: each fault with its dotted key, and the nearest one that is known."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

_WHY_BOUNDED = {
    "train.seed": "the largest number that random generators take",
    "model.num_layers": "more than any model has",
    "model.rope_theta": "a thousand times that of any model",
    "optimizer.lr": "since an update moves each weight by about that much, and weights begin below 1",
}


def explained(items: Sequence[Any], root: type[BaseModel]) -> list[str]:
    """A line for each of pydantic's errors on a `root`."""
    return [_explain(item, root) for item in _root_faults(items)]


def _root_faults(items: Sequence[Any]) -> list[Any]:
    """Leave out that a list is too short where that only means that its entries are wrong."""

    def is_consequence(item: Any) -> bool:
        place = tuple(item["loc"])
        return item["type"] == "too_short" and any(
            len(other["loc"]) > len(place) and tuple(other["loc"][: len(place)]) == place for other in items
        )

    return [item for item in items if not is_consequence(item)]


def _explain(item: Any, root: type[BaseModel]) -> str:
    location = [part for part in item["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
    key = ".".join(str(part) for part in location)
    if item["type"] == "extra_forbidden":
        return f"{key}: unknown key{_nearest(location, root)}"
    if item["type"] == "missing":
        return f"{key}: required, but not given"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "less_than_equal":
        message += f", {_WHY_BOUNDED.get(key, 'what libraries below count sizes to')}"
    return f"{key}: {message} (given: {item['input']!r})" if key and item["type"] != "value_error" else message


def _nearest(location: Sequence[Any], root: type[BaseModel]) -> str:
    section: Any = root
    for part in location[:-1]:
        if isinstance(part, str):
            section = _section_of(section.model_fields[part].annotation)
            if section is None:
                return ""
    known = list(section.model_fields)
    near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known here: {', '.join(known)}"


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _section_of(argument)
        if found is not None:
            return found
    return None
