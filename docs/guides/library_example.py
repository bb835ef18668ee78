"""A training script of one's own on the ranks, placement and groups of hpc_train, its model split by torch's DTensor.

mpirun -n 4 python library_example.py
srun --mpi=pmix -N 2 --ntasks-per-node=2 python library_example.py
torchrun --nproc-per-node=4 library_example.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hpc_train import Layout, bootstrap, build_groups

world = bootstrap(layout=Layout(tp=2), device="cpu")
groups = build_groups(world)
mesh = groups.device_mesh("dp", "tp")

torch.manual_seed(1)  # every rank begins with the same weights, of which it keeps its part
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

dp = groups.along("dp")
data = torch.Generator().manual_seed(2 + groups.coords["dp"])
first = last = None
for _ in range(20):
    x = torch.randn(8, 16, generator=data)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        gradient = parameter.grad.to_local()
        if dp.group_size > 1:
            dist.all_reduce(gradient, group=dp.handle)
        gradient /= dp.group_size
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    last = float(mean) / world.world_size
    first = last if first is None else first

place = ", ".join(f"{axis} {index}" for axis, index in groups.coords.items())
print(f"rank {world.rank} of {world.world_size} on {world.node}, slot {world.local_rank}: {place}", flush=True)
if world.rank == 0:
    print(f"loss {first:.4f} -> {last:.4f}", flush=True)
world.close()
