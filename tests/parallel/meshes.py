"""Cases of meshes and options, and what each gives: gradients of every parameter, losses and norms."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hpc_train.config import Config
from hpc_train.train.step import Trainer
from tests.ranks import TestRank
from tests.train.trainers import TestBatch, make_trainer, share_of

SEQ_LEN = 24
VOCAB = 61
MODELS: dict[str, dict[str, object]] = {
    "gpt": {"family": "gpt", "ffn_hidden_size": 96},
    "llama": {"family": "llama", "ffn_hidden_size": 96},
    # With tp=3 or 8 the places share key/value heads in an uneven pattern; with tp=6 or 12 each one has one.
    "llama-gqa": {"family": "llama", "ffn_hidden_size": 96, "num_kv_heads": 4},
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "recompute": ("none", "selective", "full"),
    "sequence_parallel": (False, True),
    "tied": (False, True),
    "uneven": (False, True),
    "dropout": (0.0, 0.2),
    "block": ("serial", "parallel"),
    "window": ("full", "all", "mixed"),
    "schedule": (("1f1b", 1), ("1f1b", 2), ("zero_bubble", 1)),
    "optimizer": ("adamw", "lamb"),
    "overlap": (True, False),
    "wire": ("fp32", "bf16"),
    "tp_tiles": (1, 2, 4),
}


@dataclass(frozen=True)
class Case:
    """One mesh with one choice of each option; options that a mesh does not have are at their first value.

    schedule: parallel.schedule and parallel.virtual_stages. wire: parallel.gradient_wire.
    """

    pp: int
    dp: int
    tp: int
    model: str = "gpt"
    recompute: str = "none"
    sequence_parallel: bool = False
    tied: bool = False
    uneven: bool = False
    dropout: float = 0.0
    block: str = "serial"
    window: str = "full"
    schedule: tuple[str, int] = ("1f1b", 1)
    optimizer: str = "adamw"
    overlap: bool = True
    wire: str = "fp32"
    tp_tiles: int = 1
    num_sequences: int = 8
    num_layers: int = 4

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    def reference(self) -> Case:
        """The same training on one rank, without what must change nothing."""
        return Case(
            1,
            1,
            1,
            self.model,
            tied=self.tied,
            dropout=self.dropout,
            block=self.block,
            window=self.window,
            optimizer=self.optimizer,
            num_sequences=self.num_sequences,
            num_layers=self.num_layers,
        )


def meshes_of(world_size: int) -> list[tuple[int, int, int]]:
    """All (pp, dp, tp) of a world that the test's model allows with its 24 heads."""
    degrees = [n for n in range(1, world_size + 1) if world_size % n == 0]
    found = [mesh for mesh in itertools.product(degrees, repeat=3) if np.prod(mesh) == world_size]
    return [(pp, dp, tp) for pp, dp, tp in found if 24 % tp == 0]


def normalised(case: Case) -> Case:
    """Without options that have no meaning on its mesh."""
    changes: dict[str, object] = {}
    if case.tp == 1:
        changes |= {"sequence_parallel": False, "tp_tiles": 1}
    else:
        rows = SEQ_LEN // case.tp if case.sequence_parallel else SEQ_LEN
        changes["tp_tiles"] = max(n for n in FACTORS["tp_tiles"] if n <= case.tp_tiles and rows % n == 0)
    if case.pp == 1 or case.pp >= 4:
        changes["uneven"] = False
    if case.dp == 1:
        changes |= {"overlap": True, "wire": "fp32"}
    virtual = case.schedule[1]
    if case.pp == 1:
        changes["schedule"] = ("1f1b", virtual)
    changes["num_layers"] = max(4, case.pp * virtual + (case.uneven and virtual > 1))
    # Virtual stages get a number of micro-batches that the stages do not divide.
    changes["num_sequences"] = (case.world_size if case.world_size > 2 else 4) + (case.dp if virtual > 1 else 0)
    return Case(**{**vars(case), **changes})


def all_cases(mesh: tuple[int, int, int], seed: int) -> list[Case]:
    """Every mixture of a model's options on a mesh, each once; of the engine's options each gets some, drawn.

    Every mixture of those too would be a thousand times as many.
    """
    chance = random.Random(seed)
    models, engine = dict(list(FACTORS.items())[:6]), dict(list(FACTORS.items())[6:])
    mixtures = (dict(zip(models, values, strict=True)) for values in itertools.product(*models.values()))
    cases = dict.fromkeys(normalised(Case(*mesh, **mixture)) for mixture in mixtures)
    drawn = ({name: chance.choice(values) for name, values in engine.items()} for _ in cases)
    return [normalised(replace(case, **options)) for case, options in zip(cases, drawn, strict=True)]


def covering(meshes: Sequence[tuple[int, int, int]], seed: int) -> list[Case]:
    """Cases in which every value of an option meets every mesh and every value of every other option, greedily few.

    Each case begins with a pair that is still missing; then option by option gets the value that makes most missing
    pairs, and of several such cases, with the options in another order, the best one is taken.
    """
    chance = random.Random(seed)
    factors = {"mesh": tuple(meshes), **FACTORS}
    missing = {
        frozenset(pair)
        for (one, ones), (other, others) in itertools.combinations(factors.items(), 2)
        for pair in itertools.product(((one, value) for value in ones), ((other, value) for value in others))
    }
    missing = {
        pair for pair in missing if any(pair in _pairs(_case({"mesh": m, **dict(pair)}, factors)) for m in meshes)
    }
    chosen: list[Case] = []
    while missing:
        first = min(missing, key=lambda pair: sorted(map(repr, pair)))
        tries = [_grown(dict(first), factors, missing, chance) for _ in range(30)]
        best = max(tries, key=lambda case: (first in _pairs(case), len(_pairs(case) & missing)))
        missing -= _pairs(best)
        chosen.append(best)
    return sorted(chosen, key=lambda case: (case.world_size, str(case)))


def _grown(
    values: dict[str, Any], factors: dict[str, tuple[Any, ...]], missing: set[frozenset[Any]], chance: random.Random
) -> Case:
    left = [name for name in factors if name not in values]
    chance.shuffle(left)
    for name in left:

        def gain(value: Any, name: str = name) -> tuple[int, float]:
            wanted = sum(frozenset([(name, value), pair]) in missing for pair in values.items())
            return wanted, chance.random()

        values[name] = max(factors[name], key=gain)
    return _case(values, factors)


def _case(values: dict[str, Any], factors: dict[str, tuple[Any, ...]]) -> Case:
    whole = {name: values.get(name, options[0]) for name, options in factors.items()}
    return normalised(Case(*whole.pop("mesh"), **whole))


def _pairs(case: Case) -> frozenset[frozenset[Any]]:
    values = [("mesh", (case.pp, case.dp, case.tp)), *((name, getattr(case, name)) for name in FACTORS)]
    return frozenset(map(frozenset, itertools.combinations(values, 2)))


def config_of(case: Case) -> Config:
    from tests.train.trainers import make_config

    layers = case.num_layers
    parallel: dict[str, object] = {
        "pp": case.pp, "dp": case.dp, "tp": case.tp, "sequence_parallel": case.sequence_parallel,
        "schedule": case.schedule[0], "virtual_stages": case.schedule[1],
        "overlap": case.overlap, "gradient_wire": case.wire, "tp_tiles": case.tp_tiles,
    }  # fmt: skip
    if case.uneven:
        # The first stage has all that the others can spare.
        others = case.pp * case.schedule[1] - 1
        parallel["layers_per_stage"] = [layers - others, *[1] * others]
    windows = {"full": None, "all": 7, "mixed": ([None, 5, 11] * layers)[:layers]}
    model = {
        **MODELS[case.model], "num_layers": layers, "hidden_size": 48, "num_heads": 24, "tied_embeddings": case.tied,
        "dropout": case.dropout, "init_std": 0.2, "block": case.block, "attention_window": windows[case.window],
    }  # fmt: skip
    return make_config(
        model,
        parallel,
        {"name": case.optimizer},
        seq_len=SEQ_LEN,
        recompute=case.recompute,
        global_batch_size=case.num_sequences,
    )


def batches_of(step: int, num_sequences: int) -> list[TestBatch]:
    """Sequences of two documents with unequal numbers of labels; one has none at all."""
    generator = torch.Generator().manual_seed(1000 + step)
    batches = []
    for index in range(num_sequences):
        tokens = torch.randint(0, VOCAB, (1, SEQ_LEN), generator=generator)
        labels = torch.roll(tokens, -1, dims=1)
        labels[:, -1] = -100
        labels[0, : (index * 7) % (SEQ_LEN + 1)] = -100
        first = 5 + index % 14
        positions = torch.cat([torch.arange(first), torch.arange(SEQ_LEN - first)])[None]
        batches.append(TestBatch(tokens, labels, positions, ((first, SEQ_LEN - first),), (index,)))
    return batches


Gradients = list[tuple[str, tuple[int, ...], tuple[slice, ...], np.ndarray]]


@dataclass
class Trace:
    """What a rank saw: of each step loss and norm, and the gradients that it counts."""

    figures: list[tuple[float, float]]
    gradients: list[Gradients]


def train_cases(me: TestRank, cases: Sequence[Case], num_steps: int, dtype: torch.dtype, exact: bool) -> list[Trace]:
    """One rank's part in each case, one after another. exact: with the gradients."""
    return [_train(me, case, num_steps, dtype, exact) for case in cases]


def _train(me: TestRank, case: Case, num_steps: int, dtype: torch.dtype, exact: bool) -> Trace:
    trainer = make_trainer(me, config_of(case), dtype)
    trace = Trace([], [])
    update = trainer.optimizer.step

    def note_and_update(*args: Any) -> None:
        if exact:
            trace.gradients.append(counted_gradients(trainer))
        update(*args)

    trainer.optimizer.step = note_and_update  # type: ignore[method-assign]
    for step in range(1, num_steps + 1):
        result = trainer.step(step, share_of(trainer, batches_of(step, case.num_sequences)), lr=1e-3)
        assert not result.skipped
        trace.figures.append((result.loss, result.grad_norm))
    return trace


def counted_gradients(trainer: Trainer) -> Gradients:
    found = []
    for chunk in trainer.parameters:
        for piece in chunk.pieces(counted=True):
            part = chunk.gradients[piece.start : piece.start + piece.box.num_elements]
            box = tuple(slice(low, low + size) for low, size in zip(piece.box.offsets, piece.box.sizes, strict=True))
            found.append((piece.name, piece.shape, box, part.view(piece.box.sizes).clone().numpy()))
    return found


def assembled(traces: Sequence[Trace], step: int) -> dict[str, np.ndarray]:
    """Every parameter's gradient from all ranks' pieces; each element must come from exactly one of them."""
    wholes: dict[str, np.ndarray] = {}
    seen: dict[str, np.ndarray] = {}
    for trace in traces:
        for name, shape, box, values in trace.gradients[step]:
            whole = wholes.setdefault(name, np.zeros(shape))
            whole[box] = values
            seen.setdefault(name, np.zeros(shape, dtype=int))[box] += 1
    for name, counts in seen.items():
        assert (counts == 1).all(), f"{name} is counted {counts.min()} to {counts.max()} times"
    return wholes
