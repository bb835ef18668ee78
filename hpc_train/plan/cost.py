"""What a token costs: parameters and floating-point operations of a model, and the utilisation they give."""

from __future__ import annotations

from hpc_train.config import Config, ModelConfig


def matmul_parameters(model: ModelConfig) -> int:
    """Weights that each token is multiplied with: all linears and the output head, not the embedding."""
    return model.num_layers * layer_matmul_parameters(model) + model.vocab_size * model.hidden_size


def layer_matmul_parameters(model: ModelConfig) -> int:
    """Weights of one layer that each token is multiplied with."""
    h = model.hidden_size
    attention = h * h + 2 * h * model.kv_heads * model.head_size + h * h
    ffn = (3 if model.family == "llama" else 2) * h * model.ffn_size
    return attention + ffn


def micro_batch_shape(config: Config) -> tuple[int, int]:
    """Sequences of a full micro-batch, and tokens of each; with parallel.hdp one as long as a rank holds."""
    hdp = config.parallel.hdp
    return (config.train.micro_batch_size, config.data.seq_len) if hdp is None else (1, hdp.capacity_tokens)


def attention_spans(model: ModelConfig, seq_len: int) -> tuple[int, ...]:
    """How many keys each layer's attention multiplies a query with: its window, or the whole sequence."""
    return tuple(min(window or seq_len, seq_len) for window in model.windows)


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Floating-point operations of one token's forward and backward, without recomputation.

    6 for each matrix weight, and 12 * hidden * span for the two attention products of each layer, whose span is its
    window or seq_len. For a GPT with ffn 4h and full attention this is 72 l h^2 (1 + s / 6h + V / 12lh), the count
    behind published MFU figures.

    Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", SC'21. The causal half of the attention is counted in full there, and so it is here.
    """
    return 6.0 * matmul_parameters(model) + 12.0 * model.hidden_size * sum(attention_spans(model, seq_len))


def mfu(tokens_per_s: float, model: ModelConfig, seq_len: int, peak_flops: float) -> float:
    """Model FLOP utilisation: the share of `peak_flops`, of all ranks together, that training used."""
    return tokens_per_s * flops_per_token(model, seq_len) / peak_flops


# Dense bf16 tensor peak in FLOP/s by the start of the device's name (cited: NVIDIA's data sheets).
_PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA A800": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H800": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA B200": 2250e12,
}


def known_peak_flops(device_name: str) -> float | None:
    """The data sheet's bf16 peak of a GPU, or None for a device that is not in the table."""
    for prefix, peak in sorted(_PEAK_FLOPS.items(), key=lambda item: -len(item[0])):
        if device_name.startswith(prefix):
            return peak
    return None
