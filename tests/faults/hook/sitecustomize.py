"""Put on PYTHONPATH of ranks by `FaultPlan`: patches the training loop once it is imported, and nothing else."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import time

_LOOP = "hpc_train.train.loop"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != _LOOP:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_and_patch(module):
            execute(module)
            _patch(module)

        spec.loader.exec_module = exec_and_patch
        return spec


def _hang(until):
    while not until.exists():
        time.sleep(0.1)


def _patch(loop):
    planned = json.loads(os.environ["HPC_TRAIN_TEST_FAULTS"])
    slow_s = sum(milliseconds for kind, milliseconds, _ in planned if kind == "slow") / 1000
    faults = {(rank, step): kind for kind, rank, step in planned if kind != "slow"}
    micro_batches = loop._micro_batches

    def with_fault(run):
        kind = faults.get((run.world.rank, run.step))
        if kind == "fail":
            raise RuntimeError(f"planned fault on rank {run.world.rank} at step {run.step}")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "hang":
            _hang(run.run_dir / "go_on")
        time.sleep(slow_s)
        return micro_batches(run)

    loop._micro_batches = with_fault


if "HPC_TRAIN_TEST_FAULTS" in os.environ:
    sys.meta_path.insert(0, _Finder())
