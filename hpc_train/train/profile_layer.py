"""Times of one layer on this rank, and of what goes on beside it, by the code that training runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from hpc_train.comm.begin import begin_shift
from hpc_train.comm.collectives import Group
from hpc_train.comm.groups import Groups
from hpc_train.config import Config
from hpc_train.errors import ConfigError
from hpc_train.models.transformer import Inputs
from hpc_train.parallel.apply import build_part, set_initial_weights, set_recomputation
from hpc_train.parallel.exchange import Exchange
from hpc_train.parallel.hybrid import piece_inputs
from hpc_train.plan.batch import MicroBatch, SequenceSlice
from hpc_train.plan.batch_pieces import PieceBatch
from hpc_train.plan.groups import HDP
from hpc_train.plan.parameters import ModelPart, TensorSplit, row_unit

BLOCK = 128
"""Tokens of the short sequences (assumed: attention hardly counts in them)."""


@final
@dataclass(frozen=True)
class Line:
    """A time that grows with a size: seconds for each unit, and what it takes whatever the size."""

    s_per_unit: float
    constant_s: float


@final
@dataclass(frozen=True)
class LayerTimes:
    """Seconds of a layer, forward and backward: with a sequence, with as many tokens in short ones, with one of these.

    longest, block: tokens of the sequence, and of a short one.
    """

    longest: int
    block: int
    one_s: float
    many_s: float
    block_s: float

    def parts(self) -> tuple[float, float, float]:
        """Seconds by the square of a sequence's tokens, by tokens, and constant.

        Both ways have the same work by tokens, so their difference is attention.

        Raises:
            ConfigError: the sequence takes no longer than the short ones.
        """
        n, w = self.longest, self.block
        square = (self.one_s - self.many_s) / (n * n - n * w)
        linear = self.many_s / n - square * w
        if not (square > 0 and linear > 0):
            raise ConfigError(
                f"a layer took {self.one_s:.3g} s with a sequence of {n} tokens and {self.many_s:.3g} s with {n // w} "
                f"sequences of {w}, which is not how its time grows. Measure on nodes that do nothing else, with more "
                "--repeats, or with a larger parallel.hdp.capacity_tokens"
            )
        return square, linear, max(0.0, self.block_s - square * w * w - linear * w)


def sequence_sizes(longest: int, unit: int) -> tuple[int, int]:
    """Tokens of the sequence and of the short ones that a layer is timed with; the first a multiple of the second, both
    of `unit`.
    """
    block = max(1, min(BLOCK, longest // 4) // unit) * unit
    return max(2, longest // block) * block, block


Tell = Callable[[str], object]
"""Hears what is being measured, and what it will take."""


def time_layer(
    config: Config, groups: Groups, device: torch.device, longest: int, repeats: int, tell: Tell = str
) -> LayerTimes:
    """Time a layer of this rank with full attention, whatever windows the model has. Collective over the tp group.

    longest: tokens of a sequence that the rank can hold.
    """
    model_config = config.model.model_copy(update={"attention_window": None})
    split = TensorSplit(groups.mesh.tp, groups.coords["tp"], config.parallel.sequence_parallel)
    exchange = Exchange(groups.along("tp"), split.sequence_parallel, config.parallel.tp_tiles)
    part = ModelPart(range(1), has_embedding=False, has_head=False)
    model, plans = build_part(model_config, longest, part, split, exchange, device)
    set_recomputation(model, config.train.recompute)
    set_initial_weights(model, plans, config.train.seed)
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    model.to(dtype)
    unit, shares = row_unit(config, split.tp), split.tp if split.sequence_parallel else 1
    length, block = sequence_sizes(longest, unit)
    hdp, times = groups.along(HDP), []
    for count, tokens in ((1, length), (length // block, block), (1, block)):
        slices = tuple(SequenceSlice(number, 0, tokens) for number in range(count))
        ids = np.zeros(count * tokens, np.int64)
        batch = PieceBatch(hdp.group_rank, MicroBatch(slices), (tokens,) * count, ids, ids)
        inputs = piece_inputs(batch, hdp, unit, device)
        stream = torch.randn(1, count * tokens // shares, config.model.hidden_size, device=device, dtype=dtype)
        stream.requires_grad_()

        def once(stream: torch.Tensor = stream, inputs: Inputs = inputs) -> None:
            model.hidden(stream, inputs).sum().backward()

        what = f"a layer with {count} {'sequence' if count == 1 else 'sequences'} of {tokens} tokens"
        times.append(least_time(once, device, repeats, what, tell))
    return LayerTimes(length, block, *times)


def time_ring(
    num_elements: int, dtype: torch.dtype, group: Group, device: torch.device, repeats: int, tell: Tell = str
) -> Line:
    """Of passing bytes on to the next rank while the one before passes as many: by bytes. Collective over the group."""
    ahead, behind = (group.group_rank + 1) % group.group_size, (group.group_rank - 1) % group.group_size
    times, sizes = [], (max(1, num_elements // 8), num_elements)
    for count in sizes:
        sent, received = torch.ones(2, count, dtype=dtype, device=device)

        def once(sent: torch.Tensor = sent, received: torch.Tensor = received) -> None:
            for under_way in begin_shift([sent], [received], group, to_rank=ahead, from_rank=behind):
                under_way.wait()

        what = f"passing on {count * dtype.itemsize} bytes in a ring of {group.group_size}"
        times.append(least_time(once, device, repeats, what, tell))
    return line_of(*(count * dtype.itemsize for count in sizes), *times)


def time_copy(num_bytes: int, device: torch.device, repeats: int, tell: Tell = str) -> float:
    """Seconds a byte between device and host memory, the slower way; on a CPU between two buffers."""
    kept = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def out() -> None:
        host.copy_(kept, non_blocking=True)

    def back() -> None:
        kept.copy_(host, non_blocking=True)

    what = f"a copy of {num_bytes} bytes between device and host"
    return max(least_time(way, device, repeats, what, tell) for way in (out, back)) / num_bytes


def least_time(action: Callable[[], object], device: torch.device, repeats: int, what: str, tell: Tell = str) -> float:
    """Seconds of an action, the device's work in it: the least of several times, as what disturbs only makes it longer.

    The first time does not count.
    """
    times = []
    for number in range(repeats + 1):
        _await(device)
        begin = time.perf_counter()
        action()
        _await(device)
        times.append(time.perf_counter() - begin)
        if number == 0:
            tell(f"{what}: {repeats} more times, {repeats * times[0]:.3g} s at most")
    return min(times[1:])


def _await(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def line_of(small: int, large: int, small_s: float, large_s: float) -> Line:
    """Through two points; where the constant comes out negative, from nothing to the larger one."""
    slope = (large_s - small_s) / (large - small)
    constant = small_s - slope * small
    return Line(slope, constant) if constant >= 0 else Line(large_s / large, 0.0)
