"""Gathers and sums of model_chunks in schedules: where they stand, that they can be done, how much of them hides."""

from __future__ import annotations

import itertools

import pytest

from hpc_train.plan.check_schedule import check_in_order, check_pipelines
from hpc_train.plan.hidden import best_hidden, hidden_shares
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.schedule import COLLECTIVES, COMPUTE, Action, Op, Schedule
from hpc_train.plan.schedule_collectives import add_collectives, early_chunks, plan_evaluation, plan_training
from hpc_train.plan.schedule_orders import plan_schedule
from tests.plan.even_costs import even_costs
from tests.train.trainers import make_config

SHAPES = [
    (kind, stages, micro_batches, virtual, tied)
    for kind, (stages, micro_batches), virtual, tied in itertools.product(
        ("1f1b", "zero_bubble"), ((1, 1), (1, 4), (2, 2), (2, 5), (4, 4), (4, 9)), (1, 2, 3), (False, True)
    )
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pipelines_side_by_side_gather_and_sum_each_chunk_once_and_nothing_waits_for_ever(shape) -> None:
    kind, num_stages, num_micro_batches, virtual, tied = shape
    schedule = plan_training(kind, num_stages, num_micro_batches, virtual, has_tied=tied)
    more = plan_training(kind, num_stages, num_micro_batches + 1, virtual, has_tied=tied)
    check_pipelines([schedule] * 3)
    check_pipelines([schedule, more])
    check_in_order(schedule)
    without = plan_schedule(kind, num_stages, num_micro_batches, virtual)
    for stage, actions in enumerate(schedule.actions):
        assert tuple(action for action in actions if action.op not in COLLECTIVES) == without.actions[stage]
        for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER):
            assert sorted(a.model_chunk for a in actions if a.op is op) == list(range(virtual))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gathers_are_in_the_order_of_first_forwards_and_sums_right_behind_last_backwards(shape) -> None:
    kind, num_stages, num_micro_batches, virtual, tied = shape
    schedule = plan_training(kind, num_stages, num_micro_batches, virtual, has_tied=tied)
    for stage, actions in enumerate(schedule.actions):
        assert all(action.op is Op.ALL_GATHER for action in actions[:virtual])
        forwards = dict.fromkeys(action.model_chunk for action in actions if action.op is Op.F)
        assert [action.model_chunk for action in actions[:virtual]] == list(forwards)
        for own in range(virtual):
            place = next(i for i, a in enumerate(actions) if a.op is Op.REDUCE_SCATTER and a.model_chunk == own)
            is_last_tied = tied and schedule.chunks[stage][own] == schedule.num_global_chunks - 1 > 0
            if is_last_tied:
                assert place == len(actions) - 1
                continue
            before = [a for a in actions[:place] if a.op in COMPUTE]
            assert before[-1].op is (Op.W if schedule.splits_backward else Op.B)
            assert before[-1].model_chunk == own
            assert not any(a.op in COMPUTE and a.model_chunk == own for a in actions[place:])


@pytest.mark.parametrize("kind", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("shape", [(1, 1, 8, True), (2, 2, 4, True), (2, 5, 7, False), (4, 9, 6, False)], ids=str)
def test_every_third_chunk_is_updated_early_behind_the_sum_of_the_next_one_to_be_summed(kind, shape) -> None:
    num_stages, num_micro_batches, virtual, tied = shape
    schedule = plan_training(kind, num_stages, num_micro_batches, virtual, has_tied=tied, early_updates=True)
    check_pipelines([schedule] * 3)
    check_in_order(schedule)
    late = plan_training(kind, num_stages, num_micro_batches, virtual, has_tied=tied)
    for stage, actions in enumerate(schedule.actions):
        assert tuple(action for action in actions if action.op is not Op.UPDATE) == late.actions[stage]
        early = early_chunks(virtual, has_tied_last=tied and stage == num_stages - 1)
        assert early == tuple(chunk for chunk in (3, 6) if chunk < virtual - (tied and stage == num_stages - 1))
        for own in early:
            place = actions.index(Action(Op.UPDATE, model_chunk=own))
            assert actions[place - 1] == Action(Op.REDUCE_SCATTER, model_chunk=own - 1)


def test_an_update_without_or_before_its_sum_is_refused() -> None:
    from hpc_train.errors import ConfigError

    schedule = plan_training("1f1b", 1, 1, 4, early_updates=True)
    (actions,) = schedule.actions
    update = Action(Op.UPDATE, model_chunk=3)
    others = [action for action in actions if action != update]
    with pytest.raises(ConfigError, match=r"early update of model_chunk 3.*must come after the reduce-scatter"):
        check_pipelines([Schedule(1, schedule.chunks, ((update, *others),))])


def test_the_time_of_a_step_with_early_updates_is_what_can_be_reckoned_by_hand() -> None:
    """From the first backward on: eight of 8, the last one's sum of 5, and three gathers of 5 behind it, of chunks 0 to
    2, each before its forward; the others are there when forwards come to them, which are six of 4 with chunk 2's.
    """
    schedule = plan_training("1f1b", 1, 1, 8, early_updates=True)
    share, period = _shares(schedule, forward=4, backward=8, gather=5, reduce=5)
    assert period == 69 + 3 * 5 + 6 * 4
    assert share == pytest.approx(1 - (period - 8 * 12) / (16 * 5))


def test_an_evaluation_gathers_and_sums_nothing() -> None:
    for actions in plan_evaluation(2, 3, 2).actions:
        assert [action.op for action in actions if action.op in COLLECTIVES] == [Op.ALL_GATHER] * 2


def _shares(schedule: Schedule, **costs: int) -> tuple[float, int]:
    (found,) = hidden_shares(schedule, [even_costs(**costs)])
    return found.share, found.makespan


def test_the_bound_of_eight_chunks_and_one_micro_batch_is_what_can_be_reckoned_by_hand() -> None:
    """Gathers of 5 beside forwards of 4: the last forward begins after 8 * 5; sums of 5 hide in backwards of 8 but the
    last one.
    """
    schedule = plan_training("1f1b", 1, 1, 8)
    share, makespan = _shares(schedule, forward=4, backward=8, gather=5, reduce=5)
    assert makespan == 8 * 5 + 4 + 8 * 8 + 5
    assert share == pytest.approx(1 - (makespan - 8 * 12) / (16 * 5))


def test_one_chunk_hides_nothing_and_free_collectives_hide_all() -> None:
    assert _shares(plan_training("1f1b", 1, 4, 1), forward=4, backward=8, gather=5, reduce=5)[0] == 0.0
    assert _shares(plan_training("1f1b", 1, 4, 8), forward=4, backward=8)[0] == 1.0


def test_more_micro_batches_leave_no_more_room_beside_the_first_forward_and_the_last_backward() -> None:
    for gather, reduce in ((5, 5), (40, 10)):
        added = []
        for num_micro_batches in (1, 4):
            (found,) = hidden_shares(
                plan_training("1f1b", 1, num_micro_batches, 8),
                [even_costs(forward=4, backward=8, gather=gather, reduce=reduce)],
            )
            added.append(found.added)
        assert 0 < added[1] <= added[0]


def test_a_plan_s_bound_falls_with_more_communication_and_fewer_chunks_and_is_left_out_where_it_says_nothing() -> None:
    model = {"family": "gpt", "num_layers": 8, "hidden_size": 64, "num_heads": 4}

    def shares(dp: int, micro_batches: int = 1, **parallel: object) -> list[float]:
        config = make_config(model, parallel, global_batch_size=dp * micro_batches)
        return [share for _, share in best_hidden(config, Mesh(1, dp, 1, 1), (0.2, 0.8, 3.0))]

    early = shares(2, virtual_stages=8)
    chunks = shares(2, virtual_stages=8, early_updates=False)
    assert chunks == sorted(chunks, reverse=True)
    assert 0.7 < chunks[1] < 0.81 < 0.84 < early[1] < 0.88
    assert shares(2) == pytest.approx([0.0] * 3, abs=1e-3)
    assert all(few < many for few, many in zip(shares(2, virtual_stages=2), chunks, strict=True))
    assert all(four <= one for four, one in zip(shares(2, 4, virtual_stages=8), early, strict=True))
    assert shares(1) == shares(2, overlap=False) == []


def test_without_collectives_in_the_list_nothing_is_hidden_or_added() -> None:
    (found,) = hidden_shares(plan_schedule("1f1b", 2, 4), [even_costs(forward=4, backward=8)])
    assert (found.added, found.communication, found.share) == (0, 0, 1.0)


def test_a_list_with_gathers_already_is_refused_by_the_checker_where_it_gets_them_twice() -> None:
    from hpc_train.errors import ConfigError

    twice = add_collectives(plan_training("1f1b", 2, 2))
    with pytest.raises(ConfigError, match="twice"):
        check_pipelines([twice])
