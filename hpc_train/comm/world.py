"""What a rank knows of itself and of the others once the job has started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_train.comm.control import Control
from hpc_train.plan.run import Plan

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI


@dataclass(frozen=True)
class World:
    """This process as one rank of a started job.

    rank .. num_nodes: our numbering (the plan's), not the launcher's. device: where this rank's tensors live.
    control: JSON messages between all ranks. mpi: an MPI communicator in our rank order, or None where the
    ranks were not started over MPI. source: "mpi", "env" or "single". plan: who is which rank, where
    bootstrap was given one or made it of a layout.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    node: str
    device: torch.device
    backend: str
    control: Control
    mpi: MPI.Comm | None
    source: str
    plan: Plan | None = None

    def agree(self, error: BaseException | None) -> None:
        """Collective over all ranks: raise on every rank if `error` is set on any (see Control.agree)."""
        self.control.agree(error, self.node)

    def close(self) -> None:
        """Collective: leave the process group in good order. MPI is finalised at interpreter exit."""
        import torch.distributed as dist

        if dist.is_initialized():
            self.control.barrier()
            dist.destroy_process_group()
