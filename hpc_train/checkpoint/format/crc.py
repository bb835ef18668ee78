"""CRC-32 of bytes that several ranks read a run of each: from the runs' own checksums, without the bytes.

A CRC is the remainder of the bytes, as a polynomial over two elements, by a fixed one. Bytes behind others multiply
theirs by a power of x, so the CRC of both is a product and a sum. Polynomials are numbers here as zlib has them: the
highest of 32 bits is the coefficient of x^0.
"""

from __future__ import annotations

_DIVISOR = 0xEDB88320
_ONE = 1 << 31
_X = 1 << 30


def joined(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two runs of bytes, one behind the other, from that of each."""
    return _product(_power_of_x(8 * second_bytes), first) ^ second


def _product(one: int, other: int) -> int:
    """one * other modulo the divisor."""
    result = 0
    while one:
        if one & _ONE:
            result ^= other
        one = (one << 1) & 0xFFFFFFFF
        other = (other >> 1) ^ (_DIVISOR if other & 1 else 0)
    return result


def _power_of_x(exponent: int) -> int:
    result, square = _ONE, _X
    while exponent:
        if exponent & 1:
            result = _product(result, square)
        square = _product(square, square)
        exponent >>= 1
    return result
