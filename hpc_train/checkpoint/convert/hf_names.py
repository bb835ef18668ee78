"""Hugging Face's names and layouts of Llama and GPT-2 tensors, each made of tensors of ours.

GPT-2 stores its linears as (in, out), the other way round than torch's Linear, and q, k, v side by side in one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_train.checkpoint.format.model_tensors import ModelSpec, Shape, model_tensors

_LLAMA_TOP = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_LLAMA_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_GPT_TOP = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
_GPT_LAYER = {
    "attention_norm": "ln_1",
    "attention.q": "attn.c_attn",
    "attention.k": "attn.c_attn",
    "attention.v": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn.up": "mlp.c_fc",
    "ffn.down": "mlp.c_proj",
}
_CONV1D = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}

HEAD = "lm_head.weight"
# Constants that old files hold beside the weights: causal masks and RoPE frequencies.
_CONSTANTS = re.compile(r"(^|\.)(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)$")


@dataclass(frozen=True)
class HfTensor:
    """A tensor of a Hugging Face file.

    shape: as stored there. parts: our tensors that lie in it side by side along the last dimension, in order;
    their shapes are those of `model_tensors`. is_transposed: stored as (in, out).
    """

    name: str
    shape: Shape
    parts: tuple[str, ...]
    is_transposed: bool


@dataclass(frozen=True)
class Place:
    """Where a tensor of ours lies: columns start .. stop of the last dimension (elements, if it has but one)."""

    hf: HfTensor
    start: int
    stop: int


def hf_tensors(spec: ModelSpec) -> dict[str, HfTensor]:
    """All tensors of the Hugging Face model by name, in the model's order."""
    found: dict[str, HfTensor] = {}
    for name, shape in model_tensors(spec).items():
        hf_name, is_transposed = _hf_name(name, spec.model.family == "gpt")
        stored = (shape[1], shape[0]) if is_transposed else shape
        before = found.get(hf_name)
        if before is None:
            found[hf_name] = HfTensor(hf_name, stored, (name,), is_transposed)
        else:
            joined = (*before.shape[:-1], before.shape[-1] + stored[-1])
            found[hf_name] = HfTensor(hf_name, joined, (*before.parts, name), is_transposed)
    return found


def places(spec: ModelSpec) -> dict[str, Place]:
    """For each tensor of ours, where it lies in Hugging Face's."""
    shapes = model_tensors(spec)
    found = {}
    for hf in hf_tensors(spec).values():
        start = 0
        for part in hf.parts:
            width = shapes[part][0] if hf.is_transposed else shapes[part][-1]
            found[part] = Place(hf, start, start + width)
            start += width
    return {name: found[name] for name in shapes}


def known_prefix(names: Mapping[str, object], family: str) -> str:
    """`transformer.` or `model.` where a file of the bare model lacks it before its names, else nothing."""
    prefix = "transformer." if family == "gpt" else "model."
    return "" if any(name.startswith(prefix) for name in names) else prefix


def is_constant(name: str) -> bool:
    """Whether a tensor is no weight but a constant that the model makes by itself."""
    return _CONSTANTS.search(name) is not None


def _hf_name(name: str, is_gpt: bool) -> tuple[str, bool]:
    """Hugging Face's name of a tensor of ours, and whether it is stored as (in, out)."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{(_GPT_TOP if is_gpt else _LLAMA_TOP)[module]}.{kind}", False
    _, layer, inner = module.split(".", 2)
    if is_gpt:
        hf_inner = _GPT_LAYER[inner]
        return f"transformer.h.{layer}.{hf_inner}.{kind}", kind == "weight" and hf_inner in _CONV1D
    return f"model.layers.{layer}.{_LLAMA_LAYER[inner]}.{kind}", False
