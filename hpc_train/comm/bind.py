"""Give this rank the cores and the network card near its device, within what the site granted, and say so."""

from __future__ import annotations

import os
from typing import Any, Literal

from hpc_train.cluster import binding, environment
from hpc_train.comm.world import World
from hpc_train.log import say, warn


def bind_rank(world: World, mode: Literal["auto", "none"], num_threads: int | None) -> None:
    """Bind this process, set torch's threads, print one table for each node. Collective over all ranks.

    mode: "none" leaves the cores to the site and prints what it gave. num_threads: None takes OMP_NUM_THREADS where
    it is set, else the rank's share of its cores.
    """
    machine = binding.read_machine()
    granted = binding.granted_cpus()
    mine = [world.node_rank, world.local_rank, world.rank, sorted(granted), _gpu_index(world, machine)]
    here = sorted(item[1:] for item in world.control.all_gather(mine) if item[0] == world.node_rank)
    plans = binding.plan_bindings(machine, [cores for _, _, cores, _ in here], [gpu for _, _, _, gpu in here])
    place = [rank for _, rank, _, _ in here].index(world.rank)
    plan = plans[place]
    if mode == "auto":
        os.sched_setaffinity(0, plan.cpus)
    sharers = sum(other.cpus == plan.cpus for other in plans)
    _set_threads(num_threads, max(1, len(plan.cpus) // sharers))
    env = environment.process_env()
    cpus_per_task = env.get("SLURM_CPUS_PER_TASK", "")
    warning = binding.affinity_warning(
        granted, int(cpus_per_task) if cpus_per_task.isdecimal() else None, num_workers=0
    )
    if warning:
        warn(warning)
    if place == 0:
        say(f"bindings on {world.node} ({'applied' if mode == 'auto' else 'left to the site'}):")
        say(binding.format_table(plans, world.node, [rank for _, rank, _, _ in here]))


def report_environment(world: World) -> None:
    """Warn on rank 0 of variables that differ between ranks though they should not. Collective over all ranks."""
    env = environment.process_env()
    hashes = world.control.all_gather(environment.relevant_hash(env))
    if len(set(hashes)) == 1:
        return
    environments = world.control.all_gather(environment.relevant(env))
    if world.rank == 0:
        for line in environment.differences(environments):
            warn(line)


def _gpu_index(world: World, machine: binding.Machine) -> int | None:
    """Which of the machine's GPUs this rank's device is."""
    if world.device.type != "cuda":
        return None
    import torch

    # torch's stubs leave these three out.
    properties: Any = torch.cuda.get_device_properties(world.device)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"
    for index, gpu in enumerate(machine.gpus):
        if gpu.pci.lower().startswith(address):
            return index
    return len(machine.gpus)  # on a machine whose sysfs hides it; the table says so


def _set_threads(num_threads: int | None, share: int) -> None:
    import torch

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    elif "OMP_NUM_THREADS" not in environment.process_env():
        torch.set_num_threads(share)
