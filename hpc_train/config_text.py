"""Configurations as text: YAML without its traps, and `key.sub=value` overrides."""

from __future__ import annotations

import re
from typing import Any

import yaml

from hpc_train.errors import ConfigError


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """A mapping from YAML text; a key given twice or anything but a mapping is refused."""
    try:
        tree = _load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expected a mapping of sections (model, data, ...), found {type(tree).__name__}")
    return tree


def _load(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except RecursionError:
        raise yaml.YAMLError("values are nested without end, or nearly so") from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key given twice, tells the line of a date or number that is none, and reads 3e-4 as a number (YAML 1.1,
    which PyYAML follows, calls it text).
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:
            why = f"{str(node.value)[:40]!r} is no value: {str(error).partition(':')[0]}"
            raise yaml.constructor.ConstructorError(None, None, why, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key has to be a word", key_node.start_mark)
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)$"),
    list("-+0123456789"),
)


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Put one `key.sub=value` into a tree of plain values.

    Raises:
        ConfigError: it is not of this form, or leads to nothing that could hold the key.
    """
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError(f"{override!r} is not an override; write key.sub=value, for example train.steps=100")
    try:
        value = _load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value in {override!r} is not valid YAML: {error}") from None
    here: Any = tree
    for part in parts[:-1]:
        here = _descend(here, part, override)
    if isinstance(here, list):
        here[_list_index(here, parts[-1], override)] = value
    else:
        here[parts[-1]] = value


def _descend(here: Any, part: str, override: str) -> Any:
    if isinstance(here, list):
        return here[_list_index(here, part, override)]
    below = here.get(part)
    if below is None:
        below = here[part] = {}
    if not isinstance(below, dict | list):
        raise ConfigError(f"{override!r} goes through {part!r}, which is a value and has no keys below it")
    return below


def _list_index(items: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        raise ConfigError(f"{override!r}: {part!r} is not an index of a list with {len(items)} entries")
    return int(part)
