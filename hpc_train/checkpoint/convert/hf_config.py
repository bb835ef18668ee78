"""Hugging Face's config.json of Llama and GPT-2, to a model section and back.

What changes the computation and is not modelled here is refused, all of it at once; keys that nobody knows as well,
since a silent option would give other logits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from hpc_train.checkpoint.format.model_tensors import ModelSpec
from hpc_train.config import ModelConfig
from hpc_train.config_values import LARGEST_SIZE
from hpc_train.errors import CheckpointError

FAMILIES = {"llama": "llama", "gpt2": "gpt"}

# Keys that change no logit of the model in evaluation: names, token ids, training and generation settings.
_HARMLESS = {
    "_name_or_path", "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "transformers_version",
    "dtype", "torch_dtype", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id",
    "decoder_start_token_id", "initializer_range", "output_attentions", "output_hidden_states", "return_dict",
    "use_return_dict", "torchscript", "chunk_size_feed_forward", "attention_dropout", "attn_pdrop", "embd_pdrop",
    "resid_pdrop", "pretraining_tp", "gradient_checkpointing", "n_ctx", "is_decoder", "reorder_and_upcast_attn",
    "max_sequence_length", "task_specific_params", "finetuning_task", "problem_type", "prefix", "id2label", "label2id",
    "num_labels", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "summary_first_dropout", "do_sample", "early_stopping", "max_length", "min_length", "max_new_tokens", "num_beams",
    "num_beam_groups", "num_return_sequences", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "diversity_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "output_scores", "return_dict_in_generate", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids", "remove_invalid_values",
    "tokenizer_class",
}  # fmt: skip
_LLAMA_KEYS = {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    "rope_parameters", "rope_scaling", "tie_word_embeddings",
}  # fmt: skip
_GPT_KEYS = {
    "architectures", "model_type", "n_embd", "n_layer", "n_head", "n_inner", "n_positions", "vocab_size",
    "layer_norm_epsilon", "tie_word_embeddings",
}  # fmt: skip
# Options with the values that our models compute. A key that is left out has the first one.
_LLAMA_OPTIONS = {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,)}
_GPT_OPTIONS = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}
_ARCHITECTURES = {"llama": ("LlamaForCausalLM", "LlamaModel"), "gpt2": ("GPT2LMHeadModel", "GPT2Model")}


def read_hf_config(tree: Mapping[str, Any], where: str, ignore: Collection[str] = ()) -> ModelSpec:
    """The model that a config.json describes. ignore: keys that the user says change nothing.

    Raises:
        CheckpointError: another architecture, or options that our models do not have; all are named.
    """
    model_type = tree.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"{where}: model_type is {model_type!r}. Models of the types {' and '.join(FAMILIES)} can be converted."
        )
    faults = [*_architecture_faults(tree, model_type), *_option_faults(tree, model_type, ignore)]
    read = _read_llama if model_type == "llama" else _read_gpt
    values, max_seq_len = read(tree, faults)
    if faults:
        raise CheckpointError("\n  ".join([f"{where}: this model cannot be converted:", *faults]))
    try:
        return ModelSpec(ModelConfig.model_validate(values), max_seq_len)
    except ValidationError as error:
        words = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}".lstrip(": ") for item in error.errors()]
        raise CheckpointError("\n  ".join([f"{where}: no model of ours has these sizes:", *words])) from None


def require_hf_can_say(model: ModelConfig) -> None:
    """Refuse a model whose options have no words in the config.json of Llama or GPT-2: its logits would be others.

    Raises:
        CheckpointError: all such options are named.
    """
    faults = []
    if model.block != "serial":
        faults.append(
            f"model.block={model.block}: blocks there have attention and feed-forward part one behind the other"
        )
    if any(model.windows):
        faults.append(f"model.attention_window={model.attention_window}: attention there is full")
    if faults:
        there = next(theirs for theirs, ours in FAMILIES.items() if ours == model.family)
        what = f"a Hugging Face model of the type {there} cannot say of this model:"
        raise CheckpointError("\n  ".join([what, *faults, "Only a model trained without them can be converted."]))


def write_hf_config(spec: ModelSpec, dtype: str, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of a model with weights of `dtype` (torch's name).

    base: the config.json that the model came with. If it still describes the model it is kept, but for the type;
    otherwise only its token ids are taken over.
    """
    if base is not None and _describes(base, spec):
        kept = {key: value for key, value in base.items() if key not in ("dtype", "torch_dtype")}
        return kept | {"dtype" if "dtype" in base else "torch_dtype": dtype}
    ids = {key: base[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if base and key in base}
    written = _write_llama(spec) if spec.model.family == "llama" else _write_gpt(spec)
    # GPT-2's own ids are those of another vocabulary, and Llama's too: said to be none rather than left to a default.
    none = {"bos_token_id": None, "eos_token_id": None}
    common = {"initializer_range": spec.model.init_std, "torch_dtype": dtype, "use_cache": True}
    return written | {"tie_word_embeddings": spec.model.tied_embeddings} | common | none | ids


def _describes(base: Mapping[str, Any], spec: ModelSpec) -> bool:
    try:
        found = read_hf_config(base, "config.json", ignore=list(base))
    except CheckpointError:
        return False
    # RoPE has no table: the longest sequence of a llama is advice.
    same_length = found.max_seq_len == spec.max_seq_len or spec.model.family == "llama"
    return same_length and _computation(found.model) == _computation(spec.model)


def _computation(model: ModelConfig) -> tuple[Any, ...]:
    """What decides about the logits, with defaults spelled out."""
    rope = model.rope_theta if model.family == "llama" else None
    sizes = (model.num_layers, model.hidden_size, model.num_heads, model.kv_heads, model.ffn_size, model.vocab_size)
    return (model.family, sizes, model.tied_embeddings, rope, model.norm_eps)


def _architecture_faults(tree: Mapping[str, Any], model_type: str) -> list[str]:
    known = _ARCHITECTURES[model_type]
    given = tree.get("architectures") or [known[0]]
    if isinstance(given, list) and all(name in known for name in given):
        return []
    return [f"architectures={given!r}: the language model is converted, which is {known[0]}"]


def _option_faults(tree: Mapping[str, Any], model_type: str, ignore: Collection[str]) -> list[str]:
    options = _LLAMA_OPTIONS if model_type == "llama" else _GPT_OPTIONS
    modelled = _LLAMA_KEYS if model_type == "llama" else _GPT_KEYS
    faults = []
    for key, value in tree.items():
        if key in options and value not in options[key]:
            faults.append(f"{key}={value!r}: computed is {' or '.join(repr(item) for item in options[key])}")
        elif key not in options and key not in modelled and key not in _HARMLESS and key not in ignore and value:
            faults.append(
                f"{key}={value!r}: unknown here. If it changes nothing in the model's output, give --ignore {key}"
            )
    return faults


def _read_llama(tree: Mapping[str, Any], faults: list[str]) -> tuple[dict[str, Any], int]:
    sizes = _required(
        tree,
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
        faults,
    )
    hidden, heads, head_dim = sizes["hidden_size"], sizes["num_attention_heads"], tree.get("head_dim")
    if head_dim is not None and (not isinstance(head_dim, int) or head_dim * heads != hidden):
        faults.append(f"head_dim={head_dim!r}: computed is hidden_size/num_attention_heads = {hidden / heads:g}")
    values = {
        "family": "llama",
        "num_layers": sizes["num_hidden_layers"],
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": tree.get("num_key_value_heads") or heads,
        "ffn_hidden_size": sizes["intermediate_size"],
        "vocab_size": sizes["vocab_size"],
        "tied_embeddings": tree.get("tie_word_embeddings", False),
        "rope_theta": _read_rope(tree, faults),
        "norm_eps": tree.get("rms_norm_eps", 1e-6),
        "init_std": tree.get("initializer_range") or 0.02,
    }
    longest = _required({"max_position_embeddings": 2048, **tree}, ("max_position_embeddings",), faults)
    return values, longest["max_position_embeddings"]


def _read_rope(tree: Mapping[str, Any], faults: list[str]) -> float:
    """The base of RoPE's frequencies, from the keys of transformers 4 or 5; any other RoPE is a fault."""
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        given = tree.get(key) or {}
        if not isinstance(given, dict):
            faults.append(f"{key}={given!r}: an object is needed, or null")
            given = {}
        rope |= given
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        key = "rope_parameters" if tree.get("rope_parameters") else "rope_scaling"
        faults.append(f"{key}={dict(tree[key])!r}: computed is plain RoPE, without scaling ('rope_type': 'default')")
    elif rope.get("partial_rotary_factor", 1.0) != 1.0:
        faults.append(f"partial_rotary_factor={rope['partial_rotary_factor']}: computed is 1.0, all of a head")
    return rope.get("rope_theta", tree.get("rope_theta", 10000.0))


def _read_gpt(tree: Mapping[str, Any], faults: list[str]) -> tuple[dict[str, Any], int]:
    sizes = _required(tree, ("n_embd", "n_layer", "n_head", "n_positions", "vocab_size"), faults)
    values = {
        "family": "gpt",
        "num_layers": sizes["n_layer"],
        "hidden_size": sizes["n_embd"],
        "num_heads": sizes["n_head"],
        "ffn_hidden_size": tree.get("n_inner") or 4 * sizes["n_embd"],
        "vocab_size": sizes["vocab_size"],
        "tied_embeddings": tree.get("tie_word_embeddings", True),
        "norm_eps": tree.get("layer_norm_epsilon", 1e-5),
        "init_std": tree.get("initializer_range") or 0.02,
    }
    return values, sizes["n_positions"]


def _required(tree: Mapping[str, Any], keys: tuple[str, ...], faults: list[str]) -> dict[str, int]:
    """Sizes that must be given: none is guessed. 1 stands in for a wrong one, which is a fault."""
    sizes = {}
    for key in keys:
        value = tree.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_SIZE:
            wanted = f"a number above 0 is needed, of at most {LARGEST_SIZE}"
            faults.append(f"{key}={value!r}: {wanted}" if key in tree else f"{key} is missing")
            value = 1
        sizes[key] = value
    return sizes


def _write_llama(spec: ModelSpec) -> dict[str, Any]:
    model = spec.model
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "max_position_embeddings": spec.max_seq_len,
        "mlp_bias": False,
        "num_attention_heads": model.num_heads,
        "num_hidden_layers": model.num_layers,
        "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "vocab_size": model.vocab_size,
    }


def _write_gpt(spec: ModelSpec) -> dict[str, Any]:
    model = spec.model
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.norm_eps,
        "n_embd": model.hidden_size,
        "n_head": model.num_heads,
        "n_inner": model.ffn_size,
        "n_layer": model.num_layers,
        "n_positions": spec.max_seq_len,
        "vocab_size": model.vocab_size,
    }
