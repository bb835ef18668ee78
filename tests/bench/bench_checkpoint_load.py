"""Load of state that all ranks hold alike from a real HDFS behind a slow link: ours, and torch's dcp.load.

HDFS (a name node, two data nodes) runs in a network namespace of its own, whose outgoing link is shaped to be the
bottleneck; ranks are processes of this machine with gloo between them. Both loads read the same checkpoint through the
same client. Loads alternate. Bytes are what the data nodes say that they sent. Prints JSON.

    python -m tests.bench.bench_checkpoint_load [--mib 1024] [--ranks 4] [--rate 1gbit] [--rounds 3]

Needs root and iproute2; --rate none for a link that is not shaped.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from tests.ranks import TestRank, run_ranks

TENSOR_ROWS, ROW = 4096, 1024
TENSOR_MIB = 16


def _state(me: TestRank, num_tensors: int, value: float | None, spread: bool) -> list[Any]:
    """All tensors of the state, or the ranks' shares of them; value None: to be filled."""
    import torch

    from hpc_train.checkpoint.format.state import StatePiece
    from hpc_train.plan.flat import Box

    shape = (TENSOR_ROWS, ROW)
    numbers = range(me.rank, num_tensors, me.world_size) if spread else range(num_tensors)
    return [
        StatePiece(
            f"model.{number:04d}",
            shape,
            Box((0, 0), shape),
            torch.zeros(TENSOR_ROWS * ROW) if value is None else torch.arange(TENSOR_ROWS * ROW) * 1.0 + number + value,
        )
        for number in numbers
    ]


def save(me: TestRank, place: str, num_tensors: int) -> None:
    """Written once, a share by each rank."""
    from hpc_train.checkpoint.saving.save import save_checkpoint
    from tests.worlds import make_world

    save_checkpoint(place, 1, _state(me, num_tensors, 1.0, spread=True), {}, make_world(me), keep=0)


def load_ours(me: TestRank, place: str, num_tensors: int) -> float:
    """Seconds until all ranks have all of it."""
    from hpc_train.checkpoint.loading.load import load_newest
    from tests.worlds import make_world

    world, pieces = make_world(me), _state(me, num_tensors, None, spread=False)
    with _together() as seconds:
        assert load_newest(place, pieces, world) is not None
    _check(me, {piece.name: piece.data for piece in pieces}, num_tensors)
    return seconds[0]


def load_dcp(me: TestRank, place: str, num_tensors: int) -> float:
    """The same by torch's own distributed checkpoint, from the same folder through the same client."""
    import torch.distributed.checkpoint as dcp

    from hpc_train.checkpoint.stores.location import locate

    state = {piece.name: piece.tensor() for piece in _state(me, num_tensors, None, spread=False)}
    with _together() as seconds:
        dcp.load(state, storage_reader=_torch_reader(locate(place) / "step_0000001"))
    _check(me, state, num_tensors)
    return seconds[0]


@contextmanager
def _together() -> Iterator[list[float]]:
    """Seconds from when all ranks have come to when all are done."""
    import torch.distributed as dist

    seconds: list[float] = []
    dist.barrier()
    begin = time.perf_counter()
    yield seconds
    dist.barrier()
    seconds.append(time.perf_counter() - begin)


def _check(me: TestRank, found: dict[str, Any], num_tensors: int) -> None:
    import torch

    for piece in _state(me, num_tensors, 1.0, spread=False):
        assert torch.equal(found[piece.name].view(-1), piece.data), piece.name


def _torch_reader(folder: Any) -> Any:
    """torch's FileSystemReader on a store of ours."""
    from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader

    class StoreFiles(FileSystem):
        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
            assert mode == "rb", mode
            place = folder / str(path)
            with place.reading() as reader:
                yield io.BufferedReader(cast(io.RawIOBase, _In(reader, place.entry().num_bytes)), 1 << 20)

        def concat_path(self, path: Any, suffix: str) -> Any:
            return suffix

        def exists(self, path: Any) -> bool:
            return (folder / str(path)).entry() is not None

    reader: Any = FileSystemReader("")
    reader.fs, reader.path = StoreFiles(), ""
    return reader


class _In(io.RawIOBase):
    """An open file of a store as Python's own."""

    def __init__(self, reader: Any, num_bytes: int) -> None:
        self._reader, self._num_bytes, self._place = reader, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._num_bytes}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        count: int = self._reader.read_into(self._place, memoryview(buffer).cast("B"))
        self._place += count
        return count


def main() -> None:
    from tests.services.hdfs import HdfsCluster
    from tests.services.shaped_link import shaped_link

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    num_tensors = options.mib // TENSOR_MIB
    state_bytes = num_tensors * TENSOR_ROWS * ROW * 4
    ways = {"ours": load_ours, "dcp.load": load_dcp}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    sent: dict[str, list[int]] = {name: [] for name in ways}
    with shaped_link(None if options.rate == "none" else options.rate) as link:
        hdfs = HdfsCluster(address=link.address, enter=link.enter)
        try:
            hdfs.start()
            place = f"{hdfs.url}/bench"
            run_ranks(save, options.ranks, place, num_tensors, timeout_s=600)
            for _ in range(options.rounds):
                for name, load in ways.items():
                    before = hdfs.bytes_sent()
                    seconds[name].append(max(run_ranks(load, options.ranks, place, num_tensors, timeout_s=600)))
                    sent[name].append(hdfs.bytes_sent() - before)
        finally:
            hdfs.stop()
    figures = {
        "state_mib": state_bytes >> 20,
        "ranks": options.ranks,
        "rate": options.rate,
        "seconds": {name: [round(value, 2) for value in values] for name, values in seconds.items()},
        "sent by the data nodes over the state": {
            name: [round(value / state_bytes, 4) for value in values] for name, values in sent.items()
        },
        "ours over dcp.load": round(statistics.median(seconds["ours"]) / statistics.median(seconds["dcp.load"]), 3),
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
