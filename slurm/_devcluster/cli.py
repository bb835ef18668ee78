"""The command line of `devcluster`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence

from . import network
from .cluster import Cluster, all_names
from .layout import LOGIN, Layout
from .machine import ClusterError, check_namespaces, one_at_a_time, require_machine

EXAMPLES = """\
examples:
  sudo devcluster start                          8 nodes of 8 GPUs, ready in seconds
  sudo devcluster exec -- srun -N8 hostname      a command on the login host
  sudo devcluster shell                          a shell there
  eval "$(devcluster env)"; sinfo                Slurm's commands in this shell
  sudo devcluster link n3 down                   pull a node's cable
  sudo devcluster stop
"""


def main(arguments: Sequence[str]) -> int:
    """Run one command; its exit code: 0 done, 2 wrong usage, 3 cannot be done here or now."""
    # All after the first -- is the command's own, another -- included; argparse differs by version here.
    cut = list(arguments).index("--") if "--" in arguments else len(arguments)
    parser = _parser()
    options = parser.parse_args(arguments[:cut])
    command = [*getattr(options, "argv", []), *arguments[cut + 1 :]]
    if bool(command) != (options.command == "exec"):
        parser.error("exec needs a command after --" if not command else f"{options.command} takes no command")
    options.argv = command
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except ClusterError as error:
        print(f"devcluster: {error}", file=sys.stderr)
        return 3
    except ValueError as error:
        print(f"devcluster: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # our reader has left; what was asked for is done
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("devcluster: interrupted", file=sys.stderr)
        return 130


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # so that a start removes what it has made


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="devcluster",
        description="A real Slurm cluster of many nodes on this machine, each with its own host name, IP "
        "address and GPUs that Slurm counts (there are no devices behind them).",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    default = Layout()
    named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named.add_argument("--name", default=default.name, help="which cluster (default: %(default)s)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    start = commands.add_parser("start", parents=[named], help="start a cluster, unless it runs already")
    for option, attribute, what in (
        ("--nodes", "num_nodes", "number of nodes"),
        ("--gpus", "gpus_per_node", "GPUs a node"),
        ("--cpus", "cpus_per_node", "CPUs a node claims to have"),
        ("--nodes-per-leaf", "nodes_per_leaf", "nodes under a leaf switch"),
        ("--leaves-per-agg", "leaves_per_agg", "leaf switches under an aggregation switch"),
    ):
        value = getattr(default, attribute)
        start.add_argument(
            option, dest=attribute, type=int, default=value, metavar="N", help=f"{what} (default: {value})"
        )
    start.add_argument(
        "--subnet", help="its addresses (default: the first free one of 10.77.0.0/24, 10.77.1.0/24, ...)"
    )
    start.set_defaults(run=_start)

    stop = commands.add_parser("stop", parents=[named], help="end all its processes and remove all traces")
    stop.add_argument("--keep-logs", action="store_true", help="leave the folder of logs, and say where it is")
    stop.set_defaults(run=_stop)

    status = commands.add_parser("status", parents=[named], help="what runs; code 3 where nothing or not all does")
    status.add_argument("--json", action="store_true", help="for programs")
    status.set_defaults(run=_status)

    commands.add_parser("list", help="the names of all clusters of this machine").set_defaults(run=_list)

    inside = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    inside.add_argument("--host", default=LOGIN, help="login (the default) or a node")
    inside.add_argument("--user", help="as this user of this machine (default: root)")
    execute = commands.add_parser("exec", parents=[named, inside], help="run a command on the login host or a node")
    execute.add_argument("argv", nargs="*", metavar="-- COMMAND", help="the command and its arguments")
    execute.set_defaults(run=_exec)
    shell = commands.add_parser("shell", parents=[named, inside], help="a shell on the login host or a node")
    shell.set_defaults(run=_exec)

    env = commands.add_parser("env", parents=[named], help="what a shell of this machine needs to use the cluster")
    env.set_defaults(run=_env)

    clear = commands.add_parser("clear", parents=[named], help="cancel all jobs and kill what they left on the nodes")
    clear.set_defaults(run=_clear)

    link = commands.add_parser("link", parents=[named], help="pull a node's network cable, or put it back")
    link.add_argument("node")
    link.add_argument("state", choices=("down", "up"))
    link.set_defaults(run=_link)

    shape = commands.add_parser("shape", parents=[named], help="make a node's network slow, or fast again")
    shape.add_argument("node")
    speed = shape.add_mutually_exclusive_group(required=True)
    speed.add_argument("--rate", help="most that it sends, and most that it receives, in tc's words: 200mbit")
    speed.add_argument("--off", action="store_true", help="no limit")
    shape.add_argument("--latency", default="50ms", help="longest wait in the queue (default: %(default)s)")
    shape.set_defaults(run=_shape)

    check = commands.add_parser("check", help="whether this machine and user can run a cluster, and what is lacking")
    check.set_defaults(run=_check)
    return parser


def _start(options: argparse.Namespace) -> int:
    sizes = {
        key: getattr(options, key)
        for key in ("name", "num_nodes", "gpus_per_node", "cpus_per_node", "nodes_per_leaf", "leaves_per_agg")
    }
    layout = Layout(**sizes, **({"subnet": options.subnet} if options.subnet else {}))
    require_machine()
    with one_at_a_time():
        cluster = Cluster(options.name)
        if cluster.running:
            asked = {**sizes, **({"subnet": options.subnet} if options.subnet else {})}
            print(f"The cluster {cluster.name} runs already: {_summary(cluster.layout)}.")
            if any(getattr(cluster.layout, key) != value for key, value in asked.items()):
                print("It is not what was asked for. Stop it first to have another.")
            return 0
        if cluster.exists:
            print(f"The cluster {cluster.name} is broken ({'; '.join(cluster.problems)}). Removing it.")
            cluster.remove()
        check_namespaces()
        if options.subnet:
            network.require_free(layout.network)
        else:
            layout = Layout(**sizes, subnet=network.free_subnet())
        begin = time.monotonic()
        cluster.start(layout)
    print(f"The cluster {cluster.name} is up after {time.monotonic() - begin:.1f} s: {_summary(layout)}.")
    if not cluster.pmix:
        print(
            "warning: `srun --mpi=pmix` cannot load PMIx here; as root: apt-get install -y libpmix-dev",
            file=sys.stderr,
        )
    name = "" if options.name == Layout().name else f" --name {options.name}"
    print(f"A shell on its login host: {_program()} shell{name}")
    print(f'In this shell: eval "$({_program()} env{name})"')
    return 0


def _summary(layout: Layout) -> str:
    return f"{layout.num_nodes} nodes of {layout.gpus_per_node} GPUs, {layout.subnet}"


def _program() -> str:
    """This command as it can be typed here."""
    return min(os.path.relpath(sys.argv[0]), sys.argv[0], key=len) if os.sep in sys.argv[0] else sys.argv[0]


def _stop(options: argparse.Namespace) -> int:
    require_machine()
    with one_at_a_time():
        cluster = Cluster(options.name)
        if not cluster.exists:
            print(f"No cluster {cluster.name} here: nothing to stop.")
            return 0
        cluster.remove(keep_logs=options.keep_logs)
    print(f"The cluster {cluster.name} is gone.")
    if options.keep_logs:
        print(f"Its logs: {cluster.state}/logs")
    return 0


def _status(options: argparse.Namespace) -> int:
    require_machine()
    cluster = Cluster(options.name)
    report = cluster.report()
    if options.json:
        print(json.dumps(report, indent=1))
    elif not cluster.running:
        why = "; ".join(report["problems"])
        print(f"The cluster {cluster.name} is broken: {why}." if cluster.exists else f"No cluster {cluster.name} here.")
    else:
        print(f"The cluster {cluster.name} runs: {_summary(cluster.layout)}, {report['conf']}")
        row = "{:<8} {:<16} {:<8} {:<12} {}"
        print(row.format("HOST", "ADDRESS", "SWITCH", "LINK", "SLURM"))
        login = report["login"]
        print(row.format(login["host"], login["address"], "-", login["link"], "slurmctld"))
        for node in report["nodes"]:
            print(row.format(node["name"], node["address"], node["leaf"], node["link"], node["slurm"]))
    return 0 if cluster.running else 3


def _list(options: argparse.Namespace) -> int:
    for name in all_names():
        print(name)
    return 0


def _exec(options: argparse.Namespace) -> int:
    require_machine()
    cluster = Cluster(options.name)
    # A node may be lost on purpose: only the host itself must be there.
    if not cluster.exists or not cluster.daemons:
        cluster.require_running()
    argv = options.argv or [os.environ.get("SHELL") or "/bin/sh"]
    command = cluster.command_on(options.host, options.user, argv)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the command would inherit that
    os.execvp(command[0], command)


def _env(options: argparse.Namespace) -> int:
    cluster = Cluster(options.name)
    with contextlib.suppress(PermissionError):
        if not cluster.exists:
            cluster.require_running()
    print(f"export SLURM_CONF={cluster.conf}")
    return 0


def _clear(options: argparse.Namespace) -> int:
    cluster = _running(options)
    num_killed = cluster.clear()
    print(f"The nodes of {cluster.name} are clear: {num_killed} processes were killed.")
    return 0


def _link(options: argparse.Namespace) -> int:
    cluster = _running(options, options.node)
    network.set_link(cluster.layout, options.node, options.state)
    return 0


def _shape(options: argparse.Namespace) -> int:
    cluster = _running(options, options.node)
    network.shape(cluster.layout, options.node, options.rate, options.latency)
    return 0


def _running(options: argparse.Namespace, host: str | None = None) -> Cluster:
    require_machine()
    cluster = Cluster(options.name)
    cluster.require_running()
    if host is not None and host not in cluster.layout.hosts:
        raise ClusterError(f"no host {host} in {cluster.name}: there are {', '.join(cluster.layout.hosts)}")
    return cluster


def _check(options: argparse.Namespace) -> int:
    require_machine()
    check_namespaces()
    print("This machine can run a cluster.")
    return 0
