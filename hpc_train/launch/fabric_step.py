"""A short step that asks each node of a job about its place in the fabric."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

from hpc_train.cluster.allocation import Allocation
from hpc_train.cluster.fabric_find import FoundFabric, find_fabric
from hpc_train.cluster.fabric_node import NodeReport, parse_reports
from hpc_train.config import FabricConfig
from hpc_train.errors import LaunchError
from hpc_train.launch.steps import agents_argv, agents_env

# assumed: Python starts on thousands of nodes from a slow file system, and nvidia-smi wakes a driver.
_ANSWER_S = 120


def fabric_of_run(
    settings: FabricConfig, allocation: Allocation, env: Mapping[str, str], *, is_in_job: bool
) -> FoundFabric:
    """The fabric of the nodes that a run really got.

    Inside a job of several nodes these are asked for their addresses and cards. On a machine without Slurm, and on
    one node, there is nothing to find unless the user names a source.

    Raises:
        ConfigError: fabric.source cannot be used for these nodes.
    """
    if settings.source is None and (not is_in_job or len(allocation.nodes) == 1):
        return FoundFabric(None)
    gpus = dict(zip(allocation.nodes, allocation.gpus_per_node, strict=True))
    asks = is_in_job and len(allocation.nodes) > 1
    return find_fabric(
        settings.source,
        allocation.nodes,
        env,
        gpus=gpus,
        gather=(lambda: ask_nodes(allocation.nodes, env)) if asks else None,
    )


def ask_nodes(nodes: Sequence[str], env: Mapping[str, str], python: Sequence[str] = ()) -> tuple[NodeReport, ...]:
    """The reports of the nodes that answered, in the order of nodes.

    python: how Python is started on the nodes; left out, as here.

    Raises:
        LaunchError: the step cannot be started or does not end.
    """
    argv = agents_argv(nodes, [*(python or (sys.executable,)), "-m", "hpc_train.cluster.fabric_node"])
    try:
        done = subprocess.run(
            argv, env=agents_env(env), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_ANSWER_S, check=False,
        )  # fmt: skip
    except OSError as error:
        raise LaunchError(f"srun cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"no answer in {_ANSWER_S} s") from None
    by_node = {report.node: report for report in parse_reports(done.stdout)}
    if not by_node:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise LaunchError(f"srun: exit code {done.returncode}: {said[-1] if said else 'without a word'}")
    return tuple(by_node[node] for node in nodes if node in by_node)
