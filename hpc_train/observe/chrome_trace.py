"""Rows of ranks as one Chrome trace, which Perfetto opens: a process a rank, with tracks that hold no overlaps.

- track 1 has the rank's own work, and within it its waits
- tracks 2 and on have transfers, each on the first track that is free while it is in flight; also those that are under
  way in the chosen steps and awaited in another one, without that wait
- an arrow goes from each send to its receive

A process's number is the rank and one, since 0 has a meaning of its own; those of arrows are counted over all ranks.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from hpc_train.observe.exposed import Key, key_of
from hpc_train.observe.rank_trace import RankTrace
from hpc_train.observe.trace_files import awaited_elsewhere, rows_of
from hpc_train.plan.out_file import open_out
from hpc_train.record import Kind

_WORK_TRACK = 1
_ARROW = {"name": "send", "cat": "send"}


def write_chrome_trace(path: Path, traces: Sequence[RankTrace], option: str) -> int:
    """Write the trace, compressed where the name ends in .gz, and return how many events it has.

    Raises:
        ConfigError: it cannot be written, or must not be. option: where the user named it.
    """
    count = 0
    with open_out(path, option) as out, _text_into(out, is_packed=path.suffix == ".gz") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for event in chrome_events(traces):
            _write(file, event, is_first=count == 0)
            count += 1
        file.write("\n]}\n")
    return count


@contextmanager
def _text_into(out: BinaryIO, *, is_packed: bool) -> Iterator[TextIO]:
    """`out` itself stays open."""
    packed = gzip.GzipFile(fileobj=out, mode="wb", compresslevel=5) if is_packed else None
    text = TextIOWrapper(cast(BinaryIO, packed) if packed else out, encoding="utf-8")
    yield text
    text.detach()
    if packed:
        packed.close()


def _write(file: TextIO, event: dict[str, Any], *, is_first: bool) -> None:
    file.write(("" if is_first else ",\n") + json.dumps(event, allow_nan=False, separators=(",", ":")))


def chrome_events(traces: Sequence[RankTrace]) -> Iterator[dict[str, Any]]:
    """The events one by one; times begin at 0."""
    begins = [int(rows[:, 1].min()) for _, _, rows in rows_of(traces)]
    begins += [row[1] for trace in traces for _, row in awaited_elsewhere(trace)]
    start_ns = min(begins, default=0)
    arrows = _arrows(traces)
    for trace in traces:
        yield from _metadata(trace)
        tracks: list[int] = []
        drawn = [(step, row, True) for step, rows in trace.rows.items() for row in rows.tolist()]
        drawn += [(step, row, False) for step, row in awaited_elsewhere(trace)]
        for step, row, is_chosen in sorted(drawn, key=lambda one: (one[1][1], -one[1][3])):
            yield from _events_of_row(trace, step, row, start_ns, tracks, arrows if is_chosen else None)
        yield from (_named(trace.rank, track + 2, f"transfers {track + 1}") for track in range(len(tracks)))
        if trace.num_dropped:
            yield _dropped(trace, start_ns)


def _metadata(trace: RankTrace) -> Iterator[dict[str, Any]]:
    pid = trace.rank + 1
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"rank {trace.rank} {trace.node}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": trace.rank}}
    yield _named(trace.rank, _WORK_TRACK, "work and waits")


def _named(rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": rank + 1, "tid": track, "args": {"name": name}}


def _dropped(trace: RankTrace, start_ns: int) -> dict[str, Any]:
    last = max((int(rows[:, 3].max()) for rows in trace.rows.values()), default=start_ns)
    text = f"dropped {trace.num_dropped}"
    event = {"ph": "i", "s": "p", "name": text, "pid": trace.rank + 1, "tid": _WORK_TRACK, "ts": _us(last - start_ns)}
    return {**event, "args": {"dropped": trace.num_dropped}}


def _events_of_row(
    trace: RankTrace, step: int, row: list[int], start_ns: int, tracks: list[int], arrows: dict[Key, int] | None
) -> Iterator[dict[str, Any]]:
    """arrows: None for a transfer whose wait is in no chosen step."""
    name_id, begin, wait, end, micro_batch, model_chunk, peer, ordinal, num_bytes = row
    name, pid = trace.names[name_id], trace.rank + 1
    end = max(begin, end)
    known = {"micro_batch": micro_batch, "model_chunk": model_chunk, "peer": peer, "bytes": num_bytes}
    details = {"step": step, **{key: value for key, value in known.items() if value >= 0}}
    common = {"cat": str(name.kind), "pid": pid, "ts": _us(begin - start_ns), "args": details}
    key = key_of(name, trace.rank, peer, ordinal)
    label = f"step {step}" if name.kind is Kind.STEP else name.label
    if key is None:
        yield {"ph": "X", "name": label, "tid": _WORK_TRACK, "dur": _us(end - begin), **common}
        return
    track = _free_track(tracks, begin, end) + 2
    yield {"ph": "X", "name": label, "tid": track, "dur": _us(end - begin), **common}
    if arrows is None:
        return
    if end > wait:
        waiting = {**common, "cat": "wait", "ts": _us(wait - start_ns)}
        yield {"ph": "X", "name": f"wait: {label}", "tid": _WORK_TRACK, "dur": _us(end - wait), **waiting}
    if key in arrows:
        # Within the slices, so that a viewer binds the arrow to them.
        is_send = name.kind is Kind.SEND
        at = _us((begin if is_send else max(begin, end - min(1000, (end - begin) // 2))) - start_ns)
        arrow = {**_ARROW, "id": arrows[key], "pid": pid, "tid": track, "ts": at}
        yield {"ph": "s", **arrow} if is_send else {"ph": "f", "bp": "e", **arrow}


def _free_track(tracks: list[int], begin: int, end: int) -> int:
    """The first track that is free at `begin`; tracks has the end of each one's last slice."""
    for track, busy_until in enumerate(tracks):
        if busy_until <= begin:
            tracks[track] = end
            return track
    tracks.append(end)
    return len(tracks) - 1


def _arrows(traces: Sequence[RankTrace]) -> dict[Key, int]:
    """A number, from 1, for each send whose receive is here too."""
    sides: dict[Key, set[Kind]] = {}
    for trace, _, rows in rows_of(traces):
        for row in rows.tolist():
            name = trace.names[row[0]]
            if name.kind in (Kind.SEND, Kind.RECEIVE):
                key = key_of(name, trace.rank, row[6], row[7])
                assert key is not None
                sides.setdefault(key, set()).add(name.kind)
    both = [key for key, kinds in sides.items() if len(kinds) == 2]
    return {key: number for number, key in enumerate(both, start=1)}


def _us(ns: int) -> float:
    return ns / 1000
