"""YAML with line numbers, so that a fault in a file of thousands of lines can be found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from hpc_train.cluster.whole_number import LARGEST
from hpc_train.errors import ConfigError

Path = tuple[str | int, ...]

# assumed: no file of facts is nested deeper; an alias inside of what it names has no end.
_MAX_DEPTH = 64
# assumed: a file in which aliases stand for more values than this for each of its characters is a slip or an attack.
_VALUES_A_CHARACTER = 100
_TOO_DEEP = f"values are nested more than {_MAX_DEPTH} deep, or an alias stands inside of what it names"


@dataclass(frozen=True)
class YamlFile:
    """Plain values of a YAML text. lines: the line of each value, by the keys and indices that lead to it. written: of
    whole numbers, as they stand there.
    """

    tree: Any
    lines: Mapping[Path, int]
    written: Mapping[Path, str]
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
        ConfigError: not YAML, a key given twice, a key that is no plain word, or a number, date or nesting beyond all
            bounds.
    """
    before, nul, _ = text.partition("\0")
    if nul:
        line = before.count("\n") + 1
        raise ConfigError(f"{source}, line {line}: not valid YAML: a NUL byte, which no text has")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        root = loader.get_single_node()
        reading = _Reading(loader, source, _VALUES_A_CHARACTER * len(text))
        tree = None if root is None else reading.value(root, ())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigError(f"{source}{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise ConfigError(f"{source}: {_TOO_DEEP}") from None
    finally:
        loader.dispose()
    return YamlFile(tree, reading.lines, reading.written, source)


@dataclass
class _Reading:
    """most: how many values the file may have."""

    loader: Any
    source: str
    most: int
    lines: dict[Path, int] = field(default_factory=dict)
    written: dict[Path, str] = field(default_factory=dict)

    def value(self, node: yaml.Node, path: Path) -> Any:
        line = self.lines[path] = node.start_mark.line + 1
        where = f"{self.source}, line {line}"
        if len(path) > _MAX_DEPTH:
            raise ConfigError(f"{where}: {_TOO_DEEP}")
        if len(self.lines) > self.most:
            raise ConfigError(f"{where}: aliases stand for more than {self.most} values; write out what is meant")
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        found = _scalar(self.loader, node, where)
        if type(found) is int:
            self.written[path] = node.value
        return found

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{self.source}, line {line}: a key has to be a plain word")
            # As it is written: a node may be called 001, a rack 1e3.
            key = key_node.value
            if key in found:
                raise ConfigError(f"{self.source}, line {line}: the key {key!r} is given twice")
            found[key] = self.value(value_node, (*path, key))
            self.lines[(*path, key)] = line
        return found


def _scalar(loader: Any, node: yaml.Node, where: str) -> Any:
    kind = node.tag.rpartition(":")[2]
    try:
        value = loader.construct_object(node)
    except (ValueError, OverflowError) as error:
        told = f"{str(node.value)[:40]!r} looks like {kind} and is none: {str(error).partition(':')[0]}"
        raise ConfigError(f"{where}: {told}. If it is a name, write it in quotes") from None
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ConfigError(f"{where}: {str(node.value)[:40]!r} is beyond all numbers that are read here")
    return value
