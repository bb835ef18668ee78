"""What a pipeline can hide of its messages: by hand for equal stages, and for whole models what changes it."""

from __future__ import annotations

import pytest

from hpc_train.plan import hidden_messages as module
from hpc_train.plan.hidden_messages import best_hidden_messages, hidden_messages
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.schedule_orders import plan_schedule
from tests.plan.even_costs import even_costs
from tests.train.trainers import make_config

MODEL = {"family": "gpt", "num_layers": 8, "hidden_size": 64, "num_heads": 4, "vocab_size": 8}


def test_two_stages_without_virtual_ones_hide_nothing_of_two_micro_batches() -> None:
    """Stage 1 does F0 5-9, B0 9-17, F1 17-21, B1 21-29, and stage 0 B0 18-26 and B1 30-38."""
    (found,) = hidden_messages(plan_schedule("1f1b", 2, 2), [even_costs(forward=4, backward=8, transfer=1)])
    assert (found.makespan, found.compute, found.communication) == (38, 36, 2)
    assert found.share == 0.0


@pytest.mark.parametrize("num_micro_batches", [8, 16])
def test_with_virtual_stages_short_messages_add_the_first_one_s_way_there_and_the_last_one_s_back(
    num_micro_batches: int,
) -> None:
    schedule = plan_schedule("1f1b", 2, num_micro_batches, 2)
    (found,) = hidden_messages(schedule, [even_costs(forward=40, backward=80, transfer=1)])
    assert (found.added, found.communication) == (3 + 3, 3 * num_micro_batches)


def test_where_a_micro_batch_has_several_lines_on_its_way_a_step_gets_longer_by_more_than_one_of_them() -> None:
    (found,) = hidden_messages(plan_schedule("1f1b", 4, 8), [even_costs(forward=40, backward=80, transfer=1)])
    assert found.share < 0


def _shares(pp: int, micro_batches: int = 8, **parallel: object) -> list[float]:
    config = make_config(MODEL, {"pp": pp, **parallel}, global_batch_size=micro_batches)
    return [share for _, share in best_hidden_messages(config, Mesh(pp, 1, 1, 1), (0.2, 0.8, 3.0))]


def test_a_plan_s_bound_falls_with_longer_messages_and_rises_with_virtual_stages_and_micro_batches() -> None:
    chunks = _shares(2, virtual_stages=2)
    assert chunks == sorted(chunks, reverse=True) and chunks[-1] > 0 and chunks[0] < 1
    assert all(few < many for few, many in zip(_shares(2), chunks, strict=True))
    assert _shares(2, 16, virtual_stages=2)[0] > chunks[0]
    assert _shares(4) == [0.0] * 3


def test_it_is_left_out_without_a_pipeline_and_where_the_schedule_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _shares(1) == []
    monkeypatch.setattr(module, "_MOST_PLAYED", 31)
    assert len(_shares(2, 7, virtual_stages=2)) == 3
    assert _shares(2, 8, virtual_stages=2) == []
