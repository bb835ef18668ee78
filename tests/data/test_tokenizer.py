"""Tokenizers: nothing is lost, offsets are characters, text cannot forge the end of a document."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.data.tokenizer import load_tokenizer, train_bpe, without_surrogates
from hpc_train.errors import ConfigError, DataError

TEXTS = ["def f(x):\n    return x + 1\n", "Straße, naïve café, 東京 \N{GRINNING FACE}\n", "hello hello world " * 20]
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return train_bpe(TEXTS, 300, tmp_path_factory.mktemp("bpe") / "tok.json")


@pytest.fixture(params=["byte", "bpe"])
def tokenizer(request, bpe):
    return load_tokenizer("byte") if request.param == "byte" else bpe


@pytest.mark.parametrize("kind", ["byte", "bpe"])
@given(text=any_text)
def test_text_comes_back_and_offsets_cover_it(kind, bpe, text):
    tokenizer = load_tokenizer("byte") if kind == "byte" else bpe
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    with_offsets, offsets = tokenizer.encode_with_offsets(text)
    assert with_offsets == ids
    covered = {at for start, end in offsets for at in range(start, end)}
    assert covered == set(range(len(text)))


def test_bytes_are_the_ids_of_the_byte_tokenizer():
    tokenizer = load_tokenizer("byte")
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.name) == (257, 256, "byte")
    assert tokenizer.encode("aé") == [97, 195, 169]
    assert tokenizer.encode_with_offsets("aéb")[1] == [(0, 1), (1, 2), (1, 2), (2, 3)]
    assert tokenizer.decode([97, 256, 98, 195]) == "a<|endoftext|>b�"


def test_text_that_spells_the_end_of_document_token_does_not_become_it(tokenizer):
    text = "a <|endoftext|> b"
    ids = tokenizer.encode(text)
    assert tokenizer.eod_id not in ids
    assert tokenizer.decode(ids) == text


def test_the_vocabulary_counts_added_tokens(tmp_path, bpe):
    """FC-76: the type of the token file is chosen from the largest id."""
    value = json.loads(bpe.file_text())
    added = {**value["added_tokens"][0], "id": 70000, "content": "<|late|>"}
    value["added_tokens"].append(added)
    (tmp_path / "tok.json").write_text(json.dumps(value))
    assert load_tokenizer(tmp_path / "tok.json").vocab_size == bpe.vocab_size + 1
    assert load_tokenizer(tmp_path / "tok.json", eod="<|late|>").eod_id == bpe.vocab_size


def test_truncation_and_padding_of_a_file_do_not_touch_documents(tmp_path, bpe):
    value = json.loads(bpe.file_text())
    value["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    value["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    (tmp_path / "tok.json").write_text(json.dumps(value))
    assert load_tokenizer(tmp_path / "tok.json").encode(TEXTS[0]) == bpe.encode(TEXTS[0])


def test_training_twice_gives_the_same_file(tmp_path):
    for name in ("one.json", "two.json"):
        train_bpe(iter(TEXTS), 320, tmp_path / name)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json", "two.json"]


def test_a_small_corpus_gives_fewer_tokens_than_asked_for(tmp_path):
    assert 257 <= train_bpe(["ab"], 5000, tmp_path / "tok.json").vocab_size < 300


def test_a_tokenizer_survives_a_pickle(tokenizer):
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])
    assert (again.name, again.sha256) == (tokenizer.name, tokenizer.sha256)


def test_half_surrogate_pairs_are_replaced_in_place():
    assert without_surrogates("a\ud800b") == "a?b"
    assert without_surrogates("a\N{GRINNING FACE}b") == "a\N{GRINNING FACE}b"


def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json is not a tokenizer"):
        load_tokenizer(tmp_path / "bad.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(tmp_path / "binary.json")


def test_a_tokenizer_without_an_end_of_document_token_is_refused_with_the_cure(tmp_path, bpe):
    text = bpe.file_text().replace("<|endoftext|>", "<|fin|>")
    (tmp_path / "tok.json").write_text(text)
    with pytest.raises(DataError, match="--eod TOKEN"):
        load_tokenizer(tmp_path / "tok.json")
    assert load_tokenizer(tmp_path / "tok.json", eod="<|fin|>").eod_id == bpe.eod_id


def test_training_refuses_no_text_and_too_small_a_vocabulary(tmp_path):
    with pytest.raises(ConfigError, match="at least 257"):
        train_bpe(TEXTS, 256, tmp_path / "tok.json")
    with pytest.raises(DataError, match="2 documents, 0 characters"):
        train_bpe(["", ""], 300, tmp_path / "tok.json")
