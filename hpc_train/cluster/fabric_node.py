"""What one node tells of the fabric: its address in Slurm's topology, its GPUs and which card is near to which.

Started on each node of a job by srun; prints JSON.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hpc_train.cluster.binding import Machine, nearest_nic, read_machine
from hpc_train.cluster.environment import process_env
from hpc_train.cluster.gpu_topology import nics_of_gpus, parse_nvlink_domain, parse_topo_matrix
from hpc_train.cluster.long_lines import in_pieces, joined_pieces
from hpc_train.errors import ConfigError

MARK = "hpc_train_fabric_node"
# assumed: nvidia-smi answers in some seconds even where it has to wake the driver.
_ANSWER_S = 20


@dataclass(frozen=True)
class NodeReport:
    """address, pattern: Slurm's variables, empty where not set. nics: the card of each GPU; None: not collected.

    notes: what the node could not tell, and why.
    """

    node: str
    address: str = ""
    pattern: str = ""
    num_gpus: int = 0
    nics: tuple[str | None, ...] | None = None
    nvlink_domain: str | None = None
    notes: tuple[str, ...] = ()


def report_node(env: Mapping[str, str], sys_root: str = "/sys") -> NodeReport:
    """Ask nvidia-smi, and sysfs where it does not answer."""
    node = env.get("SLURMD_NODENAME") or socket.gethostname()
    machine = read_machine(sys_root)
    notes: list[str] = []
    num_gpus, nics, domain = len(machine.gpus), None, None
    program = shutil.which("nvidia-smi", path=env.get("PATH"))
    if program is not None and machine.gpus:
        try:
            topology = parse_topo_matrix(_ask(program, "topo", "-m"))
            domain = parse_nvlink_domain(_ask(program, "-q"))
            if topology.num_gpus == num_gpus:
                # It shows what this step may use; with fewer than the node has, its numbers are not the node's.
                nics = nics_of_gpus(topology)
                islands = len(set(topology.islands))
                if 1 < islands < num_gpus:
                    notes.append(f"its {num_gpus} GPUs are joined by NVLink in {islands} separate groups")
        except ConfigError as error:
            notes.append(str(error))
    if nics is None and machine.gpus:
        nics = tuple(_card_nearby(machine, gpu) for gpu in range(num_gpus))
    address, pattern = env.get("SLURM_TOPOLOGY_ADDR", ""), env.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    return NodeReport(node, address, pattern, num_gpus, nics, domain, tuple(notes))


def parse_reports(text: str) -> tuple[NodeReport, ...]:
    """The reports in the output of srun, among whatever else is printed there."""
    return tuple(_from_json(json.loads(answer)) for answer in joined_pieces(MARK, text))


def _from_json(entry: Mapping[str, Any]) -> NodeReport:
    nics = None if entry["nics"] is None else tuple(entry["nics"])
    return NodeReport(**{**entry, "nics": nics, "notes": tuple(entry["notes"])})


def _card_nearby(machine: Machine, gpu: int) -> str | None:
    """The nearest card, unless it is on another NUMA node: such a one may be for storage."""
    card = nearest_nic(machine, gpu)
    own = machine.gpus[gpu].numa
    is_far = card is not None and None not in (own, card.numa) and own != card.numa
    return None if card is None or is_far else card.name


def _ask(program: str, *words: str) -> str:
    try:
        done = subprocess.run(
            [program, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_ANSWER_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"nvidia-smi {' '.join(words)}: {type(error).__name__}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ConfigError(f"nvidia-smi {' '.join(words)}: exit code {done.returncode}: {said[-1] if said else ''}")
    return done.stdout


def main() -> int:
    report = report_node(process_env())
    sys.stdout.write(in_pieces(MARK, report.node, json.dumps(asdict(report))))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
