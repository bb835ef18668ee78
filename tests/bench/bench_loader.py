"""Eight ranks' data: the node agent and our feeds, against torch DataLoaders over megatron-core's GPTDataset (mapped).

Each side, in turn, begins with the dataset out of the page cache, and takes the same number of tokens on 8 processes
that do nothing else:

1. tokens per second from the first to the last step, without the pause of 2.
2. in the middle all pause, and the kernel is asked (/proc/PID/smaps_rollup) for the memory of all processes of a side:
   ranks, loader workers, agent. What counts is Pss_Anon + Pss_Shmem beyond what the ranks had before they opened the
   data, and segments that are only held open: memory of their own, each page once however many have it (forked workers
   share a rank's pages, which makes Private_* of both small), and no page cache of mapped files.
3. at the end: how much of the .bin file is in the page cache (mincore), which is what was read of it from storage, for
   all processes of the node; over what was used. read_bytes of /proc/PID/io of the same processes stands beside it.

Prints JSON with the medians over rounds, and the ratios.

    python -m tests.bench.bench_loader [--rounds 3] [--mib 1024] [--seq-len 8192] [--workers 2] [--reader agent]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import mmap
import multiprocessing
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hpc_train.config import DataConfig, SourceConfig, TrainConfig
from hpc_train.data.index import index_path, sidecar_path
from hpc_train.data.index_writer import TokenFileWriter
from hpc_train.data.sidecar import Sidecar, sha256_of_file
from tests.processes import descendants, kill_tree

_VOCAB = 128_256
_RANKS = 8
_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Case:
    """What both sides do. tokens_per_step: of one rank."""

    prefix: str
    cache: str
    seq_len: int
    micro_batches: int
    steps: int
    workers: int
    reader: str

    @property
    def used_bytes(self) -> int:
        return _RANKS * self.steps * self.micro_batches * self.seq_len * 4


Take = Callable[[int], int]
"""Takes a step and gives the number of its tokens."""


def make_corpus(prefix: Path, num_mib: int) -> None:
    """Documents of 2,000 to 130,000 tokens, 16,000 in the middle, as of books and source trees; 4 bytes a token."""
    random = np.random.default_rng(5)
    with TokenFileWriter(prefix, np.int32) as writer:
        left = num_tokens = num_mib * (1 << 18)
        while left > 0:
            length = min(left, int(np.clip(random.lognormal(np.log(16_000), 0.8), 2_000, 130_000)))
            writer.add_document(random.integers(1, _VOCAB, length, dtype=np.int32))
            left -= length
        writer.finish()
    # As `data build` leaves it: where it does not tell the largest id, a dataset of this size is read whole at first.
    sidecar = Sidecar(
        hpc_train_version="0", tokenizer="none", tokenizer_sha256="", tokenizer_file=None, vocab_size=_VOCAB, eod_id=0,
        max_token_id=_VOCAB - 1, num_documents=writer.num_documents, num_tokens=num_tokens, num_supervised_tokens=None,
        unigram_entropy_nats=0.0, idx_sha256=sha256_of_file(index_path(prefix)), bin_bytes=num_tokens * 4, skipped={},
    )  # fmt: skip
    sidecar_path(prefix).write_text(sidecar.to_text())


def drop_from_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def cached_bytes(path: Path) -> int:
    """How much of a file is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    # A private copy-on-write mapping, of which ctypes can have the address; looking touches no page.
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
        window = ctypes.c_char.from_buffer(memory)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(window)), ctypes.c_size_t(size), pages)
        del window
    assert not failed, os.strerror(ctypes.get_errno())
    return int((np.frombuffer(pages, np.uint8) & 1).sum()) * mmap.PAGESIZE


def memory_of(pid: int) -> dict[str, int]:
    """What a process has by itself, shared segments among it, and its share of files that are mapped; bytes."""
    lines = [line.partition(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    kib = {name: int(value.split()[0]) for name, _, value in lines if value.endswith("kB")}
    return {
        "own": (kib["Pss_Anon"] + kib["Pss_Shmem"]) * 1024,
        "file": kib["Pss_File"] * 1024,
    }


def held_bytes(pids: list[int]) -> int:
    """Segments without a name that these processes have open, each once; torch's and ours."""
    found: dict[tuple[int, int], int] = {}
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(entry).startswith(("/memfd:", "/dev/shm/")):
                    status = entry.stat()
                    found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def storage_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


# One rank of each side. Both give tokens, labels, positions and what is supervised as int64 tensors.


def open_ours(case: Case, rank: int, address: tuple[str, str, str]) -> Take:
    from hpc_train.data.agent_batches import AgentAddress, ReadingPlace
    from hpc_train.data.feed import open_feed

    data, train = configs(case)
    place = ReadingPlace(_RANKS, rank, True, rank, _RANKS)
    feed = open_feed(data, train, vocab_size=_VOCAB, place=place, agent=AgentAddress(*address))
    return lambda step: sum(batch.tokens.numel() for batch in feed.micro_batches(step))


def configs(case: Case) -> tuple[DataConfig, TrainConfig]:
    data = DataConfig(seq_len=case.seq_len, train=(SourceConfig(prefix=case.prefix),), reader=case.reader)
    return data, TrainConfig(steps=case.steps, global_batch_size=_RANKS * case.micro_batches)


def open_theirs(case: Case, rank: int, address: tuple[str, str, str]) -> Take:
    from torch.utils.data import DataLoader

    dataset = gpt_dataset(case)
    size = case.micro_batches
    order = [
        list(range((step * _RANKS + rank) * size, (step * _RANKS + rank) * size + size)) for step in range(case.steps)
    ]
    # Workers are forked, as in a rank that a launcher started, and share what the rank has loaded.
    context = "fork" if case.workers else None
    loader = DataLoader(dataset, batch_sampler=order, num_workers=case.workers, multiprocessing_context=context)
    batches: Iterator[dict[str, Any]] = iter(loader)
    return lambda step: int(next(batches)["tokens"].numel())


def gpt_dataset(case: Case) -> Any:
    import logging

    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    logging.disable(logging.WARNING)
    names = SimpleNamespace(name="none")
    tokenizer = SimpleNamespace(vocab_size=_VOCAB, eod=0, eos=0, pad=-1, unique_identifiers=vars(names))
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=case.seq_len, blend=([case.prefix], None), split="1", path_to_cache=case.cache,
        tokenizer=tokenizer, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False,
    )  # fmt: skip
    wanted = [_RANKS * case.steps * case.micro_batches, None, None]
    return BlendedMegatronDatasetBuilder(GPTDataset, wanted, lambda: True, config).build()[0]


SIDES: dict[str, Callable[[Case, int, tuple[str, str, str]], Take]] = {"ours": open_ours, "theirs": open_theirs}


def rank_main(side: str, case: Case, rank: int, address: tuple[str, str, str], parent: Connection) -> None:
    """Open the data, then take steps when told to."""
    import torch

    torch.set_num_threads(1)
    gc.collect()
    parent.send(memory_of(os.getpid()))
    parent.recv()
    take = SIDES[side](case, rank, address)
    half = case.steps // 2
    for steps in (range(1, half + 1), range(half + 1, case.steps + 1)):
        parent.send("ready")
        parent.recv()
        begin = time.perf_counter()
        tokens = sum(take(step) for step in steps)
        parent.send((tokens, time.perf_counter() - begin))
        parent.recv()
    parent.send("end")
    parent.recv()
    os._exit(0)  # workers end with it


def run_side(side: str, case: Case, folder: Path) -> dict[str, float]:
    """One round of one side."""
    path = Path(f"{case.prefix}.bin")
    drop_from_cache(path)
    address = (f"bench.{secrets.token_hex(4)}", "bench", "s")
    agent = None
    if side == "ours" and case.reader == "agent":
        command = [sys.executable, "-m", "hpc_train.node_agent", "--run-dir", str(folder)]
        command += ["--job-key", address[0], "--node", address[1]]
        agent = subprocess.Popen(command, stdin=subprocess.PIPE)
    pipes = [_context.Pipe() for _ in range(_RANKS)]
    ranks = [
        _context.Process(target=rank_main, args=(side, case, rank, address, pipes[rank][1])) for rank in range(_RANKS)
    ]
    for process in ranks:
        process.start()
    ends = [ours for ours, _ in pipes]
    try:
        return measure(case, ends, [process.pid or 0 for process in ranks], agent.pid if agent else None, path)
    finally:
        for process in ranks:
            kill_tree(process.pid or 0)  # workers too: what they have mapped stays in the page cache
            process.join()
        if agent is not None:
            agent.communicate()


def measure(case: Case, ends: list[Connection], pids: list[int], agent: int | None, path: Path) -> dict[str, float]:
    before = [end.recv() for end in ends]
    _tell(ends)
    halves = []
    memory: list[dict[str, int]] = []
    read = held = 0
    for half in range(2):
        for end in ends:
            end.recv()
        begin = time.perf_counter()
        _tell(ends)
        tokens = sum(end.recv()[0] for end in ends)
        halves.append((tokens, time.perf_counter() - begin))
        others = [pid for rank in pids for pid in descendants(rank)] + ([agent] if agent else [])
        if half == 0:
            memory = [memory_of(pid) for pid in (*pids, *others)]
            held = held_bytes([*pids, *others])
        else:
            read = sum(storage_bytes(pid) for pid in (*pids, *others))
        _tell(ends)
    for end in ends:
        end.recv()
    cached = cached_bytes(path)
    grown = {kind: sum(entry[kind] for entry in memory) - sum(entry[kind] for entry in before) for kind in before[0]}
    tokens, seconds = (sum(column) for column in zip(*halves, strict=True))
    return {
        "tokens_per_s": tokens / seconds,
        "read_over_used": cached / case.used_bytes,
        "io_read_over_used": read / case.used_bytes,
        "memory_mib": (grown["own"] + held) / 2**20,
        "held_mib": held / 2**20,
        "file_mib": grown["file"] / 2**20,
        "processes": len(memory),
    }


def _tell(ends: list[Connection]) -> None:
    for end in ends:
        end.send("go")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=1024, help="size of the dataset")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--micro-batches", type=int, default=2, help="sequences of a rank in a step")
    parser.add_argument("--workers", type=int, default=2, help="of each DataLoader; 2 is megatron's default")
    parser.add_argument("--reader", choices=("agent", "rank"), default="agent", help="of our side")
    parser.add_argument("--folder", type=Path, default=None, help="on the file system to be measured")
    args = parser.parse_args()
    # What either side needs is loaded once, so that both begin with the same processes.
    _context.set_forkserver_preload(
        [
            "torch",
            "torch.utils.data",
            "hpc_train.train.build",
            "hpc_train.data.feed",
            "megatron.core.datasets.gpt_dataset",
        ]
    )
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        make_corpus(folder / "corpus", args.mib)
        case = Case(
            str(folder / "corpus"), str(folder / "cache"), args.seq_len, args.micro_batches, args.steps, args.workers,
            args.reader,
        )  # fmt: skip
        gpt_dataset(case)  # its index files are made once, before anything is measured
        rounds: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for number in range(args.rounds):
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                rounds[side].append(run_side(side, case, folder))
                print(f"round {number + 1}, {side}: {rounds[side][-1]}", file=sys.stderr, flush=True)
    medians = {
        side: {key: round(statistics.median(entry[key] for entry in entries), 3) for key in entries[0]}
        for side, entries in rounds.items()
    }
    ours, theirs = medians["ours"], medians["theirs"]
    ratios = {key: round(ours[key] / theirs[key], 3) for key in ours if theirs[key]}
    print(json.dumps({"case": vars(args) | {"folder": None}, **medians, "ours_over_theirs": ratios}, indent=1))


if __name__ == "__main__":
    main()
