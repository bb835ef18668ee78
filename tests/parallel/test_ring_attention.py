"""Rings of ranks attend as one rank does, in values and gradients: any members, lengths, windows and heads."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_train.comm.collectives import Group
from hpc_train.parallel import attention_blocks, attention_flash
from hpc_train.parallel import ring_attention as module
from hpc_train.parallel.attention_blocks import BlockKernel, Meeting, Results, Sums, TileKernel
from hpc_train.parallel.attention_flash import FlashKernel
from hpc_train.parallel.ring_attention import Ring, ring_attention
from hpc_train.plan.ring_blocks import Block, ring_blocks
from hpc_train.record import Kind, NoRecorder, Segment
from tests.parallel.rings import (
    Case,
    Tensors,
    drawn_case,
    expected,
    padded,
    plain_attention,
    ring_of,
    share_of,
    whole_sequence,
)
from tests.ranks import TestRank, run_ranks
from tests.worlds import make_group


def _error(ours: torch.Tensor, exact: torch.Tensor, scale: float) -> float:
    return float((ours.double() - exact).norm()) / max(float(exact.norm()), scale)


def _computed(case: Case, ring: int, place: Ring, dtype: torch.dtype) -> Tensors:
    """This member's result and gradients, and those of its padding behind them."""
    wholes = [whole_sequence(case, ring, index, length, dtype) for index, length in enumerate(place.lengths)]
    q, k, v, gradient = share_of(wholes, len(place), place.place)
    leaves = [padded(x, case.padding).requires_grad_() for x in (q, k, v)]
    result = ring_attention(*leaves, place, case.window)
    zeros = gradient.new_zeros(case.padding, *gradient.shape[1:])
    return result.detach(), *torch.autograd.grad(result, leaves, torch.cat([gradient, zeros]))


def _errors(me: TestRank, cases: Sequence[Case], dtype: torch.dtype) -> list[list[float]]:
    """Of each case the errors of this rank's results and gradients, ring by ring."""
    attention_blocks._TILE_TOKENS = 16  # so that short sequences have several; the process is this test's own
    group, found = make_group(me), []
    for case in cases:
        of_case = []
        for ring, (members, _) in enumerate(case.rings):
            if me.rank not in members:
                continue
            ours = _computed(case, ring, ring_of(case, ring, me.rank, group), dtype)
            exact = share_of(expected(case, ring), len(members), members.index(me.rank))
            rows = len(exact[0])
            assert all(not mine[rows:].any() for mine in ours), "padding gets nothing and gives nothing"
            # A token that sees itself alone has no gradients; errors are then told by what rows have elsewhere.
            scale = max(rows, 1) ** 0.5
            of_case += [_error(mine[:rows], theirs, scale) for mine, theirs in zip(ours, exact, strict=True)]
        found.append(of_case)
    return found


def _check(world_size: int, cases: Sequence[Case], dtype: torch.dtype, tolerance: float) -> None:
    of_ranks = run_ranks(_errors, world_size, cases, dtype, timeout_s=240)
    assert any(errors for errors in of_ranks)
    for rank, of_cases in enumerate(of_ranks):
        for case, errors in zip(cases, of_cases, strict=True):
            assert all(error <= tolerance for error in errors), f"rank {rank}, {case}: {errors}"


@pytest.mark.parametrize(
    ("world_size", "num_cases", "longest"),
    [
        (2, 15, 90),
        (3, 15, 90),
        (4, 20, 120),
        pytest.param(6, 200, 300, marks=pytest.mark.long),
        pytest.param(8, 200, 400, marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(300)
def test_in_fp64_every_ring_gives_values_and_gradients_of_a_whole_softmax(
    world_size: int, num_cases: int, longest: int
) -> None:
    chance = random.Random(world_size)
    cases = [drawn_case(chance, world_size, longest) for _ in range(num_cases)]
    if world_size == 8:
        # A ring over 3 ranks and one over 5 in the same step, and then all of them.
        cases.append(Case((((6, 0, 3), (200, 5)), ((1, 2, 4, 5, 7), (1, 333)), (tuple(range(8)), (777,))), 4, 2, None))
    _check(world_size, cases, torch.float64, 1e-9)


def test_sums_are_in_fp32_whatever_the_type() -> None:
    """bf16 rounds inputs of products and results by 2^-9; fp32 by 2^-24, some of it a few times."""
    cases = [drawn_case(random.Random(5), 3, 90) for _ in range(4)]
    _check(3, cases, torch.float32, 3e-6)
    _check(3, cases, torch.bfloat16, 2**-6)


class _Log(NoRecorder):
    def __init__(self) -> None:
        self.events: list[str] = []

    def communication(
        self, kind: Kind, operation: str, group: str, ranks: tuple[int, ...], num_bytes: int, peer: int = -1
    ) -> Segment:
        self.events.append(f"{operation} {num_bytes}")
        return _Logged(self, operation)


class _Logged(Segment):
    def __init__(self, log: _Log, name: str) -> None:
        self._log, self._name = log, name

    def begin_wait(self) -> None:
        self._log.events.append(f"wait for {self._name}")


def _events(me: TestRank, dtype: torch.dtype) -> tuple[list[str], list[str]]:
    """Of a forward and a backward of a ring of three."""
    log, plain = _Log(), make_group(me)

    class Logged(BlockKernel):
        def forward_(self, *arguments: Any) -> None:
            log.events.append("compute")

        def backward_(self, *arguments: Any) -> None:
            log.events.append("compute")

    module._kernel = lambda q, window: Logged()  # the process is this test's own
    ring = Ring((24,), (2, 0, 1), (1, 2, 0)[me.rank], Group(plain.ranks, me.rank, plain.handle, "gloo", "hdp", log))
    q, k, v = (torch.zeros(8, 1, 2, dtype=dtype, requires_grad=True) for _ in range(3))
    result = ring_attention(q, k, v, ring)
    forward, log.events = log.events, []
    result.sum().backward()
    return forward, log.events


@pytest.mark.parametrize(("dtype", "num_bytes", "of_gradients"), [(torch.float64, 256, 256), (torch.bfloat16, 64, 128)])
def test_the_next_keys_and_values_travel_beside_the_present_block(
    dtype: torch.dtype, num_bytes: int, of_gradients: int
) -> None:
    """num_bytes: of keys and values of 8 tokens. Their gradients, in fp32 at least, follow a step behind."""

    def beside(size: int) -> list[str]:
        return [f"recv {size}", f"send {size}", "compute", "wait for recv", "wait for send"]

    for forward, backward in run_ranks(_events, 3, dtype):
        assert forward == [*beside(num_bytes), *beside(num_bytes), "compute"]
        home = [word for word in beside(of_gradients) if word != "compute"]
        all_steps = [num_bytes, num_bytes + of_gradients, of_gradients]
        assert backward == [*(word for size in all_steps for word in beside(size)), *home]


LONG = Case((((0, 1, 2, 3, 4, 5, 6, 7), (64 * 1024,)),), 2, 1, None)


def _long_sequence(me: TestRank) -> tuple[Tensors, int]:
    case = LONG if me.world_size == 8 else Case((((0,), LONG.rings[0][1]),), 2, 1, None)
    made = _computed(case, 0, ring_of(case, 0, me.rank, make_group(me)), torch.float64)
    return made, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_sequence_of_64k_tokens_over_8_ranks_is_that_of_one_rank() -> None:
    """Neither has a matrix of 64K x 64K, which would take 32 GiB."""
    ((whole, num_bytes),) = run_ranks(_long_sequence, 1, timeout_s=1500)
    assert num_bytes < 2**30
    for place, (ours, num_bytes) in enumerate(run_ranks(_long_sequence, 8, timeout_s=1500)):
        assert num_bytes < 2**30
        for mine, theirs in zip(ours, share_of([whole], 8, place), strict=True):
            assert _error(mine, theirs, 0.0) <= 1e-9


# Flash attention by its description: blocks as sequences, the ends of queries and keys aligned.


def _blocks_of_ends(ends_q: torch.Tensor, ends_k: torch.Tensor) -> list[tuple[slice, slice]]:
    (q, k) = (ends.tolist() for ends in (ends_q, ends_k))
    return [(slice(*q[i : i + 2]), slice(*k[i : i + 2])) for i in range(len(q) - 1)]


def _seen(num_queries: int, num_keys: int, left: int, right: int, is_causal: bool) -> torch.Tensor:
    aligned = torch.arange(num_queries)[:, None] + num_keys - num_queries
    ahead = torch.arange(num_keys) - aligned
    seen = torch.ones_like(ahead, dtype=torch.bool) if left < 0 else ahead >= -left
    return seen & (ahead <= max(right, 0)) if is_causal or right >= 0 else seen


def _flash_weights(q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("thd,shd->hts", q, k) / q.shape[2] ** 0.5
    return scores.masked_fill(~seen, -torch.inf)


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends_q: torch.Tensor, ends_k: torch.Tensor, max_q: int,
    max_k: int, dropout: float, is_causal: bool, debug: bool, *, window_size_left: int, window_size_right: int,
) -> Tensors:  # fmt: skip
    results, logs = [], []
    for rows, keys in _blocks_of_ends(ends_q, ends_k):
        assert rows.stop - rows.start <= max_q and keys.stop - keys.start <= max_k
        seen = _seen(rows.stop - rows.start, keys.stop - keys.start, window_size_left, window_size_right, is_causal)
        scores = _flash_weights(q[rows], k[keys], seen)
        values = v[keys].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        results.append(torch.einsum("hts,shd->thd", scores.softmax(dim=2), values))
        logs.append(scores.logsumexp(dim=2))
    return torch.cat(results), torch.cat(logs, dim=1)


def _flash_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, result: torch.Tensor,
    log: torch.Tensor, ends_q: torch.Tensor, ends_k: torch.Tensor, max_q: int, max_k: int, dropout: float,
    is_causal: bool, state: torch.Tensor, unused: torch.Tensor, *, window_size_left: int, window_size_right: int,
) -> Tensors:  # fmt: skip
    of_q, of_k, of_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    groups = q.shape[1] // k.shape[1]
    for rows, keys in _blocks_of_ends(ends_q, ends_k):
        seen = _seen(rows.stop - rows.start, keys.stop - keys.start, window_size_left, window_size_right, is_causal)
        weights = (_flash_weights(q[rows], k[keys], seen) - log[:, rows, None]).exp()
        of_v[keys] += torch.einsum("hts,thd->shd", weights, gradient[rows]).unflatten(1, (-1, groups)).sum(dim=2)
        values = v[keys].repeat_interleave(groups, dim=1)
        of_weights = torch.einsum("thd,shd->hts", gradient[rows], values)
        dot = (gradient[rows] * result[rows]).sum(dim=2).t()[..., None]
        of_scores = weights * (of_weights - dot) / q.shape[2] ** 0.5
        of_q[rows] += torch.einsum("hts,shd->thd", of_scores, k[keys].repeat_interleave(groups, dim=1))
        of_k[keys] += torch.einsum("hts,thd->shd", of_scores, q[rows]).unflatten(1, (-1, groups)).sum(dim=2)
    return of_q, of_k, of_v


def _by_kernel(case: Case, kernel: TileKernel | FlashKernel, place: int, dtype: torch.dtype, device: str) -> Tensors:
    """What a member gets in all steps of a ring without windows, and without any ring: others' keys are at hand."""
    (members, lengths) = case.rings[0]
    wholes = [whole_sequence(case, 0, index, length, dtype) for index, length in enumerate(lengths)]
    shares = [[x.to(device) for x in share_of(wholes, len(members), other)] for other in range(len(members))]
    q, _, _, gradient = shares[place]
    kvs = [torch.stack([k, v]) for _, k, v, _ in shares]
    meetings = [Meeting(ring_blocks(lengths, len(members), place, other)) for other in range(len(members))]
    sums = Sums.nothing(q)
    for kv, meeting in zip(kvs, meetings, strict=True):
        kernel.forward_(sums, q, kv, meeting, None)
    exact = sums.mean_THD.dtype
    results = Results(q, sums.mean_THD.to(dtype), gradient, sums.log_TH, (sums.mean_THD * gradient).sum(dim=2))
    of_q, of_kvs = torch.zeros_like(q, dtype=exact), [torch.zeros_like(kv, dtype=exact) for kv in kvs]
    for kv, of_kv, meeting in zip(kvs, of_kvs, meetings, strict=True):
        kernel.backward_(of_q, of_kv, results, kv, meeting, None)
    return sums.mean_THD, sums.log_TH, of_q, *of_kvs


ONE_QUERY = Case((((0, 1), (2,)),), 4, 2, None)
"""The second member's only query sees the first one's only key: torch's kernels have a way of their own for that."""


def _compare_kernels(make: Callable[[], FlashKernel], dtype: torch.dtype, device: str, tolerance: float) -> None:
    """Without windows, which flash attention does not take; heads of 8, the least that torch's kernels have."""
    chance = random.Random(11)
    for drawn in (ONE_QUERY, *(drawn_case(chance, 4, 90) for _ in range(30))):
        case = replace(drawn, head_size=8)
        for place in range(len(case.rings[0][0])):
            ours = _by_kernel(case, make(), place, dtype, device)
            theirs = _by_kernel(case, TileKernel(), place, dtype, device)
            for mine, exact in zip(ours, theirs, strict=True):
                assert _error(mine.cpu(), exact.double().cpu(), 1.0) <= tolerance, (case, place)


def test_flash_attention_is_called_so_that_it_gives_what_tiles_give() -> None:
    _compare_kernels(lambda: FlashKernel(_flash_forward, _flash_backward), torch.float64, "cpu", 1e-10)


@pytest.mark.gpu
def test_flash_attention_on_a_gpu_gives_what_tiles_give() -> None:
    """To bf16's rounding of weights, 2^-9, some of them a few times."""
    _compare_kernels(FlashKernel, torch.bfloat16, "cuda", 2**-6)


def test_tiles_are_chosen_where_flash_attention_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(4, 2, 8)
    assert isinstance(module._kernel(q, None), TileKernel)
    assert isinstance(module._kernel(q.bfloat16(), None), TileKernel)
    monkeypatch.setattr(FlashKernel, "takes", lambda q_THD, window: window is None)
    assert isinstance(module._kernel(q, None), FlashKernel)
    assert isinstance(module._kernel(q, 3), TileKernel)


def test_flash_attention_is_for_gpus_and_half_precision_without_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def takes(head_size: int, window: int | None, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> bool:
        q: Any = SimpleNamespace(shape=(4, 2, head_size), dtype=dtype, device=torch.device(device))
        return FlashKernel.takes(q, window)

    assert takes(8, None) and takes(256, None)
    assert not takes(8, 3) and not takes(4, None) and not takes(264, None)
    assert not takes(8, None, torch.float32) and not takes(8, None, device="cpu")


def test_what_flash_attention_is_called_with_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each copy of it waits for the device."""
    made: list[bool] = []
    make = attention_flash._call

    def counted(blocks: Sequence[Block], is_diagonal: bool, device: torch.device) -> Any:
        made.append(is_diagonal)
        return make(blocks, is_diagonal, device)

    monkeypatch.setattr(attention_flash, "_call", counted)
    monkeypatch.setattr(module, "_kernel", lambda q, window: FlashKernel(_flash_forward, _flash_backward))
    ring = Ring((9, 4), (0,), 0, make_group(TestRank(0, 1, None, timedelta())))
    for _ in range(3):
        q, k, v = (torch.randn(13, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
        ring_attention(q, k, v, ring).sum().backward()
    assert made == [True]


def test_the_plain_softmax_of_these_tests_is_torch_s() -> None:
    q, k, v, _ = whole_sequence(LONG, 0, 0, 40, torch.float64)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(plain_attention(q, k, v, None).transpose(0, 1)[None], theirs)
