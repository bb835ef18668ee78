"""A document a row: whole up to the longest row, cut or left out beyond it, and steps of about equal tokens."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.config_read import load_config
from hpc_train.data.blend import Blend, SourceIdentity
from hpc_train.data.build import BuildOptions, build
from hpc_train.data.command import _histogram_lines
from hpc_train.data.packing import Packing, Piece
from hpc_train.data.show import show
from hpc_train.data.steps import lengths_of_step
from hpc_train.data.tokenizer import load_tokenizer
from hpc_train.errors import CheckpointError, ConfigError, DataError
from tests.data.code_corpus import code_files
from tests.data.corpora import numbered, write

POLICIES = ("split", "truncate", "drop")


def rows_of(packing, epoch=0):
    return [packing.row(epoch, i) for i in range(packing.rows_in_epoch(epoch))]


def blend_of(lengths_of_sources, longest=64, weights=None, is_packed=False, **options):
    packings = [
        Packing(np.array(lengths), longest, is_packed=is_packed, source_index=number)
        for number, lengths in enumerate(lengths_of_sources)
    ]
    identities = [SourceIdentity(f"data/{i}", f"hash{i}", 0, len(x)) for i, x in enumerate(lengths_of_sources)]
    return Blend(packings, weights or [1.0] * len(packings), identities, **options)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(any),
    longest=st.integers(1, 50),
    policy=st.sampled_from(POLICIES),
    epoch=st.integers(0, 2),
)
def test_each_row_has_a_part_of_one_document_and_all_that_the_policy_keeps_comes_once(lengths, longest, policy, epoch):
    kept = {
        "split": lengths, "truncate": [min(n, longest) for n in lengths],
        "drop": [n if n <= longest else 0 for n in lengths],
    }[policy]  # fmt: skip
    if not any(kept):
        with pytest.raises(DataError, match="no token to train on"):
            Packing(np.array(lengths), longest, policy, is_packed=False)
        return
    packing = Packing(np.array(lengths), longest, policy, is_packed=False)
    rows = rows_of(packing, epoch)
    assert all(len(row) == 1 for row in rows)
    assert [row[0].length for row in rows] == [packing.row_length(epoch, i) for i in range(len(rows))]
    parts = sorted((piece.document, piece.start, piece.length) for row in rows for piece in row)
    assert parts == [
        (document, start, min(longest, length - start))
        for document, length in enumerate(kept)
        for start in range(0, length, longest)
    ]


L = 8


@pytest.mark.parametrize(
    ("length", "policy", "parts"),
    [
        (L - 1, "split", [(0, L - 1)]),
        (L, "split", [(0, L)]),
        (L + 1, "split", [(0, L), (L, 1)]),
        (4 * L, "split", [(0, L), (L, L), (2 * L, L), (3 * L, L)]),
        (L + 1, "truncate", [(0, L)]),
        (4 * L, "truncate", [(0, L)]),
        (L, "drop", [(0, L)]),
        (L + 1, "drop", []),
    ],
)
def test_a_document_about_as_long_as_the_longest_row(length, policy, parts):
    """FC-81, beside a short document, which stays as it is."""
    packing = Packing(np.array([3, length]), L, policy, is_packed=False)
    pieces = sorted((row[0] for row in rows_of(packing)), key=lambda piece: (piece.document, piece.start))
    assert pieces == [Piece(0, 0, 3), *(Piece(1, start, count) for start, count in parts)]


@pytest.mark.parametrize("policy", POLICIES)
def test_empty_documents_give_no_rows_and_keep_their_numbers(policy):
    """FC-79"""
    packing = Packing(np.array([0, 5, 0, 0, 7, 0]), 8, policy, is_packed=False)
    assert sorted((row[0].document, row[0].length) for row in rows_of(packing)) == [(1, 5), (4, 7)]


@given(
    lengths=st.lists(st.lists(st.integers(0, 64), min_size=1, max_size=30).filter(any), min_size=1, max_size=3),
    num_tokens=st.integers(64, 200),
)
def test_steps_take_whole_rows_up_to_so_many_tokens_and_an_epoch_loses_none(lengths, num_tokens):
    blend = blend_of(lengths, epochs=1)
    taken, steps = [], []
    while (found := blend.take_tokens(num_tokens))[0]:
        rows, of_rows = found
        assert of_rows == [blend.packings[row.source].row_length(row.epoch, row.row) for row in rows]
        taken += rows
        steps.append(of_rows)
    assert all(sum(step) <= num_tokens < sum(step) + later[0] for step, later in itertools.pairwise(steps))
    pieces = [(row.source, blend.packings[row.source].row(row.epoch, row.row)[0]) for row in taken]
    assert sorted((source, piece.document) for source, piece in pieces) == [
        (source, document)
        for source, of_source in enumerate(lengths)
        for document, length in enumerate(of_source)
        if length
    ]


def test_weights_are_shares_of_tokens_where_rows_differ_in_length():
    """A source of short documents gives as many tokens as one of long ones, and not as many documents."""
    blend = blend_of([[2] * 1000, [50] * 1000])
    rows, lengths = blend.take_tokens(4000)
    of_source = [sum(n for row, n in zip(rows, lengths, strict=True) if row.source == source) for source in (0, 1)]
    assert of_source[0] == pytest.approx(2000, abs=50) and of_source[1] == pytest.approx(2000, abs=50)


@pytest.mark.parametrize("at", [0, 1, 3, 8, 13])
def test_stopping_between_steps_equals_never_stopping(at):
    """FC-84: over the borders of epochs, of two sources."""
    lengths = [list(range(1, 30)), [64, 1, 0, 33]]
    whole = blend_of(lengths)
    expected = [whole.take_tokens(100) for _ in range(20)]
    first = blend_of(lengths)
    before = [first.take_tokens(100) for _ in range(at)]
    second = blend_of(lengths)
    second.restore(json.loads(json.dumps(first.state())))
    assert before + [second.take_tokens(100) for _ in range(20 - at)] == expected


def test_a_position_of_packed_rows_is_none_of_whole_documents_and_the_other_way():
    packed, whole = blend_of([[5, 6]], is_packed=True), blend_of([[5, 6]])
    for saved, other in ((packed, whole), (whole, packed)):
        with pytest.raises(CheckpointError, match=r"packed was (True|False) and is (True|False)"):
            other.restore(saved.state())
    whole.restore(packed.state(), allow_changed=True)
    packings = [Packing(np.array([3]), 4, is_packed=is_packed) for is_packed in (True, False)]
    with pytest.raises(ConfigError, match="all packed or none"):
        Blend(packings, [1.0, 1.0], [SourceIdentity("a", "a"), SourceIdentity("b", "b")])


def test_a_step_s_lengths_are_known_from_the_indices_alone(tmp_path):
    lengths = [3, 40, 7, 0, 64, 1, 90, 12]
    prefix = write(tmp_path / "set", numbered(lengths))
    config = load_config(
        "tiny",
        [f"data.train.0.prefix={prefix}", "data.heldout=[]", "train.eval_every=0", "data.seq_len=64",
         "train.global_batch_size=2", "train.micro_batch_size=1"],
    )  # fmt: skip
    steps = [lengths_of_step(config, number) for number in (1, 2)]
    assert all(0 < sum(step) <= 128 for step in steps)
    assert sorted(steps[0] + steps[1])[-2:] == [64, 64] or len(steps[0] + steps[1]) < 8
    (tmp_path / "set.bin").write_bytes(b"\xff" * (tmp_path / "set.bin").stat().st_size)
    assert lengths_of_step(load_config(
        "tiny",
        [f"data.train.0.prefix={prefix}", "data.heldout=[]", "train.eval_every=0", "data.seq_len=64",
         "train.global_batch_size=2", "train.micro_batch_size=1", "model.vocab_size=65536"],
    ), 2) == steps[1]  # fmt: skip


def test_lengths_of_a_step_that_leaves_nothing_to_learn_are_refused_as_the_run_is(tmp_path):
    prefix = write(tmp_path / "set", numbered([3, 1, 7]))
    changes = [f"data.train.0.prefix={prefix}", "data.heldout=[]", "train.eval_every=0", "data.seq_len=1"]
    with pytest.raises(DataError, match="nothing to learn from"):
        lengths_of_step(load_config("tiny", [*changes, "data.long_documents=drop"]), 1)
    assert set(lengths_of_step(load_config("tiny", changes), 1)) == {1}


def test_a_corpus_of_real_code_has_a_long_tail_and_keeps_it(tmp_path, capsys):
    """The sources of Python's library: most files are short, and a few long ones hold much of the tokens."""
    build(code_files(every=3), load_tokenizer("byte"), tmp_path / "code", BuildOptions(num_workers=2))
    shown = show(tmp_path / "code")
    lengths = shown["lengths"]
    assert lengths["max"] > 8 * lengths["p50"] and lengths["max"] > 64 * 1024
    rows = shown["histogram"]
    long_tokens = sum(row["tokens"] for row in rows if row["from"] >= 32768)
    long_documents = sum(row["documents"] for row in rows if row["from"] >= 32768)
    assert long_tokens / shown["num_tokens"] > 3 * long_documents / shown["num_documents"] > 0
    packing = Packing(np.array([lengths["max"], 5]), lengths["max"], is_packed=False)
    assert {row[0].length for row in rows_of(packing)} == {lengths["max"], 5}


def test_the_histogram_says_what_longer_documents_hold():
    lines = _histogram_lines([{"from": 1, "documents": 98, "tokens": 100}, {"from": 64, "documents": 2, "tokens": 300}])
    assert [line.split() for line in lines[1:]] == [
        ["1", "98", "98.00%", "100", "25.00%", "100.00%", "#" * 13],
        ["64", "2", "2.00%", "300", "75.00%", "75.00%", "#" * 40],
    ]
    assert len(_histogram_lines([])) == 1
