"""From a run's configuration to what plans its batches, with checks of what can be wrong before lengths are known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_train.config import Config, HdpConfig
from hpc_train.errors import ConfigError, LaunchError
from hpc_train.plan.batch_problem import BLOCK_TOKENS, HdpRanks, finest_costs
from hpc_train.plan.batch_profile import Profile, most_layers, profile_of
from hpc_train.plan.batch_setup import BatchSetup
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.parameters import check_rows

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
        ConfigError: the run has no parallel.hdp, sizes that fit no rank, or a profile of another model or whose times
            are too far apart to be planned with.
    """
    hdp = check_hdp(config, mesh)
    speeds = [profile.speeds.get(node, 1.0) for node in nodes] or None
    ranks = HdpRanks.make(np.full(mesh.dp * mesh.cp, hdp.capacity_tokens), speeds, places)
    longest, most_tokens = config.data.seq_len, config.train.global_batch_size * config.data.seq_len
    costs = finest_costs(partial(profile.costs, config, mesh), ranks, longest, most_tokens)
    return BatchSetup(
        hdp.planner, longest, ranks, costs, most_layers(config, mesh), mesh.pp, config.parallel.virtual_stages
    )


def check_hdp(config: Config, mesh: Mesh) -> HdpConfig:
    """The section parallel.hdp, if its sizes fit the rest.

    Raises:
        ConfigError: there is none, settings that do not go with it or with each other, a capacity below one block
            of attention or not to be cut by tp, or a longest sequence that all ranks together cannot hold.
    """
    hdp, longest = config.parallel.hdp, config.data.seq_len
    if hdp is None:
        raise ConfigError(
            "batches are planned for hybrid data parallelism, and the configuration has no parallel.hdp. Give "
            "parallel.hdp.capacity_tokens=TOKENS, what a rank's micro-batch may have; see docs/concepts/long-context.md"
        )
    if hdp.offload and config.parallel.virtual_stages > 1:
        raise ConfigError(
            f"parallel.hdp.offload does not go with parallel.virtual_stages={config.parallel.virtual_stages}: the last "
            "two layers of each model chunk would stay on the device, which planning does not know. Use "
            "parallel.virtual_stages=1, or parallel.hdp.offload=false"
        )
    if hdp.offload and config.train.recompute != "none":
        raise ConfigError(
            f"parallel.hdp.offload moves activations that train.recompute={config.train.recompute} does not keep. Use "
            "train.recompute=none, or parallel.hdp.offload=false"
        )
    if hdp.offload and hdp.planner == "static":
        raise ConfigError(
            "parallel.hdp.offload has no effect with parallel.hdp.planner=static, whose rings hold a whole sequence "
            "without. Leave it out, or use another planner"
        )
    capacity, count = hdp.capacity_tokens, mesh.dp * mesh.cp
    if capacity < BLOCK_TOKENS:
        raise ConfigError(
            f"parallel.hdp.capacity_tokens={capacity} is less than one block of attention ({BLOCK_TOKENS} tokens). Use "
            f"{BLOCK_TOKENS} or more; a rank that holds less needs a larger tp or pp, or recomputation"
        )
    check_rows(config, mesh.tp)
    held = capacity if count == 1 else 2 * (capacity // 2) * count
    if longest > held and not hdp.offload:
        raise ConfigError(
            f"data.seq_len={longest} is longer than what {count} hdp ranks of parallel.hdp.capacity_tokens={capacity} "
            f"hold together at offload ratio 0, {held} tokens. Use {-(-longest // (2 * (capacity // 2)))} ranks, "
            f"capacity_tokens={2 * -(-longest // (2 * count))}, data.seq_len={held}, or "
            f"parallel.hdp.offload=true{' with planner=balanced' if hdp.planner == 'static' else ''}"
        )
    return hdp


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
    profile = profile_of(config, plan.mesh, figures["link_bytes_per_s"])
    return set_up_batches(
        config, plan.mesh, profile, figures["nodes"], (figures["order"], figures["host"], figures["port"])
    )
