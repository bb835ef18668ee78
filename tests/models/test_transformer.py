"""The plain model: documents do not see each other, and padding and masks do what they say."""

from __future__ import annotations

import pytest
import torch

from hpc_train.config import ModelConfig
from hpc_train.models.attention import AttentionPlan
from hpc_train.models.transformer import Transformer

FAMILIES = {
    "gpt": ModelConfig(family="gpt", num_layers=2, hidden_size=32, num_heads=4, vocab_size=50),
    "gpt-tied": ModelConfig(
        family="gpt", num_layers=2, hidden_size=32, num_heads=4, vocab_size=50, tied_embeddings=True
    ),
    "llama": ModelConfig(family="llama", num_layers=2, hidden_size=32, num_heads=4, vocab_size=50),
    "llama-gqa": ModelConfig(family="llama", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, vocab_size=50),
}
FAMILIES |= {
    f"{name}-parallel-window": config.model_copy(update={"block": "parallel", "attention_window": window})
    for (name, config), window in zip(FAMILIES.items(), (3, (None, 5), (4, None), (6, 2)), strict=True)
}


def _model(name: str) -> Transformer:
    model = Transformer(FAMILIES[name], max_seq_len=16).double()
    model.init_weights(seed=3)
    return model


def _positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_give_the_logits_that_each_gives_alone(name):
    model = _model(name)
    tokens = torch.randint(0, 50, (1, 16), generator=torch.Generator().manual_seed(1))
    plan = AttentionPlan.from_boundaries(((5, 1, 10),), 16, torch.device("cpu"))
    packed = model(tokens, _positions(5, 1, 10), plan)
    start = 0
    for length in (5, 1, 10):
        alone = model(tokens[:, start : start + length], _positions(length), AttentionPlan(None))
        torch.testing.assert_close(packed[:, start : start + length], alone, rtol=1e-10, atol=1e-10)
        start += length


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_sees_no_later_token(name):
    model = _model(name)
    tokens = torch.arange(16)[None] % 50
    changed = tokens.clone()
    changed[0, 9] = 49
    before, after = (model(t, _positions(16), AttentionPlan(None)) for t in (tokens, changed))
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_layer_s_window_reaches_back_so_far_and_no_further(family, block):
    """Two layers with windows of 3 and 4: what a token says is heard by itself and the 5 behind it."""
    config = FAMILIES[family].model_copy(update={"block": block, "attention_window": (3, 4)})
    model = Transformer(config, max_seq_len=16).double()
    model.init_weights(seed=3)
    tokens = torch.arange(16)[None] % 50
    changed = tokens.clone()
    changed[0, 4] = 49
    before, after = (model(t, _positions(16), AttentionPlan(None))[0] for t in (tokens, changed))
    differs = (before - after).abs().amax(dim=-1) > 0
    assert differs.nonzero().flatten().tolist() == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_parallel_block_adds_both_parts_of_one_norm(family):
    config = FAMILIES[family].model_copy(update={"block": "parallel"})
    model = Transformer(config, max_seq_len=16).double()
    model.init_weights(seed=3)
    block = model.layers["1"]
    assert [name for name, _ in block.named_children()] == ["norm", "attention", "ffn"]
    x = torch.randn(1, 16, 32, dtype=torch.float64)
    rotary = model._rotary(_positions(16), x.dtype) if family == "llama" else None
    normed = block.norm(x)
    expected = x + block.attention(normed, AttentionPlan(None), rotary) + block.ffn(normed)
    torch.testing.assert_close(block(x, AttentionPlan(None), rotary), expected)


def test_one_document_a_row_needs_no_mask():
    assert AttentionPlan.from_boundaries(((8,), (8,)), 8, torch.device("cpu")).whole_mask() is None


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_is_the_sum_over_supervised_tokens(name):
    model = _model(name)
    tokens = torch.arange(16).view(2, 8)
    labels = tokens + 1
    labels[0, 3:] = -100
    positions = torch.arange(8).expand(2, 8)
    plan = AttentionPlan(None)
    logits = model(tokens, positions, plan)
    expected = -torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    expected = expected[labels >= 0].sum()
    torch.testing.assert_close(model.loss_sum(tokens, labels, positions, plan), expected)


def test_no_supervised_token_gives_an_exact_zero_that_reaches_every_parameter():
    """FC-87: 0/0 must not become NaN in the weights."""
    model = _model("llama")
    tokens = torch.zeros(1, 8, dtype=torch.long)
    loss = model.loss_sum(tokens, torch.full((1, 8), -100), _positions(8), AttentionPlan(None))
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_weights_depend_on_the_seed_alone():
    first, second = (_model("gpt").state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_global_names_keep_q_k_v_and_gate_up_apart():
    names = dict(_model("llama").named_parameters())
    for part in ("attention.q", "attention.k", "attention.v", "ffn.gate", "ffn.up", "ffn.down"):
        assert f"layers.1.{part}.weight" in names
