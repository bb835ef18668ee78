"""Environments recorded on a real Slurm cluster (data/slurm-22.05): the variables, and what /proc told."""

from __future__ import annotations

from pathlib import Path

from hpc_train.cluster.process import ProcessFacts

DATA = Path(__file__).parent / "data" / "slurm-22.05"


def recorded() -> dict[str, tuple[dict[str, str], ProcessFacts]]:
    """Return every recorded process by name: `[what was done].[SLURM_PROCID]`."""
    found: dict[str, tuple[dict[str, str], ProcessFacts]] = {}
    env: dict[str, str] = {}
    for line in (DATA / "environments.txt").read_text().splitlines():
        if line.startswith("["):
            env, name = {}, line.strip("[]")
        elif line.startswith("held_by="):
            held_by, shell = (word.partition("=")[2] for word in line.split())
            found[name] = (env, ProcessFacts(None if held_by == "None" else held_by, shell == "True"))
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            env[key] = value
    return found
