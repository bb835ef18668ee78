"""LAMB on this rank's shards: Adam's direction, scaled for each parameter by the norm of its weights.

1. moments and direction, element by element, without the others
2. squared norms of weights and directions of what this rank counts, added up over all ranks: one small all-reduce
3. each matrix moves by lr * norm(weights) / norm(direction), wherever its elements lie

Source: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR'20.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from hpc_train.comm.collectives import Group, all_reduce_
from hpc_train.config import OptimizerConfig
from hpc_train.parallel.data import ShardedParameters
from hpc_train.train.optimizer import NORM_PIECE, ShardedOptimizer


@dataclass(frozen=True)
class _Range:
    """Elements start .. stop of a shard, of the parameter that stands at `index` in the list of all matrices."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Shard:
    """One model_chunk's shard, flat: (shard,) each.

    direction: the gradients, until `step` has put the direction in their place. num_decayed: elements at its head that
    weight decay is for. held: what of each matrix is here; counted: what of it this rank counts.
    """

    master: torch.Tensor
    direction: torch.Tensor
    moments: tuple[torch.Tensor, torch.Tensor]
    num_decayed: int
    held: list[_Range]
    counted: list[_Range]


class ShardedLamb(ShardedOptimizer):
    """LAMB; vectors (biases and norms) get neither weight decay nor a ratio, so they take AdamW's step.

    A parameter of which the weights or the direction are all zero has the ratio 1.
    """

    def __init__(
        self, chunks: Sequence[ShardedParameters], config: OptimizerConfig, matrices: Sequence[str], group: Group
    ) -> None:
        """matrices: global names of the whole model's parameters with two and more dims. group: all ranks."""
        super().__init__(chunks, config)
        self._group = group
        self._num_matrices = len(matrices)
        index = {name: place for place, name in enumerate(matrices)}
        self._shards = [
            _Shard(
                chunk.master_shard,
                chunk.gradient_shard,
                (exp_avg, exp_avg_sq),
                chunk.num_decayed_in_shard(),
                _ranges(chunk, index, counted=False),
                _ranges(chunk, index, counted=True),
            )
            for chunk, exp_avg, exp_avg_sq in zip(chunks, *self.moments.values(), strict=True)
        ]

    @torch.no_grad()
    def step(self, lr: float, updated: Collection[int], then: Callable[[int], None]) -> None:
        """Collective over all ranks; the gradients are left undefined."""
        assert not updated, "a ratio needs the norms of whole parameters, so no chunk is updated ahead"
        self.num_updates += 1
        squares_2P = torch.zeros(2, self._num_matrices, dtype=torch.float64, device=self._shards[0].master.device)
        for shard in self._shards:
            self._set_direction(shard)
            _add_squares(squares_2P[0], shard.master, shard.counted)
            _add_squares(squares_2P[1], shard.direction, shard.counted)
        all_reduce_(squares_2P.view(-1), self._group)
        weights_P, directions_P = squares_2P.sqrt_()
        has_ratio_P = (weights_P > 0) & (directions_P > 0)
        ratios = torch.where(has_ratio_P, weights_P / directions_P, 1.0).tolist()
        for index, shard in enumerate(self._shards):
            if shard.held:
                parts = [shard.direction[held.start : held.stop] for held in shard.held]
                torch._foreach_mul_(parts, [ratios[held.index] for held in shard.held])
            shard.master.add_(shard.direction, alpha=-lr)
            then(index)

    def _set_direction(self, shard: _Shard) -> None:
        """Move the moments on, and turn gradients into directions in their place, so that no third buffer is needed."""
        config, gradient = self._config, shard.direction
        exp_avg, exp_avg_sq = shard.moments
        exp_avg.lerp_(gradient, 1.0 - config.beta1)
        exp_avg_sq.mul_(config.beta2).addcmul_(gradient, gradient, value=1.0 - config.beta2)
        bias_1 = 1.0 - config.beta1**self.num_updates
        bias_2 = 1.0 - config.beta2**self.num_updates
        direction = torch.sqrt(exp_avg_sq, out=gradient).mul_(bias_2**-0.5).add_(config.eps)
        torch.div(exp_avg, direction, out=direction).mul_(1.0 / bias_1)
        if config.weight_decay:
            decayed = slice(0, shard.num_decayed)
            direction[decayed].add_(shard.master[decayed], alpha=config.weight_decay)


def _ranges(chunk: ShardedParameters, index: dict[str, int], *, counted: bool) -> list[_Range]:
    """Consecutive boxes of a parameter lie one behind the other."""
    first, _ = chunk.layout.shard_range(chunk.group.group_rank)
    found: list[_Range] = []
    for piece in chunk.pieces(counted=counted):
        if piece.name not in index:
            continue
        place, start = index[piece.name], piece.start - first
        stop = start + piece.box.num_elements
        if found and (found[-1].index, found[-1].stop) == (place, start):
            start = found.pop().start
        found.append(_Range(place, start, stop))
    return found


def _add_squares(squares_P: torch.Tensor, flat: torch.Tensor, ranges: Sequence[_Range]) -> None:
    """Add each range's sum of squares to that of its parameter: norms of pieces in the type of `flat`, then double."""
    pieces = [(part.index, piece) for part in ranges for piece in flat[part.start : part.stop].split(NORM_PIECE)]
    if not pieces:
        return
    places = torch.tensor([place for place, _ in pieces], device=flat.device)
    norms = torch.stack(torch._foreach_norm([piece for _, piece in pieces]))
    squares_P.index_add_(0, places, norms.double().square_())
