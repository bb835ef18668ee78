"""The loader: labels, masks, positions and boundaries of what a rank trains on; checks before the first step."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_train.config import DataConfig, SourceConfig, TrainConfig
from hpc_train.data import datasets
from hpc_train.data.build import BuildOptions, build
from hpc_train.data.datasets import open_sources
from hpc_train.data.index_writer import TokenFileWriter
from hpc_train.data.loader import Loader
from hpc_train.data.step_files import IGNORED_LABEL
from hpc_train.data.steps import Step
from hpc_train.data.tokenizer import load_tokenizer
from hpc_train.errors import CheckpointError, ConfigError, DataError
from hpc_train.plan.batch import BatchPlan, MicroBatch, SequenceSlice

VOCAB = 1000


def write(prefix, documents, dtype=np.uint16) -> str:
    with TokenFileWriter(prefix, dtype, overwrite=True) as writer:
        for document in documents:
            writer.add_document(document)
        writer.finish()
    return str(prefix)


def numbered(lengths, first=1):
    """Documents of consecutive ids, so that each id names its place."""
    ends = np.cumsum([0, *lengths]) + first
    return [list(range(start, end)) for start, end in itertools.pairwise(ends)]


def load(
    prefix, *, seq_len=8, size=4, micro=1, dp=1, seed=1, mask=False, heldout=(), vocab=VOCAB, eval_batches=2, **data
) -> Loader:
    data_config = DataConfig(
        seq_len=seq_len,
        train=(SourceConfig(prefix=prefix, loss_mask=mask),),
        heldout=tuple(SourceConfig(prefix=p) for p in heldout),
        **data,
    )
    train_config = TrainConfig(
        steps=1, global_batch_size=size, micro_batch_size=micro, seed=seed, eval_batches=eval_batches
    )
    return Loader(data_config, train_config, vocab_size=vocab, dp=dp)


def batches_of(loader, step, dp=1):
    return [batch for rank in range(dp) for batch in loader.micro_batches(step, rank)]


def rows_of(loader, step, dp=1):
    """(tokens, labels, positions, boundaries) of each sequence of a step, in the order of the plan."""
    return [
        (batch.tokens[i].tolist(), batch.labels[i].tolist(), batch.positions[i].tolist(), batch.boundaries[i])
        for batch in batches_of(loader, step, dp)
        for i in range(len(batch.tokens))
    ]


def epoch_rows(loader):
    """Every row of epoch 0 of a one-source loader with global_batch_size 1."""
    count = loader.blend.packings[0].rows_in_epoch(0)
    return [row for step in range(count) for row in rows_of(loader, loader.next_step(step))]


# Labels


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda all_lengths: max(all_lengths) > 1),
    seq_len=st.integers(1, 12),
    policy=st.sampled_from(["split", "truncate"]),
)
def test_each_label_is_the_next_token_of_its_document(tmp_path, lengths, seq_len, policy):
    documents = numbered(lengths)
    following = {a: b for document in documents for a, b in itertools.pairwise(document)}
    loader = load(write(tmp_path / "set", documents), seq_len=seq_len, size=1, long_documents=policy)
    seen = []
    for tokens, labels, positions, boundaries in epoch_rows(loader):
        assert len(tokens) == len(labels) == len(positions) == sum(boundaries) == seq_len
        assert positions == [i for length in boundaries for i in range(length)]
        for token, label in zip(tokens, labels, strict=True):
            assert label == following.get(token, IGNORED_LABEL)
            if token:
                seen.append(token)
    expected = [t for d in documents for t in (d if policy == "split" else d[:seq_len])]
    assert sorted(seen) == expected


def test_a_document_that_is_cut_loses_no_label(tmp_path):
    """FC-81: a row is seq_len inputs and seq_len labels, and the last label lies in the next row."""
    loader = load(write(tmp_path / "set", numbered([20])), seq_len=8, size=1)
    rows = sorted(epoch_rows(loader), key=lambda row: row[0][0])
    assert [row[0] for row in rows] == [
        list(range(1, 9)),
        list(range(9, 17)),
        [17, 18, 19, 20, 0, 0, 0, 0],
    ]
    assert [row[1] for row in rows] == [list(range(2, 10)), list(range(10, 18)), [18, 19, 20] + [-100] * 5]
    assert [row[3] for row in rows] == [(8,), (8,), (4, 4)]


def test_no_piece_crosses_into_another_document(tmp_path):
    documents = numbered([3, 0, 5, 2, 9, 1])
    owner = {token: i for i, document in enumerate(documents) for token in document}
    for tokens, _, _, boundaries in epoch_rows(load(write(tmp_path / "set", documents), size=1)):
        edges = np.cumsum([0, *boundaries])
        for start, end in itertools.pairwise(edges):
            assert len({owner.get(token) for token in tokens[start:end]}) == 1


def test_a_batch_counts_its_tokens_and_labels_and_has_int64_tensors(tmp_path):
    import torch

    loader = load(write(tmp_path / "set", numbered([5])), seq_len=8, size=2, micro=2)
    (batch,) = batches_of(loader, loader.next_step(0))
    assert batch.tokens.shape == batch.labels.shape == batch.positions.shape == (2, 8)
    assert {batch.tokens.dtype, batch.labels.dtype, batch.positions.dtype} == {torch.int64}
    assert (batch.num_tokens, batch.num_supervised) == (10, 8)


# Loss mask


def write_mask(prefix, mask) -> None:
    write(f"{prefix}_loss_mask", mask, np.uint8)


def test_the_mask_is_that_of_the_label_token(tmp_path):
    prefix = write(tmp_path / "set", [[11, 12, 13, 14, 15, 16], [21, 22]])
    write_mask(prefix, [[1, 0, 1, 1, 0, 1], [0, 0]])
    following = {12: 13, 13: 14, 15: 16}
    for seq_len in (2, 3, 8):
        loader = load(prefix, seq_len=seq_len, size=1, mask=True)
        labels = {t: y for tokens, ys, *_ in epoch_rows(loader) for t, y in zip(tokens, ys, strict=True) if t}
        assert labels == {t: following.get(t, -100) for t in (11, 12, 13, 14, 15, 16, 21, 22)}


def test_micro_batches_without_a_supervised_token_are_given_all_the_same(tmp_path):
    """FC-87: every rank runs its micro-batches; the loss divides by the sum over all ranks."""
    prefix = write(tmp_path / "set", [[1, 2, 3, 4], [5, 6, 7, 8]])
    write_mask(prefix, [[0] * 4, [1] * 4])
    loader = load(prefix, seq_len=4, size=2, dp=2, mask=True)
    step = loader.next_step(0)
    assert sorted(batch.num_supervised for batch in batches_of(loader, step, dp=2)) == [0, 3]


def test_a_built_mask_reaches_the_labels(tmp_path):
    rows = [{"text": "ask: yes", "learn": [[5, 8]]}, {"text": "ask: no", "learn": False}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = BuildOptions(loss_mask_field="learn", num_workers=1)
    build([tmp_path / "rows.jsonl"], load_tokenizer("byte"), tmp_path / "set", options)
    loader = load(str(tmp_path / "set"), seq_len=32, size=1, mask=True)
    labels = [y for _, ys, *_ in epoch_rows(loader) for y in ys if y != -100]
    assert labels == [*b"yes", 256]


# Plans and ranks


@pytest.fixture
def sixty(tmp_path) -> str:
    return write(tmp_path / "sixty", numbered(list(range(1, 40))))


@pytest.mark.parametrize("dp, micro", [(2, 1), (3, 2), (6, 1), (1, 12), (4, 3)])
def test_every_number_of_ranks_trains_on_the_same_rows_in_the_same_order(sixty, dp, micro):
    one, many = load(sixty, size=12), load(sixty, size=12, dp=dp, micro=micro)
    for step in range(6):
        assert rows_of(one, one.next_step(step)) == rows_of(many, many.next_step(step), dp)
    assert one.state() == many.state()


def test_batch_sizes_that_do_not_divide_are_refused(sixty):
    with pytest.raises(ConfigError, match="global_batch_size=12 or 16"):
        load(sixty, size=13, dp=4)


def test_a_sequence_may_be_cut_over_ranks_and_micro_batches(sixty):
    """What later planners give: the same row in two slices on two ranks, and unequal numbers of micro-batches."""
    whole, cut = load(sixty, size=2), load(sixty, size=2)
    rows = rows_of(whole, whole.next_step(0))

    def part(sequence, start, length):
        return MicroBatch((SequenceSlice(sequence, start, length),))

    plan = BatchPlan(0, ((part(0, 0, 3), part(1, 0, 8)), (part(0, 3, 5),)), 2)
    step = Step(plan, cut.next_step(0).rows)
    first, second, third = batches_of(cut, step, dp=2)
    for at, name in enumerate(("tokens", "labels", "positions")):
        joined = getattr(first, name)[0].tolist() + getattr(third, name)[0].tolist()
        assert joined == rows[0][at]
        assert getattr(second, name)[0].tolist() == rows[1][at]
    assert sum(first.boundaries[0]) == 3 and sum(third.boundaries[0]) == 5
    assert first.num_tokens + third.num_tokens + second.num_tokens == 16


# Position


def test_a_restored_loader_gives_the_rows_of_one_that_never_stopped(sixty):
    """FC-22: over the borders of two epochs; 39 documents of 1..39 tokens are 98 rows of 8."""
    whole = load(sixty, size=12)
    expected = [rows_of(whole, whole.next_step(step)) for step in range(20)]
    for at in (0, 1, 7, 8, 9, 16, 17):
        first, second = load(sixty, size=12), load(sixty, size=12, dp=3)
        for step in range(at):
            first.next_step(step)
        assert second.restore(json.loads(json.dumps(first.state()))) == []
        assert [rows_of(second, second.next_step(step), 3) for step in (at, at + 1)] == expected[at : at + 2]


def test_a_changed_dataset_is_refused_on_restore_unless_allowed(sixty, tmp_path):
    """FC-84"""
    loader = load(sixty)
    loader.next_step(0)
    other = write(tmp_path / "other", numbered([9] * 20))
    with pytest.raises(CheckpointError, match=r"source 0 was .*sixty and is .*other"):
        load(other).restore(loader.state())
    assert load(other, allow_changed_blend=True).restore(loader.state())


# Held-out data


def heldout_rows(loader, dp=1):
    return [rows_of(loader, step, dp) for step in loader.heldout_steps()]


@pytest.mark.parametrize("dp, micro", [(2, 1), (3, 1), (8, 1), (3, 4)])
def test_every_number_of_ranks_evaluates_the_same_rows(sixty, tmp_path, dp, micro):
    held = write(tmp_path / "held", numbered([5, 9, 30, 2], first=500))
    one = load(sixty, size=24, heldout=[held])
    many = load(sixty, size=24, heldout=[held], dp=dp, micro=micro)
    (expected,), (found,) = heldout_rows(one), heldout_rows(many, dp)
    padding = found[len(expected) :]
    assert found[: len(expected)] == expected and len(expected) == 6
    assert len(found) % (dp * micro) == 0
    assert all(set(tokens) == {0} and set(labels) == {-100} for tokens, labels, *_ in padding)


def test_evaluation_is_the_same_each_time_whatever_training_took_and_the_seed(sixty, tmp_path):
    held = write(tmp_path / "held", numbered([5, 9, 30, 2, 40, 40], first=500))
    loader, other = load(sixty, heldout=[held]), load(sixty, heldout=[held], seed=2)
    before = heldout_rows(loader)
    loader.next_step(0)
    assert heldout_rows(loader) == before == heldout_rows(other)
    assert [len(rows) for rows in before] == [4, 4]  # eval_batches of global_batch_size, of 16 rows
    assert sum(len(rows_of(loader, step)) for step in loader.heldout_steps(100)) == 16


def test_each_held_out_row_is_evaluated_once_at_most(sixty, tmp_path):
    held = write(tmp_path / "held", numbered([20, 20], first=500))
    loader = load(sixty, heldout=[held], eval_batches=50)
    tokens = [t for rows in heldout_rows(loader) for row in rows for t in row[0] if t]
    assert sorted(tokens) == list(range(500, 540))


def test_the_last_documents_are_held_out_of_training(tmp_path):
    prefix = write(tmp_path / "set", numbered([4] * 20))
    loader = load(prefix, seq_len=4, size=1, heldout_fraction=0.25, eval_batches=100)
    trained = {t for row in epoch_rows(loader) for t in row[0]}
    held = {t for rows in heldout_rows(loader) for row in rows for t in row[0]}
    assert trained == set(range(1, 61)) and held == set(range(61, 81))


@pytest.mark.parametrize("lengths, fraction", [([5], 0.5), ([5, 5, 5], 0.01), ([5, 5, 5], 0.99)])
def test_a_held_out_share_that_leaves_a_side_empty_is_refused(tmp_path, lengths, fraction):
    """FC-79: a validation split of 0 documents."""
    with pytest.raises(DataError, match=f"heldout_fraction={fraction} of the {len(lengths)} documents"):
        load(write(tmp_path / "set", numbered(lengths)), heldout_fraction=fraction)


def test_without_held_out_data_there_is_nothing_to_evaluate(sixty):
    loader = load(sixty)
    assert not loader.has_heldout
    assert heldout_rows(loader) == []


# Checks at the start


def source(prefix, **more):
    return DataConfig(seq_len=8, train=(SourceConfig(prefix=str(prefix), **more),))


@pytest.fixture
def built(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    build([tmp_path / "a.txt"], load_tokenizer("byte"), tmp_path / "set", BuildOptions(num_workers=1))
    return tmp_path / "set"


def test_an_id_above_the_vocabulary_is_refused_before_training(built, tmp_path):
    assert open_sources(source(built), 257).train[0].num_documents == 1
    with pytest.raises(DataError, match=r"tokenizer byte of 257 tokens, has the token id 256.*vocab_size=257"):
        open_sources(source(built), 256)
    plain = write(tmp_path / "plain", [[1, 999], [5]])
    assert open_sources(source(plain), 1000)
    with pytest.raises(DataError, match=r"plain\.bin, made, has the token id 999.*vocab_size=1000 or more"):
        open_sources(source(plain), 999)


def test_an_id_above_the_vocabulary_in_a_file_too_large_to_scan_is_found_when_read(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "_SCAN_LIMIT_BYTES", 0)
    loader = load(write(tmp_path / "set", [[1, 2], [3, 999]]), size=1, vocab=500)
    with pytest.raises(DataError, match=r"document 1 of .*set has the token id 999, and model\.vocab_size=500"):
        rows_of(loader, loader.next_step(0))


def test_a_negative_id_is_found_when_read(tmp_path):
    prefix = write(tmp_path / "set", [[1, 2, 3]], np.int32)
    np.array([1, -1, 3], "<i4").tofile(f"{prefix}.bin")
    loader = load(prefix, size=1)
    with pytest.raises(DataError, match="token id -1"):
        rows_of(loader, loader.next_step(0))


def test_files_of_different_builds_are_refused(built):
    write(built, [[1, 2, 3]])
    with pytest.raises(DataError, match=r"set\.json describes another build: it says 1 documents, 10 tokens"):
        open_sources(source(built), 300)


def test_a_damaged_sidecar_is_refused_and_a_foreign_one_left_alone(built):
    path = built.with_suffix(".json")
    path.write_text('{"of": "another program"}')
    assert open_sources(source(built), 300).train[0].sidecar is None
    for text in ('{"hpc_train_version": "1"}', "{", "\udcff"):
        path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(DataError, match=r"set\.json"):
            open_sources(source(built), 300)


def test_a_missing_or_foreign_mask_is_refused(tmp_path):
    prefix = write(tmp_path / "set", [[1, 2, 3], [4]])
    with pytest.raises(DataError, match=r"set_loss_mask\.idx does not exist.*--loss-mask"):
        open_sources(source(prefix, loss_mask=True), VOCAB)
    write_mask(prefix, [[1, 1], [1, 1]])
    with pytest.raises(DataError, match="set_loss_mask does not belong to"):
        open_sources(source(prefix, loss_mask=True), VOCAB)


def test_a_missing_dataset_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"none\.idx does not exist"):
        open_sources(source(tmp_path / "none"), VOCAB)


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_a_dataset_without_tokens_is_refused(tmp_path, documents):
    """FC-79"""
    with pytest.raises(DataError, match=f"set has no token to train on: {len(documents)} documents with 0 tokens"):
        load(write(tmp_path / "set", documents))


def test_data_of_which_no_token_follows_another_is_refused(tmp_path):
    prefix = write(tmp_path / "set", [[1, 2, 3], [4]])
    for seq_len in (2, 1):
        with pytest.raises(DataError, match=f"nothing to learn from: .*seq_len={seq_len} with .*long_documents=drop"):
            load(prefix, seq_len=seq_len, long_documents="drop")
    for policy in ("split", "truncate"):
        load(prefix, seq_len=1, long_documents=policy)


def test_configurations_are_read_by_attribute_only(sixty):
    """A user's own training script may pass any object with these fields."""
    data = SimpleNamespace(
        seq_len=8, heldout=(), heldout_fraction=0.0, long_documents="split", allow_changed_blend=False,
        train=(SimpleNamespace(prefix=sixty, weight=1.0, loss_mask=False),),
    )  # fmt: skip
    train = SimpleNamespace(global_batch_size=2, micro_batch_size=1, seed=1, eval_batches=1)
    loader = Loader(data, train, vocab_size=VOCAB, dp=2)
    assert len(rows_of(loader, loader.next_step(0), 2)) == 2
