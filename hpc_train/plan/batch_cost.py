"""What sequences cost on one rank or on a ring of ranks, in whole numbers, so that every machine plans alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hpc_train.errors import ConfigError

MILLI = 1000
RESIDENT_LAYERS = 2
"""Layers whose activations stay on the device whatever the offload ratio (cited: ByteScale, arXiv 2502.21231)."""

TICK_S = 1e-14
"""Derived: attention of 9e-12 s a square (ByteScale's) keeps three digits, 2M tokens on 4,096 ranks stay in 64 bits.
Slower machines have longer ticks (`batch_problem.finest_costs`).
"""

_LOOKED_AT = 1 << 12
"""Lengths at a time where they are looked at one by one (assumed)."""

Integers = NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True)
class OffloadCosts:
    """What it takes to keep activations off the device.

    num_layers: of a rank; copy_per_token: ticks to copy one token's activations of one layer, the slower way counting.
    """

    num_layers: int
    copy_per_token: int

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.copy_per_token < 0:
            raise ConfigError(
                f"num_layers={self.num_layers}, copy_per_token={self.copy_per_token}: offloading needs at least one "
                "layer and a copy time that is not negative"
            )


@final
@dataclass(frozen=True, slots=True)
class BatchCosts:
    """Time of a micro-batch in one layer, in ticks of any length.

    attention_per_square: for each token times token of a sequence. linear_per_token: all that grows with the tokens.
    ring_per_token: of a sequence on a ring, the time of passing all its keys, values and gradients once round, beside
    attention. ring_last_hop_per_token: the part of that for what makes one hop less, an Nth of it in a ring of N.
    ring_home_per_token: an Nth of it is the hop that takes gradients home, beside nothing. ring_per_step: what each
    step of a ring takes beside. per_micro_batch: constant. offload: None where activations stay on the device. tick_s:
    how long a tick is, for people.
    """

    attention_per_square: int
    linear_per_token: int
    ring_per_token: int = 0
    ring_per_step: int = 0
    per_micro_batch: int = 0
    offload: OffloadCosts | None = None
    tick_s: float = TICK_S
    ring_last_hop_per_token: int = 0
    ring_home_per_token: int = 0

    def __post_init__(self) -> None:
        numbers = self.numbers
        if any(not isinstance(number, int) or number < 0 for number in numbers):
            raise ConfigError(f"{self}: costs are whole numbers of ticks that are not negative")
        if self.ring_last_hop_per_token > self.ring_per_token:
            raise ConfigError(f"{self}: a ring's last hop is a part of its way round, and cannot take longer")
        if not self.attention_per_square and not self.linear_per_token:
            raise ConfigError(
                "neither attention nor the rest of a layer costs anything, so no plan is better than others"
            )

    @property
    def numbers(self) -> tuple[int, int, int, int, int, int, int]:
        """As the compiled parts take them."""
        return (
            self.attention_per_square, self.linear_per_token, self.ring_per_token, self.ring_per_step,
            self.per_micro_batch, self.ring_last_hop_per_token, self.ring_home_per_token,
        )  # fmt: skip

    def micro_batch(self, squares: Any, tokens: Any, size: Any) -> Any:
        """Ticks of a micro-batch in one layer on each of `size` ranks; numbers or arrays.

        Attention and passing run beside each other, gradients' way home and the rest after them; so a ring takes as
        long as the slower of the two. squares: the sum of the squares of its sequences' lengths. tokens: the sum of
        their lengths.
        """
        a, b, passing, step, constant, last_hop, home = self.numbers
        attention, linear = -(-a * squares // size), -(-b * tokens // size)
        is_ring = np.asarray(size) > 1
        ring = np.where(is_ring, passing * tokens - last_hop * tokens // size + step * size, 0)
        found = np.maximum(attention, ring) + np.where(is_ring, -(-home * tokens // size), 0) + linear + constant
        return int(found) if np.ndim(found) == 0 else found

    def compute(self, squares: Any, tokens: Any, size: Any) -> Any:
        """The same without what passing on takes longer than attention."""
        return -(-self.attention_per_square * squares // size) - (-self.linear_per_token * tokens // size)

    @staticmethod
    def from_seconds(
        *,
        attention_s_per_square: float,
        linear_s_per_token: float,
        ring_s_per_token: float = 0.0,
        ring_s_per_step: float = 0.0,
        micro_batch_s: float = 0.0,
        ring_last_hop_s_per_token: float = 0.0,
        ring_home_s_per_token: float = 0.0,
        num_layers: int = 1,
        copy_s_per_token: float | None = None,
        tick_s: float = TICK_S,
    ) -> BatchCosts:
        """Costs from a profile, in ticks.

        Raises:
            ConfigError: a time is not a number, infinite or negative, or all of them round to nothing.
        """
        seconds = {
            "attention_s_per_square": attention_s_per_square,
            "linear_s_per_token": linear_s_per_token,
            "ring_s_per_token": ring_s_per_token,
            "ring_s_per_step": ring_s_per_step,
            "micro_batch_s": micro_batch_s,
            "ring_last_hop_s_per_token": ring_last_hop_s_per_token,
            "ring_home_s_per_token": ring_home_s_per_token,
            "copy_s_per_token": 0.0 if copy_s_per_token is None else copy_s_per_token,
        }
        for name, value in seconds.items():
            if not math.isfinite(value) or value < 0:
                raise ConfigError(
                    f"{name}={value} in the profile is no time; measure it again (finite seconds, 0 or more)"
                )
        *ticks, copying = (round(value / tick_s) for value in seconds.values())
        offload = None if copy_s_per_token is None else OffloadCosts(num_layers, copying)
        attention, linear, ring, step, constant, last_hop, home = ticks
        return BatchCosts(attention, linear, ring, step, constant, offload, tick_s, last_hop, home)


def tokens_per_rank(lengths: Any, sizes: Any) -> Any:
    """Tokens that a rank of a ring has at most of a sequence, its two parts being padded to equal ones."""
    return np.where(np.asarray(sizes) == 1, lengths, 2 * -(-lengths // (2 * sizes)))


def offload_needed_milli(lengths: Any, sizes: Any, capacity: Any, costs: BatchCosts) -> Integers:
    """The least offload ratio with which sequences fit on rings of some sizes; over 1000 where none does."""
    tokens = np.asarray(tokens_per_rank(lengths, sizes), np.int64)
    over = np.maximum(tokens - capacity, 0)
    if costs.offload is None or costs.offload.num_layers <= RESIDENT_LAYERS:
        return np.where(over > 0, MILLI + 1, 0).astype(np.int64)
    layers = costs.offload.num_layers
    found = -(-MILLI * layers * over // np.maximum(1, tokens * (layers - RESIDENT_LAYERS)))
    return np.asarray(found, np.int64)


def offload_hidden_milli(lengths: Any, sizes: Any, costs: BatchCosts) -> Integers:
    """The largest offload ratio whose copies take no longer than the layer's compute beside them.

    That a ring may wait for its network longer than it computes does not count, so what ranks hold does not depend on
    the network.
    """
    lengths, sizes = np.asarray(lengths, np.int64), np.asarray(sizes, np.int64)
    if costs.offload is None:
        return np.zeros(np.broadcast(lengths, sizes).shape, np.int64)
    copying = np.maximum(1, costs.offload.copy_per_token * np.asarray(tokens_per_rank(lengths, sizes)))
    time = np.asarray(costs.compute(lengths**2, lengths, sizes))
    # The quotient first: time * 1000 could pass 64 bits.
    return np.minimum(MILLI, np.minimum(time // copying, 1) * MILLI + time % copying * MILLI // copying)


def held_without_offload(capacity: int, num_ranks: int) -> int:
    """The longest sequence that ranks of some capacity hold together at offload ratio 0."""
    return capacity if num_ranks == 1 else 2 * (capacity // 2) * num_ranks


def smallest_rings(lengths: Integers, capacity: int, costs: BatchCosts, largest: int) -> Integers:
    """The fewest ranks, up to `largest`, of some capacity that hold each sequence; 0 where not even these do.

    Copies may take as long as the layer's compute and no longer, so offloading never costs time by the profile. That
    is a reading of ByteScale's equation 3 (arXiv 2502.21231) without its lower bound on the ratio, under which
    sequences just above the capacity would be offloaded almost whole.
    """
    on_rings = np.maximum(2, -(-lengths // (2 * (capacity // 2))))
    plain = np.where(lengths <= capacity, 1, on_rings)
    if costs.offload is None or not largest:
        return np.where(plain <= largest, plain, 0)
    # Where parts are padded, one rank more may hide less: so the largest ring is looked at by itself.
    high = np.minimum(plain, largest)
    is_held = _hides(lengths, high, capacity, costs)
    low = np.ones_like(high)
    while (low < high).any():
        middle = (low + high) // 2
        fits = _hides(lengths, middle, capacity, costs)
        high, low = np.where(fits, middle, high), np.where(fits, low, np.minimum(middle + 1, high))
    return np.where(is_held, high, 0)


def _hides(lengths: Integers, sizes: Integers, capacity: int, costs: BatchCosts) -> Any:
    """Whether rings hold sequences with no more offloading than hides behind their compute."""
    return offload_needed_milli(lengths, sizes, capacity, costs) <= offload_hidden_milli(lengths, sizes, costs)


def _hides_all(first: int, last: int, size: int, capacity: int, costs: BatchCosts) -> bool:
    """Whether it is certain for all lengths from first to last: the most to leave hides behind the least compute."""
    needed = int(offload_needed_milli(np.array([last]), size, capacity, costs)[0])
    assert costs.offload is not None
    copying = max(1, costs.offload.copy_per_token * int(tokens_per_rank(last, size)))
    return needed <= min(MILLI, costs.compute(first**2, first, size) * MILLI // copying)


def longest_held(classes: Sequence[tuple[int, int]], costs: BatchCosts, most: int) -> int:
    """The most tokens, up to `most`, of which ranks hold every sequence of so many and fewer.

    Offloading does not hold all that is shorter than what it holds: attention, behind which copies hide, grows faster
    than what is to be copied.

    Args:
        classes: Capacities, each with the number of ranks that have it or more.
    """
    held = max(held_without_offload(*of_class) for of_class in classes)
    if costs.offload is None or held >= most:
        return min(held, most)
    # A rank's share, and with it what must leave, grows by steps; within one, compute grows: its first length counts.
    widths = {1 if count == 1 else 2 * count for _, count in classes}
    fewest = _LOOKED_AT * min(widths)
    begin, amount = held + 1, fewest
    while begin <= most:
        end = min(most + 1, begin + amount)
        if any(_hides_all(begin, end - 1, count, capacity, costs) for capacity, count in classes):
            begin, amount = end, 2 * amount
            continue
        if amount > fewest:
            amount //= 2
            continue
        firsts = [np.arange(begin - begin % width + 1, end, width) for width in widths]
        lengths = np.unique(np.concatenate([[begin], *firsts])).astype(np.int64)
        lengths = lengths[(lengths >= begin) & (lengths < end)]
        fits = [_hides(lengths, np.full_like(lengths, count), capacity, costs) for capacity, count in classes]
        failing = np.flatnonzero(~np.logical_or.reduce(fits))
        if failing.size:
            return int(lengths[failing[0]]) - 1
        begin = end
    return most
