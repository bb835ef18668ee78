"""The peak that MFU is measured against: a GPU's data sheet, else its matrix product, measured. A CPU has none."""

from __future__ import annotations

import time

import torch

from hpc_train.comm.world import World
from hpc_train.plan.cost import known_peak_flops


def world_peak_flops(world: World, dtype: torch.dtype, given_per_rank: float | None) -> tuple[float | None, str]:
    """FLOP/s of all ranks together, None where no peak is known, and where the figure is from. Collective.

    GPUs that are not in our table, or compute in fp32, measure a matrix product, all at the same time. Of a CPU no peak
    is made up: its cores are shared, so a product tells what others left of them at its moment, and steps may well be
    faster.
    """
    if given_per_rank is not None:
        return given_per_rank * world.world_size, "given by train.peak_flops_per_rank"
    if world.device.type != "cuda":
        return None, "a CPU has no data sheet's; train.peak_flops_per_rank gives one"
    known = None
    if dtype == torch.bfloat16:
        known = known_peak_flops(torch.cuda.get_device_name(world.device))
    world.control.barrier()
    mine = known if known is not None else _measure(world.device, dtype)
    total = sum(world.control.all_gather(mine))
    return total, "data sheet" if known is not None else "measured matrix product"


def _measure(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """Mean FLOP/s of square matrix products over `seconds`, after one to warm up.

    The size is large enough that a launch does not count (assumed).
    """
    size = 8192
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
    torch.cuda.synchronize(a.device)
