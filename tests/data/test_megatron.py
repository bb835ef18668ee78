"""Token files against megatron-core's own reader and writer, byte for byte, both ways."""

import numpy as np
import pytest

from hpc_train.data.index import TokenFile
from hpc_train.data.index_writer import TokenFileWriter

# Importing megatron-core warns about what it and its own imports use.
pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore")]

DOCUMENTS = [[0, 5, 65535], [], [7], list(range(300)), []]


@pytest.fixture(scope="module")
def megatron():
    from megatron.core.datasets import indexed_dataset

    return indexed_dataset


def write_theirs(megatron, prefix, documents, dtype) -> None:
    import torch

    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(torch.tensor(document, dtype=torch.int64), [len(document)])
    builder.finalize(f"{prefix}.idx")


def write_ours(prefix, documents, dtype) -> None:
    with TokenFileWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
        writer.finish()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_both_writers_make_the_same_bytes(tmp_path, megatron, dtype):
    write_ours(tmp_path / "ours", DOCUMENTS, dtype)
    write_theirs(megatron, tmp_path / "theirs", DOCUMENTS, dtype)
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"ours{ending}").read_bytes() == (tmp_path / f"theirs{ending}").read_bytes()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_megatron_reads_what_we_write(tmp_path, megatron, dtype):
    write_ours(tmp_path / "ours", DOCUMENTS, dtype)
    dataset = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == DOCUMENTS
    assert dataset.document_indices.tolist() == list(range(len(DOCUMENTS) + 1))
    assert dataset.get(3, offset=10, length=5).tolist() == [10, 11, 12, 13, 14]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_we_read_what_megatron_writes(tmp_path, megatron, dtype):
    documents = [[t % 256 for t in document] for document in DOCUMENTS]
    write_theirs(megatron, tmp_path / "theirs", documents, dtype)
    tokens = TokenFile.open(tmp_path / "theirs")
    assert tokens.dtype == np.dtype(dtype)
    assert [tokens.read_document(i).tolist() for i in range(tokens.num_documents)] == documents


def test_we_read_documents_that_megatron_wrote_as_several_sequences(tmp_path, megatron):
    import torch

    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "set.bin"), dtype=np.int32, multimodal=True)
    builder.add_document(torch.arange(10), [4, 6], [0, 1])
    builder.add_document(torch.arange(3), [3], [0])
    builder.finalize(str(tmp_path / "set.idx"))
    tokens = TokenFile.open(tmp_path / "set")
    assert tokens.num_sequences == 3
    assert tokens.read(1).tolist() == [4, 5, 6, 7, 8, 9]
    assert [tokens.read_document(i).tolist() for i in range(2)] == [list(range(10)), [0, 1, 2]]
