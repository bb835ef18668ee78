from __future__ import annotations

import subprocess
import sys

MODULES = "allocation binding devices environment hostlist limits mpi_site network process situation slurm"


def test_the_facts_need_the_standard_library_only_and_nothing_slow() -> None:
    code = (
        f"import sys; before = set(sys.modules)\nfor name in '{MODULES}'.split():\n"
        "    __import__(f'hpc_train.cluster.{name}')\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    roots = {name.partition(".")[0] for name in output.split()}
    assert roots - {"hpc_train"} <= set(sys.stdlib_module_names)
    assert not roots & {"asyncio", "multiprocessing", "tempfile", "unittest"}
