"""Long lines through srun, which breaks them: tasks print numbered pieces, and the reader joins them again."""

from __future__ import annotations

import re

# cited: srun's line buffering holds 1024 bytes a message (slurm_protocol_defs.h, MAX_MSG_LEN); a longer line may be cut
# and another task's put in between.
_PIECE_BYTES = 800
_PIECE = re.compile(r"@(\w+) (\S+) ([0-9]+)/([0-9]+) (.*)")


def in_pieces(name: str, source: str, text: str) -> str:
    """Lines that carry text, which must be one line of ASCII. source tells whose they are, such as a host's name."""
    pieces = [text[start : start + _PIECE_BYTES] for start in range(0, len(text), _PIECE_BYTES)] or [""]
    return "".join(f"@{name} {source} {index}/{len(pieces)} {piece}\n" for index, piece in enumerate(pieces, 1))


def joined_pieces(name: str, output: str) -> list[str]:
    """The texts in an output, in the order in which they began; those that lack a piece are left out."""
    found: dict[str, dict[int, str]] = {}
    sizes: dict[str, int] = {}
    for line in output.splitlines():
        if (match := _PIECE.search(line)) and match[1] == name:
            found.setdefault(match[2], {})[int(match[3])] = match[5]
            sizes[match[2]] = int(match[4])
    return [
        "".join(pieces[index] for index in sorted(pieces))
        for source, pieces in found.items()
        if len(pieces) == sizes[source]
    ]
