"""From a run's configuration to what plans its batches, with checks of what can be wrong before lengths are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_train.config import Config, HdpConfig
from hpc_train.errors import ConfigError, LaunchError
from hpc_train.plan.batch_cost import (
    MILLI,
    BatchCosts,
    held_without_offload,
    longest_held,
    offload_hidden_milli,
    offload_needed_milli,
)
from hpc_train.plan.batch_problem import BLOCK_TOKENS, HdpRanks, finest_costs
from hpc_train.plan.batch_profile import Profile, most_layers, profile_of
from hpc_train.plan.batch_setup import BatchSetup
from hpc_train.plan.changes import Change, SizesError, one_of
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.parameters import check_rows, row_unit

if TYPE_CHECKING:
    from hpc_train.plan.run import Plan

Places = tuple[Any, Any, Any]
"""Order, host and port of the hdp ranks, as `batch_places.hdp_places` finds them."""


def set_up_batches(
    config: Config, mesh: Mesh, profile: Profile, nodes: Sequence[str] = (), places: Places | None = None
) -> BatchSetup:
    """What plans the batches of a run with parallel.hdp.

    Args:
        nodes: Of each hdp rank's first stage, for nodes of other speed; without them all are alike.
        places: Where the hdp ranks are in the network; None where that is not known.

    Raises:
        ConfigError: the run has no parallel.hdp, settings or sizes that do not go together, a longest sequence that all
            ranks together cannot hold, or a profile of another model or whose times are too far apart.
    """
    hdp = _settled_hdp(config, mesh)
    speeds = [profile.speeds.get(node, 1.0) for node in nodes] or None
    ranks = HdpRanks.make(np.full(mesh.dp * mesh.cp, hdp.capacity_tokens), speeds, places)
    longest, most_tokens = config.data.seq_len, config.train.global_batch_size * config.data.seq_len
    if not hdp.offload:
        # Before costs, whose sums such a length could spoil.
        _check_held(config, mesh, held_without_offload(hdp.capacity_tokens, len(ranks)), "at offload ratio 0")
    costs = finest_costs(partial(profile.costs, config, mesh), ranks, longest, most_tokens)
    if hdp.offload:
        held = longest_held([(hdp.capacity_tokens, len(ranks))], costs, longest)
        _check_held(config, mesh, held, _ratio_text(costs, held + 1, len(ranks), hdp.capacity_tokens))
    return BatchSetup(
        hdp.planner, longest, ranks, costs, most_layers(config, mesh), mesh.pp, config.parallel.virtual_stages
    )


def check_hdp(config: Config, mesh: Mesh) -> None:
    """Refuse what no batch of a run with parallel.hdp could be planned with, by its profile or a derived one.

    Raises:
        ConfigError: as `set_up_batches`; the profile cannot be read.
    """
    set_up_batches(config, mesh, profile_of(config, mesh))


def need_hdp(config: Config) -> HdpConfig:
    """The section parallel.hdp.

    Raises:
        ConfigError: there is none.
    """
    if config.parallel.hdp is None:
        raise ConfigError(
            "batches are planned for hybrid data parallelism, and the configuration has no parallel.hdp. Give "
            "parallel.hdp.capacity_tokens=TOKENS, what a rank's micro-batch may have; see docs/concepts/long-context.md"
        )
    return config.parallel.hdp


def _settled_hdp(config: Config, mesh: Mesh) -> HdpConfig:
    """The section parallel.hdp, if its settings go with the rest."""
    hdp = need_hdp(config)
    without = Change({"parallel.hdp.offload": False})
    if hdp.offload and config.parallel.virtual_stages > 1:
        raise SizesError(
            f"parallel.hdp.offload does not go with parallel.virtual_stages={config.parallel.virtual_stages}: the last "
            "two layers of each model chunk would stay on the device, which planning does not know.",
            [Change({"parallel.virtual_stages": 1}), without],
        )
    if hdp.offload and config.train.recompute != "none":
        raise SizesError(
            f"parallel.hdp.offload moves activations that train.recompute={config.train.recompute} does not keep.",
            [Change({"train.recompute": "none"}), without],
        )
    if hdp.offload and hdp.planner == "static":
        raise SizesError(
            "parallel.hdp.offload has no effect with parallel.hdp.planner=static, whose rings hold a whole sequence "
            "without.",
            [without, *one_of("parallel.hdp.planner", ["balanced"])],
        )
    if hdp.capacity_tokens < BLOCK_TOKENS:
        raise SizesError(
            f"parallel.hdp.capacity_tokens={hdp.capacity_tokens} is less than one block of attention ({BLOCK_TOKENS} "
            "tokens); a rank that holds less needs a larger tp or pp, or recomputation.",
            one_of("parallel.hdp.capacity_tokens", [BLOCK_TOKENS]),
        )
    check_rows(config, mesh.tp)
    return hdp


def _check_held(config: Config, mesh: Mesh, held: int, ratio: str) -> None:
    """Refuse a longest sequence above what all ranks together hold. ratio: of offloading, in words."""
    hdp, longest, count = need_hdp(config), config.data.seq_len, mesh.dp * mesh.cp
    if longest <= held:
        return
    # Without offloading; with it, that is more than is needed.
    ranks = -(-longest // (2 * (hdp.capacity_tokens // 2))) * mesh.pp * mesh.tp
    changes = [Change(num_ranks=ranks), *one_of("parallel.hdp.capacity_tokens", _capacities(config, mesh))]
    changes += one_of("data.seq_len", [held])
    if not hdp.offload:
        changes.insert(2, Change({"parallel.hdp.offload": True}))
    raise SizesError(
        f"data.seq_len={longest} is longer than what {count} hdp ranks of "
        f"parallel.hdp.capacity_tokens={hdp.capacity_tokens} hold together {ratio}, {held} tokens.",
        changes,
    )


def _capacities(config: Config, mesh: Mesh) -> list[int]:
    """The least with which all ranks hold the longest sequence without offloading."""
    unit, count = row_unit(config, mesh.tp), mesh.dp * mesh.cp
    least = 2 * -(-config.data.seq_len // (2 * count)) if count > 1 else config.data.seq_len
    unit *= 1 + unit % 2 if count > 1 else 1
    return [-(-least // unit) * unit]


def _ratio_text(costs: BatchCosts, length: int, count: int, capacity: int) -> str:
    """Why the first length too long is too long."""
    at = np.array([length]), np.array([count])
    needed = int(offload_needed_milli(*at, capacity, costs)[0]) / MILLI
    hidden = int(offload_hidden_milli(*at, costs)[0]) / MILLI
    need = f"the offload ratio {needed:.3f}" if needed <= 1 else "more to leave than the layers that may"
    return f"with offloading ({length} tokens need {need}, and copies of {hidden:.3f} hide)"


def batches_of_plan(config: Config, plan: Plan) -> BatchSetup | None:
    """What plans the batches of a run that was planned; None without parallel.hdp. The same on every rank.

    Raises:
        ConfigError: as `set_up_batches`; the profile cannot be read.
        LaunchError: the plan does not say where its hdp ranks are.
    """
    if config.parallel.hdp is None:
        return None
    figures = plan.further.get("hdp")
    if figures is None:
        raise LaunchError(
            "plan.json says nothing of hdp ranks, and the configuration has parallel.hdp: it was made for another one. "
            "Let `hpc-train run` make a new one"
        )
    return set_up_batches_of(config, plan.mesh, figures)


def set_up_batches_of(config: Config, mesh: Mesh, figures: Mapping[str, Any]) -> BatchSetup:
    """The same from what a plan says of its hdp ranks (`batch_places.hdp_figures`)."""
    profile = profile_of(config, mesh, figures["link_bytes_per_s"])
    places = (figures["order"], figures["host"], figures["port"])
    return set_up_batches(config, mesh, profile, figures["nodes"], places)
