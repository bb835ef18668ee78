"""The arguments of `hpc-train profile`. Only argparse is imported here."""

from __future__ import annotations

import argparse
from typing import Any

from hpc_train.arguments import filled, positive

_EXAMPLES = """\
examples:
  hpc-train profile config.yaml -n 2                        on this machine
  salloc -N 2 --ntasks-per-node=8 hpc-train profile config.yaml --out costs.json
  hpc-train plan config.yaml -N 64 --batch 1 parallel.hdp.profile=costs.json
"""


def add_profile_parser(commands: Any) -> None:
    """Add `profile`."""
    parser = commands.add_parser(
        "profile",
        help="measure what batch planning wants to know of this machine",
        description="Measure on this machine what the run's batches are planned with: attention and the rest of a "
        "layer, passing\nkeys and values on in a ring, copies to the host. Says what each part takes, seconds to a "
        "minute in all; the nodes\nshould do nothing else.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", type=filled, metavar="CONFIG", help="a YAML file, or the name of a recipe")
    parser.add_argument(
        "overrides", type=filled, metavar="key=value", nargs="*", help="changes, for example parallel.tp=4"
    )
    ranks = "number of ranks (default: the job's; outside of one 2 for each tp rank)"
    parser.add_argument("-n", "--ntasks", dest="ranks", type=positive, metavar="RANKS", help=ranks)
    parser.add_argument(
        "--ntasks-per-node", dest="ranks_per_node", type=positive, metavar="RANKS", help="ranks on each node"
    )
    parser.add_argument(
        "--mpi", type=filled, metavar="PLUGIN", help="srun's --mpi (default: what fits the MPI library)"
    )
    parser.add_argument("--out", type=filled, default="profile.json", metavar="FILE", help="default: profile.json")
    repeats = "times that each is measured; the least one counts (default: 7)"
    parser.add_argument("--repeats", type=positive, default=7, metavar="N", help=repeats)
