"""The archive that torch.save writes of one tensor, put around bytes that lie somewhere already. Needs no torch.

It is a zip file without compression: a pickle that tells type and shape, the byte order, a version, and last the
tensor's memory. All of it but the checksum of that memory is known beforehand, so a file of many of them is laid out
before its first byte is written, and is written from beginning to end.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from math import prod

from hpc_train.checkpoint.format.opcodes import integer, integers, named, text
from hpc_train.errors import CheckpointError

_STORAGES = {
    "float64": ("DoubleStorage", 8),
    "float32": ("FloatStorage", 4),
    "float16": ("HalfStorage", 2),
    "bfloat16": ("BFloat16Storage", 2),
    "int64": ("LongStorage", 8),
    "int32": ("IntStorage", 4),
    "int16": ("ShortStorage", 2),
    "int8": ("CharStorage", 1),
    "uint8": ("ByteStorage", 1),
    "bool": ("BoolStorage", 1),
}
"""What torch's pickles call the memory of a type, and the bytes of an element."""

_ALIGNMENT = 64
"""Of the tensor's memory in its archive, as torch.save has it."""
# cited: APPNOTE.TXT of the zip format, 4.3 and 4.5.
_LOCAL, _DESCRIPTOR, _CENTRAL, _END = b"PK\3\4", b"PK\7\10", b"PK\1\2", b"PK\5\6"
_END_64, _LOCATOR_64 = b"PK\6\6", b"PK\6\7"
_SIZE_FOLLOWS = 0x0008
"""The flag of a record whose checksum stands behind it."""
_LARGE = 0xFFFFFFFF
_DATE = 0x21
"""The first day that a zip file can name: archives of equal tensors are equal."""


@dataclass(frozen=True)
class Archive:
    """head: all before the tensor's num_bytes bytes. directory: of the records in the head."""

    head: bytes
    num_bytes: int
    directory: bytes
    num_records: int
    data_header_start: int

    @property
    def total_bytes(self) -> int:
        return len(self.head) + self.num_bytes + len(self.tail(0))

    def tail(self, crc32: int) -> bytes:
        """All behind the tensor's bytes, which have this checksum."""
        is_large = self.num_bytes >= _LARGE
        sizes = struct.pack("<QQ" if is_large else "<II", self.num_bytes, self.num_bytes)
        descriptor = _DESCRIPTOR + struct.pack("<I", crc32) + sizes
        entry = _central_entry("archive/data/0", crc32, self.num_bytes, self.data_header_start, _SIZE_FOLLOWS)
        start = len(self.head) + self.num_bytes + len(descriptor)
        return descriptor + self.directory + entry + _end(self.num_records + 1, len(self.directory + entry), start)


def element_bytes(dtype: str) -> int:
    """Bytes of an element of a type by torch's name."""
    return _storage(dtype)[1]


def archive_of(dtype: str, sizes: tuple[int, ...]) -> Archive:
    """The archive of a contiguous tensor of this type and shape.

    Raises:
        CheckpointError: a type that checkpoints do not hold.
    """
    records = {
        "archive/data.pkl": _pickled(dtype, sizes),
        "archive/byteorder": b"little",
        "archive/version": b"3\n",
    }
    head, directory = b"", b""
    for name, content in records.items():
        crc32 = zlib.crc32(content)
        directory += _central_entry(name, crc32, len(content), len(head), 0)
        head += _local_header(name, crc32, len(content), 0, b"") + content
    num_bytes = prod(sizes) * element_bytes(dtype)
    start = len(head)
    return Archive(head + _data_header(num_bytes, start), num_bytes, directory, len(records), start)


def _storage(dtype: str) -> tuple[str, int]:
    if dtype not in _STORAGES:
        raise CheckpointError(f"checkpoints hold no tensors of type {dtype}, only {', '.join(_STORAGES)}")
    return _STORAGES[dtype]


def _pickled(dtype: str, sizes: tuple[int, ...]) -> bytes:
    """torch._utils._rebuild_tensor_v2((storage), 0, sizes, strides, False, OrderedDict()), as torch.save writes it."""
    strides = tuple(prod(sizes[index + 1 :]) for index in range(len(sizes)))
    parts = [
        b"\x80\x02",
        named("torch._utils", "_rebuild_tensor_v2"),
        b"((",
        text("storage"),
        named("torch", _storage(dtype)[0]),
        text("0"),
        text("cpu"),
        integer(prod(sizes)),
        b"tQ",
        integer(0),
        integers(sizes),
        integers(strides),
        b"\x89",
        named("collections", "OrderedDict"),
        b")R",
        b"tR.",
    ]
    return b"".join(parts)


def _data_header(num_bytes: int, start: int) -> bytes:
    """The local header of the tensor's memory, as long as makes that begin at a multiple of _ALIGNMENT."""
    is_large = num_bytes >= _LARGE
    extra = struct.pack("<HHQQ", 1, 16, 0, 0) if is_large else b""
    before = start + len(_local_header("archive/data/0", 0, 0, 0, extra)) + 4
    padding = -before % _ALIGNMENT
    extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
    return _local_header("archive/data/0", 0, _LARGE if is_large else 0, _SIZE_FOLLOWS, extra)


def _local_header(name: str, crc32: int, num_bytes: int, flags: int, extra: bytes) -> bytes:
    version = 45 if num_bytes == _LARGE else 20
    values = (version, flags, 0, 0, _DATE, crc32, num_bytes, num_bytes, len(name), len(extra))
    return _LOCAL + struct.pack("<HHHHHIIIHH", *values) + name.encode() + extra


def _central_entry(name: str, crc32: int, num_bytes: int, header_start: int, flags: int) -> bytes:
    is_large = num_bytes >= _LARGE
    extra = struct.pack("<HHQQ", 1, 16, num_bytes, num_bytes) if is_large else b""
    version, told = (45, _LARGE) if is_large else (20, num_bytes)
    values = (version, version, flags, 0, 0, _DATE, crc32, told, told, len(name), len(extra), 0, 0, 0, 0, header_start)
    return _CENTRAL + struct.pack("<HHHHHHIIIHHHHHII", *values) + name.encode() + extra


def _end(num_records: int, num_bytes: int, start: int) -> bytes:
    """The end of an archive whose directory of so many bytes begins at `start`."""
    before = b""
    if start >= _LARGE:
        values = (44, 45, 45, 0, 0, num_records, num_records, num_bytes, start)
        before = _END_64 + struct.pack("<QHHIIQQQQ", *values)
        before += _LOCATOR_64 + struct.pack("<IQI", 0, start + num_bytes, 1)
    counts = (0, 0, num_records, num_records, num_bytes, min(start, _LARGE), 0)
    return before + _END + struct.pack("<HHHHIIH", *counts)
