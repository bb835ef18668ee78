"""Find the files of a corpus and read documents from them: text files, JSONL (also gzipped), source trees."""

from __future__ import annotations

import gzip
import json
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

from hpc_train.errors import DataError

# A file with a zero byte here is binary: git's rule, with its length.
_BINARY_PROBE_BYTES = 8000
_JSONL_ENDINGS = (".jsonl", ".jsonl.gz")

# A work item for one worker: enough to hide the cost of passing it on, little enough to balance.
_BATCH_BYTES = 1 << 20
_BATCH_FILES = 64

Spans = bool | list[tuple[int, int]] | None


@final
@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus."""

    path: str
    size_bytes: int
    is_jsonl: bool
    # Named by the user, and not found in a folder: a file that cannot be used is then an error.
    named: bool


@final
@dataclass(frozen=True)
class Document:
    """One text, and which of its characters are supervised (None: no loss mask was asked for)."""

    text: str
    supervised: Spans


@final
@dataclass(frozen=True)
class TextBatch:
    """Some whole text files, a document each."""

    files: tuple[SourceFile, ...]
    read_bytes: int


@final
@dataclass(frozen=True)
class LineBatch:
    """Some lines of a JSONL file, a document each."""

    path: str
    first_line: int
    lines: bytes
    read_bytes: int


Batch = TextBatch | LineBatch


@final
@dataclass(frozen=True)
class RowFields:
    """The names of the fields of a JSONL row."""

    text: str = "text"
    loss_mask: str | None = None


def find_files(sources: Sequence[str | Path], suffixes: Sequence[str] = ()) -> tuple[list[SourceFile], Counter[str]]:
    """List the files of all sources, folders walked in sorted order; give also what was passed over.

    Symbolic links are followed. A file or folder reached twice counts once, so a loop of links ends. Names
    that begin with a dot are passed over in folders. With suffixes, folders give only files that end so.

    Raises:
        DataError: a source does not exist, or nothing is left.
    """
    files: list[SourceFile] = []
    skipped: Counter[str] = Counter()
    seen: set[tuple[int, int]] = set()

    def add(path: str, named: bool) -> None:
        status = os.stat(path)
        key = (status.st_dev, status.st_ino)
        if not stat.S_ISREG(status.st_mode):
            skipped["not_a_file"] += 1
        elif key in seen:
            skipped["seen_twice"] += 1
        elif not named and suffixes and not path.endswith(tuple(suffixes)):
            skipped["other_suffix"] += 1
        else:
            seen.add(key)
            files.append(SourceFile(path, status.st_size, path.endswith(_JSONL_ENDINGS), named))

    def walk(folder: str) -> None:
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            skipped["seen_twice"] += 1
            return
        seen.add((status.st_dev, status.st_ino))
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            if name.startswith("."):
                skipped["hidden"] += 1
                continue
            try:
                walk(path) if os.path.isdir(path) else add(path, named=False)
            except OSError:
                skipped["unreadable"] += 1

    for source in sources:
        path = os.fspath(source)
        try:
            if os.path.isdir(path):
                walk(path)
            elif stat.S_ISREG(os.stat(path).st_mode):
                add(path, named=True)
            else:
                raise DataError(f"the source {path} is neither a file nor a folder.")
        except FileNotFoundError:
            raise DataError(f"the source {path} does not exist. Check the path.") from None
        except OSError as error:
            raise DataError(f"the source {path} cannot be read: {error.strerror}.") from error
    if not files:
        wanted = f" ending in {', '.join(suffixes)}" if suffixes else ""
        raise DataError(
            f"no file{wanted} in {', '.join(map(str, sources))} (passed over: {describe_skipped(skipped)})."
        )
    return files, skipped


def describe_skipped(skipped: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items())) or "nothing"


def batches(files: Sequence[SourceFile]) -> Iterator[Batch]:
    """Cut the corpus into work items, in its order."""
    pending: list[SourceFile] = []
    pending_bytes = 0
    for file in files:
        if pending and (file.is_jsonl or pending_bytes >= _BATCH_BYTES or len(pending) >= _BATCH_FILES):
            yield TextBatch(tuple(pending), pending_bytes)
            pending, pending_bytes = [], 0
        if file.is_jsonl:
            yield from _line_batches(file)
        else:
            pending.append(file)
            pending_bytes += file.size_bytes
    if pending:
        yield TextBatch(tuple(pending), pending_bytes)


def _line_batches(file: SourceFile) -> Iterator[LineBatch]:
    lines: list[bytes] = []
    num_bytes, first_line, line_number, position = 0, 1, 0, 0
    try:
        with open(file.path, "rb") as raw:
            stream: Any = gzip.GzipFile(fileobj=raw) if file.path.endswith(".gz") else raw
            for line in stream:
                line_number += 1
                lines.append(line)
                num_bytes += len(line)
                if num_bytes >= _BATCH_BYTES:
                    read, position = raw.tell() - position, raw.tell()
                    yield LineBatch(file.path, first_line, b"".join(lines), read)
                    lines, num_bytes, first_line = [], 0, line_number + 1
            if lines:
                yield LineBatch(file.path, first_line, b"".join(lines), raw.tell() - position)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{file.path} is not a whole gzip file: {error} (after line {line_number}). Copy it again."
        ) from error
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error.strerror or error}.") from error


def read_batch(batch: Batch, fields: RowFields) -> tuple[list[Document], Counter[str]]:
    """Read the documents of a work item; give also what was passed over, by reason.

    Raises:
        DataError: a row that is not JSON or lacks a field, or a file named by the user that is not text.
    """
    skipped: Counter[str] = Counter()
    documents: list[Document] = []
    if isinstance(batch, LineBatch):
        # Not splitlines(): a carriage return alone does not end a line of JSONL.
        for number, line in enumerate(batch.lines.split(b"\n"), batch.first_line):
            if line.strip():
                documents.append(_read_row(line, f"{batch.path}, line {number}", fields))
        return documents, skipped
    for file in batch.files:
        text, reason = _read_text(file.path)
        if text is not None:
            documents.append(Document(text, None))
        elif file.named:
            raise DataError(f"{file.path} cannot be used as text: {reason}. Leave it out.")
        else:
            skipped[reason] += 1
    return documents, skipped


def read_texts(files: Sequence[SourceFile], text_field: str = "text") -> Iterator[str]:
    """Read all texts of a corpus, in its order."""
    for batch in batches(files):
        for document in read_batch(batch, RowFields(text_field))[0]:
            yield document.text


def _read_text(path: str) -> tuple[str | None, str]:
    try:
        with open(path, "rb") as stream:
            data = _read_unless_binary(stream)
    except OSError:
        return None, "unreadable"
    if data is None:
        return None, "binary"
    try:
        return data.decode("utf-8-sig"), ""
    except UnicodeDecodeError:
        return None, "not_utf8"


def _read_unless_binary(stream: BinaryIO) -> bytes | None:
    head = stream.read(_BINARY_PROBE_BYTES)
    return None if b"\0" in head else head + stream.read()


def _read_row(line: bytes, where: str, fields: RowFields) -> Document:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}). Each line must be one JSON object.") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a {type(row).__name__} and not a JSON object. Each line must be one object.")
    text = row.get(fields.text)
    if not isinstance(text, str):
        found = "is missing" if fields.text not in row else f"is a {type(text).__name__} and not a string"
        raise DataError(
            f"{where}: the field '{fields.text}' {found}; the row has "
            f"{', '.join(map(repr, sorted(row))) or 'no fields'}. "
            "Name the field that holds the text with --text-field."
        )
    return Document(text, None if fields.loss_mask is None else _read_spans(row, text, where, fields.loss_mask))


def _read_spans(row: dict[str, Any], text: str, where: str, field: str) -> Spans:
    value = row.get(field)
    if isinstance(value, bool):
        return value
    expected = "true, false, or a list of [start, end) pairs of character positions"
    if not isinstance(value, list):
        found = "is missing" if field not in row else f"is {value!r:.60}"
        raise DataError(f"{where}: the loss mask field '{field}' {found}; it must be {expected}.")
    spans = []
    for span in value:
        whole = isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span)
        if not whole or not 0 <= span[0] <= span[1] <= len(text):
            raise DataError(
                f"{where}: the span {span!r:.60} of '{field}' does not lie in the text of {len(text)} "
                "characters; "
                f"the field must be {expected}."
            )
        spans.append((span[0], span[1]))
    return spans
