"""A configuration from what a user gives, and back: one YAML file, or the name of a recipe, plus `key.sub=value`.

Unknown keys are refused with the nearest known name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from hpc_train.config import Config
from hpc_train.config_faults import explained
from hpc_train.config_text import apply_override, parse_yaml
from hpc_train.errors import ConfigError

RECIPES = Path(__file__).parent / "recipes"


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, or a recipe by its name, and apply `key.sub=value` overrides in their order.

    Raises:
        ConfigError: no such file or recipe, broken YAML, an unknown or missing key, a value that does not fit.
            All faults are listed at once, each with its dotted key.
    """
    text_source, text = _read_source(source)
    tree = parse_yaml(text, text_source)
    for override in overrides:
        apply_override(tree, override)
    return build_config(tree, text_source)


def build_config(tree: Mapping[str, Any], source: str) -> Config:
    """Check a tree of plain values and freeze it; `source` is named in errors."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = explained(error.errors(), Config)
        raise ConfigError(f"{source}: " + "\n  ".join(["the configuration cannot be used:", *lines])) from None


def dump_yaml(config: Config) -> str:
    """The resolved configuration as YAML text that load_config reads back to an equal value."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def recipe_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in RECIPES.glob("*.yaml")))


def _read_source(source: str | Path) -> tuple[str, str]:
    path = Path(source)
    if not path.is_file() and path.suffix == "" and (RECIPES / f"{source}.yaml").is_file():
        path = RECIPES / f"{source}.yaml"
    try:
        return str(path), path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"{source} is neither a file nor a recipe. Recipes: {', '.join(recipe_names()) or 'none'}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} cannot be read: {error}") from None
