from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.errors import CheckpointError
from hpc_train.plan.run_files import CheckpointsNote, read_checkpoints_note, read_json, write_atomically


def test_a_written_file_is_whole_or_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("text", ["", "[1]", '{"cut', "\ud800"])
def test_what_is_no_json_object_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "outcome.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    assert read_json(path) is None
    assert read_json(tmp_path / "missing") is None


def test_a_note_of_checkpoints_that_says_nothing_is_refused_with_its_key(tmp_path: Path) -> None:
    assert read_checkpoints_note(tmp_path) is None
    path = tmp_path / "checkpoints/elsewhere.json"
    path.parent.mkdir()
    path.write_text('{"folder": "hdfs://x/y", "later": 1}')
    assert read_checkpoints_note(tmp_path) == CheckpointsNote("hdfs://x/y")
    for text, said in (("[]", "a list"), ("{}", "'folder'"), ('{"folder": "x", "newest_step": "a"}', "'newest_step'")):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=f"elsewhere.json, which says .* cannot be read: .*{said}"):
            read_checkpoints_note(tmp_path)
