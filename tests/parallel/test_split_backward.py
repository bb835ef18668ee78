"""Weights' gradients from a queue are autograd's, whatever is recomputed, and nothing is kept behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_train.models.attention import AttentionPlan
from hpc_train.models.transformer import Inputs, Transformer
from hpc_train.parallel.apply import set_recomputation
from hpc_train.parallel.split_backward import QueuedLinear, QueuedWeight, WeightQueue, queue_weights
from tests.train.trainers import MODELS, SEQ_LEN, VOCAB


def _model(family: str) -> Transformer:
    config = MODELS[family].model_copy(update={"tied_embeddings": False})
    model = Transformer(config, SEQ_LEN)
    model.init_weights(seed=3)
    return model.double()


def _inputs(index: int) -> Inputs:
    tokens_BT = torch.randint(0, VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(index))
    positions_BT = torch.arange(SEQ_LEN).expand(2, SEQ_LEN)
    return Inputs(tokens_BT, tokens_BT.roll(-1, dims=1), positions_BT, AttentionPlan(None))


def _loss(model: Transformer, inputs: Inputs) -> torch.Tensor:
    return model.loss(model.hidden(None, inputs), inputs.labels_BT)


def _queued(model: Transformer) -> tuple[WeightQueue, dict[str, torch.Tensor]]:
    """The model with a queue, and where that sums gradients: what autograd adds is added there by a hook."""
    sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    queue = WeightQueue(lambda name: sums[name])
    queue_weights(model, queue)
    for name, parameter in model.named_parameters():
        parameter.grad = sums[name]
    return queue, sums


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_gradients_in_two_parts_are_those_of_one_backward(family: str, recompute: str) -> None:
    whole = _model(family)
    for index in range(3):
        _loss(whole, _inputs(index)).backward()
    model = _model(family)
    set_recomputation(model, recompute)
    names = [name for name, _ in model.named_parameters()]
    queue, sums = _queued(model)
    assert [name for name, _ in model.named_parameters()] == names
    works = []
    for index in range(3):
        _loss(model, _inputs(index)).backward()
        works.append(queue.take())
    weight = "layers.0.attention.q.weight"
    assert not sums[weight].any()
    for work in works:
        work()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(sums[name], parameter.grad, rtol=1e-12, atol=1e-12, msg=name)


def test_every_linear_but_the_head_waits_for_its_w() -> None:
    model = _model("gpt")
    _queued(model)
    plain = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    queued = [name for name, module in model.named_modules() if isinstance(module, QueuedLinear)]
    assert plain == ["head"]
    assert len(queued) == 6 * len(model.layers)


def test_in_bf16_products_are_summed_in_fp32() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(8, 4, dtype=torch.bfloat16)
    sums = {"weight": torch.zeros(4, 8), "bias": torch.zeros(4)}
    queue = WeightQueue(lambda name: sums[name])
    layer = QueuedLinear(plain, QueuedWeight(queue, "weight", "bias"))
    expected = torch.zeros(4, 8)
    for _ in range(64):
        x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
        layer(x).sum().backward()
        expected += (torch.ones(3, 4, dtype=torch.bfloat16).t() @ x.detach()).float()
        queue.take()()
    assert torch.equal(sums["weight"], expected)
    assert torch.equal(sums["bias"], torch.full((4,), 64 * 3.0))


def test_the_graph_is_gone_after_the_backward_and_the_inputs_after_their_w() -> None:
    model = _model("gpt")
    queue, _ = _queued(model)
    loss = _loss(model, _inputs(0))
    loss.backward()
    work = queue.take()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    work()
    assert work.__closure__ is not None
    assert [cell.cell_contents for cell in work.__closure__ if isinstance(cell.cell_contents, list)] == [[]]


def test_without_gradients_nothing_is_queued() -> None:
    model = _model("llama")
    queue, sums = _queued(model)
    with torch.no_grad():
        _loss(model, _inputs(0))
    queue.take()()
    assert not any(gradient.any() for gradient in sums.values())
