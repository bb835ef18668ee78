"""Stacks of many ranks as a short text: who does not answer, then ranks with equal stacks together."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.cluster.stack_dump import Frame
from hpc_train.health.stacks import RankStacks


@dataclass(frozen=True)
class Group:
    """Ranks whose main threads have equal stacks."""

    ranks: tuple[int | None, ...]
    frames: tuple[Frame, ...]
    odd: bool


def group_by_stack(found: Sequence[RankStacks]) -> list[Group]:
    """Those that answered, most ranks first. odd: others are more than twice as many, so these are to be looked at."""
    members: dict[tuple[Frame, ...], list[int | None]] = {}
    for stacks in found:
        if stacks.problem is None:
            members.setdefault(main_frames(stacks), []).append(stacks.rank)
    ordered = sorted(members.items(), key=lambda item: (-len(item[1]), item[1][0] is None, item[1][0]))
    most = len(ordered[0][1]) if ordered else 0
    return [Group(tuple(ranks), frames, most > 2 * len(ranks)) for frames, ranks in ordered]


def main_frames(stacks: RankStacks) -> tuple[Frame, ...]:
    return next((thread.frames for thread in stacks.threads if thread.is_main), ())


def report(found: Sequence[RankStacks], silent_nodes: Sequence[str], *, num_frames: int) -> str:
    """The text. `silent_nodes`: where nothing could be learnt. num_frames: innermost frames of each stack."""
    lines = [f"node {node} did not answer, nor any rank on it" for node in silent_nodes]
    for stacks in found:
        if stacks.problem is not None:
            process = f", process {stacks.pid}" if stacks.pid is not None else ""
            name = "a rank of unknown number" if stacks.rank is None else f"rank {stacks.rank}"
            lines.append(f"{name} on {stacks.node}{process} does not answer: {stacks.problem}")
            if stacks.threads:
                lines += ["  its stack as py-spy sees it:", *_frame_lines(main_frames(stacks), num_frames)]
    for group in group_by_stack(found):
        count = f"{len(group.ranks)} ranks" if len(group.ranks) > 1 else "1 rank"
        odd = " <- differs from the others" if group.odd else ""
        lines += [f"{count}: {rank_list(group.ranks)}{odd}", *_frame_lines(group.frames, num_frames)]
    return "\n".join(lines)


def rank_list(ranks: Sequence[int | None]) -> str:
    """0-3, 7; a rank whose number is not known is `?`."""
    runs: list[list[int]] = []
    for rank in sorted(rank for rank in ranks if rank is not None):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(words + ["?"] * sum(rank is None for rank in ranks))


def _frame_lines(frames: Sequence[Frame], num_frames: int) -> list[str]:
    """Innermost first, as the caller of the next line is the line below."""
    lines = [f"    {frame.function}  {_short(frame.file)}:{frame.line}" for frame in frames[:num_frames]]
    more = len(frames) - num_frames
    return [*lines, f"    ... called from {more} more"] if more > 0 else lines


def _short(file: str) -> str:
    """A path without the folder of installed packages, or from the package's own name on."""
    for folder in (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")):
        if file.startswith(folder + os.sep):
            return file[len(folder) + 1 :]
    _, package, rest = file.rpartition(f"{os.sep}hpc_train{os.sep}")
    return f"hpc_train/{rest}" if package else file
