"""hpc_train: training of large language models on Slurm clusters.

For a script of your own: `bootstrap(layout=Layout(tp=..., pp=...))` turns this process into one rank of a `World`,
placed on the fabric, and `build_groups(world)` gives its process groups. Everything else is reached through the
`hpc-train` command or the packages named in the documentation.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_train.comm.bootstrap import bootstrap as bootstrap
    from hpc_train.comm.groups import Groups as Groups
    from hpc_train.comm.groups import build_groups as build_groups
    from hpc_train.comm.layout import Layout as Layout
    from hpc_train.comm.world import World as World
    from hpc_train.plan.groups import GroupPlan as GroupPlan
    from hpc_train.plan.mesh import Mesh as Mesh

__version__ = "0.1.0"
__all__ = ["GroupPlan", "Groups", "Layout", "Mesh", "World", "__version__", "bootstrap", "build_groups"]

_MODULES = {
    "GroupPlan": "hpc_train.plan.groups",
    "Groups": "hpc_train.comm.groups",
    "Layout": "hpc_train.comm.layout",
    "Mesh": "hpc_train.plan.mesh",
    "World": "hpc_train.comm.world",
    "bootstrap": "hpc_train.comm.bootstrap",
    "build_groups": "hpc_train.comm.groups",
}


def __getattr__(name: str) -> Any:
    """Heavy parts are imported at first use, so that `import hpc_train` costs milliseconds."""
    if name not in _MODULES:
        raise AttributeError(f"module 'hpc_train' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
