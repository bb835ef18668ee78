"""Megatron's token files, read: `PREFIX.bin` (the tokens) and `PREFIX.idx` (where each sequence is).

The layout is byte for byte the one that megatron-core's IndexedDataset reads and writes. The index, little-
endian: 9 bytes of magic, u64 version 1, u8 type code, u64 number of sequences, u64 number of document
indices, then int32 lengths, int64 byte offsets, int64 document indices. All arithmetic on offsets is int64.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from hpc_train.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
VERSION = 1
# The format's type codes. Codes 6 and 7 are floating point and never hold tokens.
_DTYPE_OF_CODE: dict[int, str] = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16",
}  # fmt: skip
CODE_OF_DTYPE = {name: code for code, name in _DTYPE_OF_CODE.items()}
INT32_MAX = 2**31 - 1

# Assumed: a file that another node replaces is back within a few seconds of NFS attribute caching.
_STALE_TRIES = 5
_STALE_PAUSE_S = 0.5

# Sequences looked at in one piece when an index is checked: 12 MiB of index, derived from 12 bytes each.
_CHECK_BLOCK = 1 << 20

T = TypeVar("T")


def index_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def sidecar_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.json")


def loss_mask_prefix(prefix: str | Path) -> str:
    return f"{prefix}_loss_mask"


def dtype_for_vocab(vocab_size: int) -> np.dtype[Any]:
    """Choose the narrowest token type that holds every id of a vocabulary, added tokens included.

    Raises:
        DataError: vocab_size < 1, or ids that do not fit in int32.
    """
    if not 1 <= vocab_size <= INT32_MAX:
        raise DataError(
            f"a vocabulary of {vocab_size} tokens cannot be stored: a token file holds ids from 0 to "
            f"{INT32_MAX - 1}. "
            "Check the tokenizer."
        )
    return np.dtype(np.uint16) if vocab_size - 1 <= np.iinfo(np.uint16).max else np.dtype(np.int32)


@final
class TokenFile:
    """A checked, memory-mapped token file.

    A *sequence* is what the index lists; a *document* is a run of sequences (one, in files made by
    `data build`). The index is mapped when the file is opened, the tokens by the process that first reads
    them, so an object that crosses a fork or a pickle never shares a handle.
    """

    def __init__(self, prefix: str, index: memoryview | bytes, bin_bytes: int) -> None:
        """Use `TokenFile.open`."""
        self.prefix = prefix
        self._index = index
        self._bin_bytes = bin_bytes
        self._tokens: NDArray[Any] | None = None
        self._tokens_pid = -1
        self._read_index(index)
        self._check_index()
        self._find_documents()

    @classmethod
    def open(cls, prefix: str | Path, *, sleep: Callable[[float], None] = time.sleep) -> TokenFile:
        """Map PREFIX.idx and check it against the size of PREFIX.bin.

        A stale file handle (another node replaced the file) is retried a few times by path.

        Raises:
            DataError: a file is missing, empty, truncated, not an index, or the two do not belong together.
        """

        def attempt() -> TokenFile:
            index = _map_file(index_path(prefix))
            return cls(str(prefix), index, os.stat(bin_path(prefix)).st_size)

        return retry_stale(attempt, prefix, sleep)

    def __reduce__(self) -> tuple[Any, ...]:
        return (TokenFile.open, (self.prefix,))

    def _read_index(self, index: memoryview | bytes) -> None:
        path, found = index_path(self.prefix), len(index)
        if found < HEADER.size:
            raise DataError(
                f"{path} is truncated: an index begins with {HEADER.size} bytes of header, the file has "
                f"{found} bytes. "
                "Copy it again, or make it again with 'hpc-train data build'."
            )
        magic, version, code, num_sequences, num_indices = HEADER.unpack(index[: HEADER.size])
        if magic != MAGIC:
            raise DataError(
                f"{path} is not a token index: it begins with {bytes(magic)!r}, an index with {MAGIC!r}. "
                "Give the prefix of a Megatron .bin/.idx pair (without the ending)."
            )
        if version != VERSION:
            raise DataError(
                f"{path} is index version {version}; only version {VERSION} can be read. Make it again "
                "with 'hpc-train data build'."
            )
        name = _DTYPE_OF_CODE.get(code)
        if name is None or name.startswith("float"):
            raise DataError(
                f"{path} says its tokens have type code {code} ({name or 'unknown'}); tokens are "
                "uint8 (1), int8 (2), int16 (3), int32 (4), int64 (5) or uint16 (8). Check how the file "
                "was made."
            )
        self.dtype: np.dtype[Any] = np.dtype(name).newbyteorder("<")
        needed = HEADER.size + 12 * num_sequences + 8 * num_indices
        # A multimodal index has one more int8 a sequence at its end; it is not used here.
        if found not in (needed, needed + num_sequences):
            raise DataError(
                f"{path} should have {needed} bytes for its {num_sequences} sequences and {num_indices} "
                "document "
                f"indices, and has {found}. Copy it again, or make it again with 'hpc-train data build'."
            )
        offset = HEADER.size
        self.lengths: NDArray[np.int32] = np.frombuffer(index, "<i4", num_sequences, offset)
        self.pointers: NDArray[np.int64] = np.frombuffer(index, "<i8", num_sequences, offset + 4 * num_sequences)
        self.document_indices: NDArray[np.int64] = np.frombuffer(index, "<i8", num_indices, offset + 12 * num_sequences)
        self.num_sequences = int(num_sequences)

    def _check_index(self) -> None:
        path, itemsize = index_path(self.prefix), self.dtype.itemsize
        end, self._contiguous, self.num_tokens = 0, True, 0
        for first in range(0, self.num_sequences, _CHECK_BLOCK):
            lengths = self.lengths[first : first + _CHECK_BLOCK].astype(np.int64)
            pointers = self.pointers[first : first + _CHECK_BLOCK].astype(np.int64)
            expected = np.concatenate(([end], (pointers + lengths * itemsize)[:-1]))
            bad = np.flatnonzero((lengths < 0) | (pointers < expected))
            if bad.size:
                at = int(bad[0])
                raise DataError(
                    f"{path} is damaged at sequence {first + at}: length {lengths[at]}, byte offset "
                    f"{pointers[at]}, and the "
                    f"sequence before it ends at byte {expected[at]}. A negative offset means that the "
                    "file was made with "
                    "32-bit sums. Make it again with 'hpc-train data build'."
                )
            self._contiguous = self._contiguous and bool(np.array_equal(pointers, expected))
            end = int(pointers[-1] + lengths[-1] * itemsize)
            self.num_tokens += int(lengths.sum())
        if end != self._bin_bytes:
            raise DataError(
                f"{bin_path(self.prefix)} should have {end} bytes, by its index of {self.num_sequences} "
                "sequences of "
                f"{self.dtype.name}, and has {self._bin_bytes}. It is truncated, still being written, or "
                "belongs to another "
                "index. Copy both files again, or make them again with 'hpc-train data build'."
            )

    def _find_documents(self) -> None:
        indices = self.document_indices
        path = index_path(self.prefix)
        if indices.size and (indices[0] != 0 or indices[-1] > self.num_sequences or bool((np.diff(indices) < 0).any())):
            raise DataError(
                f"{path} has document indices that do not rise from 0 to its {self.num_sequences} sequences. "
                "Make it again with 'hpc-train data build'."
            )
        # Writers that never end a document leave its sequences unlisted: each is a document of its own.
        listed = int(indices[-1]) if indices.size else 0
        if listed == self.num_sequences == indices.size - 1 and bool((np.diff(indices) == 1).all()):
            self._bounds: NDArray[np.int64] | None = None
            self.document_lengths: NDArray[Any] = self.lengths
        else:
            unlisted = np.arange(listed + 1, self.num_sequences + 1, dtype=np.int64)
            self._bounds = np.concatenate((indices if indices.size else np.zeros(1, np.int64), unlisted))
            ends = np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))
            self.document_lengths = ends[self._bounds[1:]] - ends[self._bounds[:-1]]
            if not self._contiguous and bool((np.diff(self._bounds) > 1).any()):
                raise DataError(f"{path} has gaps between the sequences of one document, which is not supported.")

    @property
    def num_documents(self) -> int:
        return len(self.document_lengths)

    @property
    def num_bytes(self) -> int:
        """Size of PREFIX.bin."""
        return self._bin_bytes

    def check_index(self) -> None:
        """Refuse an index that was shortened since it was opened, before it is used again.

        The map would give zeros for what is gone, and so another document's tokens, or end the process by SIGBUS.

        Raises:
            DataError: it was shortened, or its handle is stale: another node removed or replaced it.
        """
        mapped = self._index.obj if isinstance(self._index, memoryview) else None
        if not isinstance(mapped, mmap.mmap):
            return
        try:
            num_bytes = mapped.size()
        except OSError as error:
            raise DataError(
                f"{index_path(self.prefix)} cannot be read any more ({error.strerror}): it was removed or replaced "
                "under a running job. Write new data under a new name."
            ) from error
        if num_bytes < len(self._index):
            raise DataError(
                f"{index_path(self.prefix)} has {num_bytes} bytes, and had {len(self._index)} when it was checked: it "
                "was shortened under a running job. Write new data under a new name."
            )

    def read(self, sequence: int, start: int = 0, length: int | None = None) -> NDArray[Any]:
        """Give tokens [start, start + length) of a sequence, up to its end if no length is given.

        The array is read-only and lies in the mapped file.
        """
        if not 0 <= sequence < self.num_sequences:
            raise IndexError(f"sequence {sequence} of {self.prefix}, which has {self.num_sequences}")
        return self._slice(int(self.pointers[sequence]), int(self.lengths[sequence]), start, length)

    def read_document(self, document: int, start: int = 0, length: int | None = None) -> NDArray[Any]:
        """Give tokens of a document, as `read` does of a sequence."""
        first, total = self._find_document(document)
        return self._slice(first, total, start, length)

    def document_range(self, document: int, start: int, length: int) -> tuple[int, int]:
        """Where tokens of a document are in PREFIX.bin: the first byte, and how many bytes."""
        first, total = self._find_document(document)
        if start < 0 or length < 0 or start + length > total:
            raise IndexError(f"tokens [{start}, {start + length}) of a document of {total} tokens of {self.prefix}")
        return first + start * self.dtype.itemsize, length * self.dtype.itemsize

    def _find_document(self, document: int) -> tuple[int, int]:
        """Byte offset and number of tokens."""
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.prefix}, which has {self.num_documents}")
        total = int(self.document_lengths[document])
        sequence = document if self._bounds is None else int(self._bounds[document])
        if total == 0:
            sequence = 0
        return int(self.pointers[sequence]) if self.num_sequences else 0, total

    def blocks(self, num_tokens: int = 1 << 22) -> Iterator[NDArray[Any]]:
        """Walk over all tokens of the file, block by block, in order."""
        tokens = self._map_tokens()
        for first in range(0, len(tokens), num_tokens):
            yield tokens[first : first + num_tokens]

    def unmap(self) -> None:
        """Let go of the mapped tokens; arrays that were given keep them as long as they live."""
        self._tokens = None

    def _slice(self, pointer: int, total: int, start: int, length: int | None) -> NDArray[Any]:
        length = total - start if length is None else length
        if start < 0 or length < 0 or start + length > total:
            raise IndexError(f"tokens [{start}, {start + length}) of a sequence of {total} tokens of {self.prefix}")
        first = pointer // self.dtype.itemsize + start
        if pointer % self.dtype.itemsize:  # only foreign writers do this
            raw = self._map_tokens().view(np.uint8)
            at = pointer + start * self.dtype.itemsize
            return np.frombuffer(raw[at : at + length * self.dtype.itemsize].tobytes(), self.dtype)
        return self._map_tokens()[first : first + length]

    def _map_tokens(self) -> NDArray[Any]:
        if self._tokens is None or self._tokens_pid != os.getpid():
            buffer = retry_stale(lambda: _map_file(bin_path(self.prefix)), self.prefix, time.sleep)
            if len(buffer) != self._bin_bytes:
                raise DataError(
                    f"{bin_path(self.prefix)} had {self._bin_bytes} bytes when it was checked and has "
                    f"{len(buffer)} now: "
                    "it was replaced under a running job. Write new data under a new name."
                )
            self._tokens, self._tokens_pid = np.frombuffer(buffer, self.dtype), os.getpid()
        return self._tokens


def _map_file(path: Path) -> memoryview | bytes:
    """Map a whole file for reading; an empty file, which cannot be mapped, gives empty bytes."""
    with open_for_reading(path) as stream:
        if os.fstat(stream.fileno()).st_size == 0:
            return b""
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))


def open_for_reading(path: Path) -> BinaryIO:
    return open(path, "rb")


def retry_stale(attempt: Callable[[], T], prefix: str | Path, sleep: Callable[[float], None]) -> T:
    """Try to open a file of a dataset again by its path while another node replaces it.

    Raises:
        DataError: it is missing, cannot be read, or stays stale.
    """
    for tries_left in reversed(range(_STALE_TRIES)):
        try:
            return attempt()
        except FileNotFoundError as error:
            ending = Path(str(error.filename)).suffix
            raise DataError(
                f"{error.filename} does not exist; a dataset is the two files {prefix}.idx and {prefix}.bin. "
                f"Give the prefix without the ending, or copy the missing {ending} file."
            ) from error
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise DataError(f"{error.filename or prefix} cannot be read: {error.strerror or error}.") from error
            if not tries_left:
                raise DataError(
                    f"{error.filename or prefix} is a stale file handle, also after {_STALE_TRIES} tries in "
                    f"{_STALE_PAUSE_S * (_STALE_TRIES - 1):g} s: another node replaced the file. Write new "
                    "data under a new name."
                ) from error
            sleep(_STALE_PAUSE_S)
    raise AssertionError("the last try returns or raises")
