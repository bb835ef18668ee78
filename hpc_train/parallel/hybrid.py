"""Hybrid data parallelism: a rank's micro-batches are pieces of sequences, some of them shared with a ring of ranks.

A model sees the pieces of a micro-batch as one row of tokens, each with its place in its sequence; attention alone
looks beyond the row. Nothing else differs from whole sequences: losses are summed over supervised tokens, and gradients
over all ranks of the hdp axis once a step, whoever had how many micro-batches.

Source: ByteScale (arXiv 2502.21231), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpc_train.comm.collectives import Group
from hpc_train.errors import ConfigError
from hpc_train.models.dropout import DropoutKey
from hpc_train.models.saving import LayerSaving
from hpc_train.models.transformer import Inputs, Part, Transformer
from hpc_train.parallel.ring_attention import Ring, RingCore
from hpc_train.plan.batch_pieces import PieceBatch


def piece_inputs(
    batch: PieceBatch,
    group: Group,
    unit: int,
    device: torch.device,
    *,
    dropout: tuple[float, int, int] | None = None,
    saving: LayerSaving | None = None,
) -> Inputs:
    """A micro-batch of pieces as a model reads it.

    Args:
        group: The hdp axis.
        unit: The row has a multiple of so many tokens, one at least: with padding behind, of no sequence, which no
            token sees and which has no labels.
        dropout: Its probability, the run's seed and the step; None where nothing is dropped.
        saving: What keeps the layers' activations.
    """
    padding = -batch.num_tokens % unit or (0 if batch.num_tokens else unit)

    def row(values: Any, fill: int) -> torch.Tensor:
        row_T = torch.tensor(values, dtype=torch.int64)
        return torch.nn.functional.pad(row_T, (0, padding), value=fill)[None].to(device)

    key = None
    positions_1T = row(batch.positions(), 0)
    if dropout is not None:
        probability, seed, step = dropout
        key = DropoutKey(probability, seed, step, row(batch.sequences(), 0), positions_1T)
    core = RingCore(Ring(batch.lengths, batch.members, batch.place, group))
    return Inputs(row(batch.tokens, 0), row(batch.labels, -100), positions_1T, core, key, saving)


def check_pieces(batches: Sequence[PieceBatch], chunks: Sequence[Transformer]) -> None:
    """Refuse what a plan may ask for and a rank with these model chunks cannot carry out.

    Raises:
        ConfigError: offloading with several model chunks, or beside recomputation.
    """
    if not any(batch.micro_batch.offload_milli for batch in batches):
        return
    if len(chunks) > 1:
        raise ConfigError(
            f"a batch plan that offloads activations, on ranks of {len(chunks)} model chunks, each of whose last two "
            "layers would stay. Use parallel.virtual_stages=1, or plan without offloading"
        )
    if any(_is_recomputed(chunk) for chunk in chunks):
        raise ConfigError(
            "a batch plan that offloads activations, which train.recompute does not save in the first place. Use "
            "train.recompute=none, or plan without offloading"
        )


def _is_recomputed(chunk: Transformer) -> bool:
    parts = [module for module in chunk.modules() if isinstance(module, Part)]
    return chunk.recompute_blocks or any(part.recompute_core for part in parts)
