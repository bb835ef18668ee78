"""Sizes in words, with as many digits as tell what is asked from what is there."""

from __future__ import annotations


def size_words(num_bytes: float) -> str:
    """`1.50 GiB`, below that `12.3 MiB`, below a tenth of one bytes."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 / 10 else f"{num_bytes:.0f} bytes"


def two_sizes(first: int, second: int) -> tuple[str, str]:
    """Two sizes that are compared: in bytes where rounded words would be the same."""
    words = size_words(first), size_words(second)
    return words if words[0] != words[1] or first == second else (f"{first} bytes", f"{second} bytes")
