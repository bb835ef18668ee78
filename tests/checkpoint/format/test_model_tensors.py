from __future__ import annotations

import pytest

from hpc_train.checkpoint.convert.hf_names import hf_tensors, places
from hpc_train.checkpoint.format.model_tensors import few, model_tensors
from hpc_train.models.transformer import Transformer
from tests.checkpoint.convert.hf_folders import SPECS


@pytest.mark.parametrize("name", SPECS)
def test_the_tensors_are_those_of_the_model_itself(name):
    spec = SPECS[name]
    parameters = Transformer(spec.model, spec.max_seq_len).named_parameters()
    assert list(model_tensors(spec).items()) == [(key, tuple(tensor.shape)) for key, tensor in parameters]


@pytest.mark.parametrize("name", SPECS)
def test_each_tensor_has_one_place_and_the_places_fill_hugging_faces(name):
    spec = SPECS[name]
    filled = dict.fromkeys(hf_tensors(spec), 0)
    for place in places(spec).values():
        assert place.start == filled[place.hf.name]
        filled[place.hf.name] = place.stop
    assert filled == {key: hf.shape[-1] for key, hf in hf_tensors(spec).items()}


def test_many_names_are_cut_short_with_their_number():
    assert few(["a", "b"]) == "a, b"
    assert few([f"t{number}" for number in range(25)], 2) == "t0, t1, ... (25 in all)"
