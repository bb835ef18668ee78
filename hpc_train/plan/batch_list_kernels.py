"""Compiled loops that make ranks' lists of micro-batches, in order, of a plan's bins and rings; see `batch_kernels`."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def pack_bins(first_of_bin, tokens, capacity):  # type: ignore[no-untyped-def]
    """Cut the sequences of each bin into micro-batches, each into the first that has room.

    Args:
        first_of_bin: Where each bin begins in `tokens`, the longest of a bin first.
        capacity: Of each bin.

    Returns:
        The micro-batch within its bin of each sequence, and how many each bin has.
    """
    number, count = np.zeros(len(tokens), np.int64), np.zeros(len(capacity), np.int64)
    rooms = np.empty(len(tokens), np.int64)
    for place in range(len(capacity)):
        used = 0
        for item in range(first_of_bin[place], first_of_bin[place + 1]):
            at = 0
            while at < used and rooms[at] < tokens[item]:
                at += 1
            if at == used:
                rooms[at] = capacity[place]
                used += 1
            rooms[at] -= tokens[item]
            number[item] = at
        count[place] = used
    return number, count


@njit(cache=True)
def number_micro_batches(first_member, member_position, first, left, is_aligned):  # type: ignore[no-untyped-def]
    """Places in the ranks' lists and in the order of all packs: before each ring what goes into the idle time there.

    Args:
        first_member, member_position: Ranks of each ring, by position, ring behind ring in the order of rings.
        first: Where the micro-batches of each bin begin: idle times, in the order of members, then ends by position.
        left: Of each end, how many micro-batches it has. It changes.
        is_aligned: Rings have the same place in the lists of all their members, so micro-batches of the ends, and empty
            ones where there are none, go before them.

    Returns:
        The place of each member's ring; that of each other micro-batch, bin behind bin; the pack of each ring and each
        other micro-batch; the length of each list.
    """
    num_members, num_positions = len(member_position), len(left)
    length = np.zeros(num_positions, np.int64)
    of_ring, of_alone = np.zeros(num_members, np.int64), np.zeros(first[-1], np.int64)
    ring_pack, alone_pack = np.zeros(len(first_member) - 1, np.int64), np.zeros(first[-1], np.int64)
    pack = 0
    for ring in range(len(first_member) - 1):
        latest = 0
        for member in range(first_member[ring], first_member[ring + 1]):
            position = member_position[member]
            for one in range(first[member], first[member + 1]):
                of_alone[one], alone_pack[one] = length[position], pack
                length[position] += 1
                pack += 1
            latest = max(latest, length[position])
        for member in range(first_member[ring], first_member[ring + 1]):
            position = member_position[member]
            while is_aligned and length[position] < latest:
                if left[position]:
                    left[position] -= 1
                    one = first[num_members + position] + left[position]
                    of_alone[one], alone_pack[one] = length[position], pack
                    pack += 1
                length[position] += 1
            of_ring[member] = length[position]
            length[position] += 1
        ring_pack[ring] = pack
        pack += 1
    for position in range(num_positions):
        for one in range(first[num_members + position], first[num_members + position] + left[position]):
            of_alone[one], alone_pack[one] = length[position], pack
            length[position] += 1
            pack += 1
    return of_ring, of_alone, ring_pack, alone_pack, length


@njit(cache=True)
def _meeting(ports, start, stop, other_start, other_stop, avoided, other_avoided):  # type: ignore[no-untyped-def]
    """A member of each of two hosts that share a port, other than those avoided; -1, -1 where there is no such pair."""
    for member in range(start, stop):
        for other in range(other_start, other_stop):
            if ports[member] == ports[other] and member != avoided and other != other_avoided:
                return member, other
    return -1, -1


@njit(cache=True)
def _host_end(hosts, start):  # type: ignore[no-untyped-def]
    stop = start
    while stop < len(hosts) and hosts[stop] == hosts[start]:
        stop += 1
    return stop


@njit(cache=True)
def lay_ring(hosts, ports, out):  # type: ignore[no-untyped-def]
    """Order the members of a ring, given host by host, so that it goes from host to host by ports that both have.

    On each host it comes in by one member, goes through the others and leaves by another one; the last host's other
    end is the first host again.
    """
    n, first_stop = len(hosts), _host_end(hosts, 0)
    at, start, entry, first_leave = 0, 0, -1, -1
    while start < n:
        stop = _host_end(hosts, start)
        is_last = stop == n
        low, high = (0, first_stop) if is_last else (stop, _host_end(hosts, stop))
        avoided = entry if stop - start > 1 else -1
        leave, next_entry = -1, -1
        if first_stop < n:
            leave, next_entry = _meeting(ports, start, stop, low, high, avoided, first_leave if is_last else -1)
        if entry >= 0:
            out[at] = entry
            at += 1
        for member in range(start, stop):
            if member != entry and member != leave:
                out[at] = member
                at += 1
        if leave >= 0 and leave != entry:
            out[at] = leave
            at += 1
        if start == 0:
            first_leave = leave if first_stop > 1 else -1
        entry, start = next_entry, stop
    # Now the first host may begin with the member that the last one leads to.
    for place in range(1, first_stop):
        if out[place] == entry:
            for later in range(place, 0, -1):
                out[later] = out[later - 1]
            out[0] = entry


@njit(cache=True)
def lay_rings(first_member, hosts, ports, out):  # type: ignore[no-untyped-def]
    """The order of all members, ring behind ring, in `out`."""
    for ring in range(len(first_member) - 1):
        start, stop = first_member[ring], first_member[ring + 1]
        lay_ring(hosts[start:stop], ports[start:stop], out[start:stop])
        for member in range(start, stop):
            out[member] += start
