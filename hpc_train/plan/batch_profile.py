"""What batch planning knows of a machine's speed: times of one layer of a model, measured or derived, in a hashed file.

Every rank and node agent plans from the same file, so they plan alike; it is for one model, split and precision, and
refused for another.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, final

from hpc_train.config import Config
from hpc_train.errors import ConfigError
from hpc_train.plan.activations import block_bytes, shape_of
from hpc_train.plan.axis_bytes import ELEMENT_BYTES, EXACT_BYTES
from hpc_train.plan.batch_cost import TICK_S, BatchCosts
from hpc_train.plan.batch_times import PassedBytes
from hpc_train.plan.cost import layer_matmul_parameters
from hpc_train.plan.estimate import MEGATRON_LM
from hpc_train.plan.json_object import parse_object
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.parameters import TensorSplit
from hpc_train.plan.stages import stage_parts

VERSION = 2
_RING_BYTES_PER_S = 11e9
"""Cited: ByteScale (arXiv 2502.21231), a ring step of 16.8 MB in 1.5 ms, on a network of 25e9 bytes/s a card."""
_CARD_BYTES_PER_S = 25e9
_COPY_BYTES_PER_S = 23e9
"""Derived: ByteScale's time of copies beside compute, 2.8 s longer for each unit of the ratio with 32 GB moved."""
_ATTENTION_BACKWARD = 2.5
"""Derived: of the forward. Five products where that has two, since the scores are made again."""


@final
@dataclass(frozen=True)
class Profile:
    """Times of one layer, forward and backward, on one rank.

    model: what they depend on. attention_s_per_square: a sequence's full causal attention, by the square of its tokens.
    linear_s_per_token: all that grows with tokens. micro_batch_s: constant. ring_s_per_byte: to pass a byte to the next
    rank of a ring; ring_s_per_step: each time. copy_s_per_byte: between device and host memory, the slower way.
    speeds: nodes that are slower or faster than the times say, 1.0 being as fast. origin: where the times are from.
    """

    model: Mapping[str, Any]
    attention_s_per_square: float
    linear_s_per_token: float
    micro_batch_s: float
    ring_s_per_byte: float
    ring_s_per_step: float
    copy_s_per_byte: float
    origin: str
    speeds: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wrong = [f"{name}={value}" for name, value in self._times().items() if not _is_time(name, value)]
        wrong += [f"speeds.{node}={speed}" for node, speed in self.speeds.items() if not _is_positive(speed)]
        if wrong:
            raise ConfigError(
                f"the profile ({self.origin}) has {', '.join(wrong)}; times and speeds are finite numbers above 0. "
                "Measure again by `hpc-train profile`, on nodes that do nothing else"
            )

    def _times(self) -> dict[str, float]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.type == "float"}

    def check_model(self, config: Config, mesh: Mesh) -> None:
        """Refuse it for a model, split or precision that it was not measured with.

        Raises:
            ConfigError: with what differs.
        """
        wanted = profile_key(config, mesh)
        differing = [
            f"{key} {self.model.get(key)!r} and not {value!r}"
            for key, value in wanted.items()
            if self.model.get(key) != value
        ]
        if differing:
            raise ConfigError(
                f"the profile ({self.origin}) is of {', '.join(differing)}. Measure this model by `hpc-train profile`, "
                "or leave out parallel.hdp.profile"
            )

    def costs(self, config: Config, mesh: Mesh, tick_s: float = TICK_S) -> BatchCosts:
        """In whole ticks, for the mean layer of the run's model.

        Layers with a window take time by tokens: a token then sees the window's where it else sees half a sequence.

        Raises:
            ConfigError: the profile is of another model.
        """
        self.check_model(config, mesh)
        windows = config.model.windows
        seen = [2 * window for window in windows if window is not None]
        offload = config.parallel.hdp is not None and config.parallel.hdp.offload
        passed = passed_bytes(config, mesh)
        return BatchCosts.from_seconds(
            attention_s_per_square=self.attention_s_per_square * (len(windows) - len(seen)) / len(windows),
            linear_s_per_token=self.linear_s_per_token + self.attention_s_per_square * sum(seen) / len(windows),
            ring_s_per_token=self.ring_s_per_byte * passed.once_round,
            # Nobody passes on what would come home next but gradients, and these go home beside nothing.
            ring_last_hop_s_per_token=self.ring_s_per_byte * passed.once_round,
            ring_home_s_per_token=self.ring_s_per_byte * passed.gradient,
            # Gradients go beside keys and values, but for the hop that takes them home: 2 N transfers one behind the
            # other in a ring of N, or 3 N - 1.
            ring_s_per_step=self.ring_s_per_step * _times_round(config),
            micro_batch_s=self.micro_batch_s,
            num_layers=most_layers(config, mesh),
            copy_s_per_token=_hidden_copy_bytes(config, mesh) * self.copy_s_per_byte if offload else None,
            tick_s=tick_s,
        )

    @property
    def hash(self) -> str:
        return _hash_of(self._document())

    def to_json(self) -> str:
        document = self._document()
        return json.dumps({"version": VERSION, "hash": _hash_of(document), **document}, indent=1) + "\n"

    def _document(self) -> dict[str, Any]:
        return {**self._times(), "model": dict(self.model), "speeds": dict(self.speeds), "origin": self.origin}

    @staticmethod
    def from_json(text: str, source: str) -> Profile:
        """Read a file's text.

        Raises:
            ConfigError: it is no profile, was changed by hand, or has a value that is no time.
        """
        try:
            document = parse_object(text, {"version": (int,), "hash": (str,)})
            version, stated = document.pop("version"), document.pop("hash")
            if version != VERSION:
                raise ConfigError(
                    f"{source} is a profile of version {version}; this program reads {VERSION}. Measure again"
                )
            parse_object(text, {"model": (dict,), "speeds": (dict,), "origin": (str,)})
            profile = _made_from(document, source)
        except (ValueError, TypeError) as problem:
            if isinstance(problem, ConfigError):
                raise
            raise ConfigError(f"{source} is not a profile: {problem}. `hpc-train profile` writes one") from problem
        if _hash_of(document) != stated:
            raise ConfigError(
                f"{source} states the hash {stated}, but its content has {_hash_of(document)}: it was changed or is "
                "incomplete. Measure again by `hpc-train profile`"
            )
        return profile


def _made_from(document: Mapping[str, Any], source: str) -> Profile:
    try:
        return Profile(**document)
    except ConfigError as problem:
        raise ConfigError(f"{source}: {problem}") from problem


def load_profile(path: str) -> Profile:
    """Read a profile.

    Raises:
        ConfigError: the file cannot be read, or `Profile.from_json` refuses it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(
            f"parallel.hdp.profile={path} cannot be read: {problem}. `hpc-train profile` writes one"
        ) from problem
    return Profile.from_json(text, path)


def profile_of(config: Config, mesh: Mesh, link_bytes_per_s: float | None = None) -> Profile:
    """The run's profile: that of parallel.hdp.profile, or a derived one.

    Raises:
        ConfigError: as `load_profile`.
    """
    hdp = config.parallel.hdp
    if hdp is not None and hdp.profile is not None:
        return load_profile(hdp.profile)
    return derived_profile(config, mesh, link_bytes_per_s)


def derived_profile(config: Config, mesh: Mesh, link_bytes_per_s: float | None = None) -> Profile:
    """A profile from the model's operations, at the share of a GPU's peak that Megatron-LM's published runs reached.

    link_bytes_per_s: of a rank's network card; None for that of the runs whose rates are taken.
    """
    model, train = config.model, config.train
    peak = train.peak_flops_per_rank or MEGATRON_LM.peak_flops
    assert peak is not None and MEGATRON_LM.efficiency is not None
    rate = peak * MEGATRON_LM.efficiency
    width = model.num_heads * model.head_size
    # Two products of 2 operations a pair; a causal mask leaves half the pairs.
    forward = 2 * width / mesh.tp
    times = 1 + _ATTENTION_BACKWARD + (train.recompute != "none")
    linears = layer_matmul_parameters(model) / mesh.tp * (8 if train.recompute == "full" else 6)
    card = link_bytes_per_s or _CARD_BYTES_PER_S
    return Profile(
        model=profile_key(config, mesh),
        attention_s_per_square=forward * times / rate,
        linear_s_per_token=linears / rate,
        micro_batch_s=1e-5,  # assumed: some ten kernels of a layer that are launched, not waited for
        ring_s_per_byte=_CARD_BYTES_PER_S / (_RING_BYTES_PER_S * card),
        ring_s_per_step=1e-5,  # assumed: latency of a message
        copy_s_per_byte=1 / _COPY_BYTES_PER_S,
        origin=f"derived from the model's operations at {rate:.3g} FLOP/s a rank and {card:.3g} bytes/s a card",
    )


def profile_key(config: Config, mesh: Mesh) -> dict[str, Any]:
    """What the times of a layer depend on."""
    model = config.model
    return {
        "family": model.family,
        "block": model.block,
        "hidden_size": model.hidden_size,
        "num_heads": model.num_heads,
        "kv_heads": model.kv_heads,
        "ffn_size": model.ffn_size,
        "precision": config.train.precision,
        "recompute": config.train.recompute,
        "tp": mesh.tp,
        "sequence_parallel": config.parallel.sequence_parallel,
        "tp_tiles": config.parallel.tp_tiles,
    }


def most_layers(config: Config, mesh: Mesh) -> int:
    """Of the ranks of any stage."""
    parts = stage_parts(config, mesh)
    return max(sum(len(part.layers) for part in parts[stage :: mesh.pp]) for stage in range(mesh.pp))


def passed_bytes(config: Config, mesh: Mesh) -> PassedBytes:
    """What goes round a ring of a token in a layer's forward and backward.

    Keys and values in both, and once more where the forward is done again; their gradients, which are sums, in fp32.
    """
    split = TensorSplit(mesh.tp, 0, config.parallel.sequence_parallel and mesh.tp > 1)
    numbers = 2 * len(split.kv_heads(config.model)) * config.model.head_size
    key_value = numbers * _times_round(config) * ELEMENT_BYTES[config.train.precision]
    return PassedBytes(key_value, numbers * EXACT_BYTES)


def _times_round(config: Config) -> int:
    """How often keys and values go round a ring in a layer's forward and backward."""
    return 2 if config.train.recompute == "none" else 3


def _hidden_copy_bytes(config: Config, mesh: Mesh) -> int:
    """What is to be copied of a token beside a layer's whole compute, so that it hides.

    The way to the host has to hide behind the forward, which is a third of it.
    """
    split = TensorSplit(mesh.tp, 0, config.parallel.sequence_parallel and mesh.tp > 1)
    shape = shape_of(config, mesh, split, is_masked=False)
    return 3 * -(-block_bytes(config, split, shape, "cuda", 0) // shape.num_tokens)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _is_time(name: str, value: object) -> bool:
    """What is constant may be nothing; what grows may not."""
    is_constant = name in ("micro_batch_s", "ring_s_per_step")
    return _is_positive(value) or (is_constant and value == 0 and not isinstance(value, bool))


def _hash_of(document: Mapping[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
