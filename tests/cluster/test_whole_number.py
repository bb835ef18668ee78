"""Numbers in texts from outside have an end."""

from __future__ import annotations

import pytest

from hpc_train.cluster.whole_number import LARGEST, whole_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("007", 7),
        ("0" * 5000 + "7", 7),
        (str(LARGEST), LARGEST),
        (str(LARGEST + 1), None),
        ("9" * 5000, None),
        ("", None),
        ("-1", None),
        ("+1", None),
        (" 1", None),
        ("1_0", None),
        ("1e3", None),
        ("\u0663", None),
        ("\u00b2", None),
    ],
)
def test_plain_digits_are_read_and_nothing_else(text: str, number: int | None) -> None:
    assert whole_number(text) == number


def test_the_bounds_belong_to_what_is_read() -> None:
    assert [whole_number(text, 2, 10) for text in ("1", "2", "10", "11")] == [None, 2, 10, None]
