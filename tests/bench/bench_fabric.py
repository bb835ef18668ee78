"""How long it takes to read a fabric of 2,560 nodes with 8 rails, in each form that it may come in.

Each text is made once from the same synthetic fabric. InfiniBand's is made by the real ibnetdiscover on a simulated
fabric with --real (minutes, since ibsim answers it port by port), else written in its form. Prints JSON; a time is CPU
time (all is done by one thread), the median of the rounds, and its ratio to that of parsing the fabric file's YAML
alone in the same run.

    python -m tests.bench.bench_fabric [--rounds 5] [--pods 20] [--real]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable

import yaml

from hpc_train.cluster.fabric import Fabric
from hpc_train.cluster.fabric_address import fabric_from_addresses
from hpc_train.cluster.fabric_clos import clos_fabric
from hpc_train.cluster.fabric_file import read_fabric_file
from hpc_train.cluster.fabric_infiniband import read_ibnetdiscover
from hpc_train.cluster.fabric_merge import merge_fabrics
from hpc_train.cluster.fabric_slurm import read_slurm_lines
from hpc_train.cluster.fabric_topology_yaml import read_topology_yaml
from hpc_train.cluster.fabric_write import write_fabric_file
from hpc_train.cluster.hostlist import compress_hostlist
from tests.services.ib_fabric import Network, discover, simulated, three_tiers

NODES_OF_POD, NODES_OF_LEAF, RAILS, SPINES, CORES_OF_PLANE = 128, 32, 8, 32, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pods", type=int, default=20)
    parser.add_argument("--real", action="store_true")
    options = parser.parse_args()
    text = f"clos:pods={options.pods},nodes={NODES_OF_POD},shuffle=1"
    fabric = clos_fabric(text)
    ours, tree, slurm_yaml = write_fabric_file(fabric), topology_conf(fabric), topology_yaml(fabric)
    groups = NODES_OF_POD // NODES_OF_LEAF
    net = three_tiers(
        pods=options.pods,
        leaves=groups,
        nodes=NODES_OF_LEAF,
        rails=RAILS,
        spines=SPINES,
        cores=CORES_OF_PLANE,
        planes=True,
    )
    infiniband = discovered(net) if options.real else printed(net)
    addresses = {
        name: (f"core.{fabric.pod_of_leaf[node.leaves[0] or '']}.{(node.leaves[0] or '').replace('.', '-')}.{name}",
               "switch.switch.switch.node")
        for name, node in fabric.nodes.items()
    }  # fmt: skip
    looked_at = read_ibnetdiscover(infiniband, "ib")
    works: dict[str, Callable[[], object]] = {
        "yaml_alone": lambda: yaml.load(ours, Loader=yaml.CSafeLoader),
        "clos": lambda: clos_fabric(text),
        "fabric_file": lambda: read_fabric_file(ours, "fabric.yaml"),
        "topology_conf": lambda: read_slurm_lines(tree, "topology.conf"),
        "topology_yaml": lambda: read_topology_yaml(slurm_yaml, "topology.yaml"),
        "addresses": lambda: fabric_from_addresses(addresses),
        "ibnetdiscover": lambda: read_ibnetdiscover(infiniband, "ib"),
        "write": lambda: write_fabric_file(looked_at),
        "merge": lambda: merge_fabrics(fabric, fabric),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(options.rounds):
        for name, work in works.items():
            begin = time.process_time()
            work()
            seconds[name].append(time.process_time() - begin)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(json.dumps({
        "nodes": len(fabric.nodes),
        "rails": RAILS,
        "ibnetdiscover_lines": infiniband.count("\n"),
        "is_real_ibnetdiscover": options.real,
        "median_cpu_s": {name: round(value, 4) for name, value in medians.items()},
        "ratio_to_yaml_alone": {name: round(value / medians["yaml_alone"], 2) for name, value in medians.items()},
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }))  # fmt: skip


def leaf_sets(fabric: Fabric) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, node in fabric.nodes.items():
        found.setdefault((node.leaves[0] or "").rpartition(".")[0], []).append(name)
    return found


def topology_conf(fabric: Fabric) -> str:
    sets = leaf_sets(fabric)
    pods: dict[str, list[str]] = {}
    for name in sets:
        pods.setdefault(name.partition(".")[0], []).append(name)
    lines = [f"SwitchName={name} Nodes={compress_hostlist(nodes)}" for name, nodes in sets.items()]
    lines += [f"SwitchName={pod} Switches={','.join(leaves)}" for pod, leaves in pods.items()]
    return "\n".join([*lines, f"SwitchName=core Switches={','.join(pods)}"]) + "\n"


def topology_yaml(fabric: Fabric) -> str:
    switches = []
    for line in topology_conf(fabric).splitlines():
        values = dict(word.split("=", 1) for word in line.split())
        below = {"nodes": values["Nodes"]} if "Nodes" in values else {"children": values["Switches"]}
        switches.append({"switch": values["SwitchName"], **below})
    return yaml.safe_dump([{"topology": "tree", "tree": {"switches": switches}}], sort_keys=False)


def printed(net: Network) -> str:
    """The network in the form that ibnetdiscover prints, checked against the real one by the tests."""
    guids = {
        name: f"{'S' if kind == 'Switch' else 'H'}-{index:016x}" for index, (name, kind) in enumerate(net.kinds.items())
    }
    parts = []
    for name, kind in net.kinds.items():
        is_switch = kind == "Switch"
        head = "Switch\t" if is_switch else "Ca\t"
        lines = [
            f'{head}{net.ports[name]} "{guids[name]}"\t\t# "{name}"' + (" base port 0 lid 1 lmc 0" if is_switch else "")
        ]
        for port, other, their in net.links[name]:
            if is_switch:
                lines.append(f'[{port}]\t"{guids[other]}"[{their}](1) \t\t# "{other}" lid 1 4xNDR')
            else:
                lines.append(f'[{port}](1) \t"{guids[other]}"[{their}]\t\t# lid 1 lmc 0 "{other}" lid 1 4xNDR')
        parts.append("\n".join(["vendid=0x0", "devid=0x0", "sysimgguid=0x1", "switchguid=0x1(1)", *lines, ""]))
    return "\n".join(parts)


def discovered(net: Network) -> str:
    with simulated(net) as env:
        return discover(env)


if __name__ == "__main__":
    main()
