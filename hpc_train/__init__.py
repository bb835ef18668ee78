"""hpc_train: training of large language models on Slurm clusters.

`hpc_train.bootstrap(source=...)` turns this process into one rank of a `World`; everything else is reached
through the `hpc-train` command or the packages named in the documentation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_train.comm.bootstrap import bootstrap as bootstrap
    from hpc_train.comm.world import World as World

__version__ = "0.1.0"
__all__ = ["World", "__version__", "bootstrap"]


def __getattr__(name: str) -> Any:
    """Heavy parts are imported at first use, so that `import hpc_train` costs milliseconds."""
    if name == "bootstrap":
        from hpc_train.comm.bootstrap import bootstrap

        return bootstrap
    if name == "World":
        from hpc_train.comm.world import World

        return World
    raise AttributeError(f"module 'hpc_train' has no attribute {name!r}")
