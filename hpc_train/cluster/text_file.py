"""A text file as people make them: UTF-8, with or without a byte order mark."""

from __future__ import annotations

from pathlib import Path

from hpc_train.errors import ConfigError


def read_text_file(path: Path, what: str = "") -> str:
    """The text of a file. what: goes before its name in errors.

    Raises:
        ConfigError: it cannot be read, or with the line, is no UTF-8.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{what}{path} cannot be read: {error}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        byte = error.object[error.start]
        raise ConfigError(f"{what}{path}, line {line}: not UTF-8: the byte 0x{byte:02x}; save it as UTF-8") from None
