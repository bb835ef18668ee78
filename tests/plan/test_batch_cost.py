"""Costs of sequences on ranks and rings."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.errors import ConfigError
from hpc_train.plan import batch_cost
from hpc_train.plan.batch_cost import (
    BatchCosts,
    OffloadCosts,
    longest_held,
    offload_hidden_milli,
    offload_needed_milli,
    smallest_rings,
    tokens_per_rank,
)

COSTS = BatchCosts(attention_per_square=1, linear_per_token=24576, ring_per_token=5560)


def test_times_are_those_of_the_published_measurement():
    # 312K tokens on 39 ranks: 2.8 ms a ring step of 8K tokens, 9 ms for the rest (cited: ByteScale).
    unit_ms = 2.8 / 8192**2
    ticks = COSTS.micro_batch(319_488**2, 319_488, 39)
    assert ticks * unit_ms == pytest.approx(39 * 2.8 + 9, rel=0.02)
    # 2M on 256: passing 1.9 ms a step would hide, so attention counts.
    assert COSTS.micro_batch(2**42, 2**21, 256) == 2**42 // 256 + 24576 * 2**21 // 256


costs = st.builds(
    lambda *numbers, last_hop, home: BatchCosts(
        *numbers, ring_last_hop_per_token=min(last_hop, numbers[2]), ring_home_per_token=home
    ),
    st.integers(0, 5), st.integers(1, 30_000), st.integers(0, 6000), st.integers(0, 9), st.integers(0, 9),
    last_hop=st.integers(0, 6000), home=st.integers(0, 6000),
)  # fmt: skip


@given(costs, st.integers(1, 3_000_000), st.integers(1, 5000))
def test_the_compiled_form_gives_the_same(some, length, size):
    from hpc_train.plan.batch_kernels import ring_ticks

    assert ring_ticks(np.array(some.numbers), length, size) == some.micro_batch(length**2, length, size)


with_attention = costs.filter(lambda some: some.attention_per_square > 0)


@given(with_attention, st.integers(50_000, 3_000_000), st.integers(1, 50), st.integers(1, 2000), st.integers(0, 10**13))
def test_the_compiled_search_finds_the_least_size(some, length, smallest, more, target):
    from hpc_train.plan.batch_kernels import least_size

    found = least_size(np.array(some.numbers), length, smallest, smallest + more, target)
    sizes = np.arange(smallest, smallest + more + 1)
    times = some.micro_batch(length**2, length, sizes)
    within = sizes[times <= target]
    # Rounding makes steps, on which a slope says nothing; they are small for sequences that need rings.
    if len(within):
        assert found == within[0] or times[found - smallest] <= times.min() * 1.001
    else:
        assert times[found - smallest] <= times.min() * 1.001


@given(st.integers(0, 10**15), st.integers(10, 10**6))
def test_a_speed_scales_exactly(ticks, speed):
    from hpc_train.plan.batch_kernels import at_speed

    assert at_speed(ticks, speed) == -(-ticks * 1000 // speed)


@given(
    length=st.integers(1, 10_000),
    capacity=st.integers(2, 64),
    num_layers=st.integers(1, 40),
    copying=st.integers(0, 10**6),
)
def test_the_smallest_ring_fits_and_a_smaller_one_does_not(length, capacity, num_layers, copying):
    some = BatchCosts(1, 24576, 5560, offload=OffloadCosts(num_layers, copying))
    lengths = np.array([length])
    size = smallest_rings(lengths, capacity, some, 10**6)

    def fits(sizes):
        needed = offload_needed_milli(lengths, sizes, capacity, some)
        return bool((needed <= offload_hidden_milli(lengths, sizes, some)).all())

    assert fits(size)
    assert size[0] == 1 or not fits(size - 1)
    assert smallest_rings(lengths, capacity, some, int(size[0]) - 1)[0] == 0


@given(
    capacity=st.integers(2, 40),
    count=st.integers(1, 7),
    num_layers=st.integers(1, 9),
    copying=st.integers(0, 200),
    linear=st.integers(1, 100),
)
def test_ranks_hold_every_sequence_up_to_the_longest_held_and_not_the_next(
    capacity, count, num_layers, copying, linear
):
    """Against all lengths one by one. A kind with less capacity and more ranks beside it changes nothing of that."""
    some = BatchCosts(1, linear, 5, offload=OffloadCosts(num_layers, copying))
    classes = [(capacity, count), (max(2, capacity // 2), count + 2)]
    most = 2 * capacity * (count + 2)
    lengths = np.arange(1, most + 1)
    fits = np.logical_or.reduce([smallest_rings(lengths, holds, some, number) > 0 for holds, number in classes])
    first_failing = int(np.argmin(fits)) if not fits.all() else most
    assert longest_held(classes, some, most) == first_failing
    with mock.patch.object(batch_cost, "_LOOKED_AT", 1):
        assert longest_held(classes, some, most) == first_failing


@pytest.mark.parametrize("count", [1, 2])
def test_of_many_lengths_that_ranks_hold_few_are_looked_at_one_by_one(count):
    some = BatchCosts(1, 24576, 5560, offload=OffloadCosts(100, 30_000))
    with mock.patch.object(batch_cost, "_hides", side_effect=batch_cost._hides) as hides:
        assert longest_held([(1 << 20, count)], some, 1 << 27) < 1 << 27
    assert sum(len(call.args[0]) for call in hides.call_args_list) < 1 << 18


def test_what_a_ring_of_two_passes_on_is_half_of_what_goes_round_but_for_what_goes_home():
    """Two hops of gradients, the second beside nothing, and one of keys and values each time they go round."""
    some = BatchCosts(0, 1, 12, ring_last_hop_per_token=12, ring_home_per_token=4)
    assert [some.micro_batch(0, 1200, size) - 1200 // size for size in (2, 4, 1200)] == [9600, 12_000, 14_392]
    # Beside more attention than passing takes, the way home is left.
    assert some.micro_batch(0, 1200, 2) - 600 == 7200 + 2400
    long = BatchCosts(1, 1, 12, ring_last_hop_per_token=12, ring_home_per_token=4)
    assert long.micro_batch(1200**2, 1200, 2) - 600 == 1200**2 // 2 + 2400


def test_without_offloading_a_ring_is_as_small_as_the_capacity_allows():
    lengths = np.array([1, 8192, 8193, 16384, 16385, 2**21])
    assert smallest_rings(lengths, 8192, COSTS, 256).tolist() == [1, 1, 2, 2, 3, 256]
    assert (tokens_per_rank(lengths, np.array([1, 1, 2, 2, 3, 256])) <= 8192).all()


def test_an_offload_ratio_keeps_what_its_equation_says():
    """Of l layers two stay whole, of the others what is not offloaded (cited: ByteScale, equation 3)."""
    some = BatchCosts(1, 24576, offload=OffloadCosts(32, 1))
    for tokens in (9000, 20_000, 60_000):
        ratio = int(offload_needed_milli(np.array([tokens]), np.array([1]), 8192, some)[0])
        held = tokens * (2 + (1000 - ratio) / 1000 * 30) / 32
        assert held <= 8192 < tokens * (2 + (1000 - ratio + 1) / 1000 * 30) / 32


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-9])
@pytest.mark.parametrize("name", ["attention_s_per_square", "ring_s_per_token", "copy_s_per_token"])
def test_a_profile_with_a_value_that_is_no_time_is_refused(name, value):
    profile = {"attention_s_per_square": 9e-12, "linear_s_per_token": 3e-7}
    with pytest.raises(ConfigError, match=f"{name}={value} in the profile is no time"):
        BatchCosts.from_seconds(**{**profile, name: value})


def test_costs_of_nothing_are_refused():
    with pytest.raises(ConfigError, match="neither attention nor the rest"):
        BatchCosts.from_seconds(attention_s_per_square=0.0, linear_s_per_token=1e-30)
    with pytest.raises(ConfigError, match="not negative"):
        BatchCosts(-1, 5)
    with pytest.raises(ConfigError, match="at least one layer"):
        OffloadCosts(0, 5)


def test_a_profile_keeps_its_digits():
    found = BatchCosts.from_seconds(
        attention_s_per_square=9.21e-12,
        linear_s_per_token=3.52e-7,
        ring_s_per_token=2.3e-7,
        copy_s_per_token=1e-8,
        num_layers=32,
    )
    assert found.numbers == (921, 35_200_000, 23_000_000, 0, 0, 0, 0)
    assert found.offload == OffloadCosts(32, 1_000_000)
