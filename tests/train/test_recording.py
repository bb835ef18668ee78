"""A rank's recorder: what of a step is in its file, NVTX ranges, file systems that fail, clocks of nodes and GPUs."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hpc_train.cli import main
from hpc_train.comm.clock_offsets import measure_clock_offsets
from hpc_train.config import ObserveConfig
from hpc_train.observe.exposed import measure_exposure
from hpc_train.observe.trace_files import find_trace, read_rank
from hpc_train.record import NOT_RECORDED, HostClock, Kind
from hpc_train.train import cuda_clock
from hpc_train.train.build import build_trainer
from hpc_train.train.recording import start_recorder
from tests.observe.traces import FakeClock, arrows, open_recorder, read_strictly
from tests.ranks import TestRank, run_ranks
from tests.train.trainers import TREES, make_config, mesh_of, sequences, share_of
from tests.worlds import make_world, single_world

_AHEAD_NS = 5_000_000_000


def _record_steps(me: TestRank, run_dir: str, parallel: dict[str, object], num_steps: int) -> list[float]:
    world = make_world(me)
    recorder = start_recorder(Path(run_dir), ObserveConfig(), world)
    config = make_config({**TREES["llama"], "num_layers": 4}, parallel)
    trainer = build_trainer(config, mesh_of(config, me.world_size), world, recorder=recorder)
    losses = []
    for step in range(1, num_steps + 1):
        with recorder.step(step):
            losses.append(trainer.step(step, share_of(trainer, sequences(step, 8)), 1e-3).loss)
    recorder.close()
    return losses


def test_a_run_over_pipeline_data_and_tensor_ranks_gives_a_trace_with_all_kinds_of_segments(tmp_path: Path) -> None:
    run_ranks(_record_steps, 8, str(tmp_path), {"pp": 2, "tp": 2}, 3, timeout_s=90)
    assert main(["trace", str(tmp_path)]) == 0
    events = read_strictly(tmp_path / "trace.json.gz")
    of_rank_0 = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    names = [event["name"] for event in of_rank_0]
    assert {"step 1", "data", "forward", "backward", "optimizer", "tp all_reduce", "pp send", "pp_backward recv"} <= {
        *names
    }
    # 8 sequences over dp=2: 4 micro-batches a rank and step.
    assert names.count("forward") == names.count("backward") == names.count("pp send") == 3 * 4
    assert {event["args"]["micro_batch"] for event in of_rank_0 if event["name"] == "forward"} == {0, 1, 2, 3}
    # Each of 4 pipelines sends 4 activations up and 4 gradients down in each of 3 steps.
    assert len(list(arrows(events))) == 4 * (4 + 4) * 3
    assert all(end["ts"] >= start["ts"] for start, end in arrows(events))
    found = measure_exposure([read_rank(find_trace(tmp_path), rank) for rank in range(8)])
    assert found.num_steps == 8 * 3
    assert all(kind.num_matched == kind.num for kind in found.kinds)
    assert sum(kind.exposed_ns for kind in found.kinds) < found.step_ns


def test_losses_are_the_same_with_and_without_a_recorder(tmp_path: Path) -> None:
    recorded = run_ranks(_record_steps, 2, str(tmp_path), {"pp": 2}, 2)
    assert recorded[0] == run_ranks(_steps_without, 2)[0]


def _steps_without(me: TestRank) -> list[float]:
    world = make_world(me)
    assert start_recorder(Path("/nowhere"), ObserveConfig(trace=False), world) is NOT_RECORDED
    config = make_config({**TREES["llama"], "num_layers": 4}, {"pp": 2})
    trainer = build_trainer(config, mesh_of(config, 2), world)
    return [trainer.step(step, share_of(trainer, sequences(step, 8)), 1e-3).loss for step in (1, 2)]


def test_each_attempt_has_a_folder_of_its_own_with_the_clocks_of_its_nodes(tmp_path: Path) -> None:
    for _ in range(2):
        start_recorder(tmp_path, ObserveConfig(), single_world()).close()
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == ["attempt_0001", "attempt_0002"]
    clock = json.loads((tmp_path / "trace" / "attempt_0002" / "clock.json").read_text())
    assert clock["nodes"] == {"0": {"offset_ns": 0, "error_ns": 0}}
    assert find_trace(tmp_path).path.name == "attempt_0002"


def test_segments_outside_the_chosen_steps_are_not_written(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path, 0, HostClock(), steps=(2, 3))
    for step in range(1, 5):
        with recorder.step(step), recorder.segment("forward"):
            pass
    recorder.close()
    trace = read_rank(find_trace(tmp_path), 0)
    assert sorted(trace.rows) == [2, 3]
    assert trace.num_dropped == 0


class _Domain:
    """Notes what NVTX is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def get_event_attributes(self, message: str) -> str:
        return message

    def push_range(self, attributes: str) -> None:
        self.calls.append(("push", attributes))

    def pop_range(self) -> None:
        self.calls.append(("pop", None))

    def start_range(self, attributes: str) -> str:
        self.calls.append(("start", attributes))
        return f"id of {attributes}"

    def end_range(self, number: str) -> None:
        self.calls.append(("end", number))


def test_nvtx_ranges_have_the_names_of_the_segments_also_where_nothing_is_written(tmp_path: Path) -> None:
    domain = _Domain()
    recorder = open_recorder(tmp_path, 0, HostClock(), steps=(9, 9), domain=domain)
    with recorder.segment("forward"):
        sent = recorder.communication(Kind.SEND, "send", "pp", (0, 1), 8, 1)
    sent.end()
    recorder.close()
    assert domain.calls == [
        ("push", "forward"),
        ("start", "pp send"),
        ("pop", None),
        ("end", "id of pp send"),
    ]


class _StuckClock(FakeClock):
    """Keeps the writing thread from going on, as a file system does that does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def resolve(self, marks: Any) -> list[int]:
        assert self.go_on.wait(60)
        return super().resolve(marks)


def test_a_file_system_that_does_not_answer_costs_rows_and_neither_time_nor_memory(tmp_path: Path) -> None:
    clock = _StuckClock()
    recorder = open_recorder(tmp_path, 0, clock)
    for step in range(1, 201):
        with recorder.step(step):
            pass
    kept = 200 - recorder.num_dropped
    assert 60 <= kept <= 70  # the queue's 64, the block in the writer's hands, the one that is not handed over yet
    clock.go_on.set()
    recorder.close()
    trace = read_rank(find_trace(tmp_path), 0)
    assert sum(map(len, trace.rows.values())) == 200 - recorder.num_dropped
    assert trace.num_dropped == recorder.num_dropped
    assert [name.label for name in trace.names] == ["step"]


def test_a_file_that_cannot_be_written_is_said_once_and_the_run_goes_on(tmp_path: Path, capsys) -> None:
    (tmp_path / "trace").write_text("in the way")
    recorder = open_recorder(tmp_path, 0, HostClock())
    for step in range(1, 301):
        with recorder.step(step):
            pass
    recorder.close()
    out = capsys.readouterr()
    assert (out.out + out.err).count("cannot be written") == 1
    assert recorder.num_dropped == 300


def test_a_disk_that_is_full_when_the_trace_is_closed_holds_no_rank_up(tmp_path: Path, capsys) -> None:
    """The last block waits for the end, which comes behind it, so that all of it is refused as the file is closed."""
    path = tmp_path / "trace" / "attempt_0001" / "rank_00000.trace"
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/full")
    clock = _StuckClock()
    recorder = open_recorder(tmp_path, 0, clock)
    with recorder.step(1):
        pass
    threading.Timer(0.5, clock.go_on.set).start()
    begin = time.monotonic()
    recorder.close()
    assert time.monotonic() - begin < 10
    out = capsys.readouterr()
    assert (out.out + out.err).count("cannot be written") == 1


def _offsets(me: TestRank) -> list[tuple[int, int, int]]:
    """Two ranks a node; the clock of node 1 is ahead."""
    import time

    world = replace(make_world(me), node_rank=me.rank // 2, num_nodes=2)
    ahead = _AHEAD_NS if world.node_rank == 1 else 0
    found = measure_clock_offsets(world, lambda: time.perf_counter_ns() + ahead)
    return [(node, offset.offset_ns, offset.error_ns) for node, offset in found.items()]


def test_the_offset_of_a_nodes_clock_is_found_to_the_error_that_is_stated() -> None:
    of_ranks = run_ranks(_offsets, 4)
    assert all(found == of_ranks[0] for found in of_ranks)
    assert of_ranks[0][0] == (0, 0, 0)
    node, offset_ns, error_ns = of_ranks[0][1]
    assert node == 1
    assert abs(offset_ns - _AHEAD_NS) <= error_ns
    assert 0 < error_ns < 1_000_000_000


class _Event:
    """A CUDA event of a device whose clock began 3 s after the host's."""

    device_ms = 0.0
    num_made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        type(self).num_made += 1

    def record(self) -> None:
        self.at_ms = _Event.device_ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: _Event) -> float:
        return later.at_ms - self.at_ms


def test_marks_on_a_gpu_are_told_on_the_hosts_clock_and_events_are_used_again(monkeypatch) -> None:
    _Event.device_ms, _Event.num_made = 100.0, 0
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(cuda_clock.time, "perf_counter_ns", lambda: round(_Event.device_ms * 1e6) + 3_000_000_000)
    clock = cuda_clock.CudaClock(torch.device("cuda"))
    for round_number in range(1, 50):
        begin = clock.mark()
        _Event.device_ms += 2.5
        end = clock.mark()
        assert clock.resolve([begin, begin, end]) == [
            round(3e9 + 100e6 + (round_number - 1) * 2.5e6),
            round(3e9 + 100e6 + (round_number - 1) * 2.5e6),
            round(3e9 + 100e6 + round_number * 2.5e6),
        ]
        clock.forget([clock.mark()])
        if round_number % 10 == 0:
            clock.anchor()
    assert _Event.num_made <= 2 + 5 + 4
