"""What the table of ranks says of each rank beside the plan: its network card, its rail, and Slurm's number for it."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_train.cluster.allocation import Allocation
from hpc_train.cluster.fabric import Fabric
from hpc_train.launch.ranks import MpirunLauncher, SrunLauncher
from hpc_train.plan.run import Plan, RankFacts


def rank_facts(
    plan: Plan, allocation: Allocation, fabric: Fabric | None, launcher: SrunLauncher | MpirunLauncher
) -> tuple[RankFacts, ...]:
    """One entry a rank; what is assumed rather than known is left out."""
    procids = {} if isinstance(launcher, MpirunLauncher) else slurm_procids(allocation, launcher.options)
    rails = fabric is not None and fabric.are_rails_known
    facts = []
    for planned in plan.ranks:
        rail = nic = None
        if fabric is not None and rails:
            rail = fabric.nodes[planned.node].rail(planned.gpu)
            nic = fabric.rail_nics[rail] if rail < len(fabric.rail_nics) else None
        facts.append(RankFacts(nic, rail, procids.get((planned.node, planned.gpu))))
    return tuple(facts)


def slurm_procids(allocation: Allocation, options: Sequence[str]) -> dict[tuple[str, int], int]:
    """SLURM_PROCID of each task by its node and index there; empty where srun's options leave it to a file.

    options: the user's own for srun, of which the last --distribution counts; without one tasks fill node after node.
    """
    pairs = list(zip(allocation.nodes, allocation.tasks_per_node, strict=True))
    method = distribution(options) or "block"
    if method == "block":
        places = [(node, slot) for node, tasks in pairs for slot in range(tasks)]
    elif method == "cyclic":
        most = max(allocation.tasks_per_node)
        places = [(node, slot) for slot in range(most) for node, tasks in pairs if slot < tasks]
    else:
        return {}
    return {place: procid for procid, place in enumerate(places)}


def distribution(options: Sequence[str]) -> str | None:
    """How srun lays tasks over nodes, from its options; None where they do not say."""
    found = None
    for index, word in enumerate(options):
        if word in ("-m", "--distribution"):
            found = options[index + 1] if index + 1 < len(options) else None
        elif word.startswith("--distribution="):
            found = word.partition("=")[2]
        elif word.startswith("-m"):
            found = word[2:].lstrip("=")
    if found is None:
        return None
    method = found.replace(",", ":").partition(":")[0].lower()
    return None if method == "*" else method.partition("=")[0]
