"""Small checkpoints of ours and Hugging Face folders made of them, without transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from hpc_train.checkpoint.convert.convert_hf import convert
from hpc_train.checkpoint.files.rows import read_whole
from hpc_train.checkpoint.folders.find import write_model_file
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.checkpoint.format.model_tensors import MODEL_PREFIX, ModelSpec, model_tensors
from hpc_train.checkpoint.format.state import DeferredPiece
from hpc_train.checkpoint.saving.save import write_alone
from hpc_train.config import ModelConfig
from hpc_train.models.attention import AttentionPlan
from hpc_train.models.transformer import Transformer
from hpc_train.plan.flat import Box

SPECS = {
    "llama": ModelSpec(
        ModelConfig(
            family="llama", num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, ffn_hidden_size=24,
            vocab_size=37, rope_theta=777.0, norm_eps=2e-5,
        ),
        12,
    ),
    "llama-tied": ModelSpec(
        ModelConfig(family="llama", num_layers=1, hidden_size=16, num_heads=2, vocab_size=37, tied_embeddings=True), 12
    ),
    "gpt": ModelSpec(ModelConfig(family="gpt", num_layers=2, hidden_size=16, num_heads=4, vocab_size=37), 12),
    "gpt-tied": ModelSpec(
        ModelConfig(
            family="gpt", num_layers=1, hidden_size=16, num_heads=2, ffn_hidden_size=24, vocab_size=37,
            tied_embeddings=True,
        ),
        12,
    ),
}  # fmt: skip


def weights(spec: ModelSpec, scale: float = 0.3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in model_tensors(spec).items()}


def write_checkpoint(
    folder: Path,
    spec: ModelSpec,
    tensors: dict[str, torch.Tensor],
    boxes: dict[str, Sequence[Box]] | None = None,
    step: int = 7,
) -> Path:
    """A checkpoint as a run leaves it, with tensors cut into the boxes given, or whole."""
    folder.mkdir(parents=True)
    pieces = []
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        whole = Box((0,) * len(shape), shape)
        for box in (boxes or {}).get(name, [whole]):
            make = partial(_cut, tensor, box, whole)
            pieces.append(DeferredPiece(MODEL_PREFIX + name, shape, box, tensor.dtype, make))
    write_alone(folder, step, pieces, {})
    write_model_file(folder / "model.yaml", spec, "a test")
    return folder


def _cut(tensor: torch.Tensor, box: Box, whole: Box) -> torch.Tensor:
    return tensor[box.slices_within(whole)].contiguous()


def stored_weights(folder: Path) -> dict[str, torch.Tensor]:
    tensors = read_manifest(folder).tensors
    return {name.removeprefix(MODEL_PREFIX): read_whole(folder, name, tensor) for name, tensor in tensors.items()}


def make_hf_folder(folder: Path, name: str) -> Path:
    """The Hugging Face folder of a small model with weights drawn, of one file."""
    checkpoint = write_checkpoint(folder / "made-of", SPECS[name], weights(SPECS[name]))
    convert(checkpoint, folder / "hf")
    return folder / "hf"


def our_logits(spec: ModelSpec, tensors: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    model = Transformer(spec.model, spec.max_seq_len)
    state = {**tensors, "head.weight": tensors.get("head.weight", tensors["embedding.weight"])}
    model.load_state_dict(state)
    with torch.no_grad():
        return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), AttentionPlan(None))
