"""Step time against published runs, the bubble against the simulator, and what is not known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hpc_train.plan import estimate
from hpc_train.plan.estimate import MEGATRON_LM, dp_bytes, estimate_step, pipeline_cost
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.schedule import COMPUTE, Action, Op
from hpc_train.plan.schedule_orders import bubble_formula, plan_1f1b
from hpc_train.plan.schedule_steps import Costs
from hpc_train.plan.simulate import simulate, time_of_work
from tests.plan.calibration import RATES, ROWS, Row, error_left_out, fit, modelled_s
from tests.plan.even_costs import even_costs
from tests.train.trainers import make_config

LLAMA = {"family": "llama", "num_layers": 8, "hidden_size": 64, "num_heads": 4, "vocab_size": 64}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.system}-{row.num_gpus}")
def test_published_step_times_are_met_to_five_percent(row: Row) -> None:
    """The band of docs/measurements/cost-model.md; two fitted numbers for five runs of each system."""
    assert modelled_s(row, RATES[row.system]) == pytest.approx(row.step_time_s, rel=0.05)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.system}-{row.num_gpus}")
def test_a_run_that_was_left_out_of_the_fit_is_met_too(row: Row) -> None:
    assert abs(error_left_out(row)) < 0.09


@pytest.mark.parametrize("system", RATES)
def test_the_rates_are_those_that_fit_the_published_runs(system: str) -> None:
    efficiency, rate = fit([row for row in ROWS if row.system == system])
    assert RATES[system].efficiency == pytest.approx(efficiency, rel=0.002)
    assert RATES[system].dp_bytes_per_s == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize(("pp", "count", "chunks"), [(2, 2, 1), (4, 9, 1), (4, 8, 2), (4, 8, 3), (3, 12, 2)])
def test_for_equal_stages_the_bubble_is_the_formula_s_and_the_simulator_s(pp: int, count: int, chunks: int) -> None:
    schedule = plan_1f1b(pp, count, virtual_stages=chunks)
    played = simulate(schedule, even_costs(forward=10, backward=20))
    modelled = pipeline_cost([30 * chunks] * pp, count, chunks)
    assert modelled == played.makespan
    bubble = 1 - count * 30 * chunks / modelled
    assert bubble == pytest.approx(played.bubble) == pytest.approx(bubble_formula("1f1b", pp, count, chunks))


@pytest.mark.parametrize("costs", [(3, 3, 6, 3), (9, 3, 3, 3), (3, 6, 6, 9), (3, 9, 6, 9), (1, 2, 4, 4)])
def test_for_unequal_stages_it_is_the_simulator_s_too(costs: tuple[int, ...]) -> None:
    def cost(stage: int, action: object) -> int:
        op = action.op  # type: ignore[attr-defined]
        return costs[stage] * (1 if op is Op.F else 2) if op in COMPUTE else 0

    played = simulate(plan_1f1b(4, 12), cost)
    assert pipeline_cost([3 * cost for cost in costs], 12) == pytest.approx(played.makespan)


@pytest.mark.parametrize(("pp", "count", "chunks"), [(2, 90, 1), (3, 101, 2), (4, 97, 1)])
def test_of_a_long_zero_bubble_schedule_no_more_than_what_repeats_is_played(
    pp: int, count: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        {**LLAMA, "num_layers": 7}, parallel={"schedule": "zero_bubble", "pp": pp, "virtual_stages": chunks}
    )
    played: list[int] = []

    def counted(work: Sequence[Sequence[Action]], chunks: Sequence[Sequence[int]], costs: Costs) -> int:
        played.append(len({action.micro_batch for action in work[0]}))
        return time_of_work(work, chunks, costs)

    def bubble(num_micro_batches: int) -> float:
        changed = config.model_copy(
            update={"train": config.train.model_copy(update={"global_batch_size": num_micro_batches})}
        )
        return estimate_step(changed, Mesh(pp, 1, 1, 1), MEGATRON_LM).bubble

    monkeypatch.setattr(estimate, "time_of_work", counted)
    whole = bubble(count)
    assert played == [count]
    monkeypatch.setattr(estimate, "_MOST_PLAYED", 10 * chunks * pp * pp)
    assert bubble(count) == pytest.approx(whole, abs=1e-9)
    shortened = played[1:]
    assert max(shortened) < count and len(shortened) == 2
    assert bubble(count + 12 * 10**7) < whole and played[3:] == shortened


def test_a_step_is_the_pipeline_s_time_and_what_dp_does_not_hide() -> None:
    config, mesh = make_config(LLAMA, seq_len=64), Mesh(2, 4, 1, 1)
    rates = replace(MEGATRON_LM, peak_flops=1e9, efficiency=0.5, dp_bytes_per_s=1e6)
    slow = replace(rates, dp_bytes_per_s=0.5e6)
    found, later = estimate_step(config, mesh, rates), estimate_step(config, mesh, slow)
    assert found.step_time_s is not None and later.step_time_s is not None
    assert found.mfu is not None and 0 < found.mfu < 0.5
    assert later.step_time_s - found.step_time_s == pytest.approx(dp_bytes(config, mesh) / 1e6)
    assert found.bubble == pytest.approx(1 / 7, abs=0.03)
    assert any("50.0% of 1e+09 FLOP/s" in note for note in found.notes)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"peak_flops": None}, "train.peak_flops_per_rank"),
        ({"efficiency": None}, "share of the peak"),
        ({"dp_bytes_per_s": None}, "link speeds"),
    ],
)
def test_what_is_not_known_is_none_and_says_why(changes: dict[str, None], wanted: str) -> None:
    found = estimate_step(make_config(LLAMA), Mesh(1, 2, 1, 1), replace(MEGATRON_LM, **changes))
    assert (found.step_time_s, found.mfu) == (None, None)
    assert found.memory_bytes > 0 and found.bubble == 0
    assert len(found.notes) == 1 and wanted in found.notes[0]


def test_without_data_parallel_its_rate_need_not_be_known() -> None:
    found = estimate_step(make_config(LLAMA), Mesh(2, 1, 1, 1), replace(MEGATRON_LM, dp_bytes_per_s=None))
    assert found.step_time_s is not None


def test_the_bubble_is_that_of_the_configured_schedule() -> None:
    def bubble(**parallel: object) -> float:
        model = {**LLAMA, "num_layers": 8, "vocab_size": 1}
        return estimate_step(make_config(model, {"pp": 2, **parallel}), Mesh(2, 1, 1, 1), MEGATRON_LM).bubble

    plain, virtual = bubble(), bubble(virtual_stages=2)
    split = bubble(schedule="zero_bubble")
    assert plain == pytest.approx(bubble_formula("1f1b", 2, 24), abs=0.002)
    assert virtual == pytest.approx(bubble_formula("1f1b", 2, 24, 2), abs=0.002)
    assert split == pytest.approx(bubble_formula("zero_bubble", 2, 24), abs=0.002)
