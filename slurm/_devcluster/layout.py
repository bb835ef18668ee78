"""What a cluster looks like: names, addresses, switches, and the text of its configuration files. Pure."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass

LOGIN = "login"
LINK_PREFIX = "dc-"  # of network namespaces and of the one link into this machine
MEMORY_MB = 512_000  # assumed: what a node claims, so that scripts written for a centre's nodes are taken

# Sockets of job steps lie below the cluster's folder, and their paths must stay under 108 characters.
_NAME = re.compile(r"[a-z][a-z0-9-]{0,19}")
_LONGEST_LINK_NAME = 15  # Linux's


@dataclass(frozen=True)
class Layout:
    """A cluster of num_nodes equal nodes under leaf, aggregation and core switches.

    Raises:
        ValueError: a name, size or subnet that cannot be built; the message says what can.
    """

    name: str = "dev"
    num_nodes: int = 8
    gpus_per_node: int = 8
    cpus_per_node: int = 64
    nodes_per_leaf: int = 2
    leaves_per_agg: int = 2
    subnet: str = "10.77.0.0/24"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"--name {self.name!r} cannot name a cluster. Use up to 20 lower-case letters, digits and "
                "hyphens, a letter first."
            )
        for option, value, least in (
            ("--nodes", self.num_nodes, 1),
            ("--gpus", self.gpus_per_node, 0),
            ("--cpus", self.cpus_per_node, 1),
            ("--nodes-per-leaf", self.nodes_per_leaf, 1),
            ("--leaves-per-agg", self.leaves_per_agg, 1),
        ):
            if value < least:
                raise ValueError(f"{option} {value} is too small. Use {least} or more.")
        room = self.network.num_addresses - 4  # network, broadcast, login host and this machine
        if self.num_nodes > room:
            raise ValueError(
                f"--subnet {self.subnet} has room for {max(room, 0)} nodes, and {self.num_nodes} were asked "
                "for. Use a larger subnet, such as 10.77.0.0/16, or fewer nodes."
            )

    @property
    def network(self) -> ipaddress.IPv4Network:
        try:
            return ipaddress.IPv4Network(self.subnet)
        except ValueError as error:
            raise ValueError(f"--subnet {self.subnet}: {error}. Use one such as 10.77.0.0/24.") from error

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"n{index}" for index in range(1, self.num_nodes + 1))

    @property
    def hosts(self) -> tuple[str, ...]:
        """All that have a namespace of their own: the login host, where slurmctld runs, and the nodes."""
        return (LOGIN, *self.nodes)

    def address(self, host: str) -> str:
        """The IP address of a node (.1, .2, ...) or of the login host (last but one of the subnet)."""
        if host == LOGIN:
            return str(self.network.broadcast_address - 2)
        return str(self.network.network_address + 1 + self.nodes.index(host))

    @property
    def machine_address(self) -> str:
        """The address that this machine itself has in the cluster's network: the last of the subnet."""
        return str(self.network.broadcast_address - 1)

    @property
    def leaves(self) -> tuple[tuple[str, ...], ...]:
        """The nodes under each leaf switch."""
        step = self.nodes_per_leaf
        return tuple(self.nodes[start : start + step] for start in range(0, self.num_nodes, step))

    def leaf_of(self, node: str) -> str:
        return f"leaf{self.nodes.index(node) // self.nodes_per_leaf + 1}"

    @property
    def link(self) -> str:
        """The name of the link by which this machine reaches the cluster."""
        return link_name(self.name)

    def namespace(self, host: str) -> str:
        return namespace_prefix(self.name) + host

    @property
    def switch_namespace(self) -> str:
        """Where the bridge is: away from this machine's firewall, which may drop what crosses a bridge."""
        return self.namespace("switch")


def link_name(name: str) -> str:
    full = LINK_PREFIX + name
    if len(full) <= _LONGEST_LINK_NAME:
        return full
    digest = hashlib.sha256(name.encode()).hexdigest()
    return LINK_PREFIX + digest[: _LONGEST_LINK_NAME - len(LINK_PREFIX)]


def namespace_prefix(name: str) -> str:
    return f"{LINK_PREFIX}{name}."


def hosts_text(layout: Layout, machine_name: str) -> str:
    """The /etc/hosts of all hosts of the cluster; machine_name is what this machine calls itself."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{layout.address(host)} {host}" for host in layout.hosts]
    if machine_name not in ("localhost", *layout.hosts):
        lines.append(f"{layout.machine_address} {machine_name}")
    return "\n".join(lines) + "\n"


def topology_text(layout: Layout) -> str:
    """topology.conf: leaf switches of nodes, aggregation switches of leaves, one core switch."""
    num_leaves = len(layout.leaves)
    lines = [f"SwitchName=leaf{leaf} Nodes={','.join(nodes)}" for leaf, nodes in enumerate(layout.leaves, 1)]
    starts = range(1, num_leaves + 1, layout.leaves_per_agg)
    for agg, start in enumerate(starts, 1):
        end = min(start + layout.leaves_per_agg, num_leaves + 1)
        lines.append(f"SwitchName=agg{agg} Switches={','.join(f'leaf{leaf}' for leaf in range(start, end))}")
    lines.append(f"SwitchName=core Switches={','.join(f'agg{agg}' for agg in range(1, len(starts) + 1))}")
    return "\n".join(lines) + "\n"


def gres_text(layout: Layout, state: str) -> str:
    """gres.conf: GPUs that Slurm counts and hands out (CUDA_VISIBLE_DEVICES), with no device behind them."""
    if not layout.gpus_per_node:
        return ""
    last = layout.gpus_per_node - 1
    return f"Name=gpu File={state}/gpu/gpu{'0' if last == 0 else f'[0-{last}]'}\n"


def cgroup_text(slurm_version: tuple[int, int]) -> str:
    """cgroup.conf: without it, Slurm from 23.02 on wants cgroups delegated by systemd. Unknown before."""
    return "CgroupPlugin=disabled\n" if slurm_version >= (23, 2) else ""


def probe_conf_text(munge_socket: str) -> str:
    """A slurm.conf with which srun does all but reach a controller: nothing listens on port 1."""
    return f"""\
ClusterName=probe
SlurmctldHost=localhost
SlurmctldPort=1
AuthInfo=socket={munge_socket}
"""


def slurm_conf_text(layout: Layout, state: str, *, mpi_default: str) -> str:
    """slurm.conf, for Slurm 22.05 and later.

    Args:
        layout: The cluster.
        state: The cluster's folder: munge socket, spool folders, logs.
        mpi_default: What srun takes without --mpi: "pmix" where that plugin exists, else "none".
    """
    gres = f" Gres=gpu:{layout.gpus_per_node}" if layout.gpus_per_node else ""
    nodes = "\n".join(
        f"NodeName={node} NodeAddr={layout.address(node)} CPUs={layout.cpus_per_node} "
        f"RealMemory={MEMORY_MB}{gres} State=UNKNOWN"
        for node in layout.nodes
    )
    gres_types = "GresTypes=gpu\n" if gres else ""
    return f"""\
# Written by devcluster at each start.
ClusterName={layout.name}
SlurmctldHost={LOGIN}({layout.address(LOGIN)})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits for its old credential to expire: 120 s by default.
AuthInfo=socket={state}/munge/socket,cred_expire=5

MailProg=/bin/true
StateSaveLocation={state}/slurmctld
SlurmctldPidFile={state}/slurmctld.pid
SlurmctldLogFile={state}/logs/slurmctld.log
SlurmdSpoolDir={state}/nodes/%n/spool
SlurmdPidFile={state}/nodes/%n/slurmd.pid
SlurmdLogFile={state}/logs/%n.log
# One folder a node: PMIx makes files there whose names are equal on all nodes.
TmpFS={state}/nodes/%n/tmp

# cgroups would have to be delegated to us. Unlike them, linuxproc lets a process that left its
# session outlive its step: `devcluster clear` ends such processes.
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# Nodes claim more CPUs and memory than this machine has.
SlurmdParameters=config_overrides
{gres_types}MpiDefault={mpi_default}
TopologyPlugin=topology/tree

SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
ReturnToService=2
SlurmdTimeout=15

{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=5
"""
