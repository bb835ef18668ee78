"""From trace files of ranks to one timeline and to the share of exposed communication."""

from __future__ import annotations

import argparse
import json
import math
import tracemalloc
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from hpc_train.cli import main
from hpc_train.errors import ConfigError, DataError
from hpc_train.observe.exposed import exposure_figures, exposure_table, measure_exposure
from hpc_train.observe.timeline_picture import EXPOSED, LATE, timeline_bars
from hpc_train.observe.trace_command import trace_command
from hpc_train.observe.trace_files import choose_ranks, find_trace, parse_ranges, read_rank
from hpc_train.record import Kind, quotient
from tests.observe.traces import (
    MS,
    FakeClock,
    arrows,
    open_recorder,
    read_strictly,
    write_clock,
    write_early_gathers,
    write_evaluations,
    write_pipeline,
)


def _options(run_dir: Path, steps: str | None) -> argparse.Namespace:
    return argparse.Namespace(run=str(run_dir), attempt=None, ranks=None, steps=steps, out=None, png=None, json=False)


def _run(run_dir: Path, *options: str) -> int:
    return main(["trace", str(run_dir), *options])


def test_eight_ranks_and_twenty_steps_become_one_trace_that_keeps_every_segment(tmp_path: Path, capsys) -> None:
    """FC-96: a process number is the rank's and one, never 0, however ranks are spread over nodes."""
    write_pipeline(tmp_path, 8, 20)
    assert _run(tmp_path) == 0
    events = read_strictly(tmp_path / "trace.json.gz")
    named = [event["name"] for event in events if event["ph"] == "X"]
    assert named.count("forward") == 8 * 20
    assert named.count("pp send") == named.count("pp recv") == 7 * 20
    assert named.count("world all_reduce") == 8 * 20
    assert {event["pid"] for event in events} == set(range(1, 9))
    titles = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert titles[4] == "rank 3 n1"
    assert f"{len(events)} events" in capsys.readouterr().out


def test_a_picture_shows_work_and_waiting_of_a_few_ranks(tmp_path: Path, capsys) -> None:
    write_pipeline(tmp_path, 4, 3)
    picture = tmp_path / "t.png"
    assert _run(tmp_path, "--steps", "2-2", "--png", str(picture)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
    assert f"written: {picture}" in capsys.readouterr().out


def test_the_legend_of_all_kinds_of_work_lies_within_the_picture(tmp_path: Path, monkeypatch) -> None:
    recorder = open_recorder(tmp_path, 0, clock := FakeClock())
    with recorder.step(1):
        for label in ("data", "forward", "backward", "backward of weights", "optimizer", "save"):
            with recorder.segment(label):
                clock.now_ns += MS
    recorder.close()
    beyond = []

    def note(figure: Figure, *args: object, **options: object) -> None:
        figure.draw_without_rendering()
        (axes,) = figure.axes
        places = [text.get_window_extent() for text in axes.get_legend().get_texts()]
        beyond.append([box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1 for box in places])

    monkeypatch.setattr(Figure, "savefig", note)
    assert _run(tmp_path, "--png", str(tmp_path / "t.png")) == 0
    assert beyond == [[False] * 9]


def test_the_waits_of_a_picture_are_those_of_the_table(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "pipeline", 4, 3)
    write_early_gathers(tmp_path / "gathers", 4, late_ns=4 * MS)
    write_evaluations(tmp_path / "evaluations", 4)
    for run_dir in (tmp_path / "pipeline", tmp_path / "gathers", tmp_path / "evaluations"):
        folder = find_trace(run_dir)
        traces = [read_rank(folder, rank, range(2, 4)) for rank in folder.ranks]
        bars, _, labels = timeline_bars(traces, 0)
        found = measure_exposure(traces)
        assert labels == sorted(kind.label for kind in found.kinds)
        for kind in found.kinds:
            lanes = [of_rank.lanes[kind.label] for of_rank in bars if kind.label in of_rank.lanes]
            for colour, total_ns in ((EXPOSED, kind.exposed_ns), (LATE, kind.late_ns)):
                drawn_ms = sum(width for lane in lanes for _, width in lane[colour])
                assert drawn_ms == pytest.approx(total_ns / MS)


def test_more_ranks_than_a_picture_holds_are_refused(tmp_path: Path) -> None:
    write_pipeline(tmp_path, 65, 1)
    assert _run(tmp_path, "--png", str(tmp_path / "t.png")) == 4
    assert not (tmp_path / "t.png").exists()


def test_an_arrow_goes_from_each_send_to_the_receive_of_the_next_rank_and_forwards_in_time(tmp_path: Path) -> None:
    write_pipeline(tmp_path, 4, 3)
    _run(tmp_path, "--out", str(tmp_path / "t.json"))
    pairs = list(arrows(read_strictly(tmp_path / "t.json")))
    assert len(pairs) == 3 * 3
    for start, end in pairs:
        assert end["pid"] == start["pid"] + 1
        # The clocks of the two nodes are 7 s apart; on one clock the message takes its 2 ms.
        assert end["ts"] - start["ts"] == pytest.approx(2000, abs=2)


def test_only_the_chosen_ranks_and_steps_are_merged(tmp_path: Path) -> None:
    write_pipeline(tmp_path, 8, 6)
    out = tmp_path / "t.json.gz"
    _run(tmp_path, "--ranks", "2-3,7", "--steps", "4-5", "--out", str(out))
    events = read_strictly(out)
    assert {event["pid"] for event in events} == {3, 4, 8}
    assert {event["name"] for event in events if event["name"].startswith("step")} == {"step 4", "step 5"}
    assert len(list(arrows(events))) == 2  # of 2 to 3 alone, in two steps
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0


def test_waiting_for_a_rank_that_has_not_begun_is_not_exposed_communication(tmp_path: Path) -> None:
    num_ranks, num_steps = 4, 5
    write_pipeline(tmp_path, num_ranks, num_steps, late_ns=3 * MS)
    folder = find_trace(tmp_path)
    found = measure_exposure([read_rank(folder, rank) for rank in folder.ranks])
    kinds = {kind.label: kind for kind in found.kinds}
    assert found.num_steps == num_ranks * num_steps
    # Of each receive's wait the last 2 ms are the message, all before is the sender's work.
    assert kinds["pp recv"].exposed_ns == 3 * num_steps * 2 * MS
    assert kinds["pp recv"].late_ns == num_steps * (10 + 22 + 34) * MS
    assert kinds["pp send"].exposed_ns == 0
    assert kinds["pp send"].in_flight_ns == 3 * num_steps * 2 * MS
    assert kinds["world all_reduce"].exposed_ns == num_ranks * num_steps * MS
    assert kinds["world all_reduce"].late_ns == 3 * num_steps * 3 * MS
    step_ns = (12 * num_ranks + 3 + 1) * MS
    assert found.share(kinds["world all_reduce"]) == pytest.approx(MS / step_ns)


def test_without_the_other_ranks_all_waiting_counts_as_exposed(tmp_path: Path) -> None:
    write_pipeline(tmp_path, 4, 1)
    found = measure_exposure([read_rank(find_trace(tmp_path), 1)])
    (receive,) = [kind for kind in found.kinds if kind.label == "pp recv"]
    assert (receive.num, receive.num_matched, receive.late_ns, receive.exposed_ns) == (1, 0, 0, 12 * MS)


@pytest.mark.parametrize("steps", [range(2, 3), range(1, 5), None])
def test_a_wait_counts_in_the_step_that_waits_whichever_step_the_transfer_was_begun_in(
    tmp_path: Path, steps: range | None
) -> None:
    write_early_gathers(tmp_path, 4)
    folder = find_trace(tmp_path)
    found = measure_exposure([read_rank(folder, rank, steps) for rank in folder.ranks])
    (gathers,) = found.kinds
    num_steps = 4 if steps is None else len(steps)
    num_early = num_steps if num_steps == 1 else num_steps - 1  # nothing is begun before step 1
    assert (gathers.num_from_before, gathers.num) == (2 * num_early, 2 * (num_early + num_steps))
    assert gathers.num_matched == gathers.num
    assert (gathers.exposed_ns, gathers.late_ns) == (2 * (5 * num_early + 3 * num_steps) * MS, 0)
    assert found.step_ns == 2 * num_steps * 90 * MS
    assert gathers.in_flight_ns == 2 * (35 * num_early + 6 * num_steps) * MS


def test_a_peer_that_begins_its_side_of_an_earlier_steps_transfer_late_is_told_from_the_network(
    tmp_path: Path,
) -> None:
    write_early_gathers(tmp_path, 3, late_ns=4 * MS)
    folder = find_trace(tmp_path)
    (gathers,) = measure_exposure([read_rank(folder, rank, range(3, 4)) for rank in folder.ranks]).kinds
    # The own gather is begun by rank 1 a millisecond behind rank 0's wait; the early one long before both waits.
    assert gathers.late_ns == MS
    assert gathers.exposed_ns == 2 * 5 * MS + 2 * 2 * MS


def test_a_message_that_its_sender_awaits_in_the_next_step_is_matched_without_that_step(tmp_path: Path) -> None:
    for rank in (0, 1):
        clock = FakeClock()
        recorder = open_recorder(tmp_path, rank, clock)
        with recorder.step(1):
            clock.now_ns = 10 * MS if rank == 0 else 2 * MS
            kind = Kind.SEND if rank == 0 else Kind.RECEIVE
            message = recorder.communication(kind, str(kind), "pp", (0, 1), 8, 1 - rank)
            if rank == 1:
                message.begin_wait()
                clock.now_ns = 12 * MS
                message.end()
            clock.now_ns = 20 * MS
        with recorder.step(2):
            if rank == 0:
                message.begin_wait()
                message.end()
        recorder.close()
    folder = find_trace(tmp_path)
    (receive,) = measure_exposure([read_rank(folder, rank, range(1, 2)) for rank in folder.ranks]).kinds
    assert (receive.label, receive.num_matched) == ("pp receive", 1)
    assert (receive.late_ns, receive.exposed_ns) == (8 * MS, 2 * MS)


def test_what_is_under_way_across_the_chosen_steps_is_drawn_and_told(tmp_path: Path, capsys) -> None:
    write_early_gathers(tmp_path, 4)
    picture = tmp_path / "t.png"
    assert _run(tmp_path, "--steps", "3-3", "--png", str(picture)) == 0
    assert "2 transfers were begun before the step that awaits them, in which they count" in capsys.readouterr().out
    events = [event for event in read_strictly(tmp_path / "trace.json.gz") if event["ph"] == "X" and event["pid"] == 1]
    # From 80 ms of step 2, where the picture of the trace begins, to that of the gather that step 4 awaits.
    gathers = [(event["ts"], event["dur"]) for event in events if event["name"] == "dp all_gather"]
    assert gathers == [(0, 35_000), (100_000, 35_000), (102_000, 6_000)]
    waits = [(event["ts"], event["dur"]) for event in events if event["name"] == "wait: dp all_gather"]
    assert waits == [(30_000, 5_000), (105_000, 3_000)]
    assert [event["ts"] for event in events if event["name"] == "step 3"] == [20_000]
    assert picture.stat().st_size > 5000


def test_the_figures_are_printed_as_a_table_and_as_strict_json(tmp_path: Path, capsys) -> None:
    write_pipeline(tmp_path, 2, 2)
    _run(tmp_path)
    text = capsys.readouterr().out
    assert "pp recv" in text and "share of step" in text and "clocks of nodes agreed to 20.0 us" in text
    _run(tmp_path, "--json")
    figures = json.loads(capsys.readouterr().out)
    assert figures["kinds"]["pp recv"]["exposed_s"] == pytest.approx(0.004)
    assert figures["ranks"] == 2 and figures["last_step"] == 2


def test_steps_and_transfers_without_duration_give_null_and_na(tmp_path: Path) -> None:
    """FC-97, and a clock that goes back."""
    clock = FakeClock(5)
    recorder = open_recorder(tmp_path, 0, clock)
    with recorder.step(1):
        with recorder.segment("forward"):
            pass
        with recorder.communication(Kind.COLLECTIVE, "all_reduce", "dp", (0, 1), 0):
            clock.now_ns = 3
        clock.now_ns = 5
    recorder.close()
    trace = read_rank(find_trace(tmp_path), 0)
    found = measure_exposure([trace])
    figures = json.loads(json.dumps(exposure_figures(found), allow_nan=False))
    assert figures["kinds"]["dp all_reduce"]["share_of_step"] is None
    assert figures["kinds"]["dp all_reduce"]["bytes_per_s"] is None
    assert "n/a" in exposure_table(found)
    _run(tmp_path)
    assert {e["dur"] for e in read_strictly(tmp_path / "trace.json.gz") if e["ph"] == "X"} == {0}


@pytest.mark.parametrize("whole", [0, 0.0, -1.0, None, float("nan"), float("inf")])
def test_a_quotient_by_nothing_is_not_known(whole: float | None) -> None:
    """FC-97: neither 0 nor infinity, of every rate that is reported."""
    assert quotient(5.0, whole) is None
    assert (quotient(None, 2.0), quotient(math.inf, 2.0), quotient(5, 2.0)) == (None, None, 2.5)


def test_beyond_the_cap_segments_are_counted_and_the_file_stays_valid(tmp_path: Path, capsys) -> None:
    """FC-94: and take no memory."""
    recorder = open_recorder(tmp_path, 0, FakeClock(), max_rows=1000)
    for step in range(1, 51):
        if step == 20:
            tracemalloc.start()
        recorder.step(step)
        for _ in range(100):
            recorder.segment("forward").end()
    grown = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert grown < 60_000  # 3100 rows of 72 bytes would be 220 kB
    recorder.close()
    assert recorder.num_dropped == 4000
    trace = read_rank(find_trace(tmp_path), 0)
    assert sum(map(len, trace.rows.values())) == 1000
    assert trace.num_dropped == 4000
    _run(tmp_path)
    assert "dropped 4000" in capsys.readouterr().out
    (event,) = [event for event in read_strictly(tmp_path / "trace.json.gz") if event["ph"] == "i"]
    assert event["name"] == "dropped 4000"


def test_a_file_that_the_end_of_the_job_cut_short_is_read_up_to_there(tmp_path: Path) -> None:
    write_pipeline(tmp_path, 2, 3)
    folder = find_trace(tmp_path)
    path = folder.path / "rank_00000.trace"
    whole = path.read_bytes()
    assert read_rank(folder, 0).missing == ""
    seen = set()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        trace = read_rank(folder, 0)
        assert trace.missing
        seen.add((trace.missing.partition(";")[0], *sorted(trace.rows)))
        assert set(read_rank(folder, 0, range(2, 3)).rows) == set(trace.rows) & {2}
    # Of each step 4 rows: cut in its block, cut behind it, and not cut but without the end that closing writes.
    for step in (1, 2, 3):
        before, own = range(1, step), range(1, step + 1)
        assert (f"the file is cut short in a block of step {step}", *before) in seen
        assert (f"the file is cut short behind a block of step {step}", *own) in seen
    assert ("the file has nothing whole, as of a rank that was killed at its start",) in seen


def test_each_flipped_byte_of_a_file_is_told(tmp_path: Path) -> None:
    write_pipeline(tmp_path, 1, 2)
    folder = find_trace(tmp_path)
    path = folder.path / "rank_00000.trace"
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        try:
            assert read_rank(folder, 0).missing, position
        except DataError as error:
            assert "damaged" in str(error) and str(path) in str(error) and "--ranks" in str(error)


def test_overlapping_transfers_of_two_ranks_with_equal_numbers_stay_apart(tmp_path: Path) -> None:
    """FC-96: none is lost, no arrow's number is shared, and what overlaps is on tracks of its own."""
    write_clock(tmp_path, {})
    for rank in (0, 1):
        clock = FakeClock(100)
        recorder = open_recorder(tmp_path, rank, clock)
        recorder.step(1)
        # Two sends under way at once, posted and over in one order.
        for group in ("pp", "pp_backward"):
            posted = []
            for _ in range(2):
                clock.now_ns += 10_000
                kind = Kind.SEND if rank == 0 else Kind.RECEIVE
                posted.append(recorder.communication(kind, str(kind), group, (0, 1), 1, 1 - rank))
            for segment in posted:
                clock.now_ns += 10_000
                segment.begin_wait()
                segment.end()
        recorder.close()
    _run(tmp_path)
    events = read_strictly(tmp_path / "trace.json.gz")
    assert sum(event["ph"] == "X" for event in events) == 8
    assert len({start["id"] for start, _ in arrows(events)}) == 4
    assert {event["tid"] for event in events if event["ph"] == "X"} == {2, 3}


def test_ranges_say_what_is_not_understood() -> None:
    assert parse_ranges("0-3,8", "--ranks") == (range(0, 4), range(8, 9))
    for wrong in ("", "3-", "-3", "5-2", "a", "1,,2"):
        with pytest.raises(ConfigError, match="--ranks"):
            parse_ranges(wrong, "--ranks")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ranks", "a"), "'a' is not understood"),
        (("--ranks", "3-0"), "'3-0' is not understood"),
        (("--ranks", "9" * 5000), "is not understood"),
        (("--ranks", "0-99999999999"), "rank 2 has no file"),
        (("--steps", "3-1"), "'3-1' is not understood"),
        (("--steps", "1,3"), "is not one range"),
        (("--attempt", "4"), "no attempt 4; it has 1"),
        (("--png", "t.txt"), "ends in .png"),
        (("--png", "nowhere/t.png"), "--png"),
        (("--out", "nowhere/t.json.gz"), "--out"),
    ],
)
def test_what_cannot_be_meant_or_written_is_a_fault_of_usage(
    tmp_path: Path, capsys, monkeypatch, options: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pipeline(tmp_path, 2, 2)
    assert _run(tmp_path, *options) == 2
    assert words in capsys.readouterr().err


def test_a_run_that_is_not_there_is_said_to_be_none(tmp_path: Path, capsys) -> None:
    assert _run(tmp_path / "nope") == 2
    assert "no run folder: there is no such folder" in capsys.readouterr().err
    assert _run(tmp_path) == 2
    assert "it has no config.yaml" in capsys.readouterr().err


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(DataError, match=r"observe\.trace=false"):
        find_trace(tmp_path)
    write_pipeline(tmp_path, 2, 2)
    with pytest.raises(ConfigError, match="rank 5 has no file"):
        choose_ranks(find_trace(tmp_path), "0-1,5")


def test_the_steps_that_there_are_are_said_where_chosen_ones_are_not_among_them(tmp_path: Path, capsys) -> None:
    """Also where there is a gap between them, and where only some of the chosen ones are there."""
    recorder = open_recorder(tmp_path, 0, clock := FakeClock())
    for step in (1, 2, 3, 6):
        with recorder.step(step):
            clock.now_ns += MS
    recorder.close()
    for asked in ("4-5", "9-99999999999999999999"):
        with pytest.raises(DataError, match=r"nothing in steps \d+ .* Recorded are steps 1-3,6 \(.*_0001\)"):
            trace_command(_options(tmp_path, steps=asked))
    for asked, note in (
        ("3-99999999999999999999", "recorded of steps 3 to 99999999999999999999 are only 3,6"),
        (None, "recorded of steps 1 to 6 are only 1-3,6"),
    ):
        trace_command(_options(tmp_path, steps=asked))
        assert note in capsys.readouterr().out
    trace_command(_options(tmp_path, steps="2-3"))
    assert "recorded of steps" not in capsys.readouterr().out
    (tmp_path / "trace" / "attempt_0002").mkdir()
    with pytest.raises(DataError, match=r"Other attempts have their own: --attempt 2\."):
        trace_command(argparse.Namespace(**{**vars(_options(tmp_path, steps="9-9")), "attempt": 1}))


def test_more_than_a_viewer_opens_is_refused_with_what_fits(tmp_path: Path, monkeypatch) -> None:
    """FC-94."""
    monkeypatch.setattr("hpc_train.observe.trace_command._MAX_ROWS", 40)
    write_pipeline(tmp_path, 4, 20)
    with pytest.raises(DataError, match=r"4 ranks x 20 steps .* some \d+ steps by --steps"):
        trace_command(_options(tmp_path, steps=None))
