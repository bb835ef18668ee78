"""Published step times of a 175B model on A100 GPUs, the rates that fit them best, and the error of each row.

`python -m tests.plan.calibration` prints the table of docs/measurements/cost-model.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from hpc_train.config import Config
from hpc_train.config_read import load_config
from hpc_train.plan.estimate import MEGATRON_LM, Rates, estimate_step
from hpc_train.plan.mesh import Mesh


@dataclass(frozen=True)
class Row:
    """One published run. is_derived: from its utilisation, since the time is not given."""

    system: str
    global_batch_size: int
    num_gpus: int
    step_time_s: float
    is_derived: bool = False

    @property
    def mesh(self) -> Mesh:
        return Mesh.fill(self.num_gpus, pp=8, tp=8)


def config_of(row: Row) -> Config:
    """MegaScale's 175B, micro-batches of one sequence, without recomputation in the count: it is in the efficiency."""
    batch = f"train.global_batch_size={row.global_batch_size}"
    return load_config("gpt-175b", [batch, "train.micro_batch_size=1", "train.recompute=none"])


def _from_mfu(system: str, mfu: float, flops_per_token: float) -> Row:
    """At 12,288 GPUs the utilisation alone is published."""
    num_gpus, num_sequences = 12288, 6144
    step_time_s = num_sequences * 2048 * flops_per_token / (num_gpus * 312e12 * mfu)
    return Row(system, num_sequences, num_gpus, step_time_s, True)


# Jiang et al., "MegaScale", NSDI'24: strong scaling of the 175B model. FLOP a token as each system
# counted them, from its rows with both time and utilisation (derived): MegaScale's windows see less.
ROWS = (
    Row("Megatron-LM", 768, 256, 40.0),
    Row("Megatron-LM", 768, 768, 15.2),
    Row("Megatron-LM", 6144, 3072, 29.02),
    Row("Megatron-LM", 6144, 8192, 12.24),
    _from_mfu("Megatron-LM", 0.412, 1.077e12),
    Row("MegaScale", 768, 256, 32.0),
    Row("MegaScale", 768, 768, 11.5),
    Row("MegaScale", 6144, 3072, 23.66),
    Row("MegaScale", 6144, 8192, 9.56),
    _from_mfu("MegaScale", 0.552, 1.065e12),
)
MEGASCALE = Rates(312e12, 0.678, 18.0e9, "fitted to MegaScale's 175B runs on 256 to 12,288 A100 GPUs")
"""Derived as MEGATRON_LM is. MegaScale hides most of what dp sends, so its rate is one of all bytes."""
RATES = {"Megatron-LM": MEGATRON_LM, "MegaScale": MEGASCALE}


@cache
def parts_s(row: Row) -> tuple[float, float]:
    """Seconds in the pipeline at the full peak, and in data-parallel transfers at 1 GB/s."""
    rates = Rates(312e12, 1.0, 1e9, "one")
    alone, whole = (_modelled_s(row, replace(rates, dp_bytes_per_s=rate)) for rate in (1e30, 1e9))
    return alone, whole - alone


def modelled_s(row: Row, rates: Rates) -> float:
    assert rates.efficiency is not None and rates.dp_bytes_per_s is not None
    computing_s, sending_s = parts_s(row)
    return computing_s / rates.efficiency + sending_s * 1e9 / rates.dp_bytes_per_s


def _modelled_s(row: Row, rates: Rates) -> float:
    estimate = estimate_step(config_of(row), row.mesh, rates)
    assert estimate.step_time_s is not None
    return estimate.step_time_s


def fit(rows: Sequence[Row]) -> tuple[float, float]:
    """Efficiency and bytes per second with the least squares of relative errors: step time is linear in 1 / each."""
    design = np.array([[part / row.step_time_s for part in parts_s(row)] for row in rows])
    (slowness, per_gigabyte), *_ = np.linalg.lstsq(design, np.ones(len(rows)), rcond=None)
    return float(1 / slowness), float(1e9 / per_gigabyte)


def error_left_out(row: Row) -> float:
    """The row's relative error with rates that are fitted to the other rows of its system."""
    efficiency, rate = fit([other for other in ROWS if other.system == row.system and other != row])
    return modelled_s(row, replace(RATES[row.system], efficiency=efficiency, dp_bytes_per_s=rate)) / row.step_time_s - 1


def main() -> None:
    for system in RATES:
        efficiency, rate = fit([row for row in ROWS if row.system == system])
        print(f"{system}: efficiency {efficiency:.3f}, {rate / 1e9:.1f} GB/s")
    print("| system | batch | GPUs | published s | modelled s | error | error if left out |\n" + "|---" * 7 + "|")
    for row in ROWS:
        modelled = modelled_s(row, RATES[row.system])
        published = f"{row.step_time_s:.2f}{' (from MFU)' if row.is_derived else ''}"
        error = f"{modelled / row.step_time_s - 1:+.1%}"
        place = f"| {row.system} | {row.global_batch_size} | {row.num_gpus} | {published} | {modelled:.2f}"
        print(f"{place} | {error} | {error_left_out(row):+.1%} |")


if __name__ == "__main__":
    main()
