"""What the loader refuses of datasets that are sound files but cannot be trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpc_train.config import DataConfig, SourceConfig
from hpc_train.data.build import BuildOptions, build
from hpc_train.data.datasets import open_sources
from hpc_train.data.index_writer import TokenFileWriter
from hpc_train.data.tokenizer import load_tokenizer, train_bpe
from hpc_train.errors import DataError


def _config(train: Path, heldout: Path | None = None) -> DataConfig:
    more = {"heldout": (SourceConfig(prefix=str(heldout)),)} if heldout else {}
    return DataConfig(seq_len=8, train=(SourceConfig(prefix=str(train)),), **more)


def test_a_dataset_in_which_no_token_has_a_next_one_is_refused(tmp_path: Path) -> None:
    """FC-79, FC-87: it would train on nothing, and end well."""
    with TokenFileWriter(tmp_path / "ends", np.uint16) as writer:
        for _ in range(3):
            writer.add_document(np.array([5]))
        writer.finish()
    with pytest.raises(DataError, match="no token to train on: 3 documents with 3 tokens"):
        open_sources(_config(tmp_path / "ends"), 300)


def test_datasets_of_two_tokenizers_are_refused_together(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words and some more words\n" * 50)
    train_bpe(["some words and some more words\n" * 50], 270, tmp_path / "bpe.json")
    for name, tokenizer in (("bytes", "byte"), ("pieces", str(tmp_path / "bpe.json"))):
        options = BuildOptions(num_workers=1)
        build([tmp_path / "text.txt"], load_tokenizer(tokenizer), tmp_path / name, options)
    open_sources(_config(tmp_path / "bytes"), 300)
    with pytest.raises(DataError, match="one tokenizer"):
        open_sources(_config(tmp_path / "bytes", tmp_path / "pieces"), 300)
