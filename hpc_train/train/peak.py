"""The peak that MFU is measured against: a GPU's data sheet, else this machine's matrix product, measured."""

from __future__ import annotations

import time

import torch

from hpc_train.comm.world import World
from hpc_train.plan.cost import known_peak_flops


def world_peak_flops(world: World, dtype: torch.dtype, given_per_rank: float | None) -> tuple[float, str]:
    """FLOP/s of all ranks together, and where the figure is from. Collective over all ranks.

    Where nothing is known all ranks multiply matrices at the same time, so cores that they share count once.
    """
    if given_per_rank is not None:
        return given_per_rank * world.world_size, "given by train.peak_flops_per_rank"
    known = None
    if world.device.type == "cuda" and dtype == torch.bfloat16:
        known = known_peak_flops(torch.cuda.get_device_name(world.device))
    world.control.barrier()
    mine = known if known is not None else _measure(world.device, dtype)
    total = sum(world.control.all_gather(mine))
    return total, "data sheet" if known is not None else "measured matrix product"


def _measure(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """Mean FLOP/s of square matrix products over `seconds`, after one to warm up.

    The size is large enough that a GPU's launch or a CPU's thread start does not count (assumed).
    """
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn(size, size, device=device, dtype=dtype)
    _product(a, b)
    start = now = time.perf_counter()
    count = 0
    while now - start < seconds:
        _product(a, b)
        count += 1
        now = time.perf_counter()
    return count * 2.0 * size**3 / (now - start)


def _product(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.mm(a, b)
    if a.device.type == "cuda":
        torch.cuda.synchronize(a.device)
