"""Ranks that speak with a node agent about saves, without torch or processes of their own."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.checkpoint.format.placed import file_of_rank, place_boxes
from hpc_train.cluster.memory_segment import Segment
from hpc_train.plan.flat import Box
from tests.agents import ServedAgent

INDEX = b"torch's index"


class NodeRank:
    """A rank with one row of a tensor `w`, of num_bytes bytes. rows: of all ranks."""

    def __init__(
        self,
        agent: ServedAgent,
        root: Path | str,
        rank: int,
        rows: int,
        *,
        count: int | None = None,
        node_rank: int = 0,
        num_nodes: int = 1,
        num_bytes: int = 1000,
        session: str = "0a",
        trial: str | None = None,
        **target: Any,
    ) -> None:
        self.rank, self.num_bytes, self.session = rank, num_bytes, session
        self.connection = agent.connect()
        self.segment = Segment.create(f"test.rank_{rank}", num_bytes)
        segments = [self.segment]
        if rank == 0:
            segments.append(Segment.create("test.index", len(INDEX)))
            segments[1].write(0, INDEX)
        box = ("w", (rows, num_bytes), "uint8", Box((rank, 0), (1, num_bytes)))
        self.placed = place_boxes(file_of_rank(rank), [box])
        message = {
            "say": "checkpoint.open",
            "session": session,
            "rank": rank,
            "count": rows if count is None else count,
            "node_rank": node_rank,
            "num_nodes": num_nodes,
            "target": {
                "root": str(root),
                "keep": 0,
                "bytes_per_s": None,
                "note_dir": None,
                "attempt": "first",
                **target,
            },
            "trial": trial,
            "finish_s": 20.0,
            "placed": [placed.to_plain() for placed in self.placed],
            "offsets": [0],
        }
        self.opened = self.ask(message, [segment.descriptor for segment in segments])

    def ask(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        return self.connection.ask(message, descriptors)[0]

    def begin(self, token: str, step: int, *, hurry: bool = False, **more: Any) -> dict[str, Any]:
        return self.ask({"say": "checkpoint.begin", "token": token, "step": step, "hurry": hurry, **more})

    def take(self, token: str, step: int, **more: Any) -> dict[str, Any]:
        """Copy a state that follows from the step, and say so."""
        self.segment.write(0, row_of(step, self.rank, self.num_bytes))
        values = {"values": {"step_told": step}} if self.rank == 0 else {}
        return self.ask({"say": "checkpoint.take", "token": token, **values, **more})

    def outcome(self, token: str, *, commit: bool) -> dict[str, Any]:
        return self.tell("outcome", token, session=self.session, commit=commit)

    def wait(self, token: str, *, commit: bool, limit_s: float = 60.0) -> dict[str, Any]:
        """The outcome, when it is known."""
        deadline = time.monotonic() + limit_s
        while not (answer := self.outcome(token, commit=commit))["is_known"]:
            assert time.monotonic() < deadline, f"nothing becomes of {token}"
            time.sleep(0.005)
        return answer

    def tell(self, verb: str, token: str, **more: Any) -> dict[str, Any]:
        return self.ask({"say": f"checkpoint.{verb}", "token": token, **more})


def row_of(step: int, rank: int, num_bytes: int) -> bytes:
    return (f"{step} {rank} ".encode() * num_bytes)[:num_bytes]


def check_step(root: Path, step: int, rows: int, num_bytes: int = 1000) -> None:
    """The checkpoint of a step is whole and exact."""
    folder = root / f"step_{step:07d}"
    manifest = read_manifest(folder)
    assert (manifest.step, manifest.values) == (step, {"step_told": step})
    for box in manifest.tensors["w"].boxes:
        with (folder / box.file).open("rb") as file:
            file.seek(box.start)
            assert file.read(box.num_bytes) == row_of(step, box.box.offsets[0], num_bytes)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*manifest.files, "manifest.json"])
    assert len(manifest.tensors["w"].boxes) == rows and (folder / ".metadata").read_bytes() == INDEX


def left_over(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


def told(root: Path) -> dict[str, Any]:
    """What a run folder was told of checkpoints elsewhere."""
    found: dict[str, Any] = json.loads((root / "checkpoints" / "elsewhere.json").read_text())
    return found
