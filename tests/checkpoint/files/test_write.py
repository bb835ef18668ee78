"""Files that a store loses are written again under other names; a rate is kept; a save can be given up."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.checkpoint.files.write import Abandoned, Flow, in_words, write_boxes, write_new_file
from hpc_train.checkpoint.format.placed import place_boxes
from hpc_train.checkpoint.stores.cause import Cause, StoreError
from hpc_train.checkpoint.stores.location import Location, locate
from hpc_train.errors import CheckpointError
from hpc_train.plan.flat import Box

_DEAD = Cause("a data node does not answer", True, "Wait.")
_FULL = Cause("no space is left", False, "Remove something.")


def _losing(times: int, cause: Cause, names: list[str]):
    """Writes half of a file and fails, so often; then writes it whole."""

    def write(place: Location) -> str:
        names.append(place.name)
        with place.writing() as file:
            file.write(memoryview(b"half"))
            if len(names) <= times:
                raise StoreError(f"lost for the {len(names)}. time", cause)
            file.write(memoryview(b" and whole"))
        return place.name

    return write


def test_a_file_that_the_store_lost_is_written_again_under_another_name(tmp_path: Path) -> None:
    names: list[str] = []
    said: list[str] = []
    pauses: list[float] = []
    target = locate(tmp_path) / "file"
    assert write_new_file(target, _losing(2, _DEAD, names), said.append, pauses.append) == "file.again-2"
    assert names == ["file", "file.again-1", "file.again-2"] and pauses == [1.0, 2.0]
    assert "lost for the 2. time" in said[1]
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "half and whole")]


@pytest.mark.parametrize(("cause", "count"), [(_DEAD, 8), (_FULL, 1)])
def test_attempts_are_bounded_and_made_where_waiting_helps(tmp_path: Path, cause: Cause, count: int) -> None:
    names: list[str] = []
    with pytest.raises(StoreError, match=f"lost for the {count}. time"):
        write_new_file(locate(tmp_path) / "file", _losing(99, cause, names), lambda text: None, lambda seconds: None)
    assert len(names) == count and list(tmp_path.iterdir()) == []


def test_a_flow_keeps_its_rate_for_all_that_share_it() -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    flow = Flow(1000.0, lambda: now[0], sleep)
    for _ in range(5):
        flow.pass_through(500)
    assert now[0] == pytest.approx(102.0)  # the last 500 begin when 2000 have had their time
    assert flow.num_bytes == 2500
    now[0] += 60
    flow.pass_through(500)
    assert now[0] == pytest.approx(162.0), "time that nobody used is not made up for"


def test_a_flow_in_a_hurry_has_no_rate_any_more_for_one_who_waits_neither() -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 102:
            flow.hurry()

    flow = Flow(1.0, lambda: now[0], sleep)
    flow.pass_through(1000)
    flow.pass_through(1000)  # its turn would come after 1000 s
    assert 102 < now[0] < 104
    flow.pass_through(1000)
    assert now[0] < 104 and flow.num_bytes == 3000


def test_a_save_that_is_given_up_ends_within_a_block(tmp_path: Path) -> None:
    placed = place_boxes("file", [("a", (8,), "uint8", Box((0,), (8,))), ("b", (8,), "uint8", Box((0,), (8,)))])
    flow = Flow()

    def content(number: int) -> memoryview:
        if number == 1:
            flow.stop("another node has failed")
        return memoryview(b"12345678")

    with pytest.raises(Abandoned, match="another node has failed"):
        write_boxes(locate(tmp_path) / "file", placed, content, flow)


def test_memory_of_another_size_than_was_laid_out_is_refused(tmp_path: Path) -> None:
    placed = place_boxes("file", [("a", (8,), "uint8", Box((0,), (8,)))])
    with pytest.raises(CheckpointError, match="a: there are 7 bytes, and 8 are needed"):
        write_boxes(locate(tmp_path) / "file", placed, lambda number: memoryview(b"1234567"), Flow())


def test_boxes_lie_where_they_were_placed(tmp_path: Path) -> None:
    boxes = [("w", (4, 300), "uint8", Box((row, 0), (1, 300))) for row in range(4)]
    placed, data = place_boxes("file", boxes), [bytes([row]) * 300 for row in range(4)]
    written = write_boxes(locate(tmp_path) / "file", placed, lambda number: memoryview(data[number]), Flow())
    content = (tmp_path / "file").read_bytes()
    assert [box.placed for box in written] == placed
    assert [content[box.start : box.start + box.num_bytes] for box in placed] == data
    assert len(content) == placed[-1].item_start + placed[-1].item_bytes


def test_a_folder_that_is_removed_beneath_a_save_is_told_with_its_cure(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with pytest.raises(FileNotFoundError) as caught:
        (root / "file").write_text("x")
    assert f". {root}, or what was being written in it, was removed or unmounted" in in_words(
        caught.value, locate(root)
    )
