"""Token files: reading what was written, refusing what is damaged, never showing half a file."""

import errno
import os
import pickle
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_train.data import index
from hpc_train.data.index import TokenFile, bin_path, dtype_for_vocab, index_path
from hpc_train.data.index_writer import TokenFileWriter
from hpc_train.errors import DataError


def write(prefix, documents, dtype=np.uint16) -> str:
    with TokenFileWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
        writer.finish()
    return str(prefix)


def write_index(prefix, code, lengths, pointers, indices, magic=b"MMIDIDX\0\0", version=1) -> None:
    """An index as any program might leave it."""
    index_path(prefix).write_bytes(
        struct.pack("<9sQBQQ", magic, version, code, len(lengths), len(indices))
        + np.array(lengths, "<i4").tobytes()
        + np.array(pointers, "<i8").tobytes()
        + np.array(indices, "<i8").tobytes()
    )


def make_sparse(prefix, num_bytes) -> None:
    with open(bin_path(prefix), "wb") as stream:
        stream.truncate(num_bytes)


@pytest.fixture
def prefix(tmp_path) -> str:
    return str(tmp_path / "set")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    dtype=st.sampled_from(["uint8", "uint16", "int32", "int64"]),
    documents=st.lists(st.lists(st.integers(0, 255), max_size=9), max_size=9),
)
def test_what_was_written_is_read(tmp_path, dtype, documents):
    prefix = tmp_path / "set"
    with TokenFileWriter(prefix, dtype, overwrite=True) as writer:
        for document in documents:
            writer.add_document(document)
        writer.finish()
    tokens = TokenFile.open(prefix)
    assert tokens.dtype == np.dtype(dtype)
    assert [tokens.read(i).tolist() for i in range(tokens.num_sequences)] == documents
    assert [tokens.read_document(i).tolist() for i in range(tokens.num_documents)] == documents
    assert tokens.num_tokens == sum(map(len, documents))
    assert tokens.lengths.tolist() == list(map(len, documents))
    assert tokens.document_indices.tolist() == list(range(len(documents) + 1))
    assert [int(t) for block in tokens.blocks(4) for t in block] == [t for d in documents for t in d]


def test_several_documents_at_once_are_written_as_one_by_one(tmp_path):
    write(tmp_path / "single", [[1, 2], [], [3]])
    with TokenFileWriter(tmp_path / "many", np.uint16) as writer:
        writer.add_documents(np.array([1, 2, 3]), [2, 0, 1])
        writer.finish()
    for path in (index_path, bin_path):
        assert path(tmp_path / "single").read_bytes() == path(tmp_path / "many").read_bytes()


def test_a_part_of_a_sequence_is_read_and_the_outside_refused(prefix):
    tokens = TokenFile.open(write(prefix, [[1, 2, 3], [4, 5, 6, 7]]))
    assert tokens.read(1, 1, 2).tolist() == [5, 6]
    assert tokens.read(1, 4).tolist() == []
    for sequence, start, length in [(1, 2, 3), (1, -1, 2), (2, 0, 1), (-1, 0, 1)]:
        with pytest.raises(IndexError):
            tokens.read(sequence, start, length)


def test_tokens_cannot_be_written_to(prefix):
    tokens = TokenFile.open(write(prefix, [[1, 2, 3]]))
    with pytest.raises(ValueError):
        tokens.read(0)[0] = 9


# Types


@pytest.mark.parametrize(
    "largest_id, dtype", [(0, "uint16"), (65499, "uint16"), (65500, "uint16"), (65535, "uint16"), (65536, "int32")]
)
def test_the_type_follows_the_largest_id_and_ids_come_back(prefix, largest_id, dtype):
    """FC-76"""
    assert dtype_for_vocab(largest_id + 1).name == dtype
    tokens = TokenFile.open(write(prefix, [[0, largest_id]], dtype_for_vocab(largest_id + 1)))
    assert (tokens.dtype.name, tokens.read(0).tolist()) == (dtype, [0, largest_id])


@pytest.mark.parametrize("bad_id", [65536, -1, 2**40])
def test_an_id_that_does_not_fit_is_refused_and_nothing_is_left(prefix, bad_id):
    """FC-76"""
    with TokenFileWriter(prefix, np.uint16) as writer:
        writer.add_document([7])
        with pytest.raises(DataError, match=f"token id {bad_id} in document 1 does not fit uint16"):
            writer.add_document([1, bad_id])
    assert list(Path(prefix).parent.iterdir()) == []


def test_fractions_and_tables_are_no_documents(prefix):
    with TokenFileWriter(prefix, np.uint16) as writer:
        for document in ([1.0, 2.5], [[1], [2]]):
            with pytest.raises(DataError, match="whole numbers"):
                writer.add_document(document)


@pytest.mark.parametrize("vocab_size", [0, -5, 2**31])
def test_a_vocabulary_that_no_type_holds_is_refused(vocab_size):
    with pytest.raises(DataError, match=str(vocab_size)):
        dtype_for_vocab(vocab_size)


# Large files


def test_offsets_past_two_gib_are_exact(prefix):
    """FC-77: three sequences of 1.5e9 bytes; the file is sparse."""
    length = 1_500_000_000
    make_sparse(prefix, 3 * length)
    write_index(prefix, 1, [length] * 3, [0, length, 2 * length], [0, 1, 2, 3])
    with open(bin_path(prefix), "r+b") as stream:
        stream.seek(3 * length - 2)
        stream.write(b"\x07\x08")
    tokens = TokenFile.open(prefix)
    assert tokens.num_tokens == 3 * length
    assert tokens.read(2, length - 2, 2).tolist() == [7, 8]


def test_documents_of_many_sequences_are_summed_in_64_bits(prefix):
    """FC-77"""
    length = 1_500_000_000
    make_sparse(prefix, 3 * length)
    write_index(prefix, 1, [length] * 3, [0, length, 2 * length], [0, 3])
    assert TokenFile.open(prefix).document_lengths.tolist() == [3 * length]


def test_offsets_that_were_summed_in_32_bits_are_refused(prefix):
    """FC-77"""
    length = 1_500_000_000
    make_sparse(prefix, 3 * length)
    write_index(prefix, 1, [length] * 3, [0, length, 2 * length - 2**32], [0, 1, 2, 3])
    with pytest.raises(DataError, match=r"sequence 2: .*32-bit"):
        TokenFile.open(prefix)


# Damage


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_missing_file_is_named(prefix, ending):
    write(prefix, [[1, 2, 3]])
    Path(prefix + ending).unlink()
    with pytest.raises(DataError, match=rf"set\{ending} does not exist.*copy the missing \{ending} file"):
        TokenFile.open(prefix)


def test_every_truncation_of_the_index_is_refused(prefix):
    write(prefix, [[1, 2, 3], [4]])
    whole = index_path(prefix).read_bytes()
    for length in range(len(whole)):
        index_path(prefix).write_bytes(whole[:length])
        with pytest.raises(DataError, match=f"set.idx .*{length}"):
            TokenFile.open(prefix)


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 9])
def test_a_bin_of_the_wrong_size_is_refused_with_both_sizes(prefix, num_bytes):
    write(prefix, [[1, 2, 3], [4]])
    make_sparse(prefix, num_bytes)
    with pytest.raises(DataError, match=rf"set.bin should have 8 bytes.* and has {num_bytes}\."):
        TokenFile.open(prefix)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"magic": b"TNTIDX\0\0\0"}, "not a token index"),
        ({"version": 2}, "version 2"),
        ({"code": 7}, r"type code 7 \(float32\)"),
        ({"code": 9}, r"type code 9 \(unknown\)"),
        ({"lengths": [2, -1]}, "sequence 1"),
        ({"pointers": [0, 3]}, "sequence 1"),
        ({"pointers": [-4, 4]}, "sequence 0"),
        ({"indices": [0, 1, 3]}, "document indices"),
        ({"indices": [1, 1, 2]}, "document indices"),
        ({"indices": [0, 2, 1]}, "document indices"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(prefix, change, message):
    make_sparse(prefix, 8)
    good = {"code": 8, "lengths": [2, 2], "pointers": [0, 4], "indices": [0, 1, 2]}
    write_index(prefix, **good)
    assert TokenFile.open(prefix).num_sequences == 2
    write_index(prefix, **{**good, **change})
    with pytest.raises(DataError, match=message):
        TokenFile.open(prefix)


def test_an_empty_dataset_can_be_read(prefix):
    """FC-79"""
    tokens = TokenFile.open(write(prefix, []))
    assert (tokens.num_documents, tokens.num_tokens, list(tokens.blocks())) == (0, 0, [])
    tokens = TokenFile.open(write(f"{prefix}2", [[], [], []]))
    assert (tokens.num_documents, tokens.read_document(2).tolist()) == (3, [])


def test_a_file_that_changes_after_the_check_is_refused(prefix):
    tokens = TokenFile.open(write(prefix, [[1, 2, 3]]))
    make_sparse(prefix, 4)
    with pytest.raises(DataError, match="replaced under a running job"):
        tokens.read(0)


def test_an_index_that_is_shortened_under_its_map_is_refused_and_one_that_is_replaced_by_name_is_not(prefix):
    """The map would give zeros for what is gone, which is another document, or end the process by SIGBUS."""
    tokens = TokenFile.open(write(prefix, [[1, 2], [3, 4], [5, 6]]))
    os.rename(f"{prefix}.idx", f"{prefix}.old")
    Path(f"{prefix}.idx").write_bytes(b"another")
    tokens.check_index()
    assert tokens.document_range(2, 0, 2) == (8, 4)
    os.truncate(f"{prefix}.old", 40)
    with pytest.raises(DataError, match=r"\.idx has 40 bytes, and had 102 when it was checked: it was shortened"):
        tokens.check_index()


@pytest.mark.parametrize(
    "indices, documents",
    [
        ([0, 2, 2, 3], [[1, 2, 3], [], [4, 5]]),
        ([0, 2], [[1, 2, 3], [4, 5]]),  # a writer that did not end its last document
        ([0], [[1, 2], [3], [4, 5]]),
        ([], [[1, 2], [3], [4, 5]]),
    ],
)
def test_documents_of_several_sequences_are_read_whole(prefix, indices, documents):
    bin_path(prefix).write_bytes(bytes([1, 2, 3, 4, 5]))
    write_index(prefix, 1, [2, 1, 2], [0, 2, 3], indices)
    tokens = TokenFile.open(prefix)
    assert tokens.document_lengths.tolist() == list(map(len, documents))
    assert [tokens.read_document(i).tolist() for i in range(tokens.num_documents)] == documents


# File systems


class StaleFiles:
    """Opening gives a stale handle so many times."""

    def __init__(self, monkeypatch, times: int) -> None:
        self.left, self.pauses = times, []
        self._open = index.open_for_reading
        monkeypatch.setattr(index, "open_for_reading", self)

    def __call__(self, path):
        if self.left:
            self.left -= 1
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return self._open(path)


def test_a_stale_handle_is_opened_again_by_path(prefix, monkeypatch):
    """FC-74"""
    write(prefix, [[1, 2]])
    files = StaleFiles(monkeypatch, times=2)
    assert TokenFile.open(prefix, sleep=files.pauses.append).read(0).tolist() == [1, 2]
    assert len(files.pauses) == 2


def test_a_handle_that_stays_stale_is_refused(prefix, monkeypatch):
    """FC-74"""
    write(prefix, [[1, 2]])
    files = StaleFiles(monkeypatch, times=10**6)
    with pytest.raises(DataError, match=r"stale file handle.*new name"):
        TokenFile.open(prefix, sleep=files.pauses.append)
    assert 2 <= len(files.pauses) < 20


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_child_after_a_fork_maps_the_file_itself(prefix):
    """FC-72"""
    write(prefix, [[1, 2, 3]])
    code = """
        import os, sys
        from hpc_train.data.index import TokenFile
        tokens = TokenFile.open(sys.argv[1])
        tokens.read(0)
        before = tokens._tokens
        if os.fork() == 0:
            assert tokens.read(0).tolist() == [1, 2, 3]
            assert tokens._tokens is not before
            os._exit(0)
        assert os.wait()[1] == 0
        assert tokens._map_tokens() is before
    """
    run_python(code, prefix)


def test_a_pickled_file_is_opened_again(prefix):
    """FC-72"""
    tokens = TokenFile.open(write(prefix, [[1, 2, 3]]))
    again = pickle.loads(pickle.dumps(tokens))
    assert again._tokens is None
    assert again.read(0).tolist() == [1, 2, 3]


# Writing whole files


def test_names_appear_only_when_finished(prefix):
    with TokenFileWriter(prefix, np.uint16) as writer:
        writer.add_document([1, 2])
        assert not index_path(prefix).exists() and not bin_path(prefix).exists()
        writer.complete()
        assert not index_path(prefix).exists() and not bin_path(prefix).exists()
        writer.publish()
    assert sorted(path.name for path in Path(prefix).parent.iterdir()) == ["set.bin", "set.idx"]


def test_a_writer_that_is_left_early_removes_its_files(prefix):
    with pytest.raises(KeyboardInterrupt), TokenFileWriter(prefix, np.uint16) as writer:
        writer.add_document([1, 2])
        raise KeyboardInterrupt
    assert list(Path(prefix).parent.iterdir()) == []


def test_an_existing_dataset_is_kept_unless_asked(prefix):
    write(prefix, [[1, 2]])
    with pytest.raises(DataError, match="--overwrite"):
        TokenFileWriter(prefix, np.uint16)
    assert TokenFile.open(prefix).read(0).tolist() == [1, 2]
    mapped = TokenFile.open(prefix)
    mapped.read(0)
    with TokenFileWriter(prefix, np.uint16, overwrite=True) as writer:
        writer.add_document([3])
        writer.finish()
    assert TokenFile.open(prefix).read(0).tolist() == [3]
    assert mapped.read(0).tolist() == [1, 2]  # who has the old file mapped keeps it


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DataError, match=r"the folder .*nowhere does not exist"):
        TokenFileWriter(tmp_path / "nowhere" / "set", np.uint16)


def test_a_folder_that_takes_no_files_is_not_called_missing():
    with pytest.raises(DataError, match=r"/proc takes no new files. Choose another --out"):
        TokenFileWriter("/proc/set", np.uint16)


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path):
    """A real limit on the size of files stands for the disk."""
    code = """
        import resource, sys
        import numpy as np
        from hpc_train.data.index_writer import TokenFileWriter
        from hpc_train.errors import DataError
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            with TokenFileWriter(sys.argv[1], np.int32) as writer:
                while True:
                    writer.add_document(np.arange(10000))
        except DataError as error:
            print(error)
    """
    message = run_python(code, str(tmp_path / "set"))
    assert "no space left for" in message and "Free space" in message
    assert list(tmp_path.iterdir()) == []
