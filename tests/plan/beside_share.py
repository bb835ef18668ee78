"""What tp's transfers can run beside, for a test and the benchmark of tiles."""

from __future__ import annotations

from hpc_train.config import Config
from hpc_train.plan.hidden_tiles import _compute, _crossings
from hpc_train.plan.mesh import Mesh


def beside_share(config: Config, mesh: Mesh) -> float:
    """The part of a micro-batch's compute that tp's transfers can run beside: not attention, nor every weight's."""
    beside = sum(crossing.product + crossing.behind for crossing in _crossings(config, mesh))
    return float(beside / _compute(config, mesh))
