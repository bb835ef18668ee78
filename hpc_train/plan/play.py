"""Plays lists of steps of many processes against each other: who waits for whom for ever, and how long it takes.

Processes meet in channels. The k-th post of each member of a channel joins its k-th meeting. A process does its posts
of one queue one after another, as NCCL does those of a communicator, so a meeting begins when all have posted and
each is through with what stands before it in the queue. A direction between two stages is a channel of two, a group's
collectives are a channel of all its members, a copy engine is a channel of one. Posting never waits; a step waits
for contents of meetings of its own process. What is played does not depend on the order in which processes are
looked at, so one play finds every deadlock and exact times.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Channel:
    """Processes, by their index, that meet in a fixed order."""

    name: Hashable
    members: tuple[int, ...]


@dataclass(frozen=True)
class Post:
    """One member's part in a meeting. content: must be the same for all members.

    duration: how long the meeting takes once all are there; the longest that a member gives counts. queue: of the
    process, which does its posts in order; None for a queue of the channel's own.
    """

    channel: Channel
    content: Hashable
    duration: int = 0
    queue: Hashable | None = None


@dataclass(frozen=True)
class Step:
    """Wait for contents posted earlier, be busy for some time, then post."""

    waits: tuple[Hashable, ...] = ()
    busy: int = 0
    post: Post | None = None


@dataclass(frozen=True)
class Stuck:
    """A process that never gets beyond a step. content: what it waits for there; step: len(list) for its end."""

    process: int
    step: int
    content: Hashable


@dataclass(frozen=True)
class Played:
    """spans: start and end of each step that was done, by process. ends: when all a process posted was over."""

    spans: tuple[tuple[tuple[int, int], ...], ...]
    ends: tuple[int, ...]
    stuck: tuple[Stuck, ...]


@dataclass(frozen=True)
class Mismatch:
    """The first meeting of a channel that two members join with different contents; None: one does not join."""

    channel: Channel
    place: int
    first: tuple[int, Hashable | None]
    second: tuple[int, Hashable | None]


def find_mismatch(processes: Sequence[Sequence[Step]]) -> Mismatch | None:
    """The first channel, in the order of posts, whose members do not post the same contents in the same order."""
    contents: dict[Channel, dict[int, list[Hashable]]] = {}
    for process, steps in enumerate(processes):
        for step in steps:
            if step.post:
                contents.setdefault(step.post.channel, {}).setdefault(process, []).append(step.post.content)
    for channel, by_member in contents.items():
        lists = [by_member.get(member, []) for member in channel.members]
        for place in range(max(map(len, lists))):
            posts = [posted[place] if place < len(posted) else None for posted in lists]
            for member, content in zip(channel.members, posts, strict=True):
                if content != posts[0]:
                    return Mismatch(channel, place, (channel.members[0], posts[0]), (member, content))
    return None


def play(processes: Sequence[Sequence[Step]]) -> Played:
    """Do all steps as early as their waits allow. Contents must be unique within a process, and match."""
    return _Play(processes).run()


@dataclass
class _Meeting:
    """What is known of a meeting: each member's queue, and when the last one that has posted did so."""

    channel: Channel
    content: Hashable
    queues: list[_Queue] = field(default_factory=list)
    start: int = 0
    duration: int = 0


@dataclass
class _Queue:
    """Meetings that a process has posted and that are not over, in order, and when the last one before them was."""

    meetings: deque[_Meeting] = field(default_factory=deque)
    last_end: int = 0

    @property
    def first(self) -> _Meeting | None:
        return self.meetings[0] if self.meetings else None


class _Play:
    def __init__(self, processes: Sequence[Sequence[Step]]) -> None:
        self.processes = processes
        self.clocks = [0] * len(processes)
        self.spans: list[list[tuple[int, int]]] = [[] for _ in processes]
        self.posted: list[list[Hashable]] = [[] for _ in processes]
        self.arrived: list[dict[Hashable, int]] = [{} for _ in processes]
        self.num_posts: Counter[tuple[Channel, int]] = Counter()
        self.meetings: dict[Channel, list[_Meeting]] = {}
        self.queues: dict[tuple[int, Hashable], _Queue] = {}
        self.waiting: dict[int, Hashable] = {}
        self.ready = list(range(len(processes)))

    def run(self) -> Played:
        while self.ready:
            self._advance(self.ready.pop())
        stuck = [Stuck(process, len(self.spans[process]), content) for process, content in self.waiting.items()]
        return Played(
            tuple(map(tuple, self.spans)), tuple(self.clocks), tuple(sorted(stuck, key=lambda found: found.process))
        )

    def _advance(self, process: int) -> None:
        """Do the steps of a process until one of them has to wait, or to its end."""
        steps, spans, arrived = self.processes[process], self.spans[process], self.arrived[process]
        while len(spans) < len(steps):
            step = steps[len(spans)]
            if self._waits_for(process, step.waits):
                return
            start = max([self.clocks[process], *(arrived[content] for content in step.waits)])
            self.clocks[process] = start + step.busy
            spans.append((start, start + step.busy))
            if step.post:
                self.posted[process].append(step.post.content)
                self._join(process, step.post)
        if not self._waits_for(process, self.posted[process]):
            self.clocks[process] = max([self.clocks[process], *arrived.values()])

    def _waits_for(self, process: int, contents: Sequence[Hashable]) -> bool:
        for content in contents:
            if content not in self.arrived[process]:
                self.waiting[process] = content
                return True
        return False

    def _join(self, process: int, post: Post) -> None:
        place = self.num_posts[post.channel, process]
        self.num_posts[post.channel, process] += 1
        meetings = self.meetings.setdefault(post.channel, [])
        if place == len(meetings):
            meetings.append(_Meeting(post.channel, post.content))
        meeting = meetings[place]
        queue = self.queues.setdefault((process, post.channel if post.queue is None else post.queue), _Queue())
        queue.meetings.append(meeting)
        meeting.queues.append(queue)
        meeting.start = max(meeting.start, self.clocks[process])
        meeting.duration = max(meeting.duration, post.duration)
        self._hold([meeting])

    def _hold(self, possible: list[_Meeting]) -> None:
        """Hold those meetings whose members are all there and have nothing before them, and what that sets free."""
        while possible:
            meeting = possible.pop()
            queues = meeting.queues
            if len(queues) < len(meeting.channel.members) or any(queue.first is not meeting for queue in queues):
                continue
            end = max([meeting.start, *(queue.last_end for queue in queues)]) + meeting.duration
            for queue in queues:
                queue.meetings.popleft()
                queue.last_end = end
                if queue.first:
                    possible.append(queue.first)
            for member in meeting.channel.members:
                self.arrived[member][meeting.content] = end
                if self.waiting.get(member) == meeting.content:
                    del self.waiting[member]
                    self.ready.append(member)
