"""Batch planners: every token once, capacities, orders of rings without a circle, on drawn lengths and ranks."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.errors import ConfigError
from hpc_train.plan.batch_balanced import BalancedPlanner
from hpc_train.plan.batch_check import check_batch_plan
from hpc_train.plan.batch_cost import BatchCosts, OffloadCosts, held_without_offload
from hpc_train.plan.batch_naive import NaivePlanner, best_fit, deal
from hpc_train.plan.batch_play import check_rings
from hpc_train.plan.batch_problem import BatchPlanner, BatchProblem, HdpRanks, lower_bound
from hpc_train.plan.batch_setup import BatchSetup
from hpc_train.plan.batch_static import StaticPlanner, smallest_cp
from hpc_train.plan.batch_times import model_times, ring_tokens
from hpc_train.plan.schedule_collectives import plan_training
from hpc_train.plan.schedule_orders import plan_schedule

COSTS = BatchCosts(
    attention_per_square=1, linear_per_token=24576, ring_per_token=5560, ring_per_step=3, per_micro_batch=7
)
PLANNERS: dict[str, BatchPlanner] = {
    "balanced": BalancedPlanner(),
    "pp": BalancedPlanner(strategy="pp", num_stages=3),
    "smallest rings": BalancedPlanner(grows_rings=False),
    "naive": NaivePlanner(),
}


KNOWN_DIGESTS = {
    "balanced": "a007226fa2df0e03",
    "pp": "f085a914be4ddc35",
    "smallest rings": "a007226fa2df0e03",
    "naive": "871f43c584004d13",
}


def make_problem(lengths, ranks, costs=COSTS):
    return BatchProblem.make(5, lengths, ranks, costs, block_tokens=2)


@st.composite
def problems(draw: st.DrawFn, most_ranks: int = 9) -> BatchProblem:
    """Lengths from nothing to what all ranks hold together; ranks of one kind or several; offloading or none."""
    num_ranks = draw(st.integers(1, most_ranks))
    capacity = draw(st.integers(2, 40))
    capacities, speeds = [capacity] * num_ranks, None
    if draw(st.booleans()):
        capacities = draw(st.lists(st.sampled_from([capacity, 2 * capacity]), min_size=num_ranks, max_size=num_ranks))
        speeds = draw(st.lists(st.sampled_from([1.0, 0.5, 0.97]), min_size=num_ranks, max_size=num_ranks))
    layers, copying = draw(st.integers(1, 8)), draw(st.sampled_from([0, 100, 20_000, 10**7]))
    offload = OffloadCosts(layers, copying) if draw(st.booleans()) else None
    costs = BatchCosts(1, 24576, draw(st.sampled_from([0, 5560])), 3, 7, offload)
    most = num_ranks * (min(capacities) // 2) * 2
    lengths = draw(st.lists(st.one_of(st.integers(0, most), st.integers(0, capacity)), max_size=30))
    order = draw(st.permutations(range(num_ranks)))
    host = [rank // 2 for rank in range(num_ranks)]
    port = [rank % 2 for rank in range(num_ranks)]
    return make_problem(lengths, HdpRanks.make(capacities, speeds, (order, host, port)), costs)


def check(table, problem, **options):
    layers = problem.costs.offload.num_layers if problem.costs.offload else 1
    plan = table.plan()
    check_batch_plan(
        plan, problem.lengths.tolist(), problem.ranks.capacity_tokens.tolist(), num_layers=layers, **options
    )
    return plan


@pytest.mark.parametrize("name", PLANNERS)
@given(problem=problems())
@settings(max_examples=40)
def test_every_token_comes_once_and_no_rank_has_more_than_it_holds(name, problem):
    table = PLANNERS[name].plan(problem)
    plan = check(table, problem, is_aligned=name in ("pp", "naive"))
    assert (plan.step, plan.dp, plan.num_sequences) == (5, len(problem.ranks), len(problem.lengths))
    assert plan.num_tokens == problem.lengths.sum()


@st.composite
def problems_of_unlike_ranks(draw: st.DrawFn) -> BatchProblem:
    """Up to what those hold together that hold most; half the sequences are near that."""
    capacities = draw(st.lists(st.sampled_from([16, 32, 64, 130]), min_size=2, max_size=7))
    speeds = draw(st.one_of(st.none(), st.lists(st.sampled_from([1.0, 0.5]), min_size=7, max_size=7)))
    held = [held_without_offload(found, sum(other >= found for other in capacities)) for found in capacities]
    lengths = draw(st.lists(st.one_of(st.integers(1, max(held)), st.sampled_from(held)), min_size=1, max_size=6))
    ranks = HdpRanks.make(capacities, speeds and speeds[: len(capacities)])
    return make_problem(lengths, ranks, BatchCosts(1000, 1, draw(st.sampled_from([0, 50]))))


@given(problem=problems_of_unlike_ranks())
@settings(max_examples=60)
def test_ranks_of_unlike_capacity_hold_what_those_of_them_hold_that_hold_most(problem):
    for num_stages in (1, 3):
        table = BalancedPlanner("pp" if num_stages > 1 else "dp", num_stages).plan(problem)
        check(table, problem, is_aligned=num_stages > 1)


@pytest.mark.parametrize(
    ("capacities", "length"),
    [([8192, 2048], 5000), ([8192, 8192, 2048], 12000), ([8192, 2048, 2048], 6200), ([8192] + [1024] * 4, 8192)],
)
def test_a_ring_grows_no_further_than_ranks_hold_their_share(capacities, length):
    costs = BatchCosts.from_seconds(
        attention_s_per_square=9.21e-12, linear_s_per_token=3.52e-7, ring_s_per_token=3.2e-8
    )
    problem = BatchProblem.make(0, [length], HdpRanks.make(capacities), costs)
    table = BalancedPlanner().plan(problem)
    check(table, problem)
    assert table.sizes.tolist() == [1 if length <= 8192 else 2]


@given(problem=problems(), cp=st.sampled_from([0, 1, 2, 3]), context=st.integers(1, 90))
@settings(max_examples=40)
def test_static_plans_are_whole_or_refused(problem, cp, context):
    try:
        table = StaticPlanner(context, cp).plan(problem)
    except ConfigError:
        num_ranks, longest = len(problem.ranks), problem.lengths.max(initial=0)
        held = min(problem.capacities) * (cp or num_ranks)
        padding = 4 * (cp or num_ranks)
        assert (cp and num_ranks % cp) or context + padding > held or longest + padding > min(context, held)
        return
    plan = check(table, problem, is_aligned=True)
    rings = {micro_batch.ring.ranks for rank in plan.ranks for micro_batch in rank if micro_batch.ring}
    assert len({len(ring) for ring in rings}) <= 1
    assert sum(map(len, rings)) <= len(problem.ranks)


@given(problem=problems(most_ranks=6), num_stages=st.integers(1, 4), kind=st.sampled_from(["1f1b", "zero_bubble"]))
@settings(max_examples=40)
def test_pipelines_that_meet_in_aligned_rings_never_wait_in_a_circle(problem, num_stages, kind):
    plan = BalancedPlanner(strategy="pp", num_stages=num_stages).plan(problem).plan()
    assert min(map(len, plan.ranks)) >= num_stages
    check_rings(plan, [plan_schedule(kind, num_stages, len(micro_batches)) for micro_batches in plan.ranks])


@given(
    problem=problems(most_ranks=6),
    name=st.sampled_from(["static", "naive", "balanced"]),
    num_stages=st.integers(1, 4),
    virtual_stages=st.integers(2, 5),
    kind=st.sampled_from(["1f1b", "zero_bubble"]),
)
@settings(max_examples=40)
def test_interleaved_pipelines_never_wait_in_a_circle(problem, name, num_stages, virtual_stages, kind):
    longest = max(1, int(problem.lengths.max(initial=1)))
    setup = BatchSetup(name, longest, problem.ranks, problem.costs, 1, num_stages, virtual_stages)
    try:
        plan = check(setup.plan_with(name, problem), problem, is_aligned=True)
    except ConfigError:
        assert name != "balanced"  # whose rings hold whatever the ranks can
        return
    counts = [len(micro_batches) for micro_batches in plan.ranks]
    check_rings(plan, [plan_training(kind, num_stages, n, virtual_stages, early_updates=True) for n in counts])


@given(problem=problems(), num_stages=st.integers(1, 3))
@settings(max_examples=40)
def test_balanced_never_takes_longer_than_rings_of_one_size(problem, num_stages):
    """By the costs, but for the slack; in pipelines where their longest micro-batch is no shorter either."""
    context = max(1, int(problem.lengths.max(initial=1)))
    try:
        theirs = model_times(StaticPlanner(context).plan(problem), problem.ranks, problem.costs)
    except ConfigError:
        return
    planner = BatchSetup("balanced", context, problem.ranks, problem.costs, 1, num_stages).planner_named("balanced")
    table = planner.plan(problem)
    check(table, problem, is_aligned=num_stages > 1)
    ours = model_times(table, problem.ranks, problem.costs)
    within_slack = ours.makespan * 1000 <= theirs.makespan * (1000 + BalancedPlanner().slack_milli)
    assert within_slack or (num_stages > 1 and ours.longest < theirs.longest)


def test_a_step_of_short_sequences_is_not_planned_twice(monkeypatch):
    """Packing rows takes longer than the plan itself, and nothing can be won."""
    monkeypatch.setattr("hpc_train.plan.batch_static.best_fit", None)
    lengths = np.random.default_rng(0).integers(50, 400, 20_000)
    problem = BatchProblem.make(0, lengths, HdpRanks.alike(64, 8192), COSTS)
    for num_stages in (1, 4):
        setup = BatchSetup("balanced", 8192, problem.ranks, COSTS, 1, num_stages)
        setup.plan(0, lengths)


def test_interleaved_pipelines_with_unequal_numbers_of_micro_batches_wait_in_a_circle():
    """Why they get equally many: with them a ring's members come to it and to the next one in different orders."""
    problem = make_problem([16, 16, 8, 3, 3], HdpRanks.alike(3, 8))
    table = BalancedPlanner(strategy="pp", num_stages=2).plan(problem)
    plan, counts = table.plan(), table.num_micro_batches.tolist()
    assert len({*counts}) > 1
    with pytest.raises(ConfigError, match="deadlock"):
        check_rings(plan, [plan_schedule("1f1b", 2, count, 2) for count in counts])


@given(problem=problems())
@settings(max_examples=40)
def test_no_plan_is_faster_than_the_bound(problem):
    bound = lower_bound(problem).ticks
    for planner in (*PLANNERS.values(), StaticPlanner(max(1, 2 * int(problem.lengths.max(initial=0))))):
        try:
            times = model_times(planner.plan(problem), problem.ranks, problem.costs)
        except ConfigError:
            assert isinstance(planner, StaticPlanner)
            continue
        assert times.makespan >= bound
        assert (times.busy <= times.ends).all()


@pytest.mark.parametrize(
    ("lengths", "micro_batch_s", "is_reached"),
    [([2884], 0.0, True), ([1100] * 3, 1e-3, False)],
    ids=["alone", "shared"],
)
def test_the_bound_rounds_nothing_up_and_lets_sequences_share_a_ring(lengths, micro_batch_s, is_reached):
    """One sequence on all ranks, a tick of whose smaller ring was rounded up; three in one row of all ranks."""
    costs = BatchCosts.from_seconds(
        attention_s_per_square=9.21e-12, linear_s_per_token=3.52e-7, micro_batch_s=micro_batch_s
    )
    problem = BatchProblem.make(0, lengths, HdpRanks.alike(4, 1024), costs)
    makespan = model_times(StaticPlanner(4096).plan(problem), problem.ranks, costs).makespan
    assert makespan >= lower_bound(problem).ticks
    assert not is_reached or makespan == lower_bound(problem).ticks


@given(problem=problems())
@settings(max_examples=30)
def test_plans_are_the_same_each_time_and_differ_in_eight_bytes(problem):
    tables = [planner.plan(problem) for planner in PLANNERS.values()]
    again = [planner.plan(problem) for planner in PLANNERS.values()]
    assert [table.digest for table in tables] == [table.digest for table in again]
    assert {len(table.digest) for table in tables} == {8}
    by_digest: dict[bytes, set[object]] = {}
    for table in (*tables, *again):
        by_digest.setdefault(table.digest, set()).add(table.plan())
    assert all(len(plans) == 1 for plans in by_digest.values())


def test_a_fresh_process_makes_the_same_plan():
    code = (
        "from tests.plan.test_batch_planners import *; problem = example();"
        "print(*[planner.plan(problem).digest.hex() for planner in PLANNERS.values()])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert out == [planner.plan(example()).digest.hex() for planner in PLANNERS.values()]


def test_the_plan_of_a_known_step_has_a_known_digest():
    """Another digest on another machine would mean that nodes plan differently; a new one here is a changed plan."""
    lengths = [number * number * 7919 % 3000 + 1 for number in range(300)] + [9000, 16 * 1024]
    problem = BatchProblem.make(2, lengths, HdpRanks.make([1024, 2048] * 16, [1.0, 0.8] * 16), COSTS)
    digests = {name: planner.plan(problem).digest.hex() for name, planner in PLANNERS.items()}
    assert digests == KNOWN_DIGESTS


def example() -> BatchProblem:
    """Sixteen ranks, one sequence that needs them all, some that need two to five, many short ones."""
    rng = np.random.default_rng(3)
    lengths = [16 * 1024, 5000, 4100, 3000, 2500, 1500, 1200, *rng.integers(1, 1024, 120).tolist()]
    return BatchProblem.make(1, lengths, HdpRanks.alike(16, 1024), COSTS)


def test_balanced_is_near_the_bound_and_better_than_naive_and_static():
    problem = example()
    makespan = {
        name: model_times(planner.plan(problem), problem.ranks, COSTS).makespan
        for name, planner in {**PLANNERS, "static": StaticPlanner(16 * 1024)}.items()
    }
    assert makespan["balanced"] <= 1.05 * lower_bound(problem).ticks
    assert makespan["balanced"] < makespan["naive"] < makespan["static"]


def test_a_ring_grows_only_where_the_step_would_last_longer():
    long, ranks = 32 * 1024, HdpRanks.alike(128, 1024)
    alone = BatchProblem.make(0, [long], ranks, BatchCosts(1, 24576, 300))
    grown, smallest = BalancedPlanner().plan(alone), BalancedPlanner(grows_rings=False).plan(alone)
    assert smallest.sizes.tolist() == [32] and grown.sizes[0] > 64
    among_many = BatchProblem.make(0, [long] + [1000] * 4000, ranks, BatchCosts(1, 24576, 300))
    assert BalancedPlanner().plan(among_many).sizes.max() == 32


def test_pipelines_get_larger_rings_since_a_long_micro_batch_goes_through_all_stages():
    problem = BatchProblem.make(0, [32 * 1024] + [1000] * 400, HdpRanks.alike(128, 1024), BatchCosts(1, 24576, 300))
    sizes = [BalancedPlanner(strategy="pp", num_stages=stages).plan(problem).sizes.max() for stages in (1, 4)]
    assert sizes[0] < sizes[1]


def test_equal_rings_that_would_leave_a_last_row_almost_empty_grow_until_rows_are_full():
    problem = BatchProblem.make(0, [32 * 1024] * 9, HdpRanks.alike(128, 1024), BatchCosts(1, 1000, 300))
    makespan = [
        model_times(planner.plan(problem), problem.ranks, problem.costs).makespan / lower_bound(problem).ticks
        for planner in (BalancedPlanner(), BalancedPlanner(grows_rings=False))
    ]
    assert makespan[0] < 1.1 and makespan[1] > 1.3


def test_slow_ranks_get_less_and_rings_leave_them_out():
    speeds = [0.5 if rank % 4 == 1 else 1.0 for rank in range(16)]
    problem = BatchProblem.make(0, [4 * 1024] + [700] * 400, HdpRanks.make([1024] * 16, speeds), COSTS)
    table = BalancedPlanner().plan(problem)
    tokens = np.zeros(16)
    np.add.at(tokens, table.ranks, np.repeat(table.pack_sums()[1] / table.sizes, table.sizes))
    slow = np.array(speeds) < 1
    assert tokens[slow].mean() == pytest.approx(tokens[~slow].mean() / 2, rel=0.1)
    (ring,) = [pack for pack in range(table.num_packs) if table.sizes[pack] > 1]
    assert not slow[table.ranks[table.first_rank[ring] : table.first_rank[ring + 1]]].any()
    assert model_times(table, problem.ranks, COSTS).makespan <= 1.05 * lower_bound(problem).ticks


def test_a_ring_leaves_slow_ranks_out_though_they_hold_more():
    ranks = HdpRanks.make([2048] * 8 + [1024] * 24, [0.5] * 4 + [1.0] * 28)
    problem = BatchProblem.make(0, [20 * 1024] + [700] * 400, ranks, COSTS)
    table = BalancedPlanner().plan(problem)
    check(table, problem)
    (ring,) = np.flatnonzero(table.sizes > 1)
    assert (ranks.speed_milli[table.ranks[table.first_rank[ring] : table.first_rank[ring + 1]]] == 1000).all()


def test_a_rank_that_holds_more_takes_what_others_cannot():
    problem = BatchProblem.make(0, [2048, 2000, 100], HdpRanks.make([1024, 1024, 2048, 1024]), COSTS)
    table = BalancedPlanner(grows_rings=False).plan(problem)
    check(table, problem)
    assert {len(micro_batch.sequences) for micro_batch in table.micro_batches(2)} == {1}
    assert table.sizes.tolist() == [1, 1, 1]


def test_offloading_makes_rings_smaller_by_as_much_as_copies_hide():
    lengths = [64 * 1024]
    sizes, ratios = [], []
    for copying in (10**9, 20_000, 1):
        costs = BatchCosts(1, 24576, 0, offload=OffloadCosts(32, copying))
        table = BalancedPlanner(grows_rings=False).plan(BatchProblem.make(0, lengths, HdpRanks.alike(16, 8192), costs))
        sizes.append(int(table.sizes[0]))
        ratios.append(int(table.offload_milli[0]))
    # Two of 32 layers stay, so 16 times as many tokens fit at most.
    assert sizes[0] == 8 and ratios[0] == 0
    assert sizes[2] == 1 and 900 < ratios[2] <= 1000
    assert sizes[0] > sizes[1] > 0


def test_ranks_without_work_take_part_with_zero_tokens():
    for planner in PLANNERS.values():
        table = planner.plan(make_problem([1, 0, 0], HdpRanks.alike(4, 8)))
        plan = check(table, make_problem([1, 0, 0], HdpRanks.alike(4, 8)))
        assert sorted(sum(micro_batch.num_tokens for micro_batch in rank) for rank in plan.ranks)[:3] == [0, 0, 0]
        assert all(plan.ranks)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_a_step_without_tokens_is_planned(lengths):
    problem = make_problem(lengths, HdpRanks.alike(3, 8))
    for planner in (*PLANNERS.values(), StaticPlanner(8)):
        assert check(planner.plan(problem), problem).num_tokens == 0


def test_a_sequence_longer_than_all_ranks_hold_is_refused_with_what_fits():
    with pytest.raises(ConfigError, match=r"sequence 1 of step 0 has 5000 tokens, and 4 hdp ranks of 1024 .*hold 4096"):
        BatchProblem.make(0, [3, 5000], HdpRanks.alike(4, 1024), COSTS)
    with pytest.raises(ConfigError, match=r"fit on 5 ranks .*1250 tokens a rank.*a context of 4096"):
        BatchProblem.make(0, [3, 5000], HdpRanks.alike(4, 1024), COSTS)
    with pytest.raises(ConfigError, match="may be offloaded"):
        costs = BatchCosts(1, 24576, 0, offload=OffloadCosts(4, 1))
        BatchProblem.make(0, [9000], HdpRanks.alike(4, 1024), costs)


def test_what_a_refusal_says_would_fit_does():
    for length in (4097, 5000, 9999):
        with pytest.raises(ConfigError):
            BatchProblem.make(0, [length], HdpRanks.alike(4, 1024), COSTS)
    BatchProblem.make(0, [4096], HdpRanks.alike(4, 1024), COSTS)
    BatchProblem.make(0, [5000], HdpRanks.alike(4, 1250), COSTS)
    BatchProblem.make(0, [5000], HdpRanks.alike(5, 1024), COSTS)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: BatchProblem.make(0, [1], HdpRanks.make([512, 100]), COSTS), "rank 1 holds 100 .*block of attention"),
        (lambda: BatchProblem.make(0, [4, -1], HdpRanks.alike(2, 512), COSTS), "sequence 1 of step 0 has -1 tokens"),
        (lambda: HdpRanks.make([512], [float("nan")]), "speed of hdp rank 0 is nan"),
        (lambda: HdpRanks.make([512], [0.0]), "speed of hdp rank 0 is 0"),
        (lambda: HdpRanks.make([]), "at least one rank"),
        (lambda: HdpRanks.make([512, 512], [1.0]), "one capacity, speed and place for each"),
        (lambda: HdpRanks.make([512] * 2, None, ([0, 0], [0, 0], [0, 0])), "each of them once"),
        (
            lambda: BatchProblem.make(0, [2**20] * 4, HdpRanks.alike(2048, 512), BatchCosts(10**9, 1)),
            "Give costs in longer ticks",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_static_refuses_what_its_fixed_rings_cannot_hold():
    problem = BatchProblem.make(0, [6000], HdpRanks.alike(8, 1024), COSTS)
    with pytest.raises(ConfigError, match="longer than a row of context=4096"):
        StaticPlanner(4096).plan(problem)
    with pytest.raises(ConfigError, match="does not divide"):
        StaticPlanner(6000, cp=3).plan(problem)
    with pytest.raises(ConfigError, match="does not fit on all 8 ranks"):
        smallest_cp(9000, 1024, 8)
    assert smallest_cp(1024, 1024, 8) == 1
    assert smallest_cp(2100, 1024, 8) == 4


def test_naive_takes_all_ranks_for_the_smallest():
    problem = BatchProblem.make(0, [5000], HdpRanks.make([512] * 3 + [8192]), COSTS)
    with pytest.raises(ConfigError, match="the balanced planner knows"):
        NaivePlanner().plan(problem)


@given(st.lists(st.integers(0, 20), max_size=40))
def test_best_fit_packs_everything_within_its_room(lengths):
    packs = best_fit(lengths, 20)
    assert sorted(at for pack in packs for at in pack) == [at for at, length in enumerate(lengths) if length]
    loads = [sum(lengths[at] for at in pack) for pack in packs]
    assert all(loads) and max(loads, default=0) <= 20
    # Any two packs together would not fit, or the second would not have been opened.
    assert all(2 * sum(loads) > 20 * (len(loads) - 1) for _ in loads)


@given(st.lists(st.integers(1, 7), max_size=40))
def test_dealing_gives_each_place_of_a_round_once(sizes):
    rounds, places = deal(sizes, 7)
    taken = [
        (number, place + at) for number, place, size in zip(rounds, places, sizes, strict=True) for at in range(size)
    ]
    assert len({*taken}) == len(taken) and all(place < 7 for _, place in taken)


def test_rings_send_less_where_they_are_smaller():
    problem = example()
    smallest = ring_tokens(BalancedPlanner(grows_rings=False).plan(problem))
    assert smallest == int((problem.lengths * (problem.smallest_sizes - 1)).sum())
    assert smallest < ring_tokens(StaticPlanner(16 * 1024).plan(problem))
