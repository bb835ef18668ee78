"""What a run left in its folder, read back: metrics, configuration, attempts, and its datasets' entropy."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.config import Config
from hpc_train.config_read import load_config
from hpc_train.errors import ConfigError, DataError
from hpc_train.plan.cost import flops_per_token
from hpc_train.plan.metrics_file import read_metrics
from hpc_train.plan.run_files import CONFIG_FILE, METRICS_FILE, PLAN_FILE, is_count, is_number, is_run_folder, read_json


@dataclass(frozen=True)
class RunRecord:
    """A run's own words. steps: lines of metrics.jsonl by step, the last line of a step that was taken twice.

    config: None where it cannot be read. problems: which files are damaged, and how; their figures are left out.
    """

    run_dir: Path
    config: Config | None
    steps: tuple[dict[str, Any], ...]
    world_size: int | None
    unigram_entropy_nats: float | None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Summary:
    """The figures of a report; None where the run has none. Losses in nats per token, rates are medians.

    notes: what is wrong with the run's files, so that figures are missing.
    """

    name: str
    ranks: int | None
    steps: int
    steps_planned: int | None
    skipped_steps: int
    tokens: int
    step_time_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    peak_flops: float | None
    first_loss: float | None
    last_loss: float | None
    heldout_loss: float | None
    best_heldout_loss: float | None
    unigram_entropy_nats: float | None
    notes: tuple[str, ...] = ()

    @property
    def gain_nats(self) -> float | None:
        """How far the last held-out loss lies below the corpus's unigram entropy."""
        if self.heldout_loss is None or self.unigram_entropy_nats is None:
            return None
        return self.unigram_entropy_nats - self.heldout_loss


def read_run(run_dir: Path) -> RunRecord:
    """Read a run folder.

    Raises:
        ConfigError: no run folder.
        DataError: it has no metrics that can be read.
    """
    if not is_run_folder(run_dir) and not any(os.path.lexists(run_dir / name) for name in (CONFIG_FILE, METRICS_FILE)):
        raise ConfigError(f"{run_dir} is no run folder: it has no {CONFIG_FILE}. Runs are at runs/NAME/JOB_OR_TIME.")
    problems: list[str] = []
    steps = read_metrics(run_dir / METRICS_FILE, problems)
    if not steps and problems:
        raise DataError(
            f"{problems[0]}, and no step can be read there. Restore it; losses are also in the run's logs/."
        )
    if not steps:
        raise DataError(f"{run_dir} has no {METRICS_FILE} with a step in it: the run has taken none. See its logs/.")
    config = _config(run_dir / CONFIG_FILE, problems)
    world_size = _world_size(run_dir / PLAN_FILE, problems)
    entropy = None if config is None else _entropy(config, problems)
    return RunRecord(run_dir, config, steps, world_size, entropy, tuple(problems))


def summarise(run: RunRecord) -> Summary:
    """Figures of a run. Rates leave out the first step, which pays for everything that is done once."""
    steady = run.steps[1:] or run.steps
    heldout = [record["eval_loss"] for record in run.steps if record.get("eval_loss") is not None]
    losses = [record["loss"] for record in run.steps if has_loss(record)]
    tokens_per_s, mfu = _median(steady, "tokens_per_s"), _median(steady, "mfu")
    config = run.config
    flops = None if config is None else flops_per_token(config.model, config.data.seq_len)
    return Summary(
        name=run.run_dir.absolute().parent.name if config is None else config.name,
        ranks=run.world_size,
        steps=run.steps[-1]["step"],
        steps_planned=None if config is None else config.train.steps,
        skipped_steps=sum(bool(record.get("skipped")) for record in run.steps),
        tokens=sum(record.get("tokens") or 0 for record in run.steps),
        step_time_s=_median(steady, "step_time_s"),
        tokens_per_s=tokens_per_s,
        mfu=mfu,
        peak_flops=tokens_per_s * flops / mfu if mfu and tokens_per_s and flops else None,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        heldout_loss=heldout[-1] if heldout else None,
        best_heldout_loss=min(heldout) if heldout else None,
        unigram_entropy_nats=run.unigram_entropy_nats,
        notes=run.problems,
    )


def has_loss(record: dict[str, Any]) -> bool:
    """Whether a step had a loss. Earlier versions wrote 0.0 for steps without a supervised token."""
    return record.get("loss") is not None and record.get("supervised_tokens") != 0


def _median(records: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [record[key] for record in records if record.get(key) is not None]
    return statistics.median(values) if values else None


def _config(path: Path, problems: list[str]) -> Config | None:
    if not os.path.lexists(path):
        problems.append(f"{path} is missing: the run's own name and planned steps are not known")
        return None
    try:
        return load_config(path)
    except ConfigError as error:
        fault = str(error).splitlines()[-1].strip().removeprefix(f"{path}: ")
        problems.append(f"{path} is damaged: it holds no configuration of a run ({fault})")
        return None


def _world_size(path: Path, problems: list[str]) -> int | None:
    plan = read_json(path, problems)
    if plan is None:
        return None
    size = plan.get("world_size")
    if is_count(size):
        return size
    problems.append(f"{path} is damaged: its world_size is no number of ranks")
    return None


def _entropy(config: Config, problems: list[str]) -> float | None:
    """Unigram entropy of the training blend: of the sources' entropies, weighted; None unless all are known.

    A mixture's entropy is at least this mean, so it never flatters the model.
    """
    total, weights = 0.0, 0.0
    for source in config.data.train:
        entropy = (read_json(Path(f"{source.prefix}.json"), problems) or {}).get("unigram_entropy_nats")
        if not is_number(entropy):
            return None
        total += source.weight * entropy
        weights += source.weight
    return total / weights
