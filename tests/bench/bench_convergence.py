"""Held-out losses at equal tokens: LAMB at 4x the batch against AdamW, and parallel blocks with windows against serial.

Trains the recipe `tiny` on the demo's corpus (env/demo.sh makes it) in several ways, one after another, each on one
rank with the same tokens in the same order and the same schedule of the learning rate over them. Several peak rates may
be given for each optimizer, and the best ones are compared, on the same held-out rows. AdamW with the large batch and
LAMB's steps says what LAMB has to make up for. Prints JSON.

    python -m tests.bench.bench_convergence CORPUS [--tokens 2600000] [--adamw-lr 3e-3] [--lamb-lr 2e-2] [--window 64]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.ranks import TestRank, run_ranks

SEQ_LEN, BATCH, LARGE_BATCH, HELDOUT_ROWS = 256, 16, 64, 128
# Beyond this a change of the algorithm is said to cost quality (the goal of the bench).
GOAL = 0.02


def _config(corpus: Path, tokens: int, changes: dict[str, Any]) -> Any:
    from hpc_train.config import load_config

    batch, lr = changes.get("batch", BATCH), changes["lr"]
    # A whole number of large batches, so that all ways see the same tokens.
    steps = max(1, tokens // (LARGE_BATCH * SEQ_LEN)) * (LARGE_BATCH // batch)
    overrides = [
        f"data.train=[{{prefix: {corpus}}}]",
        f"data.heldout=[{{prefix: {corpus}_heldout}}]",
        f"train.steps={steps}",
        f"train.global_batch_size={batch}",
        f"train.micro_batch_size={BATCH}",
        f"train.eval_batches={HELDOUT_ROWS // batch}",
        "train.eval_every=0",
        f"optimizer.name={changes.get('optimizer', 'adamw')}",
        f"optimizer.lr={lr}",
        f"optimizer.min_lr={lr / 10}",
        f"optimizer.warmup_steps={max(1, steps // 8)}",
        "checkpoint.every=0",
        "checkpoint.at_end=false",
        *changes.get("model", ()),
    ]
    return load_config("tiny", overrides)


def _train(me: TestRank, corpus: Path, tokens: int, changes: dict[str, Any]) -> dict[str, Any]:
    from hpc_train.plan.mesh import Mesh
    from hpc_train.train.build import build_run
    from hpc_train.train.loop import evaluate, train
    from tests.worlds import make_world

    config = _config(corpus, tokens, changes)
    with tempfile.TemporaryDirectory() as folder:
        run = build_run(Path(folder), config, Mesh.fill(1), make_world(me))
        begin = time.perf_counter()
        train(run)
        seconds = time.perf_counter() - begin
        return {
            "heldout_loss": evaluate(run),
            "steps": run.step,
            "tokens": run.step * config.train.global_batch_size * SEQ_LEN,
            "skipped_steps": run.skipped_steps,
            "seconds": seconds,
        }


def _ways(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    window = f"model.attention_window={args.window}"
    parallel = "model.block=parallel"
    ways = {f"adamw lr={lr:g}": {"lr": lr} for lr in args.adamw_lr}
    ways |= {f"lamb 4x lr={lr:g}": {"lr": lr, "optimizer": "lamb", "batch": LARGE_BATCH} for lr in args.lamb_lr}
    ways |= {f"adamw 4x lr={lr:g}": {"lr": lr, "batch": LARGE_BATCH} for lr in args.adamw_lr}
    ways |= {f"parallel window lr={lr:g}": {"lr": lr, "model": (parallel, window)} for lr in args.adamw_lr}
    return ways


def _best(found: dict[str, dict[str, Any]], kind: str) -> float:
    return min(result["heldout_loss"] for name, result in found.items() if name.startswith(f"{kind} lr="))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="prefix of the token files, such as demo/corpus")
    parser.add_argument("--tokens", type=int, default=2_600_000)
    parser.add_argument("--adamw-lr", type=float, nargs="+", default=[3e-3])
    parser.add_argument("--lamb-lr", type=float, nargs="+", default=[2e-2])
    parser.add_argument("--window", type=int, default=64)
    args = parser.parse_args()
    found = {}
    for name, changes in _ways(args).items():
        (found[name],) = run_ranks(_train, 1, args.corpus.resolve(), args.tokens, changes, timeout_s=7200)
        print(f"{name}: {found[name]}", flush=True)
    serial = _best(found, "adamw")
    ratios = {kind: _best(found, kind) / serial for kind in ("lamb 4x", "adamw 4x", "parallel window")}
    report = {
        "what": "held-out loss, nats a token, at equal tokens; ratio of the best of each kind to the best of adamw",
        "settings": {**vars(args), "corpus": str(args.corpus)},
        "load_average": os.getloadavg(),
        "found": found,
        "ratio": ratios,
        "within_goal": {kind: ratio <= 1 + GOAL for kind, ratio in ratios.items()},
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
