"""Steps of rings for tests: who has which sequences together, drawn by chance, and what attention must give."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hpc_train.comm.collectives import Group
from hpc_train.parallel.ring_attention import Ring
from hpc_train.plan.batch import zigzag

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """Rings of a step in their order, each its members and the lengths of its sequences; heads and window."""

    rings: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    heads: int
    kv_heads: int
    window: int | None
    head_size: int = 4
    padding: int = 0


def drawn_case(chance: random.Random, world_size: int, longest: int) -> Case:
    """Some rings of any members, which meet in any order; lengths from one token to many times a small rank's."""
    rings = []
    for _ in range(chance.randint(1, 3)):
        members = tuple(chance.sample(range(world_size), chance.randint(1, world_size)))
        lengths = tuple(chance.choice([1, chance.randint(1, 12), chance.randint(1, longest)]) for _ in range(3))
        rings.append((members, lengths[: chance.randint(1, 3)]))
    kv_heads = chance.choice([1, 2, 3])
    window = chance.choice([None, None, chance.randint(1, 12), chance.randint(1, longest)])
    return Case(tuple(rings), kv_heads * chance.choice([1, 2]), kv_heads, window, padding=chance.choice([0, 0, 3]))


def whole_sequence(case: Case, ring: int, sequence: int, length: int, dtype: torch.dtype) -> Tensors:
    """Queries, keys, values and the gradient of the result, of all tokens: (length, heads, head_size) each."""
    generator = torch.Generator().manual_seed(1000 * ring + sequence)
    counts = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    # Rounded first, so that types see the same numbers.
    return tuple(
        torch.randn(length, heads, case.head_size, generator=generator, dtype=torch.float64).bfloat16().to(dtype)
        for heads in counts
    )


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """A softmax over the whole matrix of one sequence, in the tensors' type."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) / q.shape[2] ** 0.5
    behind = torch.arange(len(q))[:, None] - torch.arange(len(q))
    is_hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
    return (scores.masked_fill(is_hidden, -torch.inf).softmax(dim=2) @ v).transpose(0, 1)


def expected(case: Case, ring: int, dtype: torch.dtype = torch.float64) -> list[Tensors]:
    """Of each sequence of a ring the result and the gradients of queries, keys and values."""
    found = []
    for sequence, length in enumerate(case.rings[ring][1]):
        q, k, v, gradient = whole_sequence(case, ring, sequence, length, dtype)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        result = plain_attention(*leaves, case.window)
        found.append((result.detach(), *torch.autograd.grad(result, leaves, gradient)))
    return found


def share_of(wholes: Sequence[Tensors], num_members: int, place: int) -> Tensors:
    """A member's rows of each kind of tensor, all sequences one behind the other."""
    rows = []
    for of_kind in zip(*wholes, strict=True):
        parts = [whole[a:b] for whole in of_kind for a, b in zigzag(len(whole), num_members, place)]
        rows.append(torch.cat(parts))
    return tuple(rows)


def ring_of(case: Case, ring: int, rank: int, group: Group) -> Ring:
    members, lengths = case.rings[ring]
    return Ring(lengths, members, members.index(rank), group)


def padded(rows: torch.Tensor, padding: int) -> torch.Tensor:
    """With rows behind that nobody may see: a sum with one of them would not be a number."""
    return torch.cat([rows, rows.new_full((padding, *rows.shape[1:]), torch.nan)])
