"""Read and write the safetensors format in pieces, of a file or of a Hugging Face folder of several.

A file is the header's length (8 bytes, little-endian), a JSON header, and the tensors' raw bytes. The safetensors
package writes a file from tensors that are all in memory and reads by mapping the file; here a block at a time goes
through, so that memory is bounded and a file cut short is an error and not a bus error. The order of tensors and the
header's spelling are the package's, so that equal tensors give equal files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from hpc_train.checkpoint.model_tensors import STORED_TYPES, Shape, few
from hpc_train.errors import CheckpointError

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

    file: Path
    dtype: str
    shape: Shape
    start: int
    num_bytes: int

    def read(self, start: int, num_bytes: int) -> bytearray:
        """Bytes start .. start + num_bytes of this tensor."""
        block = bytearray(num_bytes)
        with open(self.file, "rb", buffering=0) as file:
            file.seek(self.start + start)
            place = 0
            while place < num_bytes:
                count = file.readinto(memoryview(block)[place:])
                if not count:
                    raise CheckpointError(f"{self.file} ends {num_bytes - place} bytes early")
                place += count
        return block


def read_folder(folder: Path) -> dict[str, RawTensor]:
    """The tensors of a Hugging Face folder, from its single file or from those that its index names.

    Raises:
        CheckpointError: no such file, a damaged one, or an index that does not fit the files.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists() and index.exists():
        raise CheckpointError(f"{folder} has {SINGLE_FILE} and {INDEX_FILE}; remove the one that is not meant")
    if single.exists():
        return read_header(single)
    if not index.exists():
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        hint = f" It has {few(pickles, 3)}, a pickle, which is never read." if pickles else ""
        raise CheckpointError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}.{hint} transformers writes safetensors by "
            "save_pretrained."
        )
    weight_map = _read_index(index)
    found: dict[str, RawTensor] = {}
    for name in sorted(set(weight_map.values())):
        if not (folder / name).is_file():
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


def read_header(path: Path) -> dict[str, RawTensor]:
    """The tensors of one file, which fill it without gaps, each as long as its shape says.

    Their types may be others than those that are read: a file may hold constants that nobody needs.

    Raises:
        CheckpointError: it is no such file, or a damaged one.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path} is no safetensors file, or is cut short within its header")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise CheckpointError(f"{path} cannot be read: its header is a {type(header).__name__}, not a JSON object")
        header.pop("__metadata__", None)
        found = {name: _raw_tensor(path, name, entry, 8 + length, size) for name, entry in header.items()}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    _require_filled(path, found, 8 + length, size)
    return found


def read_index(folder: Path) -> dict[str, str] | None:
    """Which file holds which tensor; None for a folder without an index."""
    return _read_index(folder / INDEX_FILE) if (folder / INDEX_FILE).exists() else None


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


def write_folder(folder: Path, shards: Sequence[Sequence[Entry]]) -> None:
    """Write each shard as a file, and an index if there is more than one."""
    if len(shards) == 1:
        _write_file(folder / SINGLE_FILE, shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard)
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


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """As transformers spells its JSON files."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(tree, indent=2, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _write_file(path: Path, entries: Sequence[Entry]) -> None:
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
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in placed:
            written = sum(file.write(block) for block in entry.blocks())
            if written != entry.num_bytes:
                raise CheckpointError(f"{path}: {written} bytes came for {entry.name}, not {entry.num_bytes}")
        file.flush()
        os.fsync(file.fileno())


def _raw_tensor(path: Path, name: str, entry: Any, base: int, size: int) -> RawTensor:
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


def _require_filled(path: Path, tensors: Mapping[str, RawTensor], base: int, size: int) -> None:
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


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8-sig"))["weight_map"]
        wrong = [file for file in weight_map.values() if Path(file).name != file]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    if wrong:
        raise CheckpointError(f"{path} names {wrong[0]!r}; files must lie in the same folder")
    return weight_map


def _holder(found: Mapping[str, RawTensor], name: str) -> str | None:
    return found[name].file.name if name in found else None
