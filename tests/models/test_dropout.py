"""Dropout is a function of place: any split of a batch or a sequence draws the same."""

from __future__ import annotations

import torch

from hpc_train.models.dropout import DropoutKey, drop


def key(step: int = 3, seed: int = 7, sequences: tuple[int, ...] = (0, 1, 5), probability: float = 0.25) -> DropoutKey:
    return DropoutKey(probability, seed, step, torch.tensor(sequences))


def dropped(key_: DropoutKey, layer: int = 2, site: int = 0) -> torch.Tensor:
    return drop(torch.ones(len(key_.sequences_B), 64, 96), key_, layer=layer, site=site, first_token=0) == 0


def test_a_share_of_the_tokens_or_of_the_sequences_draws_what_the_whole_does() -> None:
    """FC-91"""
    whole = drop(torch.ones(3, 64, 96), key(), layer=1, site=1, first_token=0)
    for first in (0, 16, 48):
        share = drop(torch.ones(3, 16, 96), key(), layer=1, site=1, first_token=first)
        assert torch.equal(share, whole[:, first : first + 16])
    alone = drop(torch.ones(1, 64, 96), key(sequences=(5,)), layer=1, site=1, first_token=0)
    assert torch.equal(alone, whole[2:])


def test_what_is_kept_is_scaled_and_what_is_dropped_has_the_probability() -> None:
    kept = drop(torch.ones(3, 64, 96), key(), layer=1, site=0, first_token=0)
    assert set(kept.unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.75)}
    assert abs((kept == 0).double().mean().item() - 0.25) < 0.01


def test_every_coordinate_changes_the_draw_and_draws_are_independent() -> None:
    """Of two independent draws at 1/4, 1/16 of the places are dropped in both."""
    base = dropped(key())
    others = [dropped(key(step=4)), dropped(key(seed=8)), dropped(key(), layer=3), dropped(key(), site=1)]
    others += [dropped(key(sequences=(1, 5, 0))), base.roll(1, dims=1), base.roll(1, dims=2)]
    for other in others:
        assert abs((base & other).double().mean().item() - 1 / 16) < 0.005


def test_without_a_key_nothing_is_dropped() -> None:
    x = torch.randn(1, 4, 8)
    assert drop(x, None, layer=0, site=0, first_token=0) is x


def test_pieces_of_several_sequences_in_one_row_draw_what_whole_sequences_do() -> None:
    whole = drop(torch.ones(3, 64, 96), key(), layer=1, site=1, first_token=0)
    pieces = [(2, 0, 5), (2, 59, 64), (0, 7, 21)]
    numbers = torch.cat([torch.full((stop - start,), (0, 1, 5)[row]) for row, start, stop in pieces])[None]
    places = torch.cat([torch.arange(start, stop) for _, start, stop in pieces])[None]
    packed = drop(torch.ones(1, 24, 96), DropoutKey(0.25, 7, 3, numbers, places), layer=1, site=1, first_token=0)
    assert torch.equal(packed[0], torch.cat([whole[row, start:stop] for row, start, stop in pieces]))
    share = drop(torch.ones(1, 8, 96), DropoutKey(0.25, 7, 3, numbers, places), layer=1, site=1, first_token=8)
    assert torch.equal(share[0], packed[0, 8:16])
