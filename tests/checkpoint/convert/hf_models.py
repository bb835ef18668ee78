"""Small random models of Hugging Face's transformers, in folders as its save_pretrained writes them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

POSITIONS, VOCAB = 24, 77
_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 3e-5,
    "rope_theta": 5000.0,
}
_GPT = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama", {**_LLAMA, "tie_word_embeddings": False}),
    "llama-tied": ("llama", {**_LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "gpt2-tied": ("gpt2", {**_GPT, "tie_word_embeddings": True}),
    "gpt2-untied": ("gpt2", {**_GPT, "n_inner": 40, "tie_word_embeddings": False}),
}


def hf_model(name: str) -> torch.nn.Module:
    """A model with every parameter drawn, norms and biases too: zeros and ones would hide a mix-up."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    kind, options = MODELS[name]
    config_type, model_type = {"llama": (LlamaConfig, LlamaForCausalLM), "gpt2": (GPT2Config, GPT2LMHeadModel)}[kind]
    model = model_type(config_type(**options))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.eval()


def save(model: torch.nn.Module, folder: Path, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, **options)


def hf_logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).logits


def load(folder: Path) -> torch.nn.Module:
    """As a user of transformers loads it; nothing may be missing or left over."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()
