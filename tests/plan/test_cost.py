"""Costs of a model, held against published figures."""

from __future__ import annotations

import pytest

from hpc_train.config import ModelConfig
from hpc_train.plan.cost import flops_per_token, known_peak_flops, mfu

GPT_175B = ModelConfig(family="gpt", num_layers=96, hidden_size=12288, num_heads=128, vocab_size=64000)


# MegaScale (NSDI'24), table 2, Megatron-LM's rows: GPUs, batch, seconds a step, MFU in percent.
@pytest.mark.parametrize(
    ("gpus", "batch", "step_s", "percent"),
    [(256, 768, 40.0, 53.0), (768, 768, 15.2, 46.7), (3072, 6144, 29.02, 48.7), (8192, 6144, 12.24, 43.3)],
)
def test_mfu_reproduces_the_published_table(gpus, batch, step_s, percent):
    found = 100 * mfu(batch * 2048 / step_s, GPT_175B, 2048, gpus * 312e12)
    assert found == pytest.approx(percent, rel=0.005)


def test_gpt_flops_equal_the_closed_form():
    layers, h, s, vocab = 96, 12288, 2048, 64000
    closed = 72 * layers * h * h * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert flops_per_token(GPT_175B, s) == pytest.approx(closed, rel=1e-12)


def test_a_window_is_counted_in_place_of_the_sequence_layer_by_layer():
    """6 for each weight, 12 h for each key that a query is multiplied with."""
    layers, h, s = 96, 12288, 2048
    weights = flops_per_token(GPT_175B, s) - 12 * layers * h * s
    windowed = GPT_175B.model_copy(update={"attention_window": 512})
    assert flops_per_token(windowed, s) == weights + 12 * layers * h * 512
    assert flops_per_token(windowed, 256) == weights + 12 * layers * h * 256
    mixed = GPT_175B.model_copy(update={"attention_window": (512, None) * 48})
    assert flops_per_token(mixed, s) == weights + 12 * h * 48 * (512 + s)
    # MegaScale's own count, 1.065e12 a token: a mean window of about 1.2k (derived from its table 2).
    assert flops_per_token(GPT_175B.model_copy(update={"attention_window": 1200}), s) == pytest.approx(
        1.065e12, rel=1e-3
    )


def test_a_parallel_block_costs_what_a_serial_one_does():
    assert flops_per_token(GPT_175B.model_copy(update={"block": "parallel"}), 2048) == flops_per_token(GPT_175B, 2048)


def test_the_longest_device_name_wins_and_unknown_devices_have_no_peak():
    assert known_peak_flops("NVIDIA H100 PCIe") == 756e12
    assert known_peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert known_peak_flops("Some CPU") is None
