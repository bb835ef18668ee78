"""Values as opcodes of a pickle of protocol 2, for pickles of objects whose classes are not imported."""

from __future__ import annotations

import pickle
import struct


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def integer(value: int) -> bytes:
    return pickle.dumps(value, protocol=2)[2:-1]


def integers(values: tuple[int, ...]) -> bytes:
    """A tuple of them."""
    return b"(" + b"".join(map(integer, values)) + b"t"


def named(module: str, name: str) -> bytes:
    """A class or function by where whoever reads the pickle finds it."""
    return f"c{module}\n{name}\n".encode()
