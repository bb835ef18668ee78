from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.plan.run_files import read_json, write_atomically


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
