"""Trace files as ranks write them, made up, and a strict reader of Chrome traces."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpc_train.record import CLOCK_FILE, TRACE_FOLDER, HostClock, Kind, Segment, attempt_folder, rank_trace_file
from hpc_train.train.trace import TraceRecorder

MS = 1_000_000


class FakeClock(HostClock):
    """A clock that a test sets."""

    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns

    def mark(self) -> int:
        return self.now_ns


def open_recorder(run_dir: Path, rank: int, clock: Any, *, node_rank: int = 0, **options: Any) -> TraceRecorder:
    facts = {"rank": rank, "node": f"n{node_rank}", "node_rank": node_rank, "world_size": 8}
    path = run_dir / TRACE_FOLDER / attempt_folder(1) / rank_trace_file(rank)
    return TraceRecorder(path, facts, clock, **{"max_rows": 10**6, **options})


def write_clock(run_dir: Path, offsets: dict[int, tuple[int, int]]) -> None:
    folder = run_dir / TRACE_FOLDER / attempt_folder(1)
    folder.mkdir(parents=True, exist_ok=True)
    nodes = {str(node): {"offset_ns": offset, "error_ns": error} for node, (offset, error) in offsets.items()}
    (folder / CLOCK_FILE).write_text(json.dumps({"nodes": nodes}))


def write_pipeline(run_dir: Path, num_ranks: int, num_steps: int, *, late_ns: int = 3 * MS) -> None:
    """Each rank computes 10 ms, then sends to the next, which posts its receive at the step's start.

    A send takes 2 ms from when it is posted; the receiver's wait has the sender's compute in it. Even ranks are on one
    node, odd ones on another whose clock is 7 s ahead. The all-reduce at the end takes 1 ms; the last rank begins it
    `late_ns` after the others.
    """
    write_clock(run_dir, {0: (0, 0), 1: (7000 * MS, 20_000)})
    for rank in range(num_ranks):
        offset = 7000 * MS * (rank % 2)
        clock = FakeClock()
        recorder = open_recorder(run_dir, rank, clock, node_rank=rank % 2)
        for step in range(1, num_steps + 1):
            _play_step(recorder, clock, rank, num_ranks, step, 1000 * step * MS + offset, late_ns)
        recorder.close()


def _play_step(
    recorder: TraceRecorder, clock: FakeClock, rank: int, num_ranks: int, step: int, start: int, late_ns: int
) -> None:
    ranks = tuple(range(num_ranks))
    clock.now_ns = start
    with recorder.step(step):
        if rank > 0:
            received = recorder.communication(Kind.RECEIVE, "recv", "pp", ranks, 4096, rank - 1)
            received.begin_wait()
            clock.now_ns = start + (12 * rank) * MS
            received.end()
        with recorder.segment("forward", micro_batch=0, model_chunk=0):
            clock.now_ns = start + (12 * rank + 10) * MS
        if rank < num_ranks - 1:
            sent = recorder.communication(Kind.SEND, "send", "pp", ranks, 4096, rank + 1)
            clock.now_ns += 2 * MS
            sent.begin_wait()
            sent.end()
        end = start + 12 * num_ranks * MS
        clock.now_ns = end + (late_ns if rank == num_ranks - 1 else 0)
        with recorder.communication(Kind.COLLECTIVE, "all_reduce", "world", ranks, 8):
            clock.now_ns = end + late_ns + MS


def write_early_gathers(run_dir: Path, num_steps: int, *, late_ns: int = 0) -> None:
    """Two ranks, a step each 100 ms. In each a gather is begun after 80 ms and awaited in the next step after 10 ms for
    5 ms; another one is begun after 82 ms and awaited in the step itself after 85 ms for 3 ms. Rank 1 begins both
    `late_ns` later.
    """
    write_clock(run_dir, {0: (0, 0)})
    for rank in (0, 1):
        clock = FakeClock()
        recorder = open_recorder(run_dir, rank, clock)
        early = None
        for step in range(1, num_steps + 1):
            start, late = 100 * step * MS, rank * late_ns
            clock.now_ns = start
            with recorder.step(step):
                if early is not None:
                    _await(early, clock, start + 10 * MS, start + 15 * MS)
                clock.now_ns = start + 80 * MS + late
                early = recorder.communication(Kind.COLLECTIVE, "all_gather", "dp", (0, 1), 64)
                clock.now_ns = start + 82 * MS + late
                own = recorder.communication(Kind.COLLECTIVE, "all_gather", "dp", (0, 1), 64)
                _await(own, clock, start + max(85 * MS, 82 * MS + late), start + 88 * MS)
                clock.now_ns = start + 90 * MS
        recorder.close()


def write_evaluations(run_dir: Path, num_steps: int) -> None:
    """Two ranks that wait 3 ms for a sum within each step, and 20 ms for another one between steps."""
    write_clock(run_dir, {0: (0, 0)})
    for rank in (0, 1):
        clock = FakeClock()
        recorder = open_recorder(run_dir, rank, clock)
        for step in range(1, num_steps + 1):
            start = 100 * step * MS
            clock.now_ns = start
            with recorder.step(step):
                own = recorder.communication(Kind.COLLECTIVE, "all_reduce", "dp", (0, 1), 8)
                _await(own, clock, start + 2 * MS, start + 5 * MS)
            between = recorder.communication(Kind.COLLECTIVE, "all_reduce", "dp", (0, 1), 8)
            _await(between, clock, start + 10 * MS, start + 30 * MS)
        recorder.close()


def _await(transfer: Segment, clock: FakeClock, wait_ns: int, end_ns: int) -> None:
    clock.now_ns = wait_ns
    transfer.begin_wait()
    clock.now_ns = end_ns
    transfer.end()


def read_strictly(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace, each checked by the format's rules; strict JSON."""

    def refuse(word: str) -> float:
        raise ValueError(f"{word} is not JSON")

    data = path.read_bytes()
    tree = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data, parse_constant=refuse)
    assert set(tree) == {"displayTimeUnit", "traceEvents"}
    events: list[dict[str, Any]] = tree["traceEvents"]
    for event in events:
        _check_event(event)
    for slices in slices_by_track(events).values():
        _check_nesting(slices)
    _check_arrows(events)
    return events


def _check_event(event: dict[str, Any]) -> None:
    assert event["ph"] in {"M", "X", "s", "f", "i"}, event
    assert isinstance(event["name"], str) and event["name"]
    assert event["pid"] >= 1
    if event["ph"] != "M":
        assert math.isfinite(event["ts"]) and event["ts"] >= 0
        assert event["tid"] >= 1
    if event["ph"] == "X":
        assert math.isfinite(event["dur"]) and event["dur"] >= 0


def slices_by_track(events: Sequence[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], round(event["ts"] + event["dur"], 3)))
    return tracks


def _check_nesting(slices: list[tuple[float, float]]) -> None:
    """A slice of a track lies within another or outside it; one that crosses another's end would vanish."""
    open_ends: list[float] = []
    for begin, end in sorted(slices, key=lambda one: (one[0], -one[1])):
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], (begin, end, open_ends)
        open_ends.append(end)


def _check_arrows(events: Sequence[dict[str, Any]]) -> None:
    """Each number has one start and one end, on slices of two ranks."""
    tracks = slices_by_track(events)
    sides = [event for event in events if event["ph"] in "sf"]
    assert all(count == 1 for count in Counter((event["id"], event["ph"]) for event in sides).values())
    assert {e["id"] for e in sides if e["ph"] == "s"} == {e["id"] for e in sides if e["ph"] == "f"}
    for event in sides:
        assert any(begin <= event["ts"] <= end for begin, end in tracks[event["pid"], event["tid"]])


def arrows(events: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    yield from ((event, ends[event["id"]]) for event in events if event["ph"] == "s")
