"""One JSON line a step in metrics.jsonl, a progress line now and then, TensorBoard if asked. On rank 0 only."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from hpc_train.log import say
from hpc_train.plan.run_files import METRICS_FILE


class Metrics:
    """Writes what a step gave. Nothing here may end a run: a line that cannot be written is reported once."""

    def __init__(self, run_dir: Path, *, tensorboard: bool, num_steps: int, log_every: int) -> None:
        self._path = run_dir / METRICS_FILE
        self._num_steps = num_steps
        self._log_every = log_every
        self._failed = False
        self._board = _tensorboard_writer(run_dir) if tensorboard else None

    def forget_after(self, step: int) -> None:
        """Drop lines of steps that a resumed run will take again, so that each step stands there once."""
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return
        kept = [line for line in lines if (found := _step_of(line)) is not None and found <= step]
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        temporary.replace(self._path)

    def write(self, record: dict[str, Any]) -> None:
        """Append one step's figures; not-finite numbers become null, as strict JSON has none."""
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        clean["time"] = time.time()
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(clean, allow_nan=False) + "\n")
        except OSError as error:
            if not self._failed:
                say(f"warning: {self._path} cannot be written: {error}; training goes on")
            self._failed = True
        if self._board is not None:
            for key, value in clean.items():
                if isinstance(value, int | float) and key != "step":
                    self._board.add_scalar(key, value, clean["step"])
        if self._is_logged(clean):
            say(progress_line(clean, self._num_steps))

    def close(self) -> None:
        if self._board is not None:
            self._board.close()

    def _is_logged(self, record: dict[str, Any]) -> bool:
        step = record["step"]
        return (
            step % self._log_every == 0
            or step in (1, self._num_steps)
            or "eval_loss" in record
            or record.get("skipped", False)
        )


def progress_line(record: dict[str, Any], num_steps: int) -> str:
    """step 120/300 | loss 4.1234 | grad norm 0.81 | lr 3.0e-03 | 0.41 s | 10012 tokens/s | mfu 31.2 %

    mfu only where it is known.
    """
    parts = [
        f"step {record['step']}/{num_steps}",
        f"loss {_number(record['loss'], '.4f')}",
        f"grad norm {_number(record['grad_norm'], '.3f')}",
        f"lr {record['lr']:.2e}",
        f"{_number(record['step_time_s'], '.3f')} s",
        f"{_number(record['tokens_per_s'], '.0f')} tokens/s",
    ]
    if record["mfu"] is not None:
        parts.append(f"mfu {record['mfu']:.1%}")
    if record.get("eval_loss") is not None:
        parts.append(f"held-out loss {record['eval_loss']:.4f}")
    if record.get("skipped"):
        parts.append("SKIPPED: no update was made")
    return " | ".join(parts)


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def _tensorboard_writer(run_dir: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run_dir / "tensorboard"))
