"""Manifests: columns hold the boxes that they were made of; those of the first version are read."""

from __future__ import annotations

import json

import pytest

from hpc_train.checkpoint.format.manifest import Manifest, StoredTensor, parse_manifest, with_checksum
from hpc_train.checkpoint.format.stored_boxes import StoredBox, StoredBoxes
from hpc_train.checkpoint.stores.location import locate
from hpc_train.errors import CheckpointError
from hpc_train.plan.flat import Box

FILES = {".metadata": 9, "__0_0.distcp": 900, "__1_0.distcp": 800}
BOXES = {
    "bias": ("bfloat16", (7,), [StoredBox(Box((0,), (7,)), "__1_0.distcp", 128, 14, 1)]),
    "count": ("int64", (), [StoredBox(Box((), ()), "__0_0.distcp", 64, 8, 0xFFFFFFFF)]),
    "weight": (
        "float32",
        (4, 8),
        [
            StoredBox(Box((2, 0), (2, 8)), "__1_0.distcp", 256, 64, 2),
            StoredBox(Box((0, 0), (2, 8)), "__0_0.distcp", 128, 64, 3),
        ],
    ),
}


def _manifest() -> Manifest:
    tensors = {
        name: StoredTensor(dtype, shape, StoredBoxes.of(boxes, len(shape), boxes[0].num_bytes // _count(boxes[0])))
        for name, (dtype, shape, boxes) in BOXES.items()
    }
    return Manifest(5, {"num_updates": 5}, tensors, FILES)


def _count(stored: StoredBox) -> int:
    return stored.box.num_elements


def _first_version(file: str) -> dict[str, object]:
    box = {"box": {"offsets": [0], "sizes": [1]}, "file": file, "start": 0, "num_bytes": 4, "crc32": 1}
    return {"dtype": "float32", "shape": [1], "boxes": [box]}


def test_a_manifest_is_read_as_it_was_written() -> None:
    read = parse_manifest(_manifest().to_json(), locate("/there"))
    assert read == _manifest()
    for name, (_, _, boxes) in BOXES.items():
        assert list(read.tensors[name].boxes) == boxes and read.tensors[name].boxes[-1] == boxes[-1]
        with pytest.raises(IndexError):
            read.tensors[name].boxes[len(boxes)]


def test_manifests_of_the_first_version_are_read() -> None:
    tensors = {
        name: {
            "dtype": dtype,
            "shape": list(shape),
            "boxes": [{**vars(stored), "box": vars(stored.box)} for stored in boxes],
        }
        for name, (dtype, shape, boxes) in BOXES.items()
    }
    tree = {"format_version": 1, "step": 5, "values": {"num_updates": 5}, "tensors": tensors, "files": FILES}
    assert parse_manifest(json.dumps(tree), locate("/there")) == _manifest()


@pytest.mark.parametrize(
    ("column", "numbers"),
    [("start", [1]), ("sizes", [2, 8, 2]), ("file", [0, 3]), ("crc32", [1, "2"]), ("offsets", [1 << 70, 0, 0, 0])],
)
def test_columns_that_do_not_belong_together_are_refused(column: str, numbers: list[object]) -> None:
    tree = json.loads(_manifest().to_json())
    del tree["checksum"]
    tree["tensors"]["weight"]["boxes"][column] = numbers
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        parse_manifest(json.dumps(tree), locate("/there"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"step": "5"}, "its key 'step' is text, and not a whole number"),
        ({"step": None}, "'step' is null"),
        ({"tensors": []}, "its key 'tensors' is a list, and not an object"),
        ({"values": 1}, "its key 'values' is a whole number, and not an object"),
        ({"format_version": "2"}, "'format_version' is text"),
        ({"files": [["../step_0000015/x", 9]]}, "'../step_0000015/x' is no name of a file in this folder"),
        ({"files": [["/x", 9]]}, "'/x' is no name of a file"),
        ({"files": [["x", "9"]]}, "the file x cannot have '9' bytes"),
        ({"format_version": 1, "files": {"..": 9}}, "'..' is no name of a file"),
        (
            {"format_version": 1, "files": {}, "tensors": {"w": _first_version("../x")}},
            "w lies in '../x', which is none",
        ),
    ],
)
def test_what_is_no_manifest_of_ours_is_refused_with_what_is_wrong(changes: dict[str, object], told: str) -> None:
    tree = json.loads(_manifest().to_json())
    del tree["checksum"]
    with pytest.raises(
        CheckpointError, match=rf"manifest\.json cannot be read, so it is .* no manifest of ours: .*{told}"
    ):
        parse_manifest(with_checksum(json.dumps({**tree, **changes})), locate("/there"))
    del tree["values"]
    with pytest.raises(CheckpointError, match="it lacks the key 'values'"):
        parse_manifest(json.dumps(tree), locate("/there"))
