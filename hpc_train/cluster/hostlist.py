"""Slurm's compressed lists: host names (`n[001-003,010]`) and task counts (`4,1(x3)`).

Everything that Slurm rejects is refused here, and so is an unclosed bracket, which
`scontrol show hostnames` turns into one bogus name with exit status 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hpc_train.cluster.whole_number import whole_number
from hpc_train.errors import ConfigError, LaunchError

# cited: MAX_RANGE of Slurm 22.05; `scontrol show hostnames n[1-65537]` is rejected.
MAX_RANGE = 65536

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
# Longer digit runs are left in the prefix: they would not fit the integers of Slurm's own parser.
_TRAILING_NUMBER = re.compile(r"(.*?)([0-9]{1,15})", re.DOTALL)


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Expand a Slurm host list to names, in Slurm's order, duplicates kept.

    With one or two brackets the rightmost runs fastest. With more, Slurm 22.05 runs the last one
    fastest and then the others from left to right; this follows it, because positions are node indices.

    Raises:
        LaunchError: The list is empty, or Slurm would not accept it.
    """
    hosts = [host for item in _split_items(text) if item for host in _expand_item(item, text)]
    if not hosts:
        raise LaunchError(f"The host list {text!r} names no host. Give names such as n[1-4] or n1,n2.")
    return tuple(hosts)


def hosts_of_setting(name: str, text: str | None) -> tuple[str, ...]:
    """The hosts of a list that the user gave; none where it was left out. name: of the option or setting.

    Raises:
        ConfigError: It is no host list.
    """
    try:
        return expand_hostlist(text) if text else ()
    except LaunchError as error:
        raise ConfigError(f"{name}: {error}") from None


def compress_hostlist(hosts: Iterable[str]) -> str:
    """Write host names as a Slurm host list that expands to exactly the same names in the same order.

    Only neighbours share a bracket, so order and duplicates survive.
    """
    groups: list[tuple[str, list[str]]] = []
    for host in hosts:
        if not host or not _NAME.fullmatch(host):
            raise LaunchError(f"{host!r} is not a host name: letters, digits, '-', '_' and '.' are accepted.")
        match = _TRAILING_NUMBER.fullmatch(host)
        prefix, number = (match.group(1), match.group(2)) if match else (host, "")
        if number and groups and groups[-1][0] == prefix and groups[-1][1]:
            groups[-1][1].append(number)
        else:
            groups.append((prefix, [number] if number else []))
    return ",".join(_write_group(prefix, numbers) for prefix, numbers in groups)


def natural_order(name: str) -> list[str]:
    """A key to sort names by, with n2 before n10."""
    return [part.zfill(18) for part in re.split(r"(\d+)", name)]


def parse_tasks_per_node(text: str, num_nodes: int) -> tuple[int, ...]:
    """Read a count list such as `4,1(x3)`: one entry a node, in the order of the node list.

    Raises:
        LaunchError: Not of that form, a count or repeat of zero, or not num_nodes entries.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        count = whole_number(match.group(1), 1) if match else None
        repeat = whole_number(match.group(2) or "1", 1, MAX_RANGE) if match else None
        if count is None or repeat is None:
            raise LaunchError(
                f"The count list {text[:200]!r} cannot be read at {item[:60]!r}. "
                "Expected counts such as 4 or 4(x2), separated by commas, none of them zero."
            )
        counts.extend([count] * repeat)
    if len(counts) != num_nodes:
        raise LaunchError(
            f"The count list {text!r} speaks of {len(counts)} nodes, but {num_nodes} take part. "
            "Variables of two steps or jobs are mixed."
        )
    return tuple(counts)


def _split_items(text: str) -> list[str]:
    """Split at the commas that stand outside brackets."""
    items = [""]
    inside = False
    for char in text:
        if char == "[":
            if inside:
                raise _refuse(text, "a bracket inside a bracket")
            inside = True
        elif char == "]":
            if not inside:
                raise _refuse(text, "a ']' without its '['")
            inside = False
        if char == "," and not inside:
            items.append("")
        else:
            items[-1] += char
    if inside:
        raise _refuse(text, f"the bracket in {items[-1]!r} is never closed")
    return items


def _expand_item(item: str, text: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\]]*)\]", item)
    literals, brackets = pieces[0::2], pieces[1::2]
    for literal in literals:
        if not _NAME.fullmatch(literal):
            raise _refuse(text, f"{literal!r} cannot be part of a host name")
    if brackets and literals[-1]:
        raise _refuse(text, f"{literals[-1]!r} follows the last bracket; such names are listed in full")
    choices = [_expand_bracket(bracket, text) for bracket in brackets]
    total = 1
    for choice in choices:
        total *= len(choice)
    if total > 16 * MAX_RANGE:
        raise _refuse(text, f"it names {total} hosts")
    for index in range(total):
        picked = [""] * len(choices)
        rest = index
        for position in [len(choices) - 1, *range(len(choices) - 1)] if choices else []:
            rest, digit = divmod(rest, len(choices[position]))
            picked[position] = choices[position][digit]
        yield "".join(literal + part for literal, part in zip(literals, [*picked, ""], strict=True))


def _expand_bracket(bracket: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in bracket.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _refuse(text, f"{item!r} in brackets is neither a number nor a range")
        low, high = match.group(1), match.group(2) or match.group(1)
        if len(low) > 18 or len(high) > 18:
            raise _refuse(text, f"the number in {item!r} is too long")
        if int(high) < int(low):
            raise _refuse(text, f"the range {item!r} runs backwards")
        if int(high) - int(low) >= MAX_RANGE:
            raise _refuse(text, f"the range {item!r} holds more than {MAX_RANGE} hosts, Slurm's own limit")
        numbers.extend(str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))
    return numbers


def _write_group(prefix: str, numbers: list[str]) -> str:
    if len(numbers) < 2:
        return prefix + "".join(numbers)
    runs: list[tuple[str, str, int]] = []
    for number in numbers:
        if runs:
            low, high, length = runs[-1]
            if length < MAX_RANGE and number == str(int(high) + 1).zfill(len(low)):
                runs[-1] = (low, number, length + 1)
                continue
        runs.append((number, number, 1))
    return f"{prefix}[{','.join(low if low == high else f'{low}-{high}' for low, high, _ in runs)}]"


def _refuse(text: str, why: str) -> LaunchError:
    return LaunchError(
        f"The host list {text!r} cannot be read: {why}. Expected Slurm's form, such as n[1-4,7] or n1,n2; "
        "`scontrol show hostnames LIST` shows what Slurm makes of it."
    )
