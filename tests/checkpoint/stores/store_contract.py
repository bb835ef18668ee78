"""What every store of checkpoints must do, whatever file system is behind it."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from hpc_train.checkpoint.folders.attempt import ATTEMPT_VALUE
from hpc_train.checkpoint.folders.folder import commit, create_temporary, read_latest, steps_newest_first
from hpc_train.checkpoint.format.manifest import MANIFEST_FILE, Manifest
from hpc_train.checkpoint.stores.cause import StoreError
from hpc_train.checkpoint.stores.location import Location, locate


class StoreContract:
    """A class of tests inherits it and has a fixture `folder`: an empty folder of the store."""

    names = (".hidden", "with blank", "grün", "__0_0.distcp", "a+b%20c")

    def test_bytes_come_back_by_range(self, folder: Location) -> None:
        data = os.urandom(9_000_001)  # more than a block of the HDFS of the tests, and than a piece of its client
        with (folder / "file").writing() as file:
            file.write(memoryview(data[:5]))
            file.write(memoryview(data[5:]))
        with (folder / "file").reading() as reader:
            for start, count in ((0, 10), (4_194_300, 5_000), (len(data) - 3, 3), (0, len(data))):
                buffer = bytearray(count)
                assert reader.read_into(start, memoryview(buffer)) == count
                assert bytes(buffer) == data[start : start + count]
            buffer = bytearray(10)
            assert reader.read_into(len(data) - 4, memoryview(buffer)) == 4
            assert reader.read_into(len(data) + 4, memoryview(buffer)) == 0
            assert bytes(buffer[:4]) == data[-4:]

    def test_entries_tell_names_sizes_and_times(self, folder: Location) -> None:
        (folder / "b.txt").write_text("four")
        (folder / "a").make_folder()
        (folder / "a" / "deep" / "er").make_folder()
        first, second = folder.entries()
        assert (first.name, first.is_folder, first.num_bytes) == ("a", True, 0)
        assert (second.name, second.is_folder, second.num_bytes) == ("b.txt", False, 4)
        assert second.changed_at > 1.7e9
        assert (folder / "a" / "deep").is_folder() and not (folder / "a").is_file()
        assert (folder / "b.txt").is_file() and (folder / "b.txt").read_text() == "four"
        (folder / "a").make_folder()

    def test_what_is_missing_is_said_as_such(self, folder: Location) -> None:
        missing = folder / "missing"
        assert missing.entry() is None and (missing / "below").entry() is None
        assert not missing.is_file() and not missing.is_folder()
        for ask in (missing.read_text, missing.entries):
            with pytest.raises(FileNotFoundError):
                ask()
        missing.remove()

    def test_a_file_is_made_once(self, folder: Location) -> None:
        (folder / "file").write_text("first")
        with pytest.raises(FileExistsError):
            (folder / "file").write_text("second")
        assert (folder / "file").read_text() == "first"

    def test_a_rename_never_replaces_and_never_goes_inside(self, folder: Location) -> None:
        """HDFS moves a folder into an existing one, and a local rename replaces an empty one."""
        for name in ("new", "old", "empty"):
            (folder / name).make_folder()
        (folder / "new" / "file").write_text("new")
        (folder / "old" / "file").write_text("old")
        for target in ("old", "empty"):
            with pytest.raises(StoreError, match="exists already"):
                (folder / "new").rename(folder / target)
        assert [entry.name for entry in folder.entries()] == ["empty", "new", "old"]
        assert (folder / "empty").entries() == []
        assert (folder / "old" / "file").read_text() == "old"
        (folder / "new").rename(folder / "other")
        assert (folder / "other" / "file").read_text() == "new" and (folder / "new").entry() is None

    def test_a_file_takes_the_place_of_another(self, folder: Location) -> None:
        for text in ("one", "two"):
            (folder / "next").write_text(text)
            (folder / "next").replace(folder / "latest")
            assert (folder / "latest").read_text() == text
        assert [entry.name for entry in folder.entries()] == ["latest"]

    def test_remove_takes_all_that_is_below(self, folder: Location) -> None:
        (folder / "a" / "b").make_folder()
        (folder / "a" / "b" / "file").write_text("x")
        (folder / "a").remove()
        assert folder.entries() == []

    def test_a_file_given_up_is_not_mistaken_for_a_whole_one(self, folder: Location) -> None:
        with pytest.raises(ZeroDivisionError):
            with (folder / "file").writing() as file:
                file.write(memoryview(bytes(10_000_000)))
                raise ZeroDivisionError
        found = (folder / "file").entry()
        assert found is None or found.num_bytes <= 10_000_000
        (folder / "file").remove()
        (folder / "file").write_text("again")
        assert (folder / "file").read_text() == "again"

    def test_a_commit_keeps_what_it_finds_under_its_name_unless_its_own_start_has_saved_that(
        self, folder: Location
    ) -> None:
        root, said = folder / "checkpoints", list[str]()
        root.make_folder()
        (root / "step_0000007").write_text("foreign")

        def save(attempt: str | None, text: str) -> None:
            temporary = create_temporary(root, 7)
            (temporary / "file").write_text(text)
            manifest = Manifest(7, {ATTEMPT_VALUE: attempt}, {}, {"file": len(text)})
            (temporary / MANIFEST_FILE).write_text(manifest.to_json())
            assert commit(temporary, root, 7, said.append) == root / "step_0000007"
            assert (root / "step_0000007" / "file").read_text() == text
            assert [step for step, _ in steps_newest_first(root)] == [7]
            assert read_latest(root) == "step_0000007"

        save("a", "first")
        save("a", "second")
        save("b", "third")
        (root / "step_0000007" / "file").remove()
        save("b", "fourth")
        save(None, "fifth")
        save(None, "sixth")
        aside = [f"step_0000007.set-aside{number}" for number in ("", "-2", "-3", "-4", "-5")]
        assert [entry.name for entry in root.entries()] == ["latest", "step_0000007", *aside]
        assert all(name in line for name, line in zip(aside, said, strict=True))
        assert (root / aside[0]).read_text() == "foreign"
        assert [(root / aside[place] / "file").read_text() for place in (1, 3)] == ["second", "fourth"]

    def test_names_of_every_kind(self, folder: Location) -> None:
        for name in self.names:
            (folder / name).write_text(name)
            assert (folder / name).read_text() == name
            assert locate(str(folder / name)).read_text() == name
        assert len(folder.entries()) == len(self.names)

    def test_a_child_process_opens_a_connection_of_its_own(self, folder: Location) -> None:
        """FC-72: what was open before a fork is not used after it."""
        (folder / "file").write_text("seen by both")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(20)
                text = (folder / "file").read_text()
                (folder / "by child").write_text(text)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert (folder / "by child").read_text() == "seen by both"
        (folder / "by parent").write_text("x")

    def test_threads_that_ask_at_once_all_get_their_answers(self, folder: Location) -> None:
        """As the agent of a node with several ranks does, which writes their files beside each other."""
        done: list[int] = []

        def work(number: int) -> None:
            for turn in range(10):
                file = folder / f"{number}-{turn}"
                file.write_text(file.name)
                assert file.read_text() == file.name and file.is_file()
            done.append(number)

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(done) == [0, 1, 2]
        assert len(folder.entries()) == 30
