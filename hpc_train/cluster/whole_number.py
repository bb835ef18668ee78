"""Whole numbers in texts from outside: plain digits, and never more of them than are read."""

from __future__ import annotations

LARGEST = 2**63 - 1
"""What the counters of Slurm, the kernel and NumPy hold at most."""


def whole_number(text: str, least: int = 0, most: int = LARGEST) -> int | None:
    """The number that a text of plain digits says; None where it is none, or not from least to most."""
    if not (text.isascii() and text.isdecimal()):
        return None
    digits = text.lstrip("0") or "0"
    # Python refuses to convert thousands of digits, with an error of its own.
    if len(digits) > len(str(most)):
        return None
    number = int(digits)
    return number if least <= number <= most else None
