"""Linears that a tp group enters and leaves together are the whole ones, in any number of tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from hpc_train.comm.collectives import Group
from hpc_train.parallel import exchange as exchange_module
from hpc_train.parallel.exchange import Exchange
from hpc_train.parallel.split_backward import QueuedLinear, QueuedWeight, WeightQueue
from hpc_train.parallel.tensor import entered, left
from hpc_train.record import Kind, NoRecorder, Segment
from tests.ranks import TestRank, run_ranks
from tests.worlds import make_group

B, T, H, WIDE, NARROW = 2, 24, 10, 12, 6


def _normal(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    # Rounded first, so that types see the same numbers.
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.bfloat16().to(dtype)


def _linears(rank: int, dtype: torch.dtype) -> list[nn.Linear]:
    """Of a rank: two that read, the first with a bias, and two that write; the last has a bias, the same on all."""
    made = []
    for index, (size_in, size_out, bias) in enumerate([(H, WIDE, 1), (H, NARROW, 0), (WIDE, H, 0), (NARROW, H, 1)]):
        linear = nn.Linear(size_in, size_out, bias=bool(bias), dtype=dtype)
        with torch.no_grad():
            linear.weight.copy_(_normal(10 * rank + index, size_out, size_in, dtype=dtype))
            if bias:
                linear.bias.copy_(_normal(900 if index == 3 else 100 + rank, size_out, dtype=dtype))
        made.append(linear)
    return made


def _whole(world_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[list[nn.Linear]]]:
    """All ranks' work by one, in fp64: x, the result, its coefficients in the loss, and the linears with gradients."""
    linears = [_linears(rank, torch.float64) for rank in range(world_size)]
    x = _normal(7, B, T, H, dtype=torch.float64).requires_grad_()
    y = linears[0][3].bias.expand(B, T, H)
    for read_a, read_b, write_a, write_b in linears:
        y = y + read_a(x).tanh() @ write_a.weight.t() + read_b(x).tanh() @ write_b.weight.t()
    coefficients = _normal(8, B, T, H, dtype=torch.float64)
    (y * coefficients).sum().backward()
    return x, y.detach(), coefficients, linears


def _error(ours: torch.Tensor | None, exact: torch.Tensor | None) -> float:
    assert ours is not None and exact is not None
    return float((ours.double() - exact).norm() / exact.norm())


def _errors(me: TestRank, exchange: Exchange, dtype: torch.dtype, *, is_queued: bool) -> dict[str, float]:
    """How far this rank's part is from the whole: result, gradients of x, of weights and of biases."""
    group = exchange.group
    whole_x, whole_y, coefficients, whole_linears = _whole(me.world_size)
    size = T // me.world_size
    own = slice(me.rank * size, (me.rank + 1) * size) if exchange.by_tokens else slice(0, T)
    plain = _linears(group.group_rank, dtype)
    sums = {
        f"{index}.{name}": torch.zeros_like(p)
        for index, each in enumerate(plain)
        for name, p in each.named_parameters()
    }
    queue = WeightQueue(lambda name: sums[name])
    linears: list[Any] = list(plain)
    if is_queued:
        for index, each in enumerate(plain):
            bias = None if each.bias is None else f"{index}.bias"
            linears[index] = QueuedLinear(each, QueuedWeight(queue, f"{index}.weight", bias))
    x = whole_x.detach()[:, own].to(dtype).clone().requires_grad_()
    y = left([product.tanh() for product in entered(x, linears[:2], exchange)], linears[2:], exchange)
    (y * coefficients[:, own].to(dtype)).sum().backward()
    queue.take()()
    errors = {"y": _error(y.detach(), whole_y[:, own]), "x": _error(x.grad, whole_x.grad[:, own])}  # type: ignore[index]
    for index, (each, exact) in enumerate(zip(plain, whole_linears[group.group_rank], strict=True)):
        for name, parameter in each.named_parameters():
            expected = dict(exact.named_parameters())[name].grad
            if index == 3 and name == "bias":
                expected = coefficients[:, own].sum(dim=(0, 1))
            is_of_queue = is_queued and not (index == 3 and name == "bias")
            found = sums[f"{index}.{name}"] if is_of_queue else parameter.grad
            assert not is_of_queue or parameter.grad is None
            errors[f"{index}.{name}"] = _error(found, expected)
    return errors


def _all_errors(me: TestRank, tiles: Sequence[int]) -> dict[str, dict[str, float]]:
    """Also what is written for nccl, whose collectives gloo has too."""
    found, plain = {}, make_group(me)
    for num_tiles in tiles:
        for by_tokens in (False, True):
            for dtype in (torch.float64, torch.bfloat16):
                for backend, is_queued in (("gloo", False), ("gloo", True), ("nccl", False)):
                    group = dataclasses.replace(plain, backend=backend)
                    key = f"{num_tiles} tiles, by_tokens={by_tokens}, {dtype}, is_queued={is_queued}, {backend}"
                    found[key] = _errors(me, Exchange(group, by_tokens, num_tiles), dtype, is_queued=is_queued)
    return found


@pytest.mark.parametrize(("world_size", "tiles"), [(2, (1, 2, 4)), (3, (1, 2, 4)), (4, (1, 3))])
def test_in_any_number_of_tiles_a_group_computes_what_one_rank_does(world_size: int, tiles: tuple[int, ...]) -> None:
    """In bf16 to its rounding: 2^-9 of each summand and partial sum, some of them a few times as long as the sum."""
    for of_rank in run_ranks(_all_errors, world_size, tiles):
        for case, errors in of_rank.items():
            tolerance = 2**-6 if "bfloat16" in case else 1e-12
            assert all(error <= tolerance for error in errors.values()), f"{case}: {errors}"


class _Log(NoRecorder):
    """What a rank does, in order: transfers by their operation, each with a number."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.count = 0

    def communication(
        self, kind: Kind, operation: str, group: str, ranks: tuple[int, ...], num_bytes: int, peer: int = -1
    ) -> Segment:
        self.count += 1
        return _Logged(self, f"{operation} {self.count}")


class _Logged(Segment):
    def __init__(self, log: _Log, name: str) -> None:
        self._log, self._name = log, name
        log.events.append(f"begin {name}")

    def begin_wait(self) -> None:
        self._log.events.append(f"wait {self._name}")


def _order_of_events(me: TestRank, by_tokens: bool) -> tuple[list[str], list[str]]:
    """Of a forward and of a backward in two tiles."""
    log, plain = _Log(), make_group(me)
    group = Group(plain.ranks, plain.group_rank, plain.handle, plain.backend, "tp", log)
    multiply, of_weight = exchange_module._multiply, torch.Tensor.__matmul__

    def logged(x: torch.Tensor, *arguments: Any, **options: Any) -> None:
        log.events.append(f"{x.shape[0] * x.shape[1]} rows")
        multiply(x, *arguments, **options)

    def logged_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        log.events.append("weight")
        return of_weight(a, b)

    # The process is this test's own and ends with it.
    exchange_module._multiply = logged
    torch.Tensor.__matmul__ = logged_matmul  # type: ignore[method-assign, assignment]
    exchange, linears = Exchange(group, by_tokens, 2), _linears(me.rank, torch.float64)
    share = T // me.world_size if by_tokens else T
    x = _normal(7, 1, share, H, dtype=torch.float64).requires_grad_()
    y = left(entered(x, linears[:1], exchange), linears[2:3], exchange)
    forward, log.events, log.count = log.events, [], 0
    y.sum().backward()
    return forward, log.events


@pytest.mark.parametrize("by_tokens", [False, True])
def test_transfers_of_tiles_are_under_way_while_other_rows_are_multiplied(by_tokens: bool) -> None:
    for forward, backward in run_ranks(_order_of_events, 2, by_tokens):
        if by_tokens:
            entering = ["begin all_gather 1", "begin all_gather 2", "12 rows"]
            entering += ["wait all_gather 1", "6 rows", "wait all_gather 2", "6 rows"]
            first, second = "reduce_scatter 3", "reduce_scatter 4"
            leaving = ["6 rows", f"begin {first}", "6 rows", f"begin {second}", "12 rows"]
        else:
            entering = []
            first, second = "all_reduce 1", "all_reduce 2"
            leaving = ["12 rows", f"begin {first}", "12 rows", f"begin {second}"]
        waiting = [f"wait {first}", f"wait {second}"]
        assert forward == entering + leaving + waiting
        # Backwards what was left is entered and what was entered left; the first weight's gradient is made behind it.
        assert backward == [*entering, "weight", *leaving, "weight", *waiting]
