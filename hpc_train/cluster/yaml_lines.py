"""YAML with line numbers, so that a fault in a file of thousands of lines can be found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from hpc_train.errors import ConfigError

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class YamlFile:
    """Plain values of a YAML text. lines: the line of each value, by the keys and indices that lead to it."""

    tree: Any
    lines: Mapping[Path, int]
    source: str

    def refuse(self, path: Path, why: str) -> ConfigError:
        """The error for a fault at a value, or at the nearest value above it that is there."""
        while path and path not in self.lines:
            path = path[:-1]
        where = ".".join(str(part) for part in path)
        return ConfigError(f"{self.source}, line {self.lines.get(path, 1)}: {where}{': ' if where else ''}{why}")


def load_yaml_lines(text: str, source: str) -> YamlFile:
    """Read YAML and remember where each value stands.

    Raises:
        ConfigError: not YAML, a key given twice, or a key that is no plain word.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        root = loader.get_single_node()
        lines: dict[Path, int] = {}
        tree = None if root is None else _value(loader, root, (), lines, source)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigError(f"{source}{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    finally:
        loader.dispose()
    return YamlFile(tree, lines, source)


def _value(loader: Any, node: yaml.Node, path: Path, lines: dict[Path, int], source: str) -> Any:
    lines[path] = node.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode):
        return [_value(loader, item, (*path, index), lines, source) for index, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node)
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{source}, line {line}: a key has to be a plain word")
        # As it is written: a node may be called 001, a rack 1e3.
        key = key_node.value
        if key in found:
            raise ConfigError(f"{source}, line {line}: the key {key!r} is given twice")
        found[key] = _value(loader, value_node, (*path, key), lines, source)
        lines[(*path, key)] = line
    return found
