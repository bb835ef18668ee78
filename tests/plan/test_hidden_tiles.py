"""What tiles can hide: by hand for one transfer, and for whole models what every change must do to it."""

from __future__ import annotations

from fractions import Fraction

import pytest

from hpc_train.plan.hidden_tiles import Crossing, best_hidden_tiles
from hpc_train.plan.mesh import Mesh
from tests.plan.beside_share import beside_share
from tests.train.trainers import make_config

MODEL = {"family": "gpt", "num_layers": 4, "hidden_size": 64, "num_heads": 4, "vocab_size": 32}


def _crossing(is_entering: bool, transfer: int, product: int, behind: int = 0, own: str = "0") -> Crossing:
    return Crossing(is_entering, Fraction(transfer), Fraction(product), Fraction(behind), Fraction(own))


@pytest.mark.parametrize("is_entering", [False, True])
def test_a_transfer_as_long_as_its_product_is_hidden_but_for_one_tile(is_entering: bool) -> None:
    added = [_crossing(is_entering, 24, 24).added(tiles) for tiles in (1, 2, 3, 4)]
    assert added == [24, 12, 8, 6]


def test_own_rows_hide_the_tile_that_is_left_and_so_do_weights_behind_a_leaving() -> None:
    # 12 of own rows, then tiles of 3: all four transfers of 6 are over at 6, 12, 18, 24; rows at 15, 18, 21, 27.
    assert _crossing(True, 24, 24, own="1/2").added(4) == 3
    # Tiles of 3 are sent from 3 to 9, to 15, to 21, to 27, and own rows end at 24.
    assert _crossing(False, 24, 24, own="1/2").added(4) == 3
    assert _crossing(False, 24, 24, behind=6).added(4) == 0
    assert _crossing(False, 24, 24, behind=24).added(1) == 24
    # Of an entering, what is made behind it comes too late.
    assert _crossing(True, 24, 24, behind=24).added(4) == 6


def test_a_transfer_that_takes_longer_than_its_product_hides_no_more_than_that() -> None:
    assert _crossing(True, 100, 8).added(4) == 100 - 8 + 2
    assert _crossing(False, 100, 8).added(4) == 100 - 8 + 2


def _shares(tp: int = 2, tp_tiles: int = 4, seq_len: int = 16, pp: int = 1, **changes: object) -> list[float]:
    block = changes.pop("block", "serial")
    parallel = {"pp": pp, "tp": tp, "tp_tiles": tp_tiles, **changes}
    config = make_config({**MODEL, "block": block}, parallel, seq_len=seq_len)
    return [share for _, share in best_hidden_tiles(config, Mesh(pp, 1, 1, tp), (0.2, 0.8, 3.0))]


def test_a_plan_s_bound_rises_with_tiles_and_falls_with_communication() -> None:
    shares = _shares(sequence_parallel=True)
    assert shares == sorted(shares, reverse=True)
    assert all(0.0 < share < 1.0 for share in shares)
    assert all(two < four for two, four in zip(_shares(tp_tiles=2, sequence_parallel=True), shares, strict=True))
    assert _shares(tp_tiles=1) == []


def test_weights_that_wait_for_their_w_hide_nothing() -> None:
    whole = _shares(pp=2, sequence_parallel=True)
    split = _shares(pp=2, sequence_parallel=True, schedule="zero_bubble")
    assert split[0] <= whole[0]
    assert all(a < b for a, b in zip(split[1:], whole[1:], strict=True))


@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_numbers_that_are_sent_are_those_of_the_axis_bytes(block: str, recompute: str, sequence_parallel: bool) -> None:
    from hpc_train.plan.axis_bytes import axis_traffic
    from hpc_train.plan.hidden_tiles import _crossings

    model = {**MODEL, "block": block}
    parallel = {"tp": 2, "tp_tiles": 2, "sequence_parallel": sequence_parallel}
    config = make_config(model, parallel, recompute=recompute, global_batch_size=1000)
    (tp,) = axis_traffic(config, Mesh(1, 1, 1, 2))
    numbers = sum(crossing.transfer for crossing in _crossings(config, Mesh(1, 1, 1, 2)))
    loss = 2 * 16
    # Besides, norms' gradients are summed once a step.
    assert tp.forward_bytes / 1000 == pytest.approx(float(numbers + loss) * 4, rel=1e-3)


def test_transfers_run_beside_products_of_the_forward_of_inputs_and_of_weights_that_read() -> None:
    config = make_config({**MODEL, "vocab_size": 64}, {"tp": 2, "sequence_parallel": True})
    # Of 12 units a layer: all twice, those that read once more; in all thrice, with attention and the head.
    beside = 4 * (2 * 12 + 7)
    whole = 4 * 3 * (12 + 2 * 16 / 64) + 3 * (1 + 1 / 64)
    assert beside_share(config, Mesh(1, 1, 1, 2)) == pytest.approx(beside / whole, rel=0.01)
