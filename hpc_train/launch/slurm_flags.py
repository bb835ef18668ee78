"""The sbatch flags that `submit` takes by name: one table, with what each expects.

There are no abbreviations, which sbatch would guess. Whatever is not here goes behind `--` to sbatch as it is.
"""

from __future__ import annotations

import argparse
import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hpc_train.arguments import filled
from hpc_train.errors import ConfigError

NO_VALUE = True
"""What a flag without a value is parsed to: no text that somebody could type, as an empty one is."""
_MOST_WARNING_S = 65535
"""cited: sbatch(1), --signal."""


@dataclass(frozen=True)
class SlurmFlag:
    """One flag. `metavar` None: it takes no value. `optional`: the value may be left out."""

    long: str
    short: str | None
    metavar: str | None
    help: str
    optional: bool = False

    @property
    def key(self) -> str:
        return self.long.replace("-", "_")


FLAGS = (
    SlurmFlag("nodes", "-N", "NODES", "number of nodes"),
    SlurmFlag("ntasks", "-n", "RANKS", "number of ranks in all"),
    SlurmFlag("ntasks-per-node", None, "RANKS", "ranks on each node"),
    SlurmFlag("cpus-per-task", "-c", "CPUS", "CPUs of each rank"),
    SlurmFlag("gpus", "-G", "GPUS", "GPUs in all"),
    SlurmFlag("gpus-per-node", None, "GPUS", "GPUs on each node; one rank a GPU where no number of ranks is given"),
    SlurmFlag("gres", None, "LIST", "generic resources on each node"),
    SlurmFlag("mem", None, "SIZE", "memory on each node"),
    SlurmFlag("mem-per-cpu", None, "SIZE", "memory for each CPU"),
    SlurmFlag("time", "-t", "LIMIT", "time limit"),
    SlurmFlag("partition", "-p", "NAME", "partition"),
    SlurmFlag("account", "-A", "NAME", "account"),
    SlurmFlag("qos", "-q", "NAME", "quality of service"),
    SlurmFlag("job-name", "-J", "NAME", "job name (default: the configuration's name)"),
    SlurmFlag("constraint", "-C", "LIST", "features that nodes must have"),
    SlurmFlag("nodelist", "-w", "NODES", "nodes that must be among those granted"),
    SlurmFlag("exclude", "-x", "NODES", "nodes that must not be used"),
    SlurmFlag("reservation", None, "NAME", "reservation"),
    SlurmFlag("dependency", "-d", "LIST", "jobs to wait for"),
    SlurmFlag("begin", "-b", "TIME", "earliest start"),
    SlurmFlag("array", "-a", "INDEXES", "an array of runs, each with its own run folder"),
    SlurmFlag("exclusive", None, "WHAT", "whole nodes", optional=True),
    SlurmFlag("signal", None, "SIGNAL", "a signal before the end of the time limit"),
    SlurmFlag("switches", None, "COUNT", "leaf switches at most"),
    SlurmFlag("segment", None, "NODES", "nodes that must lie together"),
    SlurmFlag("network", None, "TYPE", "network to use"),
    SlurmFlag("licenses", "-L", "LIST", "licences"),
    SlurmFlag("comment", None, "TEXT", "a comment kept by Slurm"),
    SlurmFlag("mail-type", None, "EVENTS", "when to send mail"),
    SlurmFlag("mail-user", None, "ADDRESS", "where to send mail"),
    SlurmFlag("requeue", None, None, "allow Slurm to put the job back into the queue"),
    SlurmFlag("no-requeue", None, None, "never put the job back into the queue"),
)


def add_slurm_flags(
    parser: argparse.ArgumentParser, *, tool: str = "sbatch", without: Collection[str] = frozenset()
) -> None:
    """Give a parser the flags of the table but those that `tool` does not have, under the heading of Slurm."""
    group = parser.add_argument_group(f"Slurm flags (others follow behind `--`, as {tool} knows them)")
    for flag in FLAGS:
        if flag.long in without:
            continue
        names = [flag.short, f"--{flag.long}"] if flag.short else [f"--{flag.long}"]
        if flag.metavar is None:
            group.add_argument(*names, dest=f"slurm_{flag.key}", action="store_const", const=NO_VALUE, help=flag.help)
        elif flag.optional:
            group.add_argument(
                *names,
                dest=f"slurm_{flag.key}",
                type=filled,
                metavar=flag.metavar,
                nargs="?",
                const=NO_VALUE,
                help=flag.help,
            )
        else:
            group.add_argument(*names, dest=f"slurm_{flag.key}", type=filled, metavar=flag.metavar, help=flag.help)


def given_flags(arguments: argparse.Namespace) -> dict[str, str]:
    """The Slurm flags that were given, long name to value (empty where none), in the order of the table."""
    values = {flag.long: getattr(arguments, f"slurm_{flag.key}", None) for flag in FLAGS}
    return {long: "" if value is NO_VALUE else value for long, value in values.items() if value is not None}


def world_size_of(flags: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    """The number of ranks that these flags ask for, and the flags with that number made plain.

    Raises:
        ConfigError: the number is not given, or given twice in ways that disagree.
    """
    nodes = _count(flags, "nodes")
    ntasks = _count(flags, "ntasks")
    per_node = _count(flags, "ntasks-per-node")
    gpus_per_node = gpu_count(flags.get("gpus-per-node"))
    gpus = gpu_count(flags.get("gpus"))
    if ntasks is not None:
        if nodes and per_node and nodes * per_node != ntasks:
            raise ConfigError(
                f"--ntasks={ntasks} is not --nodes={nodes} times --ntasks-per-node={per_node}, which is "
                f"{nodes * per_node}; leave one of the three out"
            )
        return ntasks, dict(flags)
    if nodes and per_node:
        return nodes * per_node, dict(flags)
    if nodes and gpus_per_node and per_node is None:
        return nodes * gpus_per_node, {**flags, "ntasks-per-node": str(gpus_per_node)}
    if gpus and per_node is None:
        return gpus, {**flags, "ntasks": str(gpus)}
    raise ConfigError(
        "the number of ranks is not given. Use -n RANKS, or -N NODES with --ntasks-per-node=RANKS, or -N "
        "NODES "
        f"with --gpus-per-node=GPUS for one rank a GPU. Given: {describe_flags(flags) or 'no Slurm flags'}"
    )


def check_signal(value: str | None, stop_signal: str) -> None:
    """Refuse a --signal that the ranks do not take as a request to save and end: it would end them at once.

    Args:
        value: What --signal was given, `[R][B][:]SIGNAL[@SECONDS]`.
        stop_signal: launch.stop_signal, a name without SIG.

    Raises:
        ConfigError: the signal is neither launch.stop_signal nor TERM, or no signal.
    """
    if value is None:
        return
    options, _, rest = value.rpartition(":")
    text, at, warning_s = rest.upper().partition("@")
    if at and not (warning_s.isascii() and warning_s.isdecimal() and int(warning_s) <= _MOST_WARNING_S):
        raise ConfigError(
            f"--signal={value}: what follows @ is seconds from 0 to {_MOST_WARNING_S} before the time limit. Write "
            f"--signal={options and options + ':'}{stop_signal}@SECONDS"
        )
    if options not in ("", "B", "R", "BR", "RB"):
        raise ConfigError(f"--signal={value}: before the colon stands B, R or both; write --signal=B:{stop_signal}@60")
    try:
        asked = signal.Signals(int(text)) if text.isdecimal() else signal.Signals[f"SIG{text.removeprefix('SIG')}"]
    except (KeyError, ValueError):
        raise ConfigError(f"--signal={value} names no signal; write --signal={stop_signal}@SECONDS") from None
    if asked not in (signal.Signals[f"SIG{stop_signal}"], signal.SIGTERM):
        raise ConfigError(
            f"--signal={value} would end the ranks at once: they save and end on {stop_signal} (launch.stop_signal) "
            f"and on TERM. Write --signal={options and options + ':'}{stop_signal}@SECONDS"
        )


def verbatim_value(verbatim: Sequence[str], long: str, short: str | None = None) -> str | None:
    """What a flag behind `--` was given, the last one if it stands there twice; None where it is not there."""
    found = None
    for position, word in enumerate(verbatim):
        following = verbatim[position + 1] if position + 1 < len(verbatim) else ""
        if word in (f"--{long}", short):
            found = following
        elif word.startswith(f"--{long}="):
            found = word.partition("=")[2]
        elif short and word.startswith(short) and not word.startswith("--"):
            found = word.removeprefix(short)
    return found


def array_indexes(text: str) -> list[int]:
    """The task indexes of an --array: `0-3`, `1,3,5-9:2`, with or without `%LIMIT`.

    Raises:
        ConfigError: it is not written so.
    """
    indexes: list[int] = []
    for part in text.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        step = int(match[3] or 1) if match else 0
        if match is None or step == 0:
            raise ConfigError(f"--array={text} is no list of indexes; write 0-3, 1,3,5 or 0-15:4")
        indexes += range(int(match[1]), int(match[2] or match[1]) + 1, step)
    return indexes


def describe_flags(flags: Mapping[str, str]) -> str:
    return " ".join(f"--{long}={value}" if value else f"--{long}" for long, value in flags.items())


def _count(flags: Mapping[str, str], name: str) -> int | None:
    """A whole number above 0; None where the flag is absent or, for nodes, a range such as 2-4."""
    text = flags.get(name)
    if text is None:
        return None
    if text.isdigit() and int(text) > 0:
        return int(text)
    if name == "nodes":
        low, _, high = text.partition("-")
        if low == high and low.isdigit():
            return int(low)
        if low.isdigit() and high.isdigit():
            return None
    raise ConfigError(f"--{name}={text} is not a number of {'nodes' if name == 'nodes' else 'ranks'} above 0")


def gpu_count(text: str | None) -> int | None:
    """4, a100:4 or a100:2,h100:2: the sum of the numbers; None where nothing was given."""
    if text is None:
        return None
    counts = [entry.rpartition(":")[2] for entry in text.split(",")]
    if not all(count.isdigit() for count in counts) or not sum(map(int, counts)):
        raise ConfigError(f"{text!r} is not a number of GPUs; write 8, or TYPE:8")
    return sum(map(int, counts))
