"""What is looked at on each node: run by the doctor on every node of a job, and in place where there is no job.

Prints JSON: findings of the node alone, and facts that are compared over nodes.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_train.cluster.binding import granted_cpus, read_machine
from hpc_train.cluster.devices import count_amd_gpus
from hpc_train.cluster.environment import process_env
from hpc_train.cluster.long_lines import in_pieces, joined_pieces
from hpc_train.cluster.network import list_interfaces
from hpc_train.health.doctor import devices, hdfs, infiniband, limits, network, python_env, storage
from hpc_train.health.doctor.answers import read_text
from hpc_train.health.doctor.findings import Finding

MARK = "hpc_train_doctor_node"


def look_at_node(request: Mapping[str, Any], env: Mapping[str, str], sys_root: str = "/sys") -> dict[str, Any]:
    """Everything of this node, as JSON values.

    request: runs_dir, token (a file that the launching host made, or None), num_nodes, interface, template,
    hdfs, verbose, watch_s.
    """
    host = env.get("SLURMD_NODENAME") or socket.gethostname()
    machine = read_machine(sys_root)
    ethtool = shutil.which("ethtool", path=f"{env.get('PATH', '')}:/usr/sbin:/sbin")
    ports = infiniband.read_ports(sys_root, ethtool=ethtool)
    interfaces = list_interfaces()
    python = python_env.read_python()
    found = devices.device_findings(machine, env, granted_cpus(), count_amd_gpus(sys_root), host)
    found += infiniband.port_findings(ports, host)
    found += _counters(ports, host, request["watch_s"], sys_root, ethtool)
    chosen = {**env, **({"launch.interface": request["interface"]} if request["interface"] else {})}
    found += network.own_findings(
        interfaces, [nic.name for nic in machine.nics], chosen, host, num_nodes=request["num_nodes"]
    )
    found += limits.limit_findings(limits.read_limits(), host, has_rdma=any(port.is_active for port in ports))
    found += _storage(request, env, host)
    found += python_env.own_python_findings(python, host, has_gpus=bool(machine.gpus))
    setup = hdfs.find_setup(env, request["hdfs"])
    found += hdfs.hdfs_findings(setup, host, ticket=lambda: hdfs.has_ticket(env), verbose=request["verbose"])
    return {
        "host": host,
        "findings": [finding.as_json() for finding in found],
        "interfaces": network.as_json(interfaces),
        "address": network.resolve((request["template"] or "{host}").replace("{host}", host)),
        "python": python,
        "active_ports": sum(port.is_active for port in ports),
        "gpus": len(machine.gpus),
        "sees_token": request["token"] is None or _sees(Path(request["token"])),
    }


def parse_node_lines(text: str) -> list[dict[str, Any]]:
    """The answers of nodes in the output of srun, among whatever else is printed there."""
    return [json.loads(answer) for answer in joined_pieces(MARK, text)]


def _counters(
    ports: Sequence[infiniband.Port], host: str, watch_s: float, sys_root: str, ethtool: str | None
) -> list[Finding]:
    if not watch_s or not ports:
        return infiniband.counter_findings(ports, host)
    time.sleep(watch_s)
    later = infiniband.read_ports(sys_root, ethtool=ethtool)
    return infiniband.counter_findings(ports, host, later, watch_s)


def _storage(request: Mapping[str, Any], env: Mapping[str, str], host: str) -> list[Finding]:
    mounts = read_text("/proc/mounts")
    folders = [
        # A trial write on all nodes at once into HOME would be a burden to its server, for nothing.
        storage.read_folder(purpose, path, trial_write=purpose != "HOME", mounts=mounts)
        for purpose, path in storage.folders_of(env, request["runs_dir"]).items()
    ]
    quotas = storage.read_quotas(folders, env.get("USER", str(os.getuid())))
    return [*storage.folder_findings(folders, host), *storage.quota_findings(quotas, host)]


def _sees(token: Path) -> bool:
    """Look for the file; the folder is listed first, since a network file system may remember that it was not there."""
    # assumed: NFS keeps such memories for 60 s at most, and listing the folder ends them mostly at once.
    for _ in range(10):
        try:
            if token.name in os.listdir(token.parent):
                return True
        except OSError:
            pass
        time.sleep(0.3)
    return token.exists()


def main(arguments: Sequence[str]) -> int:
    answer = look_at_node(json.loads(arguments[0]), process_env())
    sys.stdout.write(in_pieces(MARK, answer["host"], json.dumps(answer)))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
