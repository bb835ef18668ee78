"""Plays lists of steps of many processes against each other: who waits for whom for ever, and how long it takes.

Processes meet in channels. The k-th post of each member of a channel joins its k-th meeting. A process does its posts
of one queue one after another, as NCCL does those of a communicator, so a meeting begins when all have posted and
each is through with what stands before it in the queue. A direction between two stages is a channel of two, a group's
collectives are a channel of all its members, a copy engine is a channel of one. Posting never waits; a step waits
for contents of meetings of its own process. What is played does not depend on the order in which processes are
looked at, so one play finds every deadlock and exact times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Channel(NamedTuple):
    """Processes, by their index, that meet in a fixed order."""

    name: Hashable
    members: tuple[int, ...]


class Post(NamedTuple):
    """One member's part in a meeting. content: must be the same for all members.

    duration: how long the meeting takes once all are there; the longest that a member gives counts. queue: of the
    process, which does its posts in order; None for a queue of the channel's own.
    """

    channel: Channel
    content: Hashable
    duration: int = 0
    queue: Hashable | None = None


class Step(NamedTuple):
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
    course = find_course(processes)
    busy = [[step.busy for step in steps] for steps in processes]
    ends = course.ends(busy, [[step.post.duration if step.post else 0 for step in steps] for steps in processes])
    spans = tuple(
        tuple((ends[event] - length, ends[event]) for event, length in zip(events, lengths, strict=False))
        for events, lengths in zip(course.steps, busy, strict=True)
    )
    # One that is stuck never gets to see what it posted last.
    is_stuck = {found.process for found in course.stuck}
    last = tuple(
        max((ends[event] for event in (events[-1:] if process in is_stuck else events + met)), default=0)
        for process, (events, met) in enumerate(zip(course.steps, course.meetings, strict=True))
    )
    return Played(spans, last, course.stuck)


@dataclass(frozen=True)
class Course:
    """What waits for what when lists are played, whatever the times: found once, it gives those of many costs.

    Events are steps and meetings, numbered so that each comes behind all that it waits for.

    before: the events that each waits for. steps: by process, the events of the steps that are done. meetings: by
    process, the events of its meetings that are held. posts: meeting, process and step of each post of these.
    """

    before: Sequence[Sequence[int]]
    steps: Sequence[list[int]]
    meetings: Sequence[list[int]]
    posts: Sequence[tuple[int, int, int]]
    stuck: tuple[Stuck, ...]

    def ends(self, busy: Sequence[Sequence[int]], durations: Sequence[Sequence[int]]) -> list[int]:
        """When each event is over. busy, durations: of each process and step, in place of its Step's and Post's."""
        lengths = [0] * len(self.before)
        for events, of_process in zip(self.steps, busy, strict=True):
            for event, length in zip(events, of_process, strict=False):
                lengths[event] = length
        for event, process, step in self.posts:
            lengths[event] = max(lengths[event], durations[process][step])
        ends: list[int] = []
        for before, length in zip(self.before, lengths, strict=True):
            start = 0
            for event in before:
                if ends[event] > start:
                    start = ends[event]
            ends.append(start + length)
        return ends


def find_course(processes: Sequence[Sequence[Step]]) -> Course:
    """The course of a play of these lists."""
    return _Play(processes).run()


class _Meeting:
    """What is known of a meeting: its members' queues, and the steps that posted it, as process, step and event."""

    def __init__(self, channel: Channel, content: Hashable) -> None:
        self.channel, self.content = channel, content
        self.queues: list[_Queue] = []
        self.posts: list[tuple[int, int, int]] = []


class _Queue:
    """Meetings that a process has posted and that are not over, in order, and the event of the last one before them."""

    def __init__(self) -> None:
        self.meetings: deque[_Meeting] = deque()
        self.last: int | None = None

    @property
    def first(self) -> _Meeting | None:
        return self.meetings[0] if self.meetings else None


class _Play:
    def __init__(self, processes: Sequence[Sequence[Step]]) -> None:
        self.processes = processes
        self.before: list[Sequence[int]] = []
        self.steps: list[list[int]] = [[] for _ in processes]
        self.held: list[list[int]] = [[] for _ in processes]
        self.held_posts: list[tuple[int, int, int]] = []
        self.posted: list[list[Hashable]] = [[] for _ in processes]
        self.arrived: list[dict[Hashable, int]] = [{} for _ in processes]
        self.meetings: dict[Channel, list[_Meeting]] = {}
        # Of each process, by channel: how many meetings it has posted, and its queue.
        self.places: list[dict[Channel, int]] = [{} for _ in processes]
        self.queues: list[dict[Hashable, _Queue]] = [{} for _ in processes]
        self.waiting: dict[int, Hashable] = {}
        self.ready = list(range(len(processes)))

    def run(self) -> Course:
        while self.ready:
            self._advance(self.ready.pop())
        stuck = [Stuck(process, len(self.steps[process]), content) for process, content in self.waiting.items()]
        in_order = tuple(sorted(stuck, key=lambda found: found.process))
        return Course(self.before, self.steps, self.held, self.held_posts, in_order)

    def _advance(self, process: int) -> None:
        """Do the steps of a process until one of them has to wait, or to its end."""
        todo, steps, arrived = self.processes[process], self.steps[process], self.arrived[process]
        while len(steps) < len(todo):
            step = todo[len(steps)]
            if self._waits_for(process, step.waits):
                return
            event = len(self.before)
            self.before.append((*steps[-1:], *[arrived[content] for content in step.waits]))
            steps.append(event)
            if step.post:
                self.posted[process].append(step.post.content)
                self._join(process, step.post)
        self._waits_for(process, self.posted[process])

    def _waits_for(self, process: int, contents: Sequence[Hashable]) -> bool:
        arrived = self.arrived[process]
        for content in contents:
            if content not in arrived:
                self.waiting[process] = content
                return True
        return False

    def _join(self, process: int, post: Post) -> None:
        channel, places = post.channel, self.places[process]
        place = places.get(channel, 0)
        places[channel] = place + 1
        meetings = self.meetings.setdefault(channel, [])
        if place == len(meetings):
            meetings.append(_Meeting(channel, post.content))
        meeting = meetings[place]
        of_process, key = self.queues[process], channel if post.queue is None else post.queue
        queue = of_process.get(key)
        if queue is None:
            queue = of_process[key] = _Queue()
        queue.meetings.append(meeting)
        meeting.queues.append(queue)
        meeting.posts.append((process, len(self.steps[process]) - 1, self.steps[process][-1]))
        self._hold([meeting])

    def _hold(self, possible: list[_Meeting]) -> None:
        """Hold those meetings whose members are all there and have nothing before them, and what that sets free."""
        while possible:
            meeting = possible.pop()
            queues, content = meeting.queues, meeting.content
            if len(queues) < len(meeting.channel.members) or any(queue.first is not meeting for queue in queues):
                continue
            event = len(self.before)
            last = [queue.last for queue in queues if queue.last is not None]
            self.before.append((*last, *[posted for _, _, posted in meeting.posts]))
            for queue in queues:
                queue.meetings.popleft()
                queue.last = event
                if queue.first:
                    possible.append(queue.first)
            for process, step, _ in meeting.posts:
                self.held_posts.append((event, process, step))
                self.held[process].append(event)
                self.arrived[process][content] = event
                if process in self.waiting and self.waiting[process] == content:
                    del self.waiting[process]
                    self.ready.append(process)
