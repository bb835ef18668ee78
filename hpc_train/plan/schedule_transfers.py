"""The sends and receives that the stages' work needs, one stage at a time.

A stage's list follows from its own work and that of the stages which it exchanges messages with. So a rank, which
executes one list, need not plan the others of a long pipeline.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hpc_train.plan.schedule import Action, Op, Payload, places_of

_Part = tuple[Op, int]
"""F or B of a model_chunk."""
_PAYLOADS = {Op.F: Payload.ACTIVATION, Op.B: Payload.GRADIENT}
_NOWHERE = -1


def with_transfers(
    stage: int,
    compute: Sequence[Sequence[Action]],
    chunks: Sequence[Sequence[int]],
    num_micro_batches: int,
    *,
    ahead: int = 1,
) -> tuple[Action, ...]:
    """A stage's F, B and W with its sends and receives. compute: the F, B and W of each stage.

    Each send stands right behind the action that makes its payload. Each receive stands one F, B or W ahead of the
    action that needs it, or as many as `ahead` says, so that it runs beside that one; or still earlier, where another
    receive of the same channel stands that the sender sends later.

    Raises:
        ValueError: the stage never does what another one's work is for.
    """
    own = _Stage(stage, compute[stage], chunks, num_micro_batches, ahead)
    channels = [own.channel_from(peer, compute[peer]) for peer in own.senders]
    done = [0] * len(channels)
    actions: list[Action] = []
    for index, action in enumerate(own.work):
        for number, (posts, receives) in enumerate(channels):
            while done[number] < len(posts) and posts[done[number]] == index:
                actions.append(receives[done[number]])
                done[number] += 1
        actions.append(action)
        receiver = own.receivers.get((action.op, action.model_chunk))
        if receiver is not None:
            payload = _PAYLOADS[action.op]
            actions.append(Action(Op.SEND, action.micro_batch, action.model_chunk, receiver, payload))
    return tuple(actions)


def with_few_sends(actions: Iterable[Action], most: Mapping[int, int]) -> tuple[Action, ...]:
    """A stage's list in which each send but the first ones waits for the oldest that is under way to the same stage.

    That bounds what is kept to be sent where no receive says that sends are over. most: by the stage that they go to,
    how many may be under way.
    """
    sending: Counter[int] = Counter()
    bounded: list[Action] = []
    for action in actions:
        num_over = 0
        if action.op is Op.SEND:
            assert action.peer is not None, "a send has one"
            num_over = int(sending[action.peer] == most[action.peer])
            sending[action.peer] += 1 - num_over
        bounded.append(action if action.sends_over == num_over else replace(action, sends_over=num_over))
    return tuple(bounded)


class _Stage:
    """One stage's work, and where in it stands what other stages make or need."""

    def __init__(
        self,
        stage: int,
        work: Sequence[Action],
        chunks: Sequence[Sequence[int]],
        num_micro_batches: int,
        ahead: int,
    ) -> None:
        self.stage, self.work, self.ahead = stage, work, ahead
        self._from, self._to = _neighbours(stage, chunks, -1), _neighbours(stage, chunks, 1)
        self.senders = sorted({peer for peer, _ in self._from.values()})
        self.receivers = {part: peer for part, (peer, _) in self._to.items()}
        # Of each F and B by its micro-batch; of what is sent to each stage, in order.
        self._indices = {part: array("q", [_NOWHERE]) * num_micro_batches for part in {*self._from, *self._to}}
        self._sent: dict[int, array[int]] = {peer: array("q") for peer in self.receivers.values()}
        for index, action in enumerate(work):
            part = (action.op, action.model_chunk)
            if part in self._indices and action.micro_batch is not None:
                self._indices[part][action.micro_batch] = index
            if part in self.receivers:
                self._sent[self.receivers[part]].append(index)

    def channel_from(self, peer: int, its_work: Sequence[Action]) -> tuple[array[int], list[Action]]:
        """What the stage receives from another one, in the order in which that makes it, and where each is posted."""
        needed_for = {there: part for part, (sender, there) in self._from.items() if sender == peer}
        made_by = {there: part for part, (receiver, there) in self._to.items() if receiver == peer}
        sent, used = self._sent.get(peer, array("q")), bytearray(len(self.work))
        posts, receives = array("q"), []
        num_over = 0
        for action in its_work:
            micro_batch, there = action.micro_batch, (action.op, action.model_chunk)
            assert micro_batch is not None, "F, B and W have one"
            if there in made_by:
                used[self._indices[made_by[there]][micro_batch]] = True
            if there in needed_for:
                op, own = part = needed_for[there]
                index = self._indices[part][micro_batch]
                if index == _NOWHERE:
                    wanted = Action(op, micro_batch, own).describe()
                    raise ValueError(f"stage {self.stage} never does {wanted}, which needs what stage {peer} makes")
                told = num_over
                while num_over < len(sent) and used[sent[num_over]]:
                    num_over += 1
                posts.append(max(index - self.ahead, 0))
                receives.append(Action(Op.RECV, micro_batch, own, peer, _PAYLOADS[op], num_over - told))
        for place in range(len(posts) - 1, 0, -1):
            posts[place - 1] = min(posts[place - 1], posts[place])
        return posts, receives


def _neighbours(stage: int, chunks: Sequence[Sequence[int]], step: int) -> dict[_Part, tuple[int, _Part]]:
    """For F and B of the stage's model_chunks, which F or B of another stage is one step on, or one step back."""
    places = places_of(chunks)
    found = {}
    for own, chunk in enumerate(chunks[stage]):
        for op, other in ((Op.F, chunk + step), (Op.B, chunk - step)):
            if 0 <= other < len(places) and places[other][0] != stage:
                peer, there = places[other]
                found[op, own] = (peer, (op, there))
    return found
