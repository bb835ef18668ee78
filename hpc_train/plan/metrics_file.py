"""metrics.jsonl, read back: the figures of each step that a run wrote down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_train.plan.run_files import is_count, is_number, read_json_lines

_FIGURES = ("loss", "grad_norm", "lr", "tokens", "supervised_tokens", "step_time_s", "tokens_per_s", "mfu", "eval_loss")


def read_metrics(
    path: Path, problems: list[str] | None = None, *, tail_bytes: int | None = None
) -> tuple[dict[str, Any], ...]:
    """Its lines by step, the last one of a step that was taken twice; a line that is being written is left out.

    Args:
        problems: Gets a sentence where lines are no figures of a step. These are left out.
        tail_bytes: Only the lines within the last so many bytes; None for all.
    """
    lines = read_json_lines(path, problems, is_growing=True, tail_bytes=tail_bytes)
    by_step = {line["step"]: line for line in lines if _is_of_step(line)}
    num_others = sum(not _is_of_step(line) for line in lines)
    if num_others and problems is not None:
        problems.append(f"{path} is damaged: {num_others} of its lines are no figures of a step")
    return tuple(by_step[step] for step in sorted(by_step))


def _is_of_step(line: dict[str, Any]) -> bool:
    """Whether it has a step, and in its known figures numbers or null."""
    return is_count(line.get("step")) and all(is_number(line[name]) for name in _FIGURES if line.get(name) is not None)
