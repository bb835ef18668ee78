"""`hpc-train data`: arguments that load nothing, output for people and for machines, checks of `data show`."""

import argparse
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from hpc_train.data.arguments import add_data_parser
from hpc_train.data.command import run_data_command
from hpc_train.data.index_writer import TokenFileWriter
from hpc_train.data.show import show
from hpc_train.errors import ConfigError, DataError


def run(*arguments) -> int:
    parser = argparse.ArgumentParser()
    add_data_parser(parser.add_subparsers())
    return run_data_command(parser.parse_args(["data", *map(str, arguments)]))


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i:02}.py").write_text(f"value_{i} = {i}\n" * (1 + i * i // 20))
    return folder


def test_arguments_load_neither_numpy_nor_pydantic():
    code = (
        "import sys, argparse, hpc_train.data.arguments, hpc_train.data.command\n"
        "print(*sorted({'numpy', 'pydantic', 'torch', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("command", [[], ["build"], ["show"], ["tokenizer"]])
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit) as end:
        run(*command, "--help")
    assert end.value.code == 0
    assert "hpc-train data" in capsys.readouterr().out.partition("example")[2]


def test_from_sources_to_a_verified_dataset(corpus, tmp_path, capsys):
    tokenizer, out = tmp_path / "tok.json", tmp_path / "data" / "code"
    assert run("tokenizer", corpus, "--vocab-size", 300, "--out", tokenizer) == 0
    assert capsys.readouterr().out == f"{tokenizer}: 300 tokens\n"
    build = ["build", corpus, "--suffix", ".py", "--tokenizer", tokenizer, "--out", out, "--heldout", "0.2"]
    assert run(*build, "--workers", "1") == 0
    captured = capsys.readouterr()
    assert "unigram entropy" in captured.out and "model.vocab_size=300" in captured.out
    assert captured.err.startswith("done: 60 documents")
    assert run("show", out, "--verify") == 0
    text = capsys.readouterr().out
    assert "first text: 'value_" in text and "check, hash of .idx by code.json: ok" in text


def test_json_is_all_that_stands_on_stdout(corpus, tmp_path, capsys):
    out = tmp_path / "set"
    assert run("build", corpus, "--tokenizer", "byte", "--out", out, "--workers", "1", "--json") == 0
    built = json.loads(capsys.readouterr().out)
    assert run("show", out, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert run("tokenizer", corpus, "--vocab-size", "300", "--out", tmp_path / "t.json", "--json") == 0
    assert json.loads(capsys.readouterr().out)["vocab_size"] == 300
    assert shown["num_tokens"] == built["train"]["num_tokens"]
    assert shown["unigram_entropy_nats"] == pytest.approx(built["train"]["unigram_entropy_nats"])
    assert shown["max_token_id"] == 256
    assert sum(row["documents"] for row in shown["histogram"]) == 60
    assert sum(row["tokens"] for row in shown["histogram"]) == shown["num_tokens"]


def test_a_corpus_that_gives_fewer_tokens_says_so(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("ab")
    run("tokenizer", tmp_path / "a.txt", "--vocab-size", 5000, "--out", tmp_path / "t.json")
    assert "the corpus gives no more" in capsys.readouterr().out


def test_bad_arguments_raise_what_the_exit_code_table_names(corpus, tmp_path):
    with pytest.raises(DataError, match=r"none\.json does not exist"):
        run("build", corpus, "--tokenizer", tmp_path / "none.json", "--out", tmp_path / "set")
    with pytest.raises(ConfigError, match="--vocab-size 10"):
        run("tokenizer", corpus, "--vocab-size", 10, "--out", tmp_path / "t.json")
    with pytest.raises(ConfigError, match="--workers 0"):
        run("build", corpus, "--tokenizer", "byte", "--out", tmp_path / "set", "--workers", 0)


# show


def write(prefix, documents, dtype=np.uint16):
    with TokenFileWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
        writer.finish()
    return prefix


def test_lengths_show_their_tail(tmp_path):
    prefix = write(tmp_path / "set", [[1]] * 990 + [[1] * 100] * 9 + [[1] * 5000] + [[]])
    shown = show(prefix)
    assert shown["lengths"] == {
        "min": 0, "mean": 6.9, "p50": 1, "p90": 1, "p99": 1, "p99.9": 100, "max": 5000, "empty": 1,
    }  # fmt: skip
    assert shown["histogram"] == [
        {"from": 1, "documents": 990, "tokens": 990},
        {"from": 64, "documents": 9, "tokens": 900},
        {"from": 4096, "documents": 1, "tokens": 5000},
    ]


def test_bins_begin_at_powers_of_two(tmp_path):
    shown = show(write(tmp_path / "set", [[1] * n for n in (1, 2, 3, 4, 7, 8)]))
    assert [(row["from"], row["documents"]) for row in shown["histogram"]] == [(1, 1), (2, 2), (4, 2), (8, 1)]


@pytest.mark.parametrize("documents", [[], [[]]])
def test_a_dataset_without_tokens_is_described(tmp_path, documents, capsys):
    """FC-79, FC-97"""
    prefix = write(tmp_path / "set", documents)
    shown = json.loads(json.dumps(show(prefix, verify=True), allow_nan=False))
    assert (shown["num_tokens"], shown["unigram_entropy_nats"], shown["max_token_id"]) == (0, None, None)
    assert run("show", prefix) == 0
    assert "unigram entropy: n/a" in capsys.readouterr().out


def test_a_foreign_dataset_is_described_without_a_sidecar(tmp_path):
    shown = show(write(tmp_path / "set", [[5, 6], [6, 7]], np.int32), verify=True)
    assert (shown["tokenizer"], shown["first_text"], shown["first_tokens"]) == (None, None, [5, 6])
    assert shown["unigram_entropy_nats"] == pytest.approx(1.5 * np.log(2))


@pytest.fixture
def built(corpus, tmp_path):
    out = tmp_path / "set"
    run("build", corpus, "--tokenizer", "byte", "--out", out, "--workers", "1")
    return out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("[1]", "it is a list, and not a JSON object"),
        ("3", "it is a whole number, and not a JSON object"),
        ({"hpc_train_version": None}, "its key 'hpc_train_version' is null, and not text"),
        ({"num_tokens": "many"}, "its key 'num_tokens' is text, and not a whole number"),
        ({"num_documents": True}, "its key 'num_documents' is true or false, and not a whole number"),
        ({"skipped": []}, "its key 'skipped' is a list, and not an object"),
        ({"skipped": {"empty": "x"}}, "its key 'skipped.empty' is text"),
        ("idx_sha256", "it lacks the key 'idx_sha256'"),
        ("hpc_train_version", "it lacks the key 'hpc_train_version'"),
    ],
)
def test_a_side_file_that_is_none_is_refused_with_its_key(built, change, said):
    path = built.with_suffix(".json")
    document = json.loads(path.read_text())
    if isinstance(change, dict):
        path.write_text(json.dumps({**document, **change}))
    elif change in document:
        path.write_text(json.dumps({key: value for key, value in document.items() if key != change}))
    else:
        path.write_text(change)
    with pytest.raises(DataError, match=f"set.json cannot be read: {re.escape(said)}"):
        show(built)


def test_verify_finds_an_id_that_changed(built, capsys):
    data = np.fromfile(f"{built}.bin", "<u2")
    data[3] = 60000
    data.tofile(f"{built}.bin")
    with pytest.raises(DataError, match=r"largest token id by set\.json: 256 expected, 60000 found"):
        show(built, verify=True)


def test_verify_finds_an_index_that_changed(built):
    tokens = np.fromfile(f"{built}.bin", "<u2")
    half = len(tokens) // 2
    for ending in ("bin", "idx"):
        built.with_suffix(f".{ending}").unlink()
    write(built, [tokens[:1], tokens[1:half], *[[int(t)] for t in tokens[half : half + 57]], tokens[half + 57 :]])
    with pytest.raises(DataError, match=r"hash of \.idx"):
        show(built, verify=True)


def test_verify_finds_a_mask_of_another_dataset(built):
    write(f"{built}_loss_mask", [[1, 1]], np.uint8)
    with pytest.raises(DataError, match="lengths of the loss mask"):
        show(built)
