"""Local search on a placement: exchange what hosts hold, or what seats hold, as long as byte-hops fall.

A unit is what moves: all blocks of a host, or one block. A spot is where a unit is; spots of one class hang on the same
switches, so a unit's cost at every class is one row of a table, and an exchange of two units is judged by four entries.
All is in whole numbers, and ties go to the first, so each machine finds the same placement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpc_train.plan.seats import Edges, Seats

CELLS_AT_ONCE = 1 << 22
"""Entries of a table worked out together; it bounds the memory (derived: 32 MiB of 64-bit numbers)."""
MOVERS = 48
"""Units that one of two has to be among in an exchange (assumed: more found nothing better)."""
BARRED = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Frame:
    """What is fixed during a search.

    class_of_spot: by spot. shape_of_class: only units of one shape are exchanged. kind: by class and slot, a number
    of the distance table. unit, slot: by end of an edge, grouped by unit; other_unit, other_slot, weight: its other
    end. first: by unit, where its ends begin.
    """

    class_of_spot: np.ndarray
    shape_of_class: np.ndarray
    kind: np.ndarray
    distance: np.ndarray
    unit: np.ndarray
    slot: np.ndarray
    other_unit: np.ndarray
    other_slot: np.ndarray
    weight: np.ndarray
    first: np.ndarray

    @property
    def num_units(self) -> int:
        return len(self.class_of_spot)

    @property
    def num_classes(self) -> int:
        return len(self.shape_of_class)

    def ends_of(self, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ends of edges at some units, and for each the place of its unit among them."""
        counts = self.first[units + 1] - self.first[units]
        row = np.repeat(np.arange(len(units)), counts)
        before = np.cumsum(counts) - counts
        return np.repeat(self.first[units] - before, counts) + np.arange(len(row)), row

    def rows(self, units: np.ndarray, class_of_unit: np.ndarray) -> np.ndarray:
        """What each unit would cost at each class, the others staying."""
        found = np.zeros((len(units), self.num_classes), np.int64)
        ends, row = self.ends_of(units)
        if not ends.size:
            return found
        share = max(1, CELLS_AT_ONCE // self.num_classes)
        for start in range(0, len(ends), share):
            part = ends[start : start + share]
            other = self.kind[class_of_unit[self.other_unit[part]], self.other_slot[part]]
            costs = self.distance[other[:, None], self.kind.T[self.slot[part]]] * self.weight[part, None]
            here = row[start : start + share]
            begins = np.flatnonzero(np.concatenate([[True], here[1:] != here[:-1]]))
            found[here[begins]] += np.add.reduceat(costs, begins, axis=0)
        return found

    def excess(self, class_of_unit: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """How much the four entries of an exchange overstate its gain, for each end between two exchanged units."""
        here, there = class_of_unit[self.unit[ends]], class_of_unit[self.other_unit[ends]]
        slot, other = self.slot[ends], self.other_slot[ends]
        kind = self.kind
        old = self.distance[kind[here, slot], kind[there, other]]
        new = self.distance[kind[there, slot], kind[here, other]]
        together = self.distance[kind[there, slot], kind[there, other]]
        together = together + self.distance[kind[here, slot], kind[here, other]]
        return self.weight[ends] * (old + new - together)

    def gain(self, table: np.ndarray, class_of_unit: np.ndarray, unit: int, other: int) -> int:
        """What the exchange of two units saves."""
        here, there = class_of_unit[unit], class_of_unit[other]
        ends = np.arange(self.first[unit], self.first[unit + 1])
        ends = ends[self.other_unit[ends] == other]
        four = table[unit, here] - table[unit, there] + table[other, there] - table[other, here]
        return int(four - self.excess(class_of_unit, ends).sum())


def hosts_frame(seats: Seats, edges: Edges, seat_of_block: np.ndarray) -> Frame:
    """Units are all blocks of a host. Between them only what leaves the host counts."""
    num_hosts = seats.num_hosts
    first_seat = np.searchsorted(seats.host, np.arange(num_hosts + 1))
    sizes = np.diff(first_seat)
    slot_of_seat = np.arange(len(seats)) - first_seat[seats.host]
    kinds = np.full((num_hosts, sizes.max()), -1, np.int64)
    kinds[seats.host, slot_of_seat] = seats.kind
    classes, class_of_host = np.unique(kinds, axis=0, return_inverse=True)
    # Hosts may be exchanged that have as many seats.
    num_slots = (classes >= 0).sum(axis=1)
    host, slot = seats.host[seat_of_block], slot_of_seat[seat_of_block]
    return _frame(class_of_host.ravel(), num_slots, np.maximum(classes, 0), seats.distance, edges, host, slot)


def seats_frame(seats: Seats, edges: Edges, num_blocks: int) -> Frame:
    """Units are single blocks, and nothing for a seat that stays empty; each seat is a class of its own."""
    every = np.arange(len(seats))
    distance = seats.between(every[:, None], every[None, :])
    blocks = np.arange(num_blocks)
    return _frame(every, np.zeros(len(seats), np.int64), every[:, None], distance, edges, blocks, np.zeros_like(blocks))


def _frame(
    class_of_spot: np.ndarray,
    shape_of_class: np.ndarray,
    kind: np.ndarray,
    distance: np.ndarray,
    edges: Edges,
    unit_of_block: np.ndarray,
    slot_of_block: np.ndarray,
) -> Frame:
    block, other = np.concatenate([edges.a, edges.b]), np.concatenate([edges.b, edges.a])
    weight = np.concatenate([edges.weight, edges.weight])
    unit, other_unit = unit_of_block[block], unit_of_block[other]
    leaves = unit != other_unit
    order = np.flatnonzero(leaves)[np.lexsort([other_unit[leaves], unit[leaves]])]
    first = np.searchsorted(unit[order], np.arange(len(class_of_spot) + 1))
    return Frame(
        class_of_spot, shape_of_class, kind, distance, unit[order], slot_of_block[block[order]], other_unit[order],
        slot_of_block[other[order]], weight[order], first,
    )  # fmt: skip


def search_thoroughly(frame: Frame, spot_of_unit: np.ndarray, num_rounds: int, patience: int) -> np.ndarray:
    """Tabu search: each round makes the best exchange that is not forbidden, even one that costs; the best is kept.

    It ends after so many rounds, or where the best is older than `patience` rounds. A unit may not soon return to a
    class that it left, unless that gives the best placement so far. One of the two is among the units that would gain
    most by moving alone.

    Returns:
        The spot of each unit.

    Source: Taillard, "Robust taboo search for the quadratic assignment problem", Parallel Computing 17 (1991); here
    the time for which a return is forbidden goes through fixed values instead of random ones.
    """
    spot, class_of_unit = spot_of_unit.copy(), frame.class_of_spot[spot_of_unit]
    every = np.arange(frame.num_units)
    table = frame.rows(every, class_of_unit)
    lowest = table.min(axis=1)
    forbidden_until = np.zeros((frame.num_units, frame.num_classes), np.int64)
    shape = frame.shape_of_class[class_of_unit]
    shortest = max(2, frame.num_units // 8)
    now = best = best_round = 0
    best_spot = spot.copy()
    for round_number in range(1, num_rounds + 1):
        own = table[every, class_of_unit]
        movers = np.argsort(lowest - own, kind="stable")[:MOVERS]
        gain = own[movers, None] + own[None, :] - table[movers][:, class_of_unit] - table[:, class_of_unit[movers]].T
        _take_excess(frame, class_of_unit, movers, gain)
        is_barred = forbidden_until[movers][:, class_of_unit] >= round_number
        is_barred &= (forbidden_until[:, class_of_unit[movers]] >= round_number).T
        is_barred &= now - gain >= best
        is_barred |= class_of_unit[movers, None] == class_of_unit[None, :]
        is_barred |= shape[movers, None] != shape[None, :]
        gain[is_barred] = BARRED
        at, other = divmod(int(gain.argmax()), frame.num_units)
        if is_barred[at, other]:
            break
        unit = int(movers[at])
        now -= int(gain[at, other])
        tenure = shortest + round_number * 7 % (shortest + 3)
        forbidden_until[[unit, other], class_of_unit[[unit, other]]] = round_number + tenure
        _exchange(spot, class_of_unit, unit, other)
        stale = np.unique(np.concatenate([_neighbours(frame, unit), _neighbours(frame, other)]))
        table[stale] = frame.rows(stale, class_of_unit)
        lowest[stale] = table[stale].min(axis=1)
        if now < best:
            best, best_round, best_spot = now, round_number, spot.copy()
        elif round_number - best_round >= patience:
            break
    return best_spot


def _take_excess(frame: Frame, class_of_unit: np.ndarray, movers: np.ndarray, gain: np.ndarray) -> None:
    """Correct the gain of exchanging a mover with its own neighbour."""
    ends, row = frame.ends_of(movers)
    flat = row * frame.num_units + frame.other_unit[ends]
    np.subtract.at(gain.reshape(-1), flat, frame.excess(class_of_unit, ends))


def search_quickly(frame: Frame, spot_of_unit: np.ndarray, num_passes: int) -> np.ndarray:
    """For many units: in each pass exchange the best movers of each two classes, as long as that saves.

    Returns:
        The spot of each unit.
    """
    spot, class_of_unit = spot_of_unit.copy(), frame.class_of_spot[spot_of_unit]
    table = frame.rows(np.arange(frame.num_units), class_of_unit)
    for _ in range(num_passes):
        is_touched = np.zeros(frame.num_units, bool)
        changed: list[int] = []
        for unit, other in _promising(frame, table, class_of_unit):
            if is_touched[unit] or is_touched[other]:
                continue
            if frame.gain(table, class_of_unit, unit, other) <= 0:
                continue
            near = np.concatenate([[unit, other], _neighbours(frame, unit), _neighbours(frame, other)])
            is_touched[near] = True
            changed.extend(near.tolist())
            _exchange(spot, class_of_unit, unit, other)
        if not changed:
            break
        stale = np.unique(changed)
        table[stale] = frame.rows(stale, class_of_unit)
    return spot


def _promising(frame: Frame, table: np.ndarray, class_of_unit: np.ndarray) -> list[tuple[int, int]]:
    """Of each two classes the two units whose exchange saves most, if neither is the other's neighbour; best first."""
    gain = table[np.arange(frame.num_units), class_of_unit][:, None] - table
    order = np.argsort(class_of_unit, kind="stable")
    begins = np.flatnonzero(np.diff(class_of_unit[order], prepend=-1))
    classes = class_of_unit[order][begins]
    # By class of the mover and class that it goes to.
    best = np.maximum.reduceat(gain[order], begins, axis=0)
    counts = np.diff(np.append(begins, len(order)))
    is_best = gain[order] == np.repeat(best, counts, axis=0)
    places = np.where(is_best, np.arange(len(order))[:, None], len(order))
    mover = order[np.minimum.reduceat(places, begins, axis=0)]
    both = best[:, classes] + best[:, classes].T
    shape = frame.shape_of_class[classes]
    both[shape[:, None] != shape[None, :]] = 0
    one, other = np.nonzero(np.triu(both, 1) > 0)
    ranked = np.lexsort([other, one, -both[one, other]])
    return [(int(mover[one[at], classes[other[at]]]), int(mover[other[at], classes[one[at]]])) for at in ranked]


def _neighbours(frame: Frame, unit: int) -> np.ndarray:
    return frame.other_unit[frame.first[unit] : frame.first[unit + 1]]


def _exchange(spot: np.ndarray, class_of_unit: np.ndarray, unit: int, other: int) -> None:
    spot[unit], spot[other] = spot[other], spot[unit]
    class_of_unit[unit], class_of_unit[other] = class_of_unit[other], class_of_unit[unit]


def turn_hosts(seats: Seats, edges: Edges, seat_of_block: np.ndarray, num_passes: int) -> np.ndarray:
    """Exchange blocks of one host so that what leaves it stays on one rail; hosts that are not neighbours at once.

    Returns:
        The seat of each block.
    """
    seat_of_block = seat_of_block.copy()
    first_seat = np.searchsorted(seats.host, np.arange(seats.num_hosts + 1))
    width = int(np.diff(first_seat).max())
    if width == 1:
        return seat_of_block
    kinds = np.zeros((seats.num_hosts, width), np.int64)
    slot_of_seat = np.arange(len(seats)) - first_seat[seats.host]
    kinds[seats.host, slot_of_seat] = seats.kind
    for _ in range(num_passes):
        frame = hosts_frame(seats, edges, seat_of_block)
        # What each end would cost on each slot of its host.
        other = kinds[frame.other_unit, frame.other_slot]
        costs = seats.distance[other[:, None], kinds[frame.unit]] * frame.weight[:, None]
        table = np.zeros((seats.num_hosts, width, width), np.int64)
        np.add.at(table, (frame.unit, frame.slot), costs)
        own = np.einsum("hss->hs", table)
        gain = own[:, :, None] + own[:, None, :] - table - table.transpose(0, 2, 1)
        exists = np.arange(width)[None, :] < np.diff(first_seat)[:, None]
        gain *= exists[:, :, None] & exists[:, None, :]
        flat = gain.reshape(seats.num_hosts, -1)
        best = flat.argmax(axis=1)
        saved = flat[np.arange(seats.num_hosts), best]
        block_of_seat = np.full(len(seats), -1)
        block_of_seat[seat_of_block] = np.arange(len(seat_of_block))
        is_touched = np.zeros(seats.num_hosts, bool)
        for host in np.lexsort([np.arange(seats.num_hosts), -saved]).tolist():
            if saved[host] <= 0:
                break
            if is_touched[host]:
                continue
            is_touched[_neighbours(frame, host)] = True
            pair = first_seat[host] + np.array(divmod(int(best[host]), width))
            blocks = block_of_seat[pair]
            for block, seat in zip(blocks, pair[::-1], strict=True):
                if block >= 0:
                    seat_of_block[block] = seat
        if not is_touched.any():
            break
    return seat_of_block
