"""Compiled loops of the balanced planner: whole numbers only, ties by the lower number, so all machines agree.

Imported by the functions that use it, since Numba takes a while to import. Plain loops over arrays: what NumPy does
whole is left to the callers, since compiling it takes seconds. None calls one of another file: Numba would go on with
what it has compiled when that one changes. A position is a place in the order in which
the planner looks at the ranks. Times are those of the profile until a rank's own speed is put in.
"""

from __future__ import annotations

import numpy as np
from numba import njit

MILLI = 1000


@njit(cache=True)
def at_speed(ticks, speed):  # type: ignore[no-untyped-def]
    """Ticks on a rank of some speed, rounded up, without leaving 64 bits on the way."""
    return ticks // speed * MILLI - (-(ticks % speed * MILLI) // speed)


@njit(cache=True)
def ring_ticks(costs, length, size):  # type: ignore[no-untyped-def]
    """As BatchCosts.micro_batch of one sequence."""
    attention = -(-costs[0] * length * length // size)
    passing, home = 0, 0
    if size > 1:
        passing = costs[2] * length - costs[5] * length // size + costs[3] * size
        home = -(-costs[6] * length // size)
    return max(attention, passing) + home - (-costs[1] * length // size) + costs[4]


@njit(cache=True)
def least_size(costs, length, smallest, largest, target):  # type: ignore[no-untyped-def]
    """The fewest ranks with which a sequence takes no longer than `target`; if none do, those that take it least."""
    low, high = smallest, largest
    # Times fall with the size up to some size and rise from there.
    while low < high:
        middle = (low + high) // 2
        ticks = ring_ticks(costs, length, middle)
        if ticks <= target or ticks <= ring_ticks(costs, length, middle + 1):
            high = middle
        else:
            low = middle + 1
    return low


@njit(cache=True)
def allot(costs, lengths, smallest, base, largest, ranks_milli, stages):  # type: ignore[no-untyped-def]
    """The least time in which all sequences fit by area, each on the fewest ranks that take no longer; to a thousandth.

    Rank-time never falls as rings grow, so on equal ranks no plan is faster.

    Args:
        lengths: The longest first.
        smallest, largest: Ranks that each sequence may have.
        base: Ticks on the smallest rings.
        ranks_milli: Thousand times how many ranks of the fastest kind all ranks are worth.
        stages: Of a pipeline, through all of which a sequence has to go.
    """
    area, slowest = 0, 0
    for at in range(len(lengths)):
        area += base[at] * smallest[at]
        slowest = max(slowest, base[at])
    low = stages * ring_ticks(costs, lengths[0], least_size(costs, lengths[0], smallest[0], largest[0], 0))
    low = max(low, at_speed(area, ranks_milli))
    high = max(low, stages * slowest)
    while high - low > low >> 10:
        target = (low + high) // 2
        room = target // MILLI * ranks_milli + target % MILLI * ranks_milli // MILLI
        used = 0
        for at in range(len(lengths)):
            size, ticks = smallest[at], base[at]
            if ticks > target // stages:
                size = least_size(costs, lengths[at], size, largest[at], target // stages)
                ticks = ring_ticks(costs, lengths[at], size)
            used += ticks * size
            if used > room:
                break
        if used <= room:
            high = target
        else:
            low = target + 1
    return high


@njit(cache=True)
def sizes_within(costs, lengths, smallest, base, largest, target):  # type: ignore[no-untyped-def]
    """For each sequence the fewest ranks that take no longer than `target`, or those that take it least."""
    sizes = smallest.copy()
    for at in range(len(lengths)):
        if base[at] > target:
            sizes[at] = least_size(costs, lengths[at], smallest[at], largest[at], target)
    return sizes


@njit(cache=True)
def shelf_sizes(costs, lengths, smallest, shelf_of, num_shelves, largest, width):  # type: ignore[no-untyped-def]
    """Sizes with which the rings of each shelf, side by side, fill the width and end together as nearly as they can.

    Returns no size, 0, for rings of a shelf whose smallest rings are wider than the ranks.
    """
    sizes = smallest.copy()
    for shelf in range(num_shelves):
        low, high, used = 1, 1, 0
        for at in range(len(lengths)):
            if shelf_of[at] == shelf:
                used += smallest[at]
                high = max(high, ring_ticks(costs, lengths[at], smallest[at]))
        if used > width:
            for at in range(len(lengths)):
                if shelf_of[at] == shelf:
                    sizes[at] = 0
            continue
        while low < high:
            target = (low + high) // 2
            used = 0
            slowest = 0
            for at in range(len(lengths)):
                if shelf_of[at] == shelf:
                    size = least_size(costs, lengths[at], smallest[at], largest[at], target)
                    used += size
                    slowest = max(slowest, ring_ticks(costs, lengths[at], size))
            if used <= width and slowest <= target:
                high = target
            else:
                low = target + 1
        # A little more time than the least saves many ranks where passing, not attention, takes the time.
        target = high + (high >> 7)
        for at in range(len(lengths)):
            if shelf_of[at] == shelf:
                sizes[at] = least_size(costs, lengths[at], smallest[at], largest[at], target)
    return sizes


@njit(cache=True)
def window_max(values, size, out):  # type: ignore[no-untyped-def]
    """The largest of each run of `size` values, by blocks of that many."""
    n = len(values)
    forward, backward = np.empty(n, np.int64), np.empty(n, np.int64)
    for at in range(n):
        forward[at] = values[at] if at % size == 0 else max(forward[at - 1], values[at])
    for at in range(n - 1, -1, -1):
        backward[at] = values[at] if at == n - 1 or (at + 1) % size == 0 else max(backward[at + 1], values[at])
    for at in range(n - size + 1):
        out[at] = max(backward[at], forward[at + size - 1])


@njit(cache=True)
def _first_to_end(highest, slowest, tightest, count, ticks, need):  # type: ignore[no-untyped-def]
    """The first of some runs on which a ring ends first, and when; -1 where no run holds it.

    slowest, tightest: speed and capacity, negative. Ranks lie sorted by both, so most runs have those of their
    neighbours.
    """
    best, best_end, at = -1, 0, 0
    while at < count:
        speed, capacity = slowest[at], tightest[at]
        stop = at
        while stop < count and slowest[stop] == speed and tightest[stop] == capacity:
            stop += 1
        if -capacity >= need:
            least = highest[at]
            for other in range(at + 1, stop):
                least = min(least, highest[other])
            ends = least + at_speed(ticks, -speed)
            if best < 0 or ends < best_end:
                best_end = ends
                best = at
                while highest[best] != least:
                    best += 1
        at = stop
    return best, best_end


@njit(cache=True)
def place_rings(sizes, ticks, needs, minus_capacity, minus_speed, load, gap, stages):  # type: ignore[no-untyped-def]
    """Put each ring on the run of neighbours on which it ends first, one ring after another.

    Args:
        sizes, ticks, needs: By ring and choice: ranks (0: no such choice), time, and tokens that each rank must hold.
        minus_capacity, minus_speed: By position, negative.
        load: By position, zero; when its last ring ends, when this returns.
        gap: Room for one number a member; the idle time before its ring of each, ring behind ring, when this returns.
        stages: Of a pipeline. The first ring of a rank, its longest, has the pipeline to itself while it goes through
            the other stages.

    Returns:
        The first position of each ring (-1: it fits nowhere), its size and its start.
    """
    num_rings, num_choices = sizes.shape
    n = len(load)
    first, chosen = np.full(num_rings, -1), np.zeros(num_rings, np.int64)
    start = np.zeros(num_rings, np.int64)
    highest, slowest, tightest = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    filled, window, is_known = 0, 0, False
    for ring in range(num_rings):
        best_end = -1
        for choice in range(num_choices):
            size = sizes[ring, choice]
            if size < 1 or size > n:
                continue
            if size != window:
                window_max(minus_speed, size, slowest)
                window_max(minus_capacity, size, tightest)
                window, is_known = size, False
            if not is_known:
                window_max(load, size, highest)
                is_known = True
            at, ends = _first_to_end(highest, slowest, tightest, n - size + 1, ticks[ring, choice], needs[ring, choice])
            if at >= 0 and (best_end < 0 or ends < best_end):
                best_end, first[ring], chosen[ring], start[ring] = ends, at, size, highest[at]
        if best_end < 0:
            continue
        at, size = first[ring], chosen[ring]
        for position in range(at, at + size):
            gap[filled] = start[ring] - load[position]
            is_first = stages > 1 and load[position] == 0
            load[position] = best_end + (stages - 1) * (best_end - start[ring]) if is_first else best_end
            filled += 1
        is_known = size == window and stages == 1
        if is_known:
            for other in range(max(0, at - size + 1), min(n - size, at + size - 1) + 1):
                highest[other] = max(highest[other], best_end)
    return first, chosen, start


@njit(cache=True)
def _sift(keys, ids, first, count):  # type: ignore[no-untyped-def]
    """Bring the changed top of a heap, the least key and then the least id first, to its place."""
    key, number = keys[first], ids[first]
    at = 0
    while 2 * at + 1 < count:
        child = first + 2 * at + 1
        if 2 * at + 2 < count:
            right = child + 1
            if keys[right] < keys[child] or (keys[right] == keys[child] and ids[right] < ids[child]):
                child = right
        if keys[child] > key or (keys[child] == key and ids[child] > number):
            break
        keys[first + at], ids[first + at] = keys[child], ids[child]
        at = child - first
    keys[first + at], ids[first + at] = key, number


@njit(cache=True)
def assign_alone(tokens, ticks, capacity, speed, idle, kinds):  # type: ignore[no-untyped-def]
    """Give each sequence that stays on one rank a bin: idle time before a ring, or the end of a rank's list.

    Idle time is taken while the largest has room; else the rank is taken on which the sequence ends first.

    Args:
        tokens, ticks: The longest first.
        capacity, speed: By position.
        idle: The numbers of idle times, the largest first; their sizes, negative; the position of all by number, those
            without any time too. The first two change.
        kinds: Where each kind of equal capacity and speed begins; positions kind behind kind, by load; their loads. The
            last two change.

    Returns:
        The bin of each sequence: the number of an idle time, or the number of all these plus a position. -1: it fits on
        no rank.
    """
    gaps, gap_keys, gap_position = idle
    first_of_kind, ids, keys = kinds
    bins = np.full(len(tokens), -1)
    num_kinds = len(first_of_kind) - 1
    for item in range(len(tokens)):
        if len(gaps):
            position = gap_position[gaps[0]]
            taken = at_speed(ticks[item], speed[position])
            if taken <= -gap_keys[0] and tokens[item] <= capacity[position]:
                bins[item] = gaps[0]
                gap_keys[0] += taken
                _sift(gap_keys, gaps, 0, len(gaps))
                continue
        best, best_end = -1, 0
        for kind in range(num_kinds):
            position = ids[first_of_kind[kind]]
            if tokens[item] > capacity[position]:
                continue
            ends = keys[first_of_kind[kind]] + at_speed(ticks[item], speed[position])
            if best < 0 or ends < best_end:
                best, best_end = kind, ends
        if best < 0:
            continue
        top = first_of_kind[best]
        bins[item] = len(gap_position) + ids[top]
        keys[top] = best_end
        _sift(keys, ids, top, first_of_kind[best + 1] - top)
    return bins


@njit(cache=True)
def play_packs(first_rank, ranks, ticks, speed):  # type: ignore[no-untyped-def]
    """When each rank is done where every pack waits for all its ranks, and how long each is busy.

    A rank's list has its packs in their order, so one pass is enough.
    """
    ends, busy = np.zeros(len(speed), np.int64), np.zeros(len(speed), np.int64)
    for pack in range(len(first_rank) - 1):
        start, slowest = 0, speed[ranks[first_rank[pack]]]
        for member in range(first_rank[pack], first_rank[pack + 1]):
            start, slowest = max(start, ends[ranks[member]]), min(slowest, speed[ranks[member]])
        taken = at_speed(ticks[pack], slowest)
        for member in range(first_rank[pack], first_rank[pack + 1]):
            ends[ranks[member]] = start + taken
            busy[ranks[member]] += taken
    return ends, busy
