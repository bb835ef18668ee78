"""Held-out losses at equal tokens: LAMB at 4x the batch against AdamW, and parallel blocks with windows against serial.

Trains the recipe `tiny` on the demo's corpus (env/demo.sh makes it) in several ways, one after another, each on one
rank with the same tokens in the same order and the same schedule of the learning rate over them. Several peak rates may
be given for each optimizer, and the best ones are compared, on the same held-out rows. AdamW with the large batch and
LAMB's steps says what LAMB has to make up for. Prints JSON.

    python -m tests.bench.bench_convergence CORPUS [--tokens 2600000] [--batch 4] [--adamw-lr 3e-3] [--lamb-lr 2e-2]
        [--window 64] [--ways adamw lamb adamw-4x parallel]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.ranks import TestRank, run_ranks

SEQ_LEN, FACTOR, HELDOUT_ROWS = 256, 4, 128
WAYS = ("adamw", "lamb", "adamw-4x", "parallel")
# Beyond this a change of the algorithm is said to cost quality (the goal of the bench).
GOAL = 0.02


def _config(corpus: Path, tokens: int, small: int, changes: dict[str, Any]) -> Any:
    """small: sequences in a batch of AdamW; `factor` of the changes multiplies it."""
    from hpc_train.config_read import load_config

    factor, lr = changes.get("factor", 1), changes["lr"]
    batch = factor * small
    # A whole number of large batches, so that all ways see the same tokens.
    steps = max(1, tokens // (FACTOR * small * SEQ_LEN)) * (FACTOR // factor)
    overrides = [
        f"data.train=[{{prefix: {corpus}}}]",
        f"data.heldout=[{{prefix: {corpus}_heldout}}]",
        f"train.steps={steps}",
        f"train.global_batch_size={batch}",
        f"train.micro_batch_size={small}",
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


def _train(me: TestRank, corpus: Path, tokens: int, small: int, changes: dict[str, Any]) -> dict[str, Any]:
    from hpc_train.plan.mesh import Mesh
    from hpc_train.train.build import build_run
    from hpc_train.train.loop import evaluate, train
    from tests.worlds import make_world

    config = _config(corpus, tokens, small, changes)
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
    lamb = {"optimizer": "lamb", "factor": FACTOR}
    of_kinds = {
        "adamw": {f"adamw lr={lr:g}": {"lr": lr} for lr in args.adamw_lr},
        "lamb": {f"lamb 4x lr={lr:g}": {"lr": lr, **lamb} for lr in args.lamb_lr},
        "adamw-4x": {f"adamw 4x lr={lr:g}": {"lr": lr, "factor": FACTOR} for lr in args.adamw_lr},
        "parallel": {f"parallel window lr={lr:g}": {"lr": lr, "model": (parallel, window)} for lr in args.adamw_lr},
    }
    return {name: changes for kind in args.ways for name, changes in of_kinds[kind].items()}


def _best(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Of each kind the loss with its best rate."""
    best: dict[str, float] = {}
    for name, result in found.items():
        kind = name.partition(" lr=")[0]
        best[kind] = min(best.get(kind, math.inf), result["heldout_loss"])
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="prefix of the token files, such as demo/corpus")
    parser.add_argument("--tokens", type=int, default=2_600_000)
    parser.add_argument("--adamw-lr", type=float, nargs="+", default=[3e-3])
    parser.add_argument("--lamb-lr", type=float, nargs="+", default=[2e-2])
    parser.add_argument("--batch", type=int, default=4, help="sequences of 256 tokens a step, of AdamW at 1x")
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="adamw is what others are held to")
    args = parser.parse_args()
    found = {}
    for name, changes in _ways(args).items():
        (found[name],) = run_ranks(_train, 1, args.corpus.resolve(), args.tokens, args.batch, changes, timeout_s=7200)
        print(f"{name}: {found[name]}", flush=True)
    best = _best(found)
    ratios = {kind: loss / best["adamw"] for kind, loss in best.items() if kind != "adamw" and "adamw" in best}
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
