"""Conversions against Hugging Face's own code: equal logits there and back, equal files after a round trip.

Tolerance 1e-5 in fp32: both compute the same sums of some tens of terms near 1, in another order.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpc_train.checkpoint.convert.convert_hf import convert
from hpc_train.checkpoint.folders.find import read_model
from tests.checkpoint.convert import hf_models
from tests.checkpoint.convert.hf_folders import SPECS, our_logits, stored_weights, weights, write_checkpoint

pytestmark = pytest.mark.transformers

TOKENS = torch.randint(0, 37, (2, 12), generator=torch.Generator().manual_seed(1))


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_logits_are_equal_from_hugging_face_and_back_and_so_are_the_files(name, tmp_path):
    model = hf_models.hf_model(name)
    hf_models.save(model, tmp_path / "hf")
    (tmp_path / "hf/tokenizer.json").write_text("{}")
    convert(tmp_path / "hf", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back")
    expected = hf_models.hf_logits(model, TOKENS)
    ours = our_logits(read_model(tmp_path / "ours"), stored_weights(tmp_path / "ours"), TOKENS)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    again = hf_models.hf_logits(hf_models.load(tmp_path / "back"), TOKENS)
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-5)
    assert _files(tmp_path / "back") == _files(tmp_path / "hf")


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2-tied"])
def test_a_folder_of_several_bf16_files_comes_back_the_same(name, tmp_path):
    hf_models.save(hf_models.hf_model(name).bfloat16(), tmp_path / "hf", max_shard_size="12KB")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    done = convert(tmp_path / "hf", tmp_path / "ours")
    assert done.dtypes == ("bfloat16",)
    convert(tmp_path / "ours", tmp_path / "back")
    assert _files(tmp_path / "back") == _files(tmp_path / "hf")


@pytest.mark.parametrize("name", SPECS)
def test_transformers_computes_the_logits_of_a_model_of_ours(name, tmp_path):
    """No config.json came with it: all of it is written anew."""
    tensors = weights(SPECS[name])
    write_checkpoint(tmp_path / "ours", SPECS[name], tensors)
    convert(tmp_path / "ours", tmp_path / "hf", max_shard_bytes=4000)
    logits = hf_models.hf_logits(hf_models.load(tmp_path / "hf"), TOKENS)
    torch.testing.assert_close(logits, our_logits(SPECS[name], tensors, TOKENS), rtol=1e-5, atol=1e-5)
    convert(tmp_path / "hf", tmp_path / "again")
    again = stored_weights(tmp_path / "again")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in tensors.items())


def test_bf16_is_said_in_the_configuration_that_transformers_reads(tmp_path):
    hf_models.save(hf_models.hf_model("llama-gqa"), tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "half", dtype="bf16")
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in hf_models.load(tmp_path / "half").state_dict().values()} == {torch.bfloat16}


def test_a_file_of_the_bare_gpt2_with_its_causal_masks_is_read(tmp_path):
    """The form in which GPT-2 itself was published: no `transformer.` before the names, masks among the weights."""
    from safetensors.torch import save_file

    model = hf_models.hf_model("gpt2-tied")
    hf_models.save(model, tmp_path / "hf")
    bare = {name: tensor.contiguous() for name, tensor in model.transformer.state_dict().items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, hf_models.POSITIONS, hf_models.POSITIONS)
    save_file(bare, tmp_path / "hf/model.safetensors")
    convert(tmp_path / "hf", tmp_path / "ours")
    ours = our_logits(read_model(tmp_path / "ours"), stored_weights(tmp_path / "ours"), TOKENS)
    torch.testing.assert_close(ours, hf_models.hf_logits(model, TOKENS), rtol=1e-5, atol=1e-5)
