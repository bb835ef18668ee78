"""Megatron's token files, written: whole or not at all. `index` has the layout."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from hpc_train.data.index import CODE_OF_DTYPE, HEADER, INT32_MAX, MAGIC, VERSION, bin_path, index_path
from hpc_train.errors import DataError


@final
class TokenFileWriter:
    """Write a token file; PREFIX.bin and PREFIX.idx appear, complete, when `finish` returns.

    Until then everything is in temporary files beside them, which `discard`, or leaving the `with` block
    without `finish`, removes.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike, *, overwrite: bool = False) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype.name not in CODE_OF_DTYPE or self.dtype.kind not in "iu":
            raise DataError(f"{self.dtype.name} cannot be the type of a token file; use uint8, uint16, int32 or int64.")
        for path in (index_path(prefix), bin_path(prefix)):
            if path.exists() and not overwrite:
                raise DataError(
                    f"{path} exists, and a running job may have it mapped. Choose another --out, or give --overwrite."
                )
        self._lengths = array("i")
        self._num_bytes = 0
        mark = f".tmp-{os.getpid()}"
        self._bin_tmp, self._index_tmp = Path(f"{prefix}.bin{mark}"), Path(f"{prefix}.idx{mark}")
        self._finished = False
        with self._explain():
            self._stream: BinaryIO = open(self._bin_tmp, "wb", buffering=1 << 20)  # noqa: SIM115

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._finished:
            self.discard()

    def add_document(self, tokens: ArrayLike | Sequence[int]) -> None:
        """Append one document of one sequence. No tokens is a document too.

        To call from Python; `data build` appends many at a time.

        Raises:
            DataError: an id is negative or does not fit the type; the disk is full.
        """
        ids = np.asarray(tokens)
        self.add_documents(ids if ids.size else ids.astype(self.dtype), [ids.size])

    def add_documents(self, tokens: NDArray[Any], lengths: ArrayLike) -> None:
        """Append several documents, whose tokens lie one after another in one array."""
        sizes = np.asarray(lengths, dtype=np.int64)
        if tokens.dtype.kind not in "iu" or tokens.ndim != 1 or int(sizes.sum()) != tokens.size:
            raise DataError(
                f"documents are one row of whole numbers, {sizes.sum()} in all, and not {tokens.dtype} of "
                f"shape {tokens.shape}."
            )
        self._check_ids(tokens, sizes)
        with self._explain():
            self._stream.write(tokens.astype(self.dtype.newbyteorder("<"), copy=False).tobytes())
        self._lengths.frombytes(sizes.astype(np.int32).tobytes())
        self._num_bytes += tokens.size * self.dtype.itemsize

    def _check_ids(self, tokens: NDArray[Any], sizes: NDArray[np.int64]) -> None:
        limit = int(np.iinfo(self.dtype).max)
        if sizes.size and int(sizes.max()) > INT32_MAX:
            raise DataError(
                f"document {len(self._lengths) + int(sizes.argmax())} has {int(sizes.max())} tokens; the "
                "index holds "
                f"lengths up to {INT32_MAX}. Split it."
            )
        if not tokens.size or (int(tokens.min()) >= 0 and int(tokens.max()) <= limit):
            return
        at = int(tokens.argmin()) if int(tokens.min()) < 0 else int(tokens.argmax())
        document = len(self._lengths) + int(np.searchsorted(np.cumsum(sizes), at, side="right"))
        raise DataError(
            f"token id {int(tokens[at])} in document {document} does not fit {self.dtype.name} (0 to "
            f"{limit}) of "
            f"{self.prefix}.bin. Choose the type with dtype_for_vocab(vocab_size), added tokens included."
        )

    @property
    def num_documents(self) -> int:
        return len(self._lengths)

    def finish(self) -> None:
        """Complete both files on disk and give them their names."""
        self.complete()
        self.publish()

    def complete(self) -> None:
        """Write both temporary files to the end and to the disk."""
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.zeros(0, np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        pointers = ends - lengths.astype(np.int64) * self.dtype.itemsize
        header = HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[self.dtype.name], len(lengths), len(lengths) + 1)
        with self._explain():
            _flush_to_disk(self._stream)
            self._stream.close()
            with open(self._index_tmp, "wb") as stream:
                stream.write(header)
                stream.write(lengths.astype("<i4", copy=False).tobytes())
                stream.write(pointers.astype("<i8", copy=False).tobytes())
                stream.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
                _flush_to_disk(stream)

    def publish(self) -> None:
        """Give the completed files their names."""
        with self._explain():
            # The index goes first and comes last: no moment shows an index beside another file's tokens.
            index_path(self.prefix).unlink(missing_ok=True)
            os.replace(self._bin_tmp, bin_path(self.prefix))
            os.replace(self._index_tmp, index_path(self.prefix))
        self._finished = True

    def discard(self) -> None:
        """Remove what was written so far. Safe to call twice."""
        with contextlib.suppress(OSError):  # closing flushes, and a full disk fails here again
            self._stream.close()
        for path in (self._bin_tmp, self._index_tmp):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explain(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if hasattr(self, "_stream"):
                self.discard()
            raise explain_write_error(error, bin_path(self.prefix), self._num_bytes) from error


def _flush_to_disk(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def explain_write_error(error: OSError, path: Path, num_bytes: int) -> DataError:
    """Say in one sentence why a file could not be written and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        try:
            free = f"{shutil.disk_usage(path.parent).free} bytes are free there"
        except OSError:
            free = "the free space there is unknown"
        return DataError(
            f"no space left for {path} after {num_bytes} bytes ({error.strerror}); {free}, and a quota may "
            "be lower. "
            "The temporary files were removed. Free space, or choose another --out."
        )
    if error.errno == errno.ENOENT and not path.parent.is_dir():
        return DataError(f"{path} cannot be written: the folder {path.parent} does not exist. Make it first.")
    if error.errno == errno.ENOENT:
        return DataError(f"{path} cannot be written: {path.parent} takes no new files. Choose another --out.")
    return DataError(f"{path} cannot be written: {error.strerror or error}.")
