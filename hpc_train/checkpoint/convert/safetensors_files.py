"""Read and write the safetensors format in pieces, of a file or of a Hugging Face folder of several.

A file is the header's length (8 bytes, little-endian), a JSON header, and the tensors' raw bytes. The safetensors
package writes a file from tensors that are all in memory and reads by mapping the file; here a block at a time goes
through, so that memory is bounded and a file cut short is an error and not a bus error. The order of tensors and the
header's spelling are the package's, so that equal tensors give equal files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, TypeGuard

from hpc_train.checkpoint.format.model_tensors import STORED_TYPES, Shape, few
from hpc_train.checkpoint.progress import UNHEARD, Advance
from hpc_train.checkpoint.stores.location import Location, Place, locate
from hpc_train.checkpoint.stores.store import Reader
from hpc_train.errors import CheckpointError

BYTE_ORDER_MARK = "\ufeff"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DTYPES = {code: dtype for dtype, code in CODES.items()}
# The package's own bound on a header.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class RawTensor:
    """A tensor in a file, and where its bytes lie. dtype: by torch's name; one that is not read, by the file's code."""

    file: Location
    dtype: str
    shape: Shape
    start: int
    num_bytes: int

    def read(self, start: int, num_bytes: int) -> bytearray:
        """Bytes start .. start + num_bytes of this tensor."""
        block = bytearray(num_bytes)
        with self.file.reading() as file:
            count = file.read_into(self.start + start, memoryview(block))
        if count != num_bytes:
            raise CheckpointError(f"{self.file} ends {num_bytes - count} bytes early")
        return block


def read_folder(place: Place) -> dict[str, RawTensor]:
    """The tensors of a Hugging Face folder, from its single file or from those that its index names.

    Raises:
        CheckpointError: no such file, a damaged one, or an index that does not fit the files.
    """
    folder = locate(place)
    there = {entry.name for entry in folder.entries() if not entry.is_folder}
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.name in there and index.name in there:
        raise CheckpointError(f"{folder} has {SINGLE_FILE} and {INDEX_FILE}; remove the one that is not meant")
    if single.name in there:
        return read_header(single)
    if index.name not in there:
        pickles = sorted(name for name in there if name.endswith((".bin", ".pt", ".pth")))
        hint = f" It has {few(pickles, 3)}, a pickle, which is never read." if pickles else ""
        raise CheckpointError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}.{hint} transformers writes safetensors by "
            "save_pretrained."
        )
    weight_map = _read_index(index)
    found: dict[str, RawTensor] = {}
    for name in sorted(set(weight_map.values())):
        if name not in there:
            raise CheckpointError(f"{index} names {name}, which is missing")
        found |= read_header(folder / name)
    missing = [f"{name} in {file}" for name, file in weight_map.items() if _holder(found, name) != file]
    if missing:
        raise CheckpointError(f"{index} names tensors that are not in their files: {few(missing)}")
    if extra := [name for name in found if name not in weight_map]:
        raise CheckpointError(f"{folder} has tensors that {INDEX_FILE} does not name: {few(extra)}")
    return found


def require_types(tensors: Mapping[str, RawTensor]) -> None:
    """Refuse tensors of types that are not read.

    Raises:
        CheckpointError: with the first one's name.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in CODES:
            raise CheckpointError(
                f"{tensor.file}: {name} is stored as {tensor.dtype}. Read are {', '.join(_DTYPES)}: no quantised "
                "weights."
            )


def read_header(place: Place) -> dict[str, RawTensor]:
    """The tensors of one file, which fill it without gaps, each as long as its shape says.

    Their types may be others than those that are read: a file may hold constants that nobody needs.

    Raises:
        CheckpointError: it is no such file, or a damaged one.
    """
    path = locate(place)
    try:
        entry = path.entry()
        size = entry.num_bytes if entry is not None else 0
        with path.reading() as file:
            length = int.from_bytes(_read(file, 0, 8), "little")
            if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path} is no safetensors file, or is cut short within its header")
            header = json.loads(_read(file, 8, length))
        if not isinstance(header, dict):
            raise CheckpointError(f"{path} cannot be read: its header is a {type(header).__name__}, not a JSON object")
        header.pop("__metadata__", None)
        found = {name: _raw_tensor(path, name, entry, 8 + length, size) for name, entry in header.items()}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    _require_filled(path, found, 8 + length, size)
    return found


def _read(file: Reader, start: int, num_bytes: int) -> bytes:
    block = bytearray(num_bytes)
    return bytes(block[: file.read_into(start, memoryview(block))])


def read_index(folder: Location) -> dict[str, str] | None:
    """Which file holds which tensor; None for a folder without an index."""
    return _read_index(folder / INDEX_FILE) if (folder / INDEX_FILE).is_file() else None


@dataclass(frozen=True)
class Entry:
    """A tensor to write. blocks: gives its bytes, in order, when they are needed."""

    name: str
    dtype: str
    shape: Shape
    blocks: Callable[[], Iterator[Any]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write_folder(place: Place, shards: Sequence[Sequence[Entry]], progress: Advance = UNHEARD) -> None:
    """Write each shard as a file, and an index if there is more than one."""
    folder = locate(place)
    if len(shards) == 1:
        _write_file(folder / SINGLE_FILE, shards[0], progress)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard, progress)
        weight_map |= {entry.name: name for entry in shard}
    entries = [entry for shard in shards for entry in shard]
    metadata = {
        "total_parameters": sum(math.prod(entry.shape) for entry in entries),
        "total_size": sum(entry.num_bytes for entry in entries),
    }
    write_json(folder / INDEX_FILE, {"metadata": metadata, "weight_map": weight_map})


def split_shards(entries: Iterable[Entry], max_bytes: int) -> list[list[Entry]]:
    """Entries in their order, cut where the next one would make a file too large. One that alone is goes alone."""
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.num_bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.num_bytes
    return shards


def write_json(path: Location, tree: Mapping[str, Any]) -> None:
    """As transformers spells its JSON files."""
    path.write_text(json.dumps(tree, indent=2, sort_keys=True) + "\n")


def _write_file(path: Location, entries: Sequence[Entry], progress: Advance) -> None:
    # The package's order; STORED_TYPES is in its order of types.
    placed = sorted(entries, key=lambda entry: (STORED_TYPES.index(entry.dtype), entry.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in placed:
        begin, end = end, end + entry.num_bytes
        header[entry.name] = {
            "dtype": CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.writing() as file:
        file.write(memoryview(len(text).to_bytes(8, "little") + text))
        for entry in placed:
            written = 0
            for block in entry.blocks():
                file.write(memoryview(block))
                written += len(block)
                progress.advance(len(block))
            if written != entry.num_bytes:
                raise CheckpointError(f"{path}: {written} bytes came for {entry.name}, not {entry.num_bytes}")


def _raw_tensor(path: Location, name: str, entry: Any, base: int, size: int) -> RawTensor:
    values = entry if isinstance(entry, dict) else {}
    code, shape, offsets = (values.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(code, str) and _are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
        raise CheckpointError(
            f"{path} is damaged: its header says of {name} {str(entry)[:120]}; needed are dtype, shape and "
            "data_offsets, in whole numbers of at least 0"
        )
    begin, end = offsets
    dtype = _DTYPES.get(code, code)
    tensor = RawTensor(path, dtype, tuple(shape), base + begin, end - begin)
    needed = math.prod(tensor.shape) * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else max(0, tensor.num_bytes)
    if tensor.num_bytes != needed or base + end > size:
        raise CheckpointError(
            f"{path} is damaged or cut short: {name} {list(tensor.shape)} needs {needed} bytes, and its "
            f"place is {base + begin} to {base + end} of a file with {size}"
        )
    return tensor


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _require_filled(path: Location, tensors: Mapping[str, RawTensor], base: int, size: int) -> None:
    """Each tensor begins where the one before it ends, and the last one ends with the file."""
    end, before = base, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if tensor.start != end:
            what = "overlaps" if tensor.start < end else "leaves a gap behind"
            raise CheckpointError(
                f"{path} is damaged: {name} begins at byte {tensor.start} and {what} {before}, which ends at {end}"
            )
        end, before = end + tensor.num_bytes, name
    if end != size:
        raise CheckpointError(f"{path} is damaged: {size - end} bytes lie behind its last tensor, {before}")


def _read_index(path: Location) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text().removeprefix(BYTE_ORDER_MARK))["weight_map"]
        wrong = [file for file in weight_map.values() if PurePosixPath(file).name != file]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    if wrong:
        raise CheckpointError(f"{path} names {wrong[0]!r}; files must lie in the same folder")
    return weight_map


def _holder(found: Mapping[str, RawTensor], name: str) -> str | None:
    return found[name].file.name if name in found else None
