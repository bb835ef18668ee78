"""How much of tensor parallel's communication its tiles can hide, by playing each transfer beside its products.

A transfer takes the line alone, tiles go one behind the other, and a rank multiplies in the order of
parallel/exchange.py. What is not hidden makes the time of the products longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from hpc_train.config import Config
from hpc_train.plan.axis_bytes import is_split_by_tokens
from hpc_train.plan.cost import micro_batch_shape
from hpc_train.plan.hidden import RATIOS
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.stages import model_costs


@dataclass(frozen=True)
class Crossing:
    """A transfer with the products beside it, in any one unit of time.

    product: of all rows with the weights before (leaving) or behind (entering) the transfer. behind: weights' gradients
    that are made before the end of a leaving is awaited. own: share of the rows that need no transfer.
    """

    is_entering: bool
    transfer: Fraction
    product: Fraction = Fraction(0)
    behind: Fraction = Fraction(0)
    own: Fraction = Fraction(0)

    def added(self, num_tiles: int) -> Fraction:
        """What the transfer adds to the time of the products."""
        compute = self.product + self.behind
        if num_tiles == 1:
            return self.transfer
        tile, rows = self.transfer / num_tiles, self.product * (1 - self.own) / num_tiles
        now = line = Fraction(0)
        if self.is_entering:
            now = self.product * self.own
            for _ in range(num_tiles):
                line += tile
                now = max(now, line) + rows
            return now + self.behind - compute
        for _ in range(num_tiles):
            now += rows
            line = max(now, line) + tile
        return max(now + self.product * self.own + self.behind, line) - compute


def best_hidden_tiles(config: Config, mesh: Mesh, ratios: Sequence[float] = RATIOS) -> tuple[tuple[float, float], ...]:
    """For each ratio (tp's transfers of a micro-batch to its compute) the share of them that tiles can hide.

    Nothing where tp is 1 or there is one tile. The loss's numbers and sums at a step's end are left out.
    """
    if mesh.tp == 1 or config.parallel.tp_tiles == 1:
        return ()
    compute, crossings = _compute(config, mesh), list(_crossings(config, mesh))
    sent = sum(crossing.transfer for crossing in crossings)
    found = []
    for ratio in ratios:
        scale = Fraction(ratio).limit_denominator(1000) * compute / sent
        added = sum(
            Crossing(c.is_entering, c.transfer * scale, c.product, c.behind, c.own).added(
                config.parallel.tp_tiles if c.product else 1
            )
            for c in crossings
        )
        found.append((ratio, float(1 - added / (sent * scale))))
    return tuple(found)


def _compute(config: Config, mesh: Mesh) -> Fraction:
    """Floating-point operations of one micro-batch on a tp rank."""
    num_sequences, seq_len = micro_batch_shape(config)
    costs = model_costs(config.model, seq_len, num_sequences, config.train.recompute)
    return Fraction(sum(costs.layers) + costs.head_and_loss, mesh.tp)


def _crossings(config: Config, mesh: Mesh) -> Iterator[Crossing]:
    """Of one micro-batch: products in floating-point operations, transfers in numbers sent."""
    model, by_tokens = config.model, is_split_by_tokens(config, mesh)
    h, kv = model.hidden_size, model.kv_heads * model.head_size
    attention = (h * h + 2 * h * kv, h * h)
    ffn = ((2 if model.family == "llama" else 1) * h * model.ffn_size, h * model.ffn_size)
    parts = [attention, ffn]
    if model.block == "parallel":
        parts = [(attention[0] + ffn[0], attention[1] + ffn[1])]
    num_sequences, seq_len = micro_batch_shape(config)
    tokens = num_sequences * seq_len
    once = Fraction(tokens * h * (mesh.tp - 1), mesh.tp)
    own = Fraction(1, mesh.tp) if by_tokens else Fraction(0)
    is_split = config.parallel.schedule == "zero_bubble"

    def product(numbers: int) -> Fraction:
        return Fraction(2 * tokens * numbers, mesh.tp)

    def enter(numbers: int) -> Iterator[Crossing]:
        if by_tokens:
            yield Crossing(True, once, product(numbers), own=own)

    def leave(numbers: int, behind: int = 0) -> Iterator[Crossing]:
        yield Crossing(False, once if by_tokens else 2 * once, product(numbers), product(behind), own)

    for _ in range(model.num_layers):
        for index, (reading, writing) in enumerate(parts):
            is_last = index == len(parts) - 1
            for _ in range(2 if config.train.recompute == "full" else 1):
                yield from enter(reading)
            # The last leaving of a block is done again only where its result is dropped out.
            is_again = config.train.recompute == "full" and (not is_last or model.dropout > 0)
            for _ in range(2 if is_again else 1):
                yield from leave(writing)
            yield from enter(writing)
            yield from leave(reading, 0 if is_split else reading)
    for _ in range(2):  # the head and the embedding, whose transfers have no product beside them
        yield from enter(0)
        yield from leave(0)
