"""Small real runs of the hpc-train command for tests: a corpus of bytes, a tiny model, a few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hpc_train.data.index_writer import TokenFileWriter
from tests.ranks import mpi_environment, run_tree

VOCAB = 64


def write_corpus(prefix: Path, *, num_documents: int = 60, largest_id: int = VOCAB - 1) -> None:
    """Documents of 5 to 64 tokens that a model can learn: each counts upwards from a start of its own."""
    import numpy as np

    writer = TokenFileWriter(prefix, np.uint16)
    for document in range(num_documents):
        length = 5 + (document * 37) % 60
        writer.add_document((np.arange(length) + document * 11) % VOCAB)
    writer.add_document(np.array([1, largest_id, 2]))
    writer.finish()


def write_config(folder: Path, *, launch: Mapping[str, object] | None = None, **train: object) -> Path:
    """A configuration over folder/corpus; `train` and `launch` override these sections."""
    tree = {
        "name": "test",
        "model": {"family": "llama", "num_layers": 1, "hidden_size": 32, "num_heads": 2, "vocab_size": VOCAB},
        "data": {"seq_len": 32, "train": [{"prefix": str(folder / "corpus")}], "heldout_fraction": 0.1},
        "train": {"steps": 6, "global_batch_size": 4, "eval_every": 3, "eval_batches": 2, "log_every": 1, **train},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2},
        "checkpoint": {"every": 2},
        "launch": {"runs_dir": str(folder / "runs"), "timeout_s": 60, **(launch or {})},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def hpc_train(
    args: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 240.0,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m hpc_train ARGS` to its end."""
    command = [sys.executable, "-m", "hpc_train", *map(str, args)]
    return run_tree(command, env=mpi_environment(env), timeout_s=timeout_s, cwd=cwd)


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """What a file of JSON lines has, which may be being written to: without a last line that has not ended yet."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def last_step(run_dir: Path) -> int:
    """The last step with figures in a run's folder; 0 where there is none."""
    lines = whole_lines(run_dir / "metrics.jsonl")
    return int(lines[-1]["step"]) if lines else 0


def metrics(run_dir: Path) -> list[dict[str, object]]:
    """The figures of each step that do not depend on the clock."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timed = {"step_time_s", "tokens_per_s", "mfu", "time"}
    return [{key: value for key, value in line.items() if key not in timed} for line in lines]
