"""Start-up times of this checkout, as one JSON object: python tests/bench/bench_startup.py [RUNS]

Each figure is a median of RUNS (10) interleaved runs of a fresh Python, and is asserted nowhere:

    import_hpc_train_s     `import hpc_train`, beyond an empty Python
    help_s                 `hpc-train --help`, all of it
    train_beyond_torch_s   `import hpc_train.train.loop`, beyond `import torch`
    torch_s                `import torch`, beyond an empty Python
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

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


def measure(num_runs: int) -> dict[str, float | str | int]:
    """The figures of the module's docstring."""
    times: dict[str, list[float]] = {name: [] for name in _PROGRAMS}
    for run in range(num_runs + 1):
        for name, arguments in _PROGRAMS.items():
            seconds = _seconds(arguments)
            if run:  # the first one fills the page cache and writes .pyc files
                times[name].append(seconds)
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "import_hpc_train_s": round(median["package"] - median["bare"], 4),
        "help_s": round(median["help"], 4),
        "train_beyond_torch_s": round(median["train"] - median["torch"], 4),
        "torch_s": round(median["torch"] - median["bare"], 4),
        "bare_python_s": round(median["bare"], 4),
        "num_runs": num_runs,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 10), indent=2))
