"""Runs for tests that look at training and not at its start: ranks are forked from a server that has torch loaded.

What `hpc-train run` does from the moment at which its ranks are connected, with neither launcher nor driver nor agents:
a rank starts in a tenth of a second and not in the seconds of `import torch`.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace
from pathlib import Path

from hpc_train.config import Config
from hpc_train.config_read import load_config
from hpc_train.launch.driver import RunRequest, make_report
from hpc_train.launch.run_folder import make_folder
from hpc_train.plan.run import Plan
from tests.ranks import TestRank, run_ranks
from tests.train.runs import metrics
from tests.worlds import make_world


def train_forked(folder: Path, run: str, num_ranks: int, *overrides: str) -> list[dict[str, object]]:
    """Train by folder/config.yaml in folder/run, or go on there; the figures of all steps (see `runs.metrics`).

    An error of a rank is raised here. What ranks print is in logs/forked.log.
    """
    run_dir = folder / run
    make_folder(run_dir)
    config = load_config(folder / "config.yaml", overrides)
    report = make_report(RunRequest(config, ranks=num_ranks), None, socket.gethostname(), {})
    run_ranks(_train, num_ranks, run_dir, config, report.plan, timeout_s=200)
    return metrics(run_dir)


def _train(me: TestRank, run_dir: Path, config: Config, plan: Plan) -> None:
    from hpc_train.train import main
    from hpc_train.train.debugger import NoDebugger
    from hpc_train.train.stop import StopMark

    world = replace(make_world(me), node=plan.nodes[0], plan=plan)
    with open(run_dir / "logs/forked.log", "a") as out:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), NoDebugger({}, None) as debugger:
            main._train(run_dir, config, plan.mesh, world, StopMark(), debugger)
