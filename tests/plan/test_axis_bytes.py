"""Bytes along each axis: by hand, and against what really goes through the collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from hpc_train.errors import ConfigError
from hpc_train.plan.axis_bytes import axis_traffic, every_rank_kind
from hpc_train.plan.mesh import Mesh
from tests.parallel.meshes import Case, batches_of, config_of, normalised
from tests.ranks import TestRank, run_ranks
from tests.train.trainers import make_config, make_trainer, share_of

GPT = {"family": "gpt", "num_layers": 4, "hidden_size": 32, "num_heads": 4}


def _by_axis(config: Any, mesh: Mesh) -> dict[str, Any]:
    return {traffic.axis: traffic for traffic in axis_traffic(config, mesh)}


def test_an_axis_of_one_rank_sends_nothing() -> None:
    assert axis_traffic(make_config(GPT), Mesh(1, 1, 1, 1)) == ()


def test_pipeline_messages_are_one_each_way_for_each_micro_batch() -> None:
    config = make_config(GPT, {"pp": 2, "tp": 2}, micro_batch_size=3)
    found = _by_axis(config, Mesh(2, 2, 1, 2))["pp"]
    micro_batches, tokens = 24 // (2 * 3), 3 * 16
    assert (found.pattern, found.ends_bytes) == ("line", 0)
    assert found.forward_bytes == found.backward_bytes == micro_batches * tokens * 32 * 4


def test_sequence_parallel_divides_pipeline_messages_by_tp_and_bf16_halves_them() -> None:
    parallel = {"pp": 2, "tp": 4}
    plain = _by_axis(make_config(GPT, parallel), Mesh(2, 1, 1, 4))
    shared = _by_axis(make_config(GPT, {**parallel, "sequence_parallel": True}), Mesh(2, 1, 1, 4))
    half = _by_axis(make_config(GPT, parallel, precision="bf16"), Mesh(2, 1, 1, 4))
    assert plain["pp"].forward_bytes == 4 * shared["pp"].forward_bytes == 2 * half["pp"].forward_bytes
    # An all-gather and a reduce-scatter move what an all-reduce does; what is left is the sums of norms' gradients.
    assert 0 < shared["tp"].forward_bytes - plain["tp"].forward_bytes < 0.05 * plain["tp"].forward_bytes


def test_virtual_stages_send_as_often_as_they_are_many_and_once_less_around() -> None:
    config = make_config(GPT, {"pp": 2, "virtual_stages": 2})
    found = _by_axis(config, Mesh(2, 2, 1, 1))["pp"]
    message = 12 * 16 * 32 * 4
    assert (found.forward_bytes, found.backward_bytes, found.ends_bytes) == (2 * message, 2 * message, message)


def test_data_parallel_sends_fp32_gradients_and_parameters_in_their_type() -> None:
    numbers = 12800 * 4 + 61 * 32 * 2 + 16 * 32  # multiples of 4 * 16, so nothing is padded but the vectors' sum
    for precision, width in (("fp32", 8), ("bf16", 6)):
        found = _by_axis(make_config(GPT, precision=precision), Mesh(1, 4, 1, 1))["dp"]
        assert found.forward_bytes == pytest.approx(numbers * width * 3 / 4, rel=0.01)
        assert (found.pattern, found.backward_bytes) == ("ring", 0)


def test_gradients_that_travel_as_bf16_take_half_the_bytes() -> None:
    found = [
        _by_axis(make_config(GPT, {"gradient_wire": wire}), Mesh(1, 4, 1, 1))["dp"].forward_bytes
        for wire in ("fp32", "bf16")
    ]
    assert found[1] * 8 == found[0] * 6


def test_context_parallel_shares_tokens_and_turns_keys_and_values_around() -> None:
    config = make_config({**GPT, "family": "llama", "num_kv_heads": 2})
    alone, shared = _by_axis(config, Mesh(2, 1, 1, 1)), _by_axis(config, Mesh(2, 1, 4, 1))
    assert alone["pp"].forward_bytes == 4 * shared["pp"].forward_bytes
    keys_and_values = 24 * (16 // 4) * 2 * (2 * 8) * 4
    passes = 3 + 3 + 4
    gradients = _by_axis(config, Mesh(2, 4, 1, 1))["dp"].forward_bytes
    # Two layers a stage; and the ring of gradients is the one that dp has without cp.
    assert shared["cp"].forward_bytes == 2 * passes * keys_and_values + gradients


def test_a_batch_that_the_mesh_cannot_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="global_batch_size=24 is not a multiple"):
        axis_traffic(make_config(GPT), Mesh(1, 5, 1, 1))


COUNTED = [
    Case(1, 2, 2, "gpt", sequence_parallel=True, recompute="full"),
    Case(2, 1, 2, "llama-gqa", tied=True, sequence_parallel=True, dropout=0.2, recompute="full"),
    Case(2, 2, 1, "gpt", tied=True, uneven=True),
    Case(4, 1, 1, "llama", tied=True),
    Case(1, 1, 4, "llama", recompute="selective"),
    Case(1, 4, 1, "llama-gqa"),
    Case(2, 1, 2, "gpt", recompute="full"),
    Case(1, 1, 4, "gpt", recompute="full", dropout=0.2),
    Case(1, 1, 4, "llama-gqa", sequence_parallel=True, block="parallel"),
    Case(1, 1, 4, "gpt", recompute="full", dropout=0.2, block="parallel", sequence_parallel=True),
    Case(1, 1, 4, "llama", recompute="full", block="parallel"),
    Case(1, 1, 4, "gpt", block="parallel", window="mixed"),
    Case(1, 2, 2, "gpt", block="parallel", sequence_parallel=True, recompute="full", dropout=0.2),
    Case(2, 1, 2, "llama", block="parallel", recompute="full"),
    normalised(Case(2, 1, 2, "gpt", tied=True, schedule=("1f1b", 2))),
    normalised(Case(4, 1, 1, "llama", tied=True, schedule=("zero_bubble", 2))),
    normalised(Case(1, 2, 2, "llama-gqa", tied=True, schedule=("1f1b", 2))),
    normalised(Case(1, 4, 1, "gpt", wire="bf16", schedule=("1f1b", 2))),
    Case(1, 2, 2, "llama-gqa", recompute="full", sequence_parallel=True, tp_tiles=4),
    Case(1, 1, 4, "gpt", recompute="full", block="parallel", tp_tiles=4),
]
SHARED_HEADS = [Case(1, 1, 3, "llama-gqa"), Case(1, 1, 3, "llama-gqa", sequence_parallel=True)]


def _count_sent(me: TestRank, cases: list[Case]) -> list[dict[str, int]]:
    """What this rank hands to torch.distributed in the second step of each case, by the group's name. In the first one
    all ranks have the same parameters, which need no gather.

    A send counts its bytes; an all-reduce, whose messages torch does not show, what a ring sends.
    """
    import torch
    import torch.distributed as dist

    sent: Counter[str] = Counter()

    def described(group: Any) -> str:
        return "world" if group is None else str(group.group_desc)

    def counting(call: Callable[..., Any], share: Callable[[int], float]) -> Callable[..., Any]:
        def counted(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            if tensor.dtype != torch.float64:  # the sums of loss, tokens and norm, which the plan leaves out
                num_bytes = tensor.numel() * tensor.element_size()
                sent[described(group)] += round(num_bytes * share(dist.get_world_size(group)))
            return call(tensor, *args, group=group, **kwargs)

        return counted

    dist.isend = counting(dist.isend, lambda size: 1.0)  # the process is this test's own and ends with it
    dist.all_reduce = counting(dist.all_reduce, lambda size: 2 * (size - 1) / size)
    found = []
    for case in cases:
        trainer = make_trainer(me, config_of(case))
        for step in (1, 2):
            sent.clear()
            trainer.step(step, share_of(trainer, batches_of(step, case.num_sequences)), lr=1e-3)
        found.append(dict(sent))
    return found


@pytest.mark.parametrize(("world_size", "cases"), [(4, COUNTED), (3, SHARED_HEADS)])
def test_the_plan_counts_what_ranks_really_send(world_size: int, cases: list[Case]) -> None:
    of_ranks = run_ranks(_count_sent, world_size, cases, timeout_s=200)
    for index, case in enumerate(cases):
        config, mesh = config_of(case), Mesh(case.pp, case.dp, 1, case.tp)
        planned = dict(every_rank_kind(config, mesh))
        whole = next((axis for axis in ("pp", "dp", "tp") if getattr(mesh, axis) == world_size), "none")
        for rank, found in enumerate(of_ranks):
            counted = {
                whole if name in ("world", "default_pg") else name: count for name, count in found[index].items()
            }
            place = mesh.coords(rank)
            sent = planned[place["pp"], place["tp"]]
            expected = {
                "pp": sent.pp_forward, "pp_backward": sent.pp_backward, "tied": sent.pp_ends, "dp": sent.dp,
                "tp": sent.tp,
            }  # fmt: skip
            if case.schedule[1] > 1:
                # Where chunks go round, activations and gradients go both ways.
                expected["pp"] += expected.pop("pp_backward")
                counted["pp"] = counted.get("pp", 0) + counted.pop("pp_backward", 0)
            if mesh.pp == 2:
                # The two ends are all there is, so they have no group of their own.
                expected["pp"] += expected.pop("tied")
            assert set(counted) <= set(expected)
            for name, num_bytes in expected.items():
                assert counted.get(name, 0) == pytest.approx(num_bytes, abs=8), f"{case}, rank {rank}: {name}"
