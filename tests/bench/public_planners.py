"""Other projects' planners of long and short sequences: what ranks do by our costs, and how long planning takes."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
from numpy.typing import NDArray

from hpc_train.plan.batch_cost import BatchCosts


class _Group:
    """What megatron-core asks of a process group when it plans."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def megatron_times(
    lengths: NDArray[np.int64], num_ranks: int, capacity: int, costs: BatchCosts, _: str | None
) -> tuple[list[int], float]:
    """When each rank is done under megatron-core's BalancedCPScheduler, without waiting between its groups."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    start = time.perf_counter()
    scheduler = BalancedCPScheduler(capacity, _Group(num_ranks))
    _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)
    seconds = time.perf_counter() - start
    ends = [0] * num_ranks
    for group in groups:
        sizes = Counter(sample for of_rank in group for sample in of_rank)
        for rank, samples in enumerate(group):
            for sample in samples:
                length = int(lengths[sample])
                ends[rank] += costs.micro_batch(length**2, length, sizes[sample])
    return ends, seconds


def verl_times(
    lengths: NDArray[np.int64], num_ranks: int, capacity: int, costs: BatchCosts, folder: str | None
) -> tuple[list[int], float]:
    """When each rank is done where verl's Karmarkar-Karp gives sequences to groups of the fewest ranks for the longest.

    Its file is loaded by itself, since its package wants much that planning does not need.
    """
    cp = 1
    while cp * capacity < lengths.max():
        cp *= 2
    partition = _load(Path(folder or ".") / "verl" / "utils" / "seqlen_balancing.py").karmarkar_karp
    work = costs.micro_batch(lengths**2, lengths, cp)
    start = time.perf_counter()
    groups = partition(work.tolist(), num_ranks // cp, False)
    seconds = time.perf_counter() - start
    return [int(sum(work[index] for index in group)) for group in groups for _ in range(cp)], seconds


def _load(path: Path) -> Any:
    import torch  # noqa: F401 - it stays loaded, while what stands in for the rest of verl does not

    spec = importlib.util.spec_from_file_location("verl_seqlen_balancing", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    names = ("verl", "verl.protocol", "verl.utils", "verl.utils.tensordict_utils", "verl.utils.device")
    with patch.dict(sys.modules, {name: MagicMock() for name in names}):
        spec.loader.exec_module(module)
    return module
