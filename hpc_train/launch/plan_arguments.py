"""The arguments of `hpc-train plan`. Only argparse is imported here."""

from __future__ import annotations

import argparse
from typing import Any

from hpc_train.arguments import filled, positive

_EXAMPLES = """\
examples:
  hpc-train plan config.yaml -N 32 --fabric fabric.yaml
  hpc-train plan config.yaml -N 2048 --fabric clos:pods=16,nodes=160 --html plan.html
                                                   a made-up network of 16 pods of 160 nodes
  hpc-train plan config.yaml --nodelist 'n[001-016,033-048]' parallel.tp=8 parallel.pp=4
  salloc -N 4 hpc-train plan config.yaml           in a job: the nodes that it was granted
  hpc-train plan config.yaml -N 32 --order tp,dp,pp,cp --json > plan.json
  hpc-train plan config.yaml -N 32 --batch 1 --html step.html
                                                   rings, micro-batches and times of the first step
"""


def add_plan_parser(commands: Any) -> None:
    """Add `plan`."""
    parser = commands.add_parser(
        "plan",
        help="which rank goes where, what crosses which switches, memory and time",
        description="Plan a run without starting it: which rank goes on which GPU, what crosses which switches in "
        "Slurm's order\nand in the planned one, and what memory and time it takes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", type=filled, metavar="CONFIG", help="a YAML file, or the name of a recipe")
    parser.add_argument(
        "overrides", type=filled, metavar="key=value", nargs="*", help="changes, for example parallel.pp=4"
    )
    nodes = parser.add_mutually_exclusive_group()
    nodes.add_argument("-N", "--nodes", dest="num_nodes", type=positive, metavar="NODES", help="number of nodes")
    nodes.add_argument("-w", "--nodelist", type=filled, metavar="LIST", help="these nodes, in this order")
    parser.add_argument(
        "--ntasks-per-node",
        dest="ranks_per_node",
        type=positive,
        metavar="RANKS",
        help="ranks on each node (default: its GPUs, where the fabric tells)",
    )
    parser.add_argument(
        "--fabric",
        type=filled,
        metavar="SOURCE",
        help="files with commas between them, or clos:... (default: fabric.source, else what Slurm tells)",
    )
    parser.add_argument(
        "--order",
        type=filled,
        metavar="ORDER",
        help="auto, slurm, or the axes from the innermost outwards, such as tp,dp,pp,cp (default: fabric.order)",
    )
    parser.add_argument("--json", action="store_true", help="print plan.json instead of the tables")
    parser.add_argument("--groups", action="store_true", help="list the groups in it also above 4096 ranks")
    parser.add_argument("--html", type=filled, metavar="OUT", help="also write a page that draws it")
    parser.add_argument(
        "--batch",
        type=positive,
        metavar="STEP",
        help="instead: who does what in this step (the first is 1) of a run with parallel.hdp, by its data's indices",
    )
