"""Activations off the device: as many as asked for, back in time, and the same bits."""

from __future__ import annotations

import gc

import pytest
import torch

from hpc_train.config import ModelConfig
from hpc_train.models.attention import AttentionPlan
from hpc_train.models.dropout import DropoutKey
from hpc_train.models.transformer import Inputs, Transformer
from hpc_train.parallel.offload import HostRoom, OffloadedLayers
from tests.live_bytes import LiveBytes

CPU = torch.device("cpu")
NUM_LAYERS = 6
TOKENS = 256
TREES = {
    "gpt": {"family": "gpt", "dropout": 0.1},
    "llama": {"family": "llama", "num_kv_heads": 2, "block": "parallel"},
}


def make_model(name: str) -> Transformer:
    tree = {"num_layers": NUM_LAYERS, "hidden_size": 64, "num_heads": 4, "vocab_size": 61, **TREES[name]}
    model = Transformer(ModelConfig.model_validate(tree), TOKENS)
    model.init_weights(3)
    return model


def inputs_of(model: Transformer, room: HostRoom | None, share_milli: int, num_tokens: int = TOKENS) -> Inputs:
    tokens = torch.randint(0, 61, (1, num_tokens), generator=torch.Generator().manual_seed(num_tokens))
    saving = None if room is None else OffloadedLayers(room, share_milli, list(model.parameters()))
    dropped = model.config.dropout
    key = DropoutKey(dropped, 1, 2, torch.tensor([0])) if dropped else None
    positions = torch.arange(num_tokens)[None]
    return Inputs(tokens, tokens.roll(-1, dims=1), positions, AttentionPlan(None), key, saving)


def trained(model: Transformer, inputs: Inputs) -> list[torch.Tensor]:
    """The loss and all gradients."""
    model.zero_grad()
    loss = model.loss(model.hidden(None, inputs), inputs.labels_BT)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("share_milli", [1, 300, 1000])
def test_losses_and_gradients_are_the_same_bits(name: str, share_milli: int) -> None:
    model, room = make_model(name), HostRoom(CPU)
    for num_tokens in (TOKENS, 100):
        ours = trained(model, inputs_of(model, room, share_milli, num_tokens))
        theirs = trained(model, inputs_of(model, None, 0, num_tokens))
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    assert room.bytes_out == 0


def saved_bytes(model: Transformer, inputs: Inputs, room: HostRoom | None) -> int:
    """Of the device, alive between forward and backward, without parameters."""
    gc.collect()
    with LiveBytes() as live:
        live._known.update(parameter.untyped_storage()._cdata for parameter in model.parameters())
        x = model.hidden(None, inputs)
        gc.collect()
        found = live.now - (0 if room is None else room.bytes_kept)
        x.sum().backward()
    return found


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("share_milli", [300, 700, 1000])
def test_saved_bytes_fall_by_the_planned_share_of_all_layers_but_two(name: str, share_milli: int) -> None:
    """To 5 % of what all layers save."""
    model, room = make_model(name), HostRoom(CPU)
    whole = saved_bytes(model, inputs_of(model, None, 0), None)
    left = saved_bytes(model, inputs_of(model, room, share_milli), room)
    assert (whole - left) / whole == pytest.approx(share_milli / 1000 * (NUM_LAYERS - 2) / NUM_LAYERS, abs=0.05)


def test_buffers_are_used_again_also_by_micro_batches_of_other_sizes() -> None:
    model, room = make_model("llama"), HostRoom(CPU)
    trained(model, inputs_of(model, room, 500))
    kept = room.bytes_kept
    for num_tokens in (TOKENS, TOKENS - 5, TOKENS - 9, TOKENS):
        trained(model, inputs_of(model, room, 500, num_tokens))
    assert room.bytes_kept <= 1.3 * kept


def test_a_layer_is_brought_back_while_the_one_behind_it_goes_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, room = make_model("llama"), HostRoom(CPU)
    out: list[int] = []
    back: list[int] = []
    copy_out, copy_back = room.copy_out, room.copy_back

    def counted_out(source_N: torch.Tensor) -> torch.Tensor:
        buffer = copy_out(source_N)
        out.append(buffer.data_ptr())
        return buffer

    def counted_back(buffer_M: torch.Tensor, target_N: torch.Tensor) -> None:
        back.append(out.index(buffer_M.data_ptr()))
        copy_back(buffer_M, target_N)

    monkeypatch.setattr(room, "copy_out", counted_out)
    monkeypatch.setattr(room, "copy_back", counted_back)
    begun: dict[int, int] = {}
    for number, layer in model.layers.items():
        layer.register_full_backward_hook(lambda *_, number=int(number): begun.update({number: len(back)}))
    inputs = inputs_of(model, room, 1000)
    loss = model.loss(model.hidden(None, inputs), inputs.labels_BT)
    in_layer = len(out) // (NUM_LAYERS - 2)
    loss.backward()
    assert begun == {5: 0, 4: in_layer, 3: 2 * in_layer, 2: 3 * in_layer, 1: 4 * in_layer, 0: 4 * in_layer}
    of_layers = [number // in_layer for number in back]
    assert of_layers == sorted(of_layers, reverse=True)
