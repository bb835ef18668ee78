"""From trace files of ranks to one timeline and to the share of exposed communication."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from hpc_train.cli import main
from hpc_train.errors import DataError
from hpc_train.observe.exposed import exposure_figures, exposure_table, measure_exposure
from hpc_train.observe.trace_command import trace_command
from hpc_train.observe.trace_files import choose_ranks, find_trace, parse_ranges, quotient, read_rank
from hpc_train.record import Kind
from tests.observe.traces import MS, FakeClock, arrows, open_recorder, read_strictly, write_clock, write_pipeline


def _options(run_dir: Path, steps: str | None) -> argparse.Namespace:
    return argparse.Namespace(run=str(run_dir), attempt=None, ranks=None, steps=steps, out=None, png=None, json=False)


def _run(run_dir: Path, *options: str) -> int:
    return main(["trace", str(run_dir), *options])


def test_eight_ranks_and_twenty_steps_become_one_trace_that_keeps_every_segment(tmp_path: Path, capsys) -> None:
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
    clock = FakeClock(5)
    recorder = open_recorder(tmp_path, 0, clock)
    with recorder.step(1):
        with recorder.segment("forward"):
            pass
        with recorder.communication(Kind.COLLECTIVE, "all_reduce", "dp", (0, 1), 0):
            clock.now_ns = 3  # a clock that goes back
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
    assert quotient(5.0, whole) is None
    assert quotient(None, 2.0) is None


def test_beyond_the_cap_segments_are_counted_and_the_file_stays_valid(tmp_path: Path, capsys) -> None:
    recorder = open_recorder(tmp_path, 0, FakeClock(), max_rows=1000)
    for step in range(1, 51):
        recorder.step(step)
        for _ in range(100):
            recorder.segment("forward").end()
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
    for length in (len(whole) - 1, len(whole) - 100, len(whole) - 500):
        path.write_bytes(whole[:length])
        assert set(read_rank(folder, 0).rows) <= {1, 2, 3}
        assert 1 in read_rank(folder, 0).rows


def test_overlapping_transfers_of_two_ranks_with_equal_numbers_stay_apart(tmp_path: Path) -> None:
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
        with pytest.raises(DataError, match="--ranks"):
            parse_ranges(wrong, "--ranks")


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"observe\.trace=false"):
        find_trace(tmp_path)
    write_pipeline(tmp_path, 2, 2)
    with pytest.raises(DataError, match="rank 5 has no file"):
        choose_ranks(find_trace(tmp_path), "0-1,5")
    with pytest.raises(DataError, match="no attempt 4"):
        find_trace(tmp_path, 4)
    with pytest.raises(DataError, match="steps 7 to 9"):
        trace_command(_options(tmp_path, steps="7-9"))


def test_more_than_a_viewer_opens_is_refused_with_what_fits(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("hpc_train.observe.trace_command._MAX_ROWS", 40)
    write_pipeline(tmp_path, 4, 20)
    with pytest.raises(DataError, match=r"4 ranks x 20 steps .* some \d+ steps by --steps"):
        trace_command(_options(tmp_path, steps=None))
