"""The manifest is written of what is there as it was laid out, each element once; all else fails the save."""

from __future__ import annotations

import random
import re
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from hpc_train.checkpoint.files.finish import finish
from hpc_train.checkpoint.files.write import Flow, write_boxes
from hpc_train.checkpoint.format.coverage import coverage_fault, first_overlap
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.checkpoint.format.placed import WrittenBox, place_boxes
from hpc_train.checkpoint.stores.location import locate
from hpc_train.errors import CheckpointError
from hpc_train.plan.flat import Box, boxes_of_range


def _write(folder: Path, file: str, boxes: list[Box]) -> list[WrittenBox]:
    placed = place_boxes(file, [("w", (4, 8), "uint8", box) for box in boxes])
    data = [bytes(box.num_elements) for box in boxes]
    return write_boxes(locate(folder) / file, placed, lambda number: memoryview(data[number]), Flow())


def _finish(folder: Path, written: list[WrittenBox]) -> None:
    finish(locate(folder), 3, written, {}, memoryview(b"index"), lambda text: None)


def test_sizes_are_those_of_the_layout(tmp_path: Path) -> None:
    written = _write(tmp_path, "a", [Box((0, 0), (2, 8))]) + _write(tmp_path, "b", [Box((2, 0), (2, 8))])
    _finish(tmp_path, written)
    assert read_manifest(tmp_path).files == {name: (tmp_path / name).stat().st_size for name in (".metadata", "a", "b")}


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_than_was_written_fails_the_save(tmp_path: Path, change: int) -> None:
    """As of a store that shows an old state, or of two that wrote to one name."""
    written = _write(tmp_path, "a", [Box((0, 0), (4, 8))])
    num_bytes = (tmp_path / "a").stat().st_size
    with (tmp_path / "a").open("r+b") as file:
        file.truncate(num_bytes + change)
    with pytest.raises(CheckpointError, match=f"a has {num_bytes + change} bytes, and {num_bytes} were written there"):
        _finish(tmp_path, written)
    assert not (tmp_path / "manifest.json").exists()


def test_a_file_that_is_not_shown_fails_the_save(tmp_path: Path) -> None:
    written = _write(tmp_path, "a", [Box((0, 0), (4, 8))])
    (tmp_path / "a").unlink()
    with pytest.raises(CheckpointError, match="does not show a, which was written there"):
        _finish(tmp_path, written)


def test_pieces_that_overlap_and_leave_a_gap_of_the_same_size_fail_the_save(tmp_path: Path) -> None:
    written = _write(tmp_path, "a", [Box((0, 0), (2, 8))]) + _write(tmp_path, "b", [Box((1, 0), (2, 8))])
    with pytest.raises(
        CheckpointError, match=r"w: pieces of sizes \[2, 8\] at \[0, 0\] and \[2, 8\] at \[1, 0\] overlap"
    ):
        _finish(tmp_path, written)


@pytest.mark.parametrize(
    ("boxes", "fault"),
    [
        ([Box((0, 0), (4, 8))], None),
        ([Box((0, 0), (4, 7))], "hold 28 elements of 32"),
        ([Box((0, 0), (4, 4)), Box((0, 4), (4, 4))], None),
        ([Box((0, 0), (4, 4)), Box((0, 5), (4, 4))], r"not within \[4, 8\]"),
        ([Box((0, 0), (4, 8)), Box((2, 2), (0, 4))], None),  # an empty one
    ],
)
def test_coverage_by_examples(boxes: list[Box], fault: str | None) -> None:
    found = coverage_fault((4, 8), boxes)
    assert found is None if fault is None else re.search(fault, found or "")


def test_one_element_twice() -> None:
    assert coverage_fault((), [Box((), ())]) is None
    assert coverage_fault((), [Box((), ()), Box((), ())]) is not None


def _pinwheel() -> list[Box]:
    """Five boxes that no straight cut separates."""
    return [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]


def test_overlaps_are_found_where_comparing_all_pairs_finds_some() -> None:
    chance = random.Random(3)
    num_overlapping = 0
    for _ in range(400):
        num_dims = chance.randrange(1, 4)
        boxes = [
            Box(
                tuple(chance.randrange(6) for _ in range(num_dims)),
                tuple(chance.randrange(1, 4) for _ in range(num_dims)),
            )
            for _ in range(chance.randrange(1, 6))
        ]
        meet = any(a.intersection(b) is not None for a, b in combinations(boxes, 2))
        found = first_overlap(boxes)
        assert (found is not None) == meet
        assert found is None or found[0].intersection(found[1]) is not None
        num_overlapping += meet
    assert 100 < num_overlapping < 400
    assert first_overlap(_pinwheel()) is None and coverage_fault((3, 3), _pinwheel()) is None
    assert first_overlap([*_pinwheel(), Box((1, 1), (1, 1))]) is not None


def test_the_boxes_of_a_large_mesh_are_separated_by_cuts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 tp ranks have a column block each, in flat ranges over 96 dp ranks: no pair has to be compared."""
    boxes = []
    for tp in range(8):
        count = 1001 * 32
        cuts = [count * number // 96 for number in range(97)]
        for start, stop in pairwise(cuts):
            for box in boxes_of_range((1001, 32), start, stop):
                boxes.append(Box((box.offsets[0], 32 * tp + box.offsets[1]), box.sizes))

    def compare(one: Box, other: Box) -> None:
        raise AssertionError("pairs are compared")

    monkeypatch.setattr(Box, "intersection", compare)
    assert coverage_fault((1001, 256), boxes) is None
