"""Dropout as a function of place: what is dropped depends on (seed, step, sequence, layer, site, token, channel) alone.

No generator has a state, so any mesh, any split of a sequence and a recomputed block draw the same.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

# cited: splitmix64's finalizer; Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA'14.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
_RANDOM_BITS = 24


@dataclass(frozen=True)
class DropoutKey:
    """What is the same for all that a micro-batch drops.

    sequences_B: the global index of each row's sequence in its step; where rows have pieces of several, of each token:
    (B, T), with its place in its sequence in places_BT.
    """

    probability: float
    seed: int
    step: int
    sequences_B: torch.Tensor
    places_BT: torch.Tensor | None = None


def drop(x_BTh: torch.Tensor, key: DropoutKey | None, *, layer: int, site: int, first_token: int) -> torch.Tensor:
    """Zero elements with the key's probability and scale the others up; without a key, x as it is.

    layer, site: which dropout of the model this is. first_token: the place in its row of x's first token.
    """
    if key is None or key.probability == 0.0:
        return x_BTh
    _, num_tokens, num_channels = x_BTh.shape
    tokens = slice(first_token, first_token + num_tokens)
    sequences = key.sequences_B.to(x_BTh.device)
    if key.places_BT is None:
        sequences_BT1 = sequences[:, None, None]
        places_BT = torch.arange(tokens.start, tokens.stop, device=x_BTh.device)
    else:
        sequences_BT1 = sequences[:, tokens, None]
        places_BT = key.places_BT[:, tokens]
    start = _number(key.seed, key.step, layer, site)
    rows_BT1 = _mix(sequences_BT1 * _GAMMA + start)
    places_BTh = places_BT[..., None] * num_channels + torch.arange(num_channels, device=x_BTh.device)
    bits_BTh = _mix(rows_BT1 + places_BTh * _GAMMA) >> (64 - _RANDOM_BITS)
    bits_BTh &= (1 << _RANDOM_BITS) - 1
    keep_BTh = bits_BTh >= int(key.probability * (1 << _RANDOM_BITS))
    return x_BTh * keep_BTh * (1.0 / (1.0 - key.probability))


def _mix(values: torch.Tensor) -> torch.Tensor:
    """Every bit of the result depends on every bit of the int64 values, which wrap around."""
    for shift, factor in _MIX:
        values = (values ^ _shifted(values, shift)) * factor
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    # int64's own shift copies the sign.
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _number(*parts: int) -> int:
    digest = hashlib.sha256(",".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
