"""Small programs that users would start by `exec`, as source text."""

TORCH = """\
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(f"sum {int(total)} size {dist.get_world_size()} local {os.environ['LOCAL_RANK']}", flush=True)
dist.destroy_process_group()
"""

LIBRARY = """\
import os, hpc_train
for source in ("auto", "mpi"):
    world = hpc_train.bootstrap(source)
    assert str(world.rank) == os.environ["RANK"], (source, world.rank)
    print(f"{source} is {world.source} with {world.world_size} ranks", flush=True)
    world.close()
"""

MPI = """\
import os
from mpi4py import MPI
world = MPI.COMM_WORLD
assert str(world.rank) == os.environ["RANK"], (world.rank, os.environ["RANK"])
assert str(world.size) == os.environ["WORLD_SIZE"]
print("mpi is up", flush=True)
print(f"mpi {world.allreduce(world.rank)} of {world.size}", flush=True)
"""

VARIABLES = """\
import json, os, socket
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR",
         "MASTER_PORT", "HPC_TRAIN_RENDEZVOUS_TOKEN", "OMP_NUM_THREADS"]
print(json.dumps({**{name: os.environ.get(name) for name in names}, "host": socket.gethostname()}), flush=True)
"""

ONE_FAILS = """\
import os, sys, time
if os.environ["RANK"] == "1":
    print("about to fail", flush=True)
    sys.exit(7)
time.sleep(600)
"""

TRACEBACKS = """\
import os, sys, time, traceback
for number in range(50):
    print("line", number, "x" * 5000)
    try:
        raise RuntimeError(f"boom {number} " + "of rank " * 9)
    except RuntimeError:
        traceback.print_exc()
open(f"ready.{os.environ['RANK']}", "w").close()
while len([name for name in os.listdir() if name.startswith("ready.")]) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.05)
while os.environ["RANK"] != "5" and not os.path.exists("run/failure.json"):
    time.sleep(0.05)
raise RuntimeError("all ranks fail, and rank 5 is the first")
"""
