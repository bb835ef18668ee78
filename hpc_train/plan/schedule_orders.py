"""Plans of a pipeline's step: 1F1B, interleaved 1F1B with virtual stages, zero bubble (ZB-H1), and forwards alone.

Stage s of p holds the global chunks s, p + s, 2p + s and so on, so a micro-batch goes v times round the stages. All
plans have one form: each stage does some forwards ahead, then a forward and a backward in turn, then the backwards left
over, all stages in the same order of micro-batches and chunks; a stage's place says how many go ahead. Zero bubble puts
a weight gradient (W) behind each backward, some micro-batches late, so that it fills what the others leave idle.

With F, B and W of a whole stage for a micro-batch, the stages idle for (p - 1)(F + B + W) / v of a step with whole
backwards, and for (p - 1)(F + B - W) / v with split ones where the three take equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from hpc_train.errors import ConfigError
from hpc_train.plan.changes import Change, SizesError
from hpc_train.plan.schedule import Action, Op, Schedule, StageLists
from hpc_train.plan.schedule_transfers import with_few_sends, with_transfers

Kind = Literal["1f1b", "zero_bubble"]

MOST_ALIKE = 5
"""Groups of micro-batches of one size that show what more of them would.

Derived: from a stage's next forward back to its oldest open weight gradient are at most (v - 1)(p + 1) + 2(p - 1) of
its actions of a kind, and a group has v p or more; so what is in work is of 4 groups at most, and with the fifth every
such set within groups of one size has been there.
"""

FEW_SENDS = 2
"""Sends that an evaluation has under way to the next stage.

Derived, for stages that take equally long: when a stage has done a forward, the next stage has begun the one before,
and so has posted the receive of this one. So one under way would hold up nothing; with two, times may vary.
"""


def plan_schedule(kind: Kind, num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """The plan that `parallel.schedule` names.

    Raises:
        ConfigError: fewer micro-batches than stages, with what would work.
    """
    if kind == "zero_bubble":
        return plan_zero_bubble(num_stages, num_micro_batches, virtual_stages=virtual_stages)
    return plan_1f1b(num_stages, num_micro_batches, virtual_stages=virtual_stages)


def check_micro_batches(num_stages: int, num_micro_batches: int, changes: Sequence[Change] = ()) -> None:
    """Refuse a pipeline that some stage of would be idle in every phase. changes: what would give fewer or more.

    Raises:
        ConfigError: fewer micro-batches than stages, with what would work.
    """
    if num_stages < 1 or num_micro_batches < 1:
        raise ConfigError(
            f"a pipeline of {num_stages} stages with {num_micro_batches} micro-batches does nothing; give at least "
            "1 stage and 1 micro-batch"
        )
    if num_micro_batches < num_stages:
        raise SizesError(
            f"parallel.pp={num_stages} gives a pipeline of {num_stages} stages, and it has {num_micro_batches} "
            f"micro-batches a step; its schedule needs at least {num_stages}.",
            changes,
            f"Use parallel.pp={num_micro_batches} or less, or {num_stages} micro-batches or more by a larger "
            "train.global_batch_size, a smaller train.micro_batch_size or a smaller parallel.dp.",
        )


def plan_1f1b(num_stages: int, num_micro_batches: int, *, virtual_stages: int = 1, eager: bool = False) -> Schedule:
    """One forward, one backward: a stage keeps at most as many activations as there are stages from it to the end.

    Stage i does num_stages - 1 - i forwards, then forward and backward in turn, then the backwards left over. With
    equal costs the stages idle for (p - 1) / (v m + p - 1) of the step. A message's way there and an answer's way back
    then lie between a stage's forward and backward, at the price of one way a micro-batch.

    With virtual stages the micro-batches go in groups of as many as there are stages, or more where these do not divide
    them, and a group goes through all chunks before the next one starts. Such plans are always eager: were the forwards
    fewer, stages would wait for a message in each turn, and with all of a direction's messages in one queue, for ever.

    Args:
        num_stages: Stages of the pipeline.
        num_micro_batches: Of this pipeline and step; other pipelines may have other numbers.
        virtual_stages: Chunks of layers a stage.
        eager: Twice as many forwards ahead, which hides those ways for almost twice the activations on the first
            stages.

    Raises:
        ConfigError: fewer micro-batches than stages, which would leave some stage idle in every phase.

    Source: Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP'19, with a flush
    after each step; interleaved: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", SC'21; receives posted an action ahead as in MegaScale (NSDI'24). Eager: Zhuang et al., "On
    optimizing the communication of model parallelism", MLSys'23.
    """
    return _plan(num_stages, num_micro_batches, virtual_stages, eager, split=False)


def plan_zero_bubble(
    num_stages: int, num_micro_batches: int, *, virtual_stages: int = 1, eager: bool = False
) -> Schedule:
    """ZB-H1: 1F1B's forwards and input gradients, with weight gradients in what would be idle time.

    Stage i is i weight gradients behind its input gradients, so it has as many micro-batches in work as 1F1B's first
    stage. Arguments and errors as those of `plan_1f1b`.

    Source: Qi et al., "Zero bubble pipeline parallelism", ICLR'24.
    """
    return _plan(num_stages, num_micro_batches, virtual_stages, eager, split=True)


def plan_forward_only(num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Every micro-batch forward through the stages, for an evaluation; any number of them.

    A stage keeps few tensors to send, however many micro-batches there are. Only what the last stage sends to the first
    one waits there for its turn: of a group with more micro-batches than stages those beyond them.

    Where a round of the chunks has few micro-batches, a receive that was posted an action ahead could be of the next
    round and hold up, in the queue of its direction, a send that this round waits for. There none is.
    """
    sizes = _listed(_group_sizes(num_stages, num_micro_batches))
    forwards = _Orders(num_stages, sizes, virtual_stages).forwards
    chunks = chunks_of_stages(num_stages, virtual_stages)
    ahead = int(virtual_stages == 1 or num_micro_batches >= num_stages - 1)

    def actions_of(stage: int) -> Sequence[Action]:
        actions = with_transfers(stage, [forwards] * num_stages, chunks, num_micro_batches, ahead=ahead)
        return with_few_sends(actions, {0: max(FEW_SENDS, sizes[0] - num_stages), stage + 1: FEW_SENDS})

    return Schedule(num_micro_batches, chunks, StageLists(num_stages, actions_of))


def chunks_of_stages(num_stages: int, virtual_stages: int) -> tuple[tuple[int, ...], ...]:
    """The global chunks of each stage: chunk k is on stage k mod num_stages."""
    return tuple(tuple(range(stage, num_stages * virtual_stages, num_stages)) for stage in range(num_stages))


def bubble_formula(kind: Kind, num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> float:
    """The share of a step in which stages idle, where F, B and W take equally long and messages no time.

    The documented formula (docs/measurements/pipeline.md), to call from Python; plans are played instead.
    """
    idle = num_stages - 1
    work = virtual_stages * num_micro_batches * (3 if kind == "zero_bubble" else 1)
    return idle / (work + idle)


@lru_cache(maxsize=2)
def shortened_work(
    kind: Kind, num_stages: int, num_micro_batches: int, virtual_stages: int = 1, most_alike: int = MOST_ALIKE
) -> Sequence[Sequence[Action]]:
    """F, B and W of each stage without what repeats, so that their number does not grow with the micro-batches.

    With MOST_ALIKE every set of micro-batches that a stage has in work at some moment of the whole plan is there, in
    the order of their first moments.

    most_alike: Groups of micro-batches of one size that are kept.
    """
    check_micro_batches(num_stages, num_micro_batches)
    sizes = _listed(_group_sizes(num_stages, num_micro_batches), most_alike)
    orders = _Orders(num_stages, sizes, virtual_stages, split=kind == "zero_bubble")
    return StageLists(num_stages, orders.of_stage)


def _plan(num_stages: int, num_micro_batches: int, virtual_stages: int, eager: bool, *, split: bool) -> Schedule:
    check_micro_batches(num_stages, num_micro_batches)
    sizes = _listed(_group_sizes(num_stages, num_micro_batches))
    return _planned(_Orders(num_stages, sizes, virtual_stages, eager=eager, split=split))


def _planned(orders: _Orders) -> Schedule:
    num_stages, num_micro_batches = orders.num_stages, sum(orders.sizes)
    if orders.virtual_stages < 1:
        raise ConfigError(
            f"parallel.virtual_stages={orders.virtual_stages} leaves a stage without layers; give 1 or more"
        )
    chunks = chunks_of_stages(num_stages, orders.virtual_stages)

    def actions_of(stage: int) -> Sequence[Action]:
        return with_transfers(stage, StageLists(num_stages, orders.of_stage), chunks, num_micro_batches)

    return Schedule(num_micro_batches, chunks, StageLists(num_stages, actions_of), min_micro_batches=num_stages)


@dataclass(frozen=True)
class _Orders:
    """F, B and W of each stage. sizes: of the groups of micro-batches that go through all chunks together."""

    num_stages: int
    sizes: Sequence[int]
    virtual_stages: int
    eager: bool = False
    split: bool = False

    @cached_property
    def forwards(self) -> list[Action]:
        """In the order that is the same on each stage."""
        return self._in_groups(Op.F, range(self.virtual_stages))

    @cached_property
    def backwards(self) -> list[Action]:
        return self._in_groups(Op.B, range(self.virtual_stages - 1, -1, -1))

    @cached_property
    def weights(self) -> list[Action]:
        return [Action(Op.W, backward.micro_batch, backward.model_chunk) for backward in self.backwards]

    def of_stage(self, stage: int) -> Sequence[Action]:
        # The first micro-batch's last chunk comes behind a whole group's other chunks.
        first_round = (self.virtual_stages - 1) * self.sizes[0]
        for_each_stage_after = 2 if self.eager or self.virtual_stages > 1 else 1
        ahead = first_round + for_each_stage_after * (self.num_stages - 1 - stage)
        work = _in_turn(self.forwards, self.backwards, min(ahead, len(self.forwards)))
        return _with_weights(work, self.weights, stage) if self.split else work

    def _in_groups(self, op: Op, own_chunks: Sequence[int]) -> list[Action]:
        actions, first = [], 0
        for size in self.sizes:
            actions += [Action(op, index, own) for own in own_chunks for index in range(first, first + size)]
            first += size
        return actions


def _group_sizes(num_stages: int, num_micro_batches: int) -> tuple[tuple[int, int], ...]:
    """How many micro-batches go through all chunks together, and how many such groups there are: at least one for each
    stage, larger groups first.

    With a smaller group a stage would wait for its micro-batches to come round; with a larger one behind a smaller the
    backwards would catch up with the forwards.
    """
    num_groups = max(1, num_micro_batches // num_stages)
    size, left_over = divmod(num_micro_batches, num_groups)
    return (size + 1, left_over), (size, num_groups - left_over)


def _listed(group_sizes: Sequence[tuple[int, int]], most_alike: int | None = None) -> list[int]:
    """The size of each group. most_alike: leave out what are more of one size."""
    return [size for size, count in group_sizes for _ in range(count if most_alike is None else min(count, most_alike))]


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], num_ahead: int) -> list[Action]:
    in_turn = [
        action for pair in zip(forwards[num_ahead:], backwards[: -num_ahead or None], strict=True) for action in pair
    ]
    return [*forwards[:num_ahead], *in_turn, *backwards[len(backwards) - num_ahead :]]


def _with_weights(work: Sequence[Action], weights: Sequence[Action], num_behind: int) -> list[Action]:
    """Behind each backward but the first ones the oldest weight gradient that is open, and the others at the end."""
    still_open = iter(weights)
    actions: list[Action] = []
    num_done = 0
    for action in work:
        actions.append(action)
        if action.op is Op.B:
            num_done += 1
            if num_done > num_behind:
                actions.append(next(still_open))
    return [*actions, *still_open]
