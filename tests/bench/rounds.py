"""What the step-time benchmarks share: the model, its data, paired rounds of ways to train it, and the report.

Rounds are interleaved, so that what else the machine does falls on all alike; figures are medians over rounds.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.ranks import TestRank

SEQ_LEN, VOCAB, STEPS_A_ROUND = 512, 8192, 3
MODEL = {"family": "gpt", "num_layers": 4, "hidden_size": 256, "num_heads": 8, "vocab_size": VOCAB}
# Losses of the first steps, all in fp32: sums in another order, then updates by them.
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Peer:
    """One way to train: a step over micro-batches that gives the mean loss (None on ranks that do not know it).

    finish: waits for what a step has begun for the next one.
    """

    step: Callable[[list[Any]], float | None]
    optimizer_bytes: Callable[[], int] = lambda: 0
    finish: Callable[[], None] = lambda: None


def plain_model() -> Any:
    from hpc_train.config import ModelConfig
    from hpc_train.models.transformer import Transformer

    model = Transformer(ModelConfig(**MODEL), SEQ_LEN)
    model.init_weights(seed=1)
    return model


def our_trainer(me: TestRank, parallel: Mapping[str, object], model: Mapping[str, object] = MODEL) -> Any:
    from tests.train.trainers import make_config, make_trainer

    config = make_config(model, parallel, seq_len=SEQ_LEN, seed=1)
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"clip_grad_norm": 1.0})})
    return make_trainer(me, config)


def our_peer(trainer: Any) -> Peer:
    steps = iter(range(1, 1 << 30))
    moments = [moment for of_chunks in trainer.optimizer.moments.values() for moment in of_chunks]
    return Peer(
        lambda batches: trainer.step(next(steps), batches, 1e-4).loss,
        lambda: sum(moment.untyped_storage().nbytes() for moment in moments),
        trainer.finish,
    )


def torch_optimizer(parameters: Sequence[Any]) -> Any:
    """AdamW with the settings of ours; DTensors and plain tensors in groups of their own, as its kernel needs."""
    import torch

    kinds: dict[tuple[bool, bool], list[Any]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dim() >= 2, hasattr(parameter, "to_local")), []).append(parameter)
    groups = [{"params": some, "weight_decay": 0.1 if decayed else 0.0} for (decayed, _), some in kinds.items()]
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)


def batches_of(
    num_sequences: int,
    micro_batch_size: int,
    share: slice = slice(None),
    vocab_size: int = VOCAB,
    seq_len: int = SEQ_LEN,
) -> list[Any]:
    """A step's micro-batches: of all its sequences, or of a rank's share of them."""
    import torch

    from hpc_train.data.loader import Batch

    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, vocab_size, (num_sequences, seq_len + 1), generator=generator)[share]
    batches = []
    for start in range(0, len(tokens), micro_batch_size):
        part = tokens[start : start + micro_batch_size]
        size = len(part)
        positions = torch.arange(seq_len).expand(size, seq_len)
        one_document = ((seq_len,),) * size
        batches.append(Batch(part[:, :-1], part[:, 1:], positions, one_document, size * seq_len, size * seq_len))
    return batches


def measure(peers: Mapping[str, Peer], batches: list[Any], rounds: int) -> dict[str, Any]:
    """On each rank: what a step of each peer took in each round, and the losses of its two first steps. Collective.

    Processor time has all threads, without waiting: it says what a peer costs on a machine where others run too.
    """
    import torch.distributed as dist

    losses = {name: [peer.step(batches) for _ in range(2)] for name, peer in peers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    processor: dict[str, list[float]] = {name: [] for name in peers}
    names = list(peers)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            peers[name].step(batches)  # so that the timed steps begin as they end: with what a step before has begun
            start, start_processor = time.perf_counter(), time.process_time()
            for _ in range(STEPS_A_ROUND):
                peers[name].step(batches)
            seconds[name].append((time.perf_counter() - start) / STEPS_A_ROUND)
            processor[name].append((time.process_time() - start_processor) / STEPS_A_ROUND)
            peers[name].finish()
    memory = {name: peer.optimizer_bytes() for name, peer in peers.items()}
    return {"seconds": seconds, "processor": processor, "first_losses": losses, "optimizer_bytes": memory}


def report(
    results: list[dict[str, Any]], pairs: Sequence[tuple[str, str]], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What is printed. results: of each rank; a round's time is that of its slowest. pairs: whom against whom.

    Raises:
        AssertionError: peers whose first losses differ do not train the same model on the same data.
    """
    peers = results[0]["seconds"]
    of_ranks = {name: [result["seconds"][name] for result in results] for name in peers}
    slowest = {name: [max(times) for times in zip(*seconds, strict=True)] for name, seconds in of_ranks.items()}
    losses = {name: _known([result["first_losses"][name] for result in results]) for name in peers}
    check_losses(losses, pairs)
    ratios = {
        f"{ours} / {theirs}": [a / b for a, b in zip(slowest[ours], slowest[theirs], strict=True)]
        for ours, theirs in pairs
    }
    return {
        "what": "median step time in seconds, slowest rank; processor time by rank; ratios: medians of paired rounds",
        "settings": dict(settings),
        "load_average": os.getloadavg(),
        "step_s": {name: statistics.median(values) for name, values in slowest.items()},
        "processor_s": {name: [statistics.median(result["processor"][name]) for result in results] for name in peers},
        "ratio": {pair: statistics.median(values) for pair, values in ratios.items()},
        "ratio_range": {pair: (min(values), max(values)) for pair, values in ratios.items()},
        "first_losses": losses,
    }


def check_losses(losses: Mapping[str, Sequence[float]], pairs: Sequence[tuple[str, str]]) -> None:
    """Raises AssertionError: first losses of two peers differ by more than sums in another order do."""
    for ours, theirs in pairs:
        for a, b in zip(losses[ours], losses[theirs], strict=True):
            assert abs(a - b) <= LOSS_TOLERANCE * abs(b), f"losses of {ours} and {theirs} differ: {losses}"


def _known(of_ranks: list[list[float | None]]) -> list[float]:
    """The losses of the last rank that knows them."""
    return next(losses for losses in reversed(of_ranks) if None not in losses)  # type: ignore[return-value]
