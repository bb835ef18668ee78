"""Matrix products of sequences that a tp group enters and leaves together, in tiles beside their transfers.

Inside, every rank has its share of the heads or features of all tokens; outside, all have the whole residual stream, or
with sequence parallel a share of its tokens. A product that is entered reads what all ranks have; one that is left
gives a partial sum, which is added over the group.

With tiles a transfer runs beside products:

- enter by tokens: all tiles' gathers are begun, one behind the other. The rows of this rank's own tokens are multiplied
  first, then tile by tile what has come from the others
- leave by tokens: tile by tile the rows of others' tokens are multiplied, and their sum is begun. The rows of this
  rank's own tokens come last, beside the last tiles' sums
- leave without sequence parallel: tile by tile rows are multiplied, and their all-reduce is begun. Entering
  sends nothing

With one tile each transfer is awaited where it is begun, and rows are multiplied all at once.

Source: Jiang et al., "MegaScale", NSDI'24, section 3.2; Wang et al., "Overlap communication with dependent computation
via decomposition in large deep learning models", ASPLOS'23.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hpc_train.comm.begin import begin_all_reduce
from hpc_train.comm.collectives import Group, all_reduce_
from hpc_train.comm.tokens import (
    TokenSums,
    all_gather_tokens,
    begin_gather_tokens,
    reduce_scatter_tokens,
    room_for_whole,
)


@dataclass(frozen=True)
class Factor:
    """What rows are multiplied with: (in, out), and what is added to each row of the product."""

    matrix: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Leaving:
    """A sum over the group, perhaps under way."""

    _sum: torch.Tensor
    _transfers: Sequence[Any] = ()

    def wait(self) -> torch.Tensor:
        """(B, T, h), or with sequence parallel (B, T/n, h)."""
        for transfer in self._transfers:
            transfer.wait()
        return self._sum


@dataclass(frozen=True)
class Exchange:
    """How one rank of a tp group enters and leaves. Every call is collective over the group.

    by_tokens: sequence parallel. num_tiles divides a share's tokens; without sequence parallel, all rows.
    """

    group: Group
    by_tokens: bool
    num_tiles: int = 1

    def enter(self, x_BTh: torch.Tensor, factors: Sequence[Factor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Whole sequences, from what this rank has of them, and their product with each factor."""
        if not self.by_tokens or self.num_tiles == 1:
            whole_BTh = all_gather_tokens(x_BTh, self.group) if self.by_tokens else x_BTh
            biases = [factor.bias for factor in factors]
            products = [F.linear(whole_BTh, factor.matrix.t(), b) for factor, b in zip(factors, biases, strict=True)]
            return whole_BTh, products
        whole_BTh = room_for_whole(x_BTh, self.group)
        tiles = begin_gather_tokens(whole_BTh, self.num_tiles, self.group)
        outputs = [whole_BTh.new_empty(*whole_BTh.shape[:2], factor.matrix.shape[1]) for factor in factors]
        for factor, output in zip(factors, outputs, strict=True):
            _multiply(self._own(whole_BTh), factor, self._own(output))
        for number, tile in enumerate(tiles):
            tile.wait()
            for factor, output in zip(factors, outputs, strict=True):
                for rows, place in zip(self._others(whole_BTh, number), self._others(output, number), strict=True):
                    _multiply(rows, factor, place)
        return whole_BTh, outputs

    def leave(self, xs: Sequence[torch.Tensor], matrices: Sequence[torch.Tensor]) -> Leaving:
        """The sum over the group of all products of one x and one matrix, begun.

        xs: (B, T, ...) each, whole sequences. matrices: (in, h), one for each x.
        """
        xs = [x_BTf.contiguous() for x_BTf in xs]
        if self.num_tiles > 1:
            return self._leave_by_tokens(xs, matrices) if self.by_tokens else self._leave_whole(xs, matrices)
        partial_BTh = xs[0] @ matrices[0]
        for x_BTf, matrix in zip(xs[1:], matrices[1:], strict=True):
            partial_BTh.flatten(0, 1).addmm_(x_BTf.flatten(0, 1), matrix)
        if self.by_tokens:
            return Leaving(reduce_scatter_tokens(partial_BTh, self.group))
        return Leaving(all_reduce_(partial_BTh, self.group))

    def _leave_by_tokens(self, xs: Sequence[torch.Tensor], matrices: Sequence[torch.Tensor]) -> Leaving:
        (B, T, _), h, n = xs[0].shape, matrices[0].shape[1], self.group.group_size
        share_BSh = xs[0].new_empty(B, T // n, h)
        sums = TokenSums(share_BSh, self.num_tiles, self.group)
        for tile in range(self.num_tiles):
            partial_nBsh = xs[0].new_empty(n, B, T // n // self.num_tiles, h)
            for index, (x_BTf, matrix) in enumerate(zip(xs, matrices, strict=True)):
                places = self._parts_of_others(partial_nBsh)
                for rows, place in zip(self._others(x_BTf, tile), places, strict=True):
                    _multiply(rows, Factor(matrix), place, is_added=index > 0)
            sums.begin(tile, partial_nBsh)
        for index, (x_BTf, matrix) in enumerate(zip(xs, matrices, strict=True)):
            _multiply(self._own(x_BTf), Factor(matrix), share_BSh, is_added=index > 0)
        return Leaving(share_BSh, [sums])

    def _leave_whole(self, xs: Sequence[torch.Tensor], matrices: Sequence[torch.Tensor]) -> Leaving:
        (B, T, _), h = xs[0].shape, matrices[0].shape[1]
        sum_BTh = xs[0].new_empty(B, T, h)
        tiles = []
        for number, tile_Rh in enumerate(sum_BTh.view(self.num_tiles, -1, h)):
            for index, (x_BTf, matrix) in enumerate(zip(xs, matrices, strict=True)):
                rows_Rf = x_BTf.view(self.num_tiles, -1, x_BTf.shape[2])[number]
                _multiply(rows_Rf[None], Factor(matrix), tile_Rh[None], is_added=index > 0)
            tiles.append(begin_all_reduce(tile_Rh, self.group))
        return Leaving(sum_BTh, tiles)

    def _own(self, x_BTf: torch.Tensor) -> torch.Tensor:
        """The rows of this rank's tokens: (B, S, f)."""
        B, _, f = x_BTf.shape
        return x_BTf.view(B, self.group.group_size, -1, f)[:, self.group.group_rank]

    def _others(self, x_BTf: torch.Tensor, tile: int) -> Iterator[torch.Tensor]:
        """A tile's rows of the other ranks' tokens, in blocks (ranks, s, f): of each sequence those before and behind
        this rank.
        """
        B, _, f = x_BTf.shape
        tiles_BntSf = x_BTf.view(B, self.group.group_size, self.num_tiles, -1, f)[:, :, tile]
        for tile_nSf in tiles_BntSf:
            yield from self._before_and_behind(tile_nSf)

    def _parts_of_others(self, partial_nBsh: torch.Tensor) -> Iterator[torch.Tensor]:
        """The places of the same blocks in what is sent."""
        for part_nsh in partial_nBsh.unbind(1):
            yield from self._before_and_behind(part_nsh)

    def _before_and_behind(self, of_ranks: torch.Tensor) -> Iterator[torch.Tensor]:
        place = self.group.group_rank
        if place > 0:
            yield of_ranks[:place]
        if place < self.group.group_size - 1:
            yield of_ranks[place + 1 :]


def _multiply(x_brk: torch.Tensor, factor: Factor, into_bro: torch.Tensor, *, is_added: bool = False) -> None:
    """Put the product of blocks of rows where it belongs, or add it to what is there."""
    matrix_bko = factor.matrix.expand(len(x_brk), -1, -1)
    if is_added:
        into_bro.baddbmm_(x_brk, matrix_bko)
    elif factor.bias is None:
        torch.bmm(x_brk, matrix_bko, out=into_bro)
    else:
        torch.baddbmm(factor.bias, x_brk, matrix_bko, out=into_bro)
