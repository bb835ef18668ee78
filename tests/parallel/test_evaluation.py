"""Evaluations of a pipeline keep few tensors to send, however many micro-batches there are, and lose no bit."""

from __future__ import annotations

import itertools
import math
import weakref

import pytest

from hpc_train.plan.schedule_orders import FEW_SENDS
from tests.ranks import TestRank, run_ranks
from tests.train.trainers import TREES, make_config, make_trainer, sequences

COUNTS = (1, 2, 3, 7, 29)


def _evaluate(me: TestRank, virtual_stages: int) -> list[tuple[float, int, int]]:
    """Of each number of micro-batches the mean loss, the sends, and how many of their tensors were alive at once."""
    from hpc_train.parallel import pipeline

    alive: set[int] = set()
    numbers = itertools.count()
    num_sent = most = 0
    send_to = pipeline.send_to

    def counted(tensor, *args):
        nonlocal num_sent, most
        number = next(numbers)
        alive.add(number)
        weakref.finalize(tensor.untyped_storage(), alive.discard, number)
        num_sent, most = num_sent + 1, max(most, len(alive))
        return send_to(tensor, *args)

    pipeline.send_to = counted
    tree = {**TREES["llama"], "num_layers": 12}
    parallel = {"pp": me.world_size} if me.world_size > 1 else {}
    trainer = make_trainer(me, make_config(tree, {**parallel, "virtual_stages": virtual_stages}))
    found = []
    for count in COUNTS:
        num_sent = most = 0
        found.append((trainer.evaluate([sequences(9, count)]), num_sent, most))
        assert not alive
    return found


@pytest.mark.parametrize(("stages", "virtual_stages"), [(2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2)])
def test_few_tensors_are_kept_to_be_sent_and_losses_are_those_of_one_rank(stages: int, virtual_stages: int) -> None:
    (expected,) = run_ranks(_evaluate, 1, 1)
    for stage, found in enumerate(run_ranks(_evaluate, stages, virtual_stages)):
        for count, (loss, num_sent, most), (loss_of_one, _, _) in zip(COUNTS, found, expected, strict=True):
            assert math.isfinite(loss)
            assert loss == loss_of_one
            assert num_sent == count * (virtual_stages if stage < stages - 1 else virtual_stages - 1)
            assert most <= max(FEW_SENDS, stages - 1 if stage == stages - 1 else 0)
