"""Start-up times of this checkout, as one JSON object: python -m tests.bench.bench_startup [RUNS]

Each figure is a median of RUNS (10) interleaved runs, and is asserted nowhere:

    import_hpc_train_s     `import hpc_train`, beyond an empty Python
    help_s                 `hpc-train --help`, all of it
    train_beyond_torch_s   `import hpc_train.train.loop`, beyond `import torch`
    torch_s                `import torch`, beyond an empty Python
    first_step_s           `hpc-train run` with two ranks of a tiny model, from the command to the end of its first step
    run_s, run_cpu_s       the same until it has saved its second and last step and ended, and the time of processors
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.ranks import mpi_environment
from tests.train.runs import write_config, write_corpus

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAMS = {
    "bare": ["-c", "pass"],
    "package": ["-c", "import hpc_train"],
    "help": ["-m", "hpc_train", "--help"],
    "torch": ["-c", "import torch"],
    "train": ["-c", "import torch; import hpc_train.train; import hpc_train.train.loop"],
}


def _seconds(arguments: list[str]) -> float:
    env = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], env=env, cwd="/", stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run_seconds(folder: Path, number: int) -> tuple[float, float, float]:
    """Of a run: until its first step was taken, until its end, and of processor time."""
    run_dir = folder / f"run{number}"
    command = [sys.executable, "-m", "hpc_train", "run", str(folder / "config.yaml"), "-n", "2"]
    before, begin = _cpu_of_children(), time.time()
    subprocess.run([*command, "--run-dir", str(run_dir)], env=mpi_environment(), stdout=subprocess.DEVNULL, check=True)
    end, cpu = time.time(), _cpu_of_children() - before
    first = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    return first["time"] - begin, end - begin, cpu


def measure(num_runs: int) -> dict[str, float | str | int]:
    """The figures of the module's docstring."""
    times: dict[str, list[float]] = {name: [] for name in (*_PROGRAMS, "first_step", "run", "run_cpu")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus")
        write_config(folder, steps=2, eval_every=0)
        for number in range(num_runs + 1):
            found = {name: _seconds(arguments) for name, arguments in _PROGRAMS.items()}
            found |= dict(zip(("first_step", "run", "run_cpu"), _run_seconds(folder, number), strict=True))
            if number:  # the first one fills the page cache and writes .pyc files
                for name, seconds in found.items():
                    times[name].append(seconds)
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "import_hpc_train_s": round(median["package"] - median["bare"], 4),
        "help_s": round(median["help"], 4),
        "train_beyond_torch_s": round(median["train"] - median["torch"], 4),
        "torch_s": round(median["torch"] - median["bare"], 4),
        "bare_python_s": round(median["bare"], 4),
        "first_step_s": round(median["first_step"], 2),
        "run_s": round(median["run"], 2),
        "run_cpu_s": round(median["run_cpu"], 2),
        "num_runs": num_runs,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 10), indent=2))
