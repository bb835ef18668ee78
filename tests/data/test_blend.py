"""Blends: the shares asked for, and a position that is found again exactly."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.data.blend import Blend, SourceIdentity
from hpc_train.data.packing import Packing
from hpc_train.errors import CheckpointError, ConfigError


def blend_of(
    rows=(16,), weights=None, seed=1, seq_len=4, policy="split", hashes=None, prefixes=None, epochs=None
) -> Blend:
    """A blend of sources with so many rows an epoch, of one document a row."""
    packings = [
        Packing(np.full(count, seq_len), seq_len, policy, seed=seed, source_index=i) for i, count in enumerate(rows)
    ]
    identities = [
        SourceIdentity(prefixes[i] if prefixes else f"data/{i}", hashes[i] if hashes else f"hash{i}", 0, count, False)
        for i, count in enumerate(rows)
    ]
    return Blend(packings, weights or [1.0] * len(rows), identities, epochs=epochs)


def documents(blend, refs):
    """What a rank would read: the pieces themselves, and not only their places."""
    return [
        (ref.source, tuple((p.document, p.start, p.length) for p in blend.packings[ref.source].row(ref.epoch, ref.row)))
        for ref in refs
    ]


def saved(blend) -> dict:
    return json.loads(json.dumps(blend.state(), allow_nan=False))


# Position


@pytest.mark.parametrize("policy", ["split", "truncate", "drop"])
@pytest.mark.parametrize("rows", [(16,), (5, 16), (3, 1, 7)])
def test_stopping_anywhere_equals_never_stopping(rows, policy):
    """FC-22, FC-84: at each row of two epochs and a half, the borders among them, and restored twice."""
    whole = blend_of(rows, policy=policy)
    expected = documents(whole, whole.take(40 + 9))
    for at in range(41):
        first = blend_of(rows, policy=policy)
        before = documents(first, first.take(at))
        second = blend_of(rows, policy=policy)
        second.restore(saved(first))
        assert second.state() == first.state()
        third = blend_of(rows, policy=policy)
        third.restore(saved(second))
        assert before + documents(third, third.take(9)) == expected[: at + 9]


@pytest.mark.parametrize("consumed", [6, 7, 12, 15])
def test_resuming_at_and_after_the_end_of_an_epoch(consumed):
    """FC-84: n, n + 1, 2n and 2n + 3 of n = 6 rows; the offset of one epoch is not applied to the next."""
    blend = blend_of((6,))
    blend.take(consumed)
    again = blend_of((6,))
    again.restore(saved(blend))
    assert again.total == consumed
    refs = again.take(12)
    assert [(ref.epoch, ref.row) for ref in refs] == [divmod(consumed + i, 6) for i in range(12)]
    whole_epoch = documents(again, refs[-consumed % 6 :][:6])
    assert sorted(whole_epoch) == [(0, ((document, 0, 4),)) for document in range(6)]


def test_each_epoch_has_its_own_order_and_every_row():
    """FC-22"""
    blend = blend_of((16,))
    epochs = [documents(blend, blend.take(16)) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    weights=st.lists(st.floats(0.01, 10), min_size=2, max_size=4),
)
def test_the_sequence_does_not_depend_on_how_many_rows_a_step_takes(sizes, weights):
    """FC-84: a changed batch size goes on where the old one stopped."""
    rows = [3, 8, 5, 2][: len(weights)]
    stepwise, whole = blend_of(rows, weights), blend_of(rows, weights)
    taken = [ref for size in sizes for ref in stepwise.take(size)]
    assert taken == whole.take(sum(sizes))
    assert stepwise.state() == whole.state()


def test_epochs_of_unequal_row_counts_are_followed_exactly():
    """FC-84: next-fit rows differ in number from epoch to epoch, so no division can find the place."""
    lengths = np.array([3, 5, 2, 7, 1, 6, 4, 4, 8, 2, 2])

    def make():
        return Blend([Packing(lengths, 8, "truncate", seed=9)], [1.0], [SourceIdentity("a", "h")])

    whole = make()
    counts = [whole.packings[0].rows_in_epoch(epoch) for epoch in range(6)]
    assert len(set(counts)) > 1
    expected = documents(whole, whole.take(sum(counts)))
    assert sorted(document for _, row in expected for document, _, _ in row) == sorted(list(range(11)) * 6)
    expected += documents(whole, whole.take(5))
    for at in range(sum(counts)):
        first, second = make(), make()
        first.take(at)
        second.restore(saved(first))
        assert documents(second, second.take(5)) == expected[at : at + 5]


# Weights


@given(weights=st.lists(st.floats(0.05, 20), min_size=1, max_size=5), num_rows=st.integers(1, 300))
def test_every_source_has_its_share_at_every_moment(weights, num_rows):
    blend = blend_of([1000] * len(weights), weights)
    counts = np.zeros(len(weights))
    for ref in blend.take(num_rows):
        counts[ref.source] += 1
        wanted = counts.sum() * np.array(weights) / sum(weights)
        assert np.abs(counts - wanted).max() < max(1, len(weights) - 1) + 1e-9


def test_weights_are_taken_as_written():
    """0.1 and 0.2 are a tenth and a fifth, not their nearest binary fractions."""
    refs = blend_of((900,) * 3, [0.1, 0.2, 0.3]).take(600)
    assert [sum(ref.source == i for ref in refs) for i in range(3)] == [100, 200, 300]
    assert [ref.source for ref in refs[:6]] * 100 == [ref.source for ref in refs]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_that_are_no_share_are_refused(weight):
    with pytest.raises(ConfigError, match="data/1"):
        blend_of((4, 4), [1.0, weight])


def test_a_blend_with_limited_epochs_ends_and_gives_every_row_once():
    blend = blend_of((3, 10), [5.0, 1.0], epochs=1)
    refs = blend.take(1000)
    assert sorted((ref.source, ref.row) for ref in refs) == [(0, i) for i in range(3)] + [(1, i) for i in range(10)]
    assert blend.take(5) == []


# Changes


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weights": [1.0, 3.0]}, "weight of data/1 was 1.0 and is 3.0"),
        ({"hashes": ["hash0", "other"]}, "the index of data/1 has other contents"),
        ({"hashes": ["hash0", "other"], "prefixes": ["data/0", "new/1"]}, "source 1 was data/1 and is new/1"),
        ({"rows": (16, 8, 8)}, "2 sources became 3"),
        ({"rows": (16, 9)}, "num_documents of data/1 was 8 and is 9"),
        ({"rows": (8, 16), "hashes": ["hash1", "hash0"], "prefixes": ["data/1", "data/0"]}, "source 0 was data/0"),
        ({"seed": 2}, "train.seed was 1 and is 2"),
        ({"seq_len": 8}, "data.seq_len was 4 and is 8"),
        ({"policy": "drop"}, "data.long_documents was split and is drop"),
    ],
)
def test_a_changed_blend_is_refused_and_the_change_named(change, message):
    """FC-84"""
    blend = blend_of((16, 8))
    blend.take(11)
    changed = blend_of(**{"rows": (16, 8), **change})
    with pytest.raises(CheckpointError, match=f"{message}.*allow_changed_blend"):
        changed.restore(saved(blend))
    assert changed.total == 0
    assert any(message in sentence for sentence in changed.restore(saved(blend), allow_changed=True))


def test_a_dataset_that_moved_is_the_same_dataset():
    blend = blend_of((16, 8))
    blend.take(11)
    moved = blend_of((16, 8), prefixes=["/scratch/0", "/scratch/1"])
    assert moved.restore(saved(blend)) == []
    assert moved.take(9) == blend.take(9)


def test_after_an_allowed_change_old_sources_go_on_and_new_ones_begin():
    """FC-84: a new source is not given every row until it has caught up."""
    blend = blend_of((100, 100))
    blend.take(50)
    changed = blend_of((100, 100, 100), [1.0, 1.0, 2.0])
    changed.restore(saved(blend), allow_changed=True)
    refs = changed.take(40)
    rows = [[ref.row for ref in refs if ref.source == i] for i in range(3)]
    assert rows == [list(range(25, 35)), list(range(25, 35)), list(range(20))]
    assert changed.total == 90


def test_after_an_allowed_change_of_the_order_a_source_begins_its_next_epoch():
    blend = blend_of((16, 8))
    blend.take(11)
    changed = blend_of((16, 8), seed=2)
    changed.restore(saved(blend), allow_changed=True)
    assert {(ref.epoch, ref.row) for ref in changed.take(2)} == {(1, 0)}


@pytest.mark.parametrize("damage", [{}, {"version": 99}, {"cursors": []}, {"cursors": [{"epoch": 1}, {"pos": 2}]}])
def test_a_damaged_position_is_refused(damage):
    blend = blend_of((16, 8))
    state = {**saved(blend), **damage} if damage else {}
    with pytest.raises(CheckpointError, match="saved data position"):
        blend.restore(state)
