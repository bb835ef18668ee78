"""Several faults at once, in drawn runs: the refusal names changes that all checks accept, the least and nearest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import yaml

from hpc_train.cluster.allocation import Allocation
from hpc_train.config import Config
from hpc_train.config_read import load_config
from hpc_train.errors import ConfigError
from hpc_train.launch.checks import check_plan, check_sizes
from hpc_train.plan.advice import checked, with_change
from hpc_train.plan.changes import Change, SizesError
from hpc_train.plan.place import check_seats
from hpc_train.plan.run import world_mesh
from tests.plan.drawn_shapes import Shape, advised, allocation_of, drawn_shapes, followed

SINGLE: dict[str, Iterable[Any]] = {
    "parallel.pp": range(1, 17),
    "parallel.dp": [None, *range(1, 17)],
    "parallel.tp": range(1, 17),
    "parallel.sequence_parallel": [False],
    "parallel.tp_tiles": range(1, 17),
    "parallel.layers_per_stage": [None],
    "parallel.virtual_stages": range(1, 13),
    "parallel.schedule": ["1f1b"],
    "parallel.overlap": [True],
    "parallel.early_updates": [None],
    "parallel.gradient_wire": ["fp32"],
    "train.micro_batch_size": range(1, 17),
    "train.recompute": ["none", "selective", "full"],
}
"""What may mend a run by itself and leaves it the same run on as many ranks."""


def is_accepted(config: Config | None, allocation: Allocation) -> bool:
    """By all checks of a plan, without a search for advice; None: the sections refuse it."""
    try:
        if config is None:
            return False
        mesh = world_mesh(config, allocation)
        check_sizes(config, mesh)
        check_seats(mesh, allocation, None, config.fabric.order)
    except ConfigError:
        return False
    return True


def refusals(seed: int) -> Iterator[tuple[Shape, Config, str]]:
    """Drawn runs whose sections agree and that the checks of a plan refuse, with what they say."""
    for shape in drawn_shapes(seed):
        try:
            config = load_config("tiny", shape.words)
        except ConfigError:
            continue
        try:
            check_plan(config, shape.allocation, None)
        except ConfigError as refused:
            yield shape, config, str(refused)


def check_holds(shape: Shape, why: str) -> bool:
    """Whether there is advice; each change of it has to pass as it is typed."""
    changes = advised(why)
    for change in changes:
        after = followed(shape, change)
        assert is_accepted(load_config("tiny", after.words), after.allocation), (shape, change)
    return bool(changes)


def check_nearest(shape: Shape, config: Config, why: str) -> None:
    """The first change has no setting too many, and is a single one where one does."""
    for first in advised(why)[:1]:
        settings = {key: yaml.safe_load(value) for key, value in first.settings.items()}
        if first.num_ranks is not None or len(settings) > 1:
            fewer = [{key: value} for key, values in SINGLE.items() for value in values]
            fewer += [{other: settings[other] for other in settings if other != key} for key in settings]
            for change in map(Change, fewer):
                assert not is_accepted(with_change(config, change), shape.allocation), (shape, why, change)


def test_refusals_of_several_faults_advise_the_fewest_settings_that_all_checks_accept() -> None:
    num_advised = 0
    for shape, config, why in islice(refusals(1), 200):
        num_advised += check_holds(shape, why)
        check_nearest(shape, config, why)
    assert num_advised >= 190


@pytest.mark.long
def test_refusals_of_several_faults_advise_what_holds_in_a_whole_sweep() -> None:
    assert sum(check_holds(shape, why) for shape, _, why in islice(refusals(1), 2450)) >= 2350


def test_a_search_that_finds_nothing_ends_by_its_tries_or_by_the_clock() -> None:
    """Each change is refused with further ones, without end; the clock stands still, or goes a second a look."""
    tried = 0

    def check(config: Config, allocation: Allocation) -> None:
        nonlocal tried
        tried += 1
        raise SizesError("No.", [Change({"train.steps": tried + number}) for number in (1000, 2000, 3000)])

    config, allocation = load_config("tiny"), allocation_of(1, 2)
    with pytest.raises(ConfigError, match=r"No change near by was found that all checks accept: with train\.steps="):
        checked(config, allocation, check, clock=lambda: 0.0)
    assert tried == 601
    tried, seconds = 0, iter(range(1000))
    with pytest.raises(ConfigError, match="No change near by"):
        checked(config, allocation, check, clock=lambda: float(next(seconds)))
    assert tried == 21


def test_five_faults_one_behind_another_are_mended_where_nearer_changes_are_too_many_to_try() -> None:
    """Each is mended by any of eight values, so that 4,680 changes are nearer than those that mend all."""
    keys = ("eval_batches", "log_every", "gc_every", "max_skipped_steps", "seed")

    def check(config: Config, allocation: Allocation) -> None:
        for key in keys:
            if getattr(config.train, key) < 7000:
                raise SizesError(f"{key}.", [Change({f"train.{key}": 7000 + number}) for number in range(8)])

    with pytest.raises(ConfigError) as caught:
        checked(load_config("tiny"), allocation_of(1, 2), check, clock=lambda: 0.0)
    for change in advised(str(caught.value)):
        assert change.settings.keys() == {f"train.{key}" for key in keys}
        assert min(map(int, change.settings.values())) >= 7000
    assert advised(str(caught.value))
