"""`hpc-train plan`: what a run would do to the network, to memory and to time, before it is started."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_train import log
from hpc_train.cluster.allocation import Allocation, job_without
from hpc_train.cluster.environment import process_env
from hpc_train.cluster.fabric import Fabric
from hpc_train.cluster.fabric_find import FoundFabric, find_fabric
from hpc_train.cluster.hostlist import hosts_of_setting
from hpc_train.cluster.process import own_process
from hpc_train.cluster.situation import find_situation
from hpc_train.config import Config, FabricConfig
from hpc_train.config_read import load_config
from hpc_train.errors import ConfigError
from hpc_train.launch.checks import check_plan
from hpc_train.launch.driver import find_job
from hpc_train.launch.fabric_step import fabric_of_run
from hpc_train.launch.job_allocation import allocation_of_job
from hpc_train.launch.plan_batch import LengthsOf, batch_command, write_page
from hpc_train.plan.batch_of_run import need_hdp
from hpc_train.plan.mesh import MAX_RANKS
from hpc_train.plan.out_file import check_out
from hpc_train.plan.page import page_html
from hpc_train.plan.places import natural_key
from hpc_train.plan.report import report_plan
from hpc_train.plan.table import report_text


def plan_command(options: Namespace, lengths_of: LengthsOf) -> int:
    """Carry out `plan`. lengths_of: see `plan_batch.batch_command`."""
    config = load_config(options.config, options.overrides)
    if options.html:
        check_out(options.html, "--html", inputs=[options.config])
    if options.groups and not options.json:
        raise ConfigError("--groups has no effect without --json, which lists them; add --json, or leave --groups out")
    if options.groups and options.batch is not None:
        raise ConfigError("--groups has no effect with --batch, whose JSON has no groups; leave it out")
    order = _checked_order(options.order)
    allocation, found = _find_nodes(options, config, process_env())
    if options.batch is not None:
        need_hdp(config)
    check_plan(config, allocation, found.fabric, order, _other_nodes(config, allocation, found.fabric))
    if options.batch is not None:
        return batch_command(options, config, order, allocation, found, lengths_of)
    report = report_plan(config, allocation, found.fabric, order, notes=(*found.notes, *allocation.warnings))
    if options.html:
        write_page(Path(options.html), page_html(report))
    if options.json:
        print((report.plan.with_groups() if options.groups else report.plan).to_json(), end="")
        for note in report.all_notes:
            log.say(f"note: {note}", sys.stderr)
    else:
        print(report_text(report), end="")
    return 0


def _other_nodes(config: Config, allocation: Allocation, fabric: Fabric | None) -> list[str]:
    """Of a fabric those that more ranks would get."""
    if fabric is None:
        return []
    taken = {*allocation.nodes, *hosts_of_setting("fabric.exclude", config.fabric.exclude)}
    return sorted((node for node in fabric.nodes if node not in taken), key=natural_key)


def _checked_order(order: str | None) -> str | None:
    if order is not None:
        try:
            FabricConfig(order=order)
        except ValueError:
            raise ConfigError(
                f"--order {order} is neither auto nor slurm nor the four axes from the innermost to the outermost; "
                "write for example --order tp,dp,pp,cp"
            ) from None
    return order


def _find_nodes(options: Namespace, config: Config, env: Mapping[str, str]) -> tuple[Allocation, FoundFabric]:
    """The nodes to plan for: those that are asked for, else the job's, else those of the fabric that the mesh needs."""
    source = options.fabric or config.fabric.source
    excluded = set(hosts_of_setting("fabric.exclude", config.fabric.exclude))
    if options.num_nodes is None and options.nodelist is None:
        job = find_job(env, find_situation(env, own_process()))
        if job is not None:
            job = job_without(job, config.fabric.exclude)
            allocation = allocation_of_job(job, None, options.ranks_per_node)
            settings = config.fabric.model_copy(update={"source": source})
            return allocation, fabric_of_run(settings, allocation, env, is_in_job=True)
    asked = hosts_of_setting("--nodelist", options.nodelist) or None
    twice = [node for node, count in Counter(asked or ()).items() if count > 1]
    if twice:
        raise ConfigError(f"--nodelist {options.nodelist} has {', '.join(twice[:4])} more than once; name a node once")
    found = find_fabric(source, asked, env)
    if asked is not None:
        names: Sequence[str] = [node for node in asked if node not in excluded]
    else:
        names = _chosen_nodes(options, config, found.fabric, excluded)
    if not names:
        raise ConfigError(f"fabric.exclude={config.fabric.exclude} leaves no node to plan for; exclude fewer")
    strange = excluded.difference(asked or (found.fabric.nodes if found.fabric is not None else names))
    if strange:
        note = f"fabric.exclude names {', '.join(sorted(strange)[:4])}, which the plan has not anyway"
        found = replace(found, notes=(*found.notes, note))
    return _allocation(names, options.ranks_per_node, found.fabric), found


def _chosen_nodes(options: Namespace, config: Config, fabric: Fabric | None, excluded: set[str]) -> Sequence[str]:
    """The first nodes by name, as many as are asked for or as the mesh needs.

    Raises:
        ConfigError: nothing says how many, or there are not so many.
    """
    if fabric is None:
        number = options.num_nodes
        if number is None and config.parallel.dp is not None and options.ranks_per_node is not None:
            number = -(-_mesh_ranks(config) // options.ranks_per_node)
        if number is None:
            raise ConfigError(
                "nothing says for which nodes to plan: this is not inside a Slurm job, and no fabric is known. Give "
                "-N NODES or --nodelist LIST, with --ntasks-per-node RANKS, or --fabric SOURCE"
            )
        if number > MAX_RANKS:
            raise ConfigError(f"{number} nodes are more than the {MAX_RANKS} ranks that are planned for; give fewer")
        return [f"node{index + 1}" for index in range(number)]
    names = sorted((name for name in fabric.nodes if name not in excluded), key=natural_key)
    number = options.num_nodes
    if number is None and config.parallel.dp is not None:
        number = _nodes_needed(_mesh_ranks(config), names, options.ranks_per_node, fabric)
    if number is not None and number > len(names):
        raise ConfigError(
            f"{number} nodes are asked for, but the fabric from {fabric.source} has {len(names)}"
            f"{' that are not excluded' if excluded else ''}. Give a smaller -N, or another --fabric"
        )
    return names[:number]


def _mesh_ranks(config: Config) -> int:
    parallel = config.parallel
    assert parallel.dp is not None
    return parallel.pp * parallel.dp * parallel.cp * parallel.tp


def _nodes_needed(num_ranks: int, names: Sequence[str], ranks_per_node: int | None, fabric: Fabric) -> int:
    """How many of these nodes hold so many ranks; one more than there are where they do not."""
    for number, name in enumerate(names, 1):
        num_ranks -= _ranks_of(name, ranks_per_node, fabric)
        if num_ranks <= 0:
            return number
    return len(names) + 1


def _allocation(names: Sequence[str], ranks_per_node: int | None, fabric: Fabric | None) -> Allocation:
    tasks = tuple(_ranks_of(name, ranks_per_node, fabric) for name in names)
    return Allocation(tuple(names), tasks, tasks, None, "the command line")


def _ranks_of(name: str, ranks_per_node: int | None, fabric: Fabric | None) -> int:
    num_gpus = fabric.nodes[name].num_gpus if fabric is not None else None
    if ranks_per_node is None and num_gpus is None:
        where = "no fabric is known" if fabric is None else f"the fabric from {fabric.source} does not say"
        raise ConfigError(f"how many ranks {name} gets is not known, since {where}; give --ntasks-per-node RANKS")
    if ranks_per_node is not None and num_gpus is not None and ranks_per_node > num_gpus:
        raise ConfigError(
            f"--ntasks-per-node {ranks_per_node} is more than the {num_gpus} GPUs of node {name}, and a rank has one "
            "GPU. Give fewer, or leave the option out"
        )
    return ranks_per_node or num_gpus or 0
