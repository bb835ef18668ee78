"""From submission to the first collective: `hpc-train submit` against a hand-written sbatch script with torch alone.

Both start 8 ranks on 2 nodes of a real Slurm cluster on this machine, which the benchmark starts and stops (root). The
hand-written script calls srun once; each rank makes a gloo group from Slurm's variables and sums one number. Rounds
are interleaved; a time ends when rank 0 says that the first sum is done. Prints JSON.

    python -m tests.bench.bench_submit [--rounds 5] [--nodes 2] [--ranks-per-node 4]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from tests.services.slurm_cluster import SlurmCluster
from tests.train.runs import write_config, write_corpus

ROOT = Path(__file__).parents[2]
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

PLAIN = """
import os, time
import torch, torch.distributed as dist
rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=size)
dist.all_reduce(torch.ones(1))
if rank == 0:
    print("first collective", time.time(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def _plain_script(folder: Path, nodes: int, per_node: int) -> Path:
    (folder / "plain.py").write_text(PLAIN)
    script = folder / "plain.sh"
    script.write_text(
        "#!/bin/bash\n"
        f"#SBATCH -N {nodes} --ntasks-per-node={per_node} --output={folder}/plain-%j.out\n"
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29400\n'
        f"exec srun --mpi=none --kill-on-bad-exit=1 {sys.executable} {folder}/plain.py\n"
    )
    return script


def _time_plain(slurm: SlurmCluster, folder: Path, script: Path) -> float:
    start = time.time()
    job = slurm.run(["sbatch", "--parsable", str(script)], timeout=60, env=ENV).stdout.split()[0]
    # Not sbatch --wait, which asks ever more seldom.
    while (
        slurm.run(["squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job]).stdout.strip() != "COMPLETED"
    ):
        time.sleep(3.0)  # each question costs the ranks some of their two cores
    said = (folder / f"plain-{job}.out").read_text()
    return float(next(line for line in said.splitlines() if "first collective" in line).split()[-1]) - start


def _time_ours(slurm: SlurmCluster, folder: Path, run: str, nodes: int, per_node: int) -> float:
    start = time.time()
    words = ["submit", str(folder / "config.yaml"), "-N", str(nodes), "--ntasks-per-node", str(per_node)]
    command = [sys.executable, "-m", "hpc_train", *words, "--run-dir", str(folder / run), "--follow"]
    done = slurm.run(command, timeout=300, env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if "are connected over" in line)
    return datetime.fromisoformat(line.split()[0]).timestamp() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=4)
    args = parser.parse_args()
    ours, plain = [], []
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd()) as name,
        SlurmCluster(name=f"test-{os.getpid()}", nodes=args.nodes) as slurm,
    ):
        folder = Path(name)
        write_corpus(folder / "corpus")
        ranks = args.nodes * args.ranks_per_node
        write_config(folder, global_batch_size=ranks, steps=1, eval_every=0)
        script = _plain_script(folder, args.nodes, args.ranks_per_node)
        for number in range(args.rounds + 1):
            plain.append(_time_plain(slurm, folder, script))
            ours.append(_time_ours(slurm, folder, f"run{number}", args.nodes, args.ranks_per_node))
    # The first round fills the caches.
    print(
        json.dumps(
            {
                "what": "seconds from submission to the first collective done, medians",
                "settings": vars(args),
                "hpc_train_s": statistics.median(ours[1:]),
                "plain_s": statistics.median(plain[1:]),
                "ratio": statistics.median(a / b for a, b in zip(ours[1:], plain[1:], strict=True)),
                "all_s": {"hpc_train": ours[1:], "plain": plain[1:]},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
