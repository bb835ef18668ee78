"""Put on PYTHONPATH of ranks by test_placement_slurm: each rank tells every group that it really is in who it is.

The exchange goes over the group itself, so a file of `formed/` says who met there, and not what was planned.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
from pathlib import Path

_GROUPS = "hpc_train.comm.groups"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != _GROUPS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_and_patch(module):
            execute(module)
            _patch(module)

        spec.loader.exec_module = exec_and_patch
        return spec


def _patch(groups):
    build = groups.build_groups

    def build_and_tell(world, *arguments, **options):
        built = build(world, *arguments, **options)
        me = {
            "rank": world.rank,
            "node": os.environ["SLURMD_NODENAME"],
            "slot": int(os.environ["SLURM_LOCALID"]),
            "procid": int(os.environ["SLURM_PROCID"]),
        }
        met = {axis: _meet(built.along(axis), me) for axis in ("tp", "cp", "dp", "pp")}
        folder = Path(os.environ["HPC_TRAIN_RUN_DIR"], "formed")
        folder.mkdir(exist_ok=True)
        (folder / f"{world.rank}.json").write_text(json.dumps({"me": me, "met": met}))
        return built

    groups.build_groups = build_and_tell


def _meet(group, me):
    import torch.distributed as dist

    if group.handle is None:
        return [me]
    told = [None] * group.group_size
    dist.all_gather_object(told, me, group=group.handle)
    return told


sys.meta_path.insert(0, _Finder())
