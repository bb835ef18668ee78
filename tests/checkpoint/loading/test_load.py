"""Loads on several ranks: any cut into any other, each byte read once, faults of one rank told by all."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hpc_train.checkpoint.files import boxes
from hpc_train.checkpoint.folders.folder import prune
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.checkpoint.format.state import StatePiece
from hpc_train.checkpoint.loading import needs
from hpc_train.checkpoint.loading.load import load_newest
from hpc_train.checkpoint.saving.save import write_alone
from hpc_train.checkpoint.stores.cause import Cause, StoreError
from hpc_train.checkpoint.stores.location import locate
from hpc_train.errors import CheckpointError
from hpc_train.plan.checkpoint_load import plan_load
from hpc_train.plan.flat import Box, boxes_of_range
from tests.checkpoint.plain_state import Alone
from tests.ranks import TestRank, run_ranks
from tests.worlds import make_world

SHAPES = {"model.a": (37, 11), "model.b": (5, 6, 7), "model.c": (64,), "optimizer.a": (37, 11), "model.one": ()}
CHUNK = 256
"""Bytes at once in these tests: small, so that every tensor has several chunks."""


def _whole(name: str, step: int) -> torch.Tensor:
    shape = SHAPES[name]
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape) + 1000 * list(SHAPES).index(name) + step / 2


def _cut(shape: tuple[int, ...], chance: random.Random) -> list[Box]:
    """Along one dimension, and each part into flat ranges."""
    if not shape:
        return [Box((), ())]
    dim = chance.randrange(len(shape))
    cuts = sorted({0, shape[dim], *(chance.randrange(shape[dim]) for _ in range(chance.randrange(3)))})
    found = []
    for low, high in pairwise(cuts):
        sizes = tuple(high - low if axis == dim else extent for axis, extent in enumerate(shape))
        moved = tuple(low if axis == dim else 0 for axis in range(len(shape)))
        total = math.prod(sizes)
        for start, stop in pairwise(sorted({0, total, *(chance.randrange(total) for _ in range(chance.randrange(3)))})):
            for box in boxes_of_range(sizes, start, stop):
                found.append(Box(tuple(a + b for a, b in zip(box.offsets, moved, strict=True)), box.sizes))
    return found


def _save(root: Path, step: int, seed: int) -> None:
    chance = random.Random(seed)
    pieces = []
    for name, shape in SHAPES.items():
        whole = Box((0,) * len(shape), shape)
        for box in _cut(shape, chance):
            data = _whole(name, step)[box.slices_within(whole)].contiguous().view(-1)
            pieces.append(StatePiece(name, shape, box, data))
    folder = root / f"step_{step:07d}"
    folder.mkdir(parents=True)
    write_alone(folder, step, pieces, {"num_updates": step})


def _pieces(me: TestRank, seed: int) -> list[StatePiece]:
    """What a rank wants: boxes of a cut that all ranks draw alike, each wanted by some of them, or by all."""
    chance, pieces = random.Random(seed), []
    for name, shape in SHAPES.items():
        for box in _cut(shape, chance):
            holders = chance.choices(range(me.world_size), k=chance.choice([1, 1, 2, 4]))
            times = me.world_size if chance.random() < 0.2 else holders.count(me.rank)
            for _ in range(1 if times == me.world_size else times):
                pieces.append(StatePiece(name, shape, box, torch.full((box.num_elements,), -1.0)))
    return pieces


def _small_chunks() -> None:
    needs.plan_load = lambda *args, **more: plan_load(*args, chunk_bytes=CHUNK, **more)


def _load(me: TestRank, root: str, seeds: list[int]) -> list[tuple[int, Counter[tuple[str, int]]]]:
    """Load once a seed, compare every number; of each load the step, and which bytes this rank read how often."""
    _small_chunks()
    world, results = make_world(me), []
    read = boxes.BoxFiles.read
    for seed in seeds:
        counts: Counter[tuple[str, int]] = Counter()

        def counted(files, name, start, num_bytes, counts=counts):
            assert num_bytes <= CHUNK
            counts.update((name, place) for place in range(start, start + num_bytes))
            return read(files, name, start, num_bytes)

        boxes.BoxFiles.read = counted
        pieces = _pieces(me, seed)
        loaded = load_newest(root, pieces, world)
        assert loaded is not None and loaded.values == {"num_updates": loaded.step}
        for piece in pieces:
            whole = Box((0,) * len(piece.shape), piece.shape)
            assert torch.equal(piece.tensor(), _whole(piece.name, loaded.step)[piece.box.slices_within(whole)]), seed
        results.append((loaded.step, counts))
    return results


@pytest.mark.parametrize("world_size", [1, 4])
def test_any_cut_is_loaded_into_any_other_and_each_byte_is_read_once(tmp_path: Path, world_size: int) -> None:
    _save(tmp_path, 3, seed=5)
    stored = [box for tensor in read_manifest(tmp_path / "step_0000003").tensors.values() for box in tensor.boxes]
    expected = Counter((box.file, place) for box in stored for place in range(box.start, box.start + box.num_bytes))
    for_all = run_ranks(_load, world_size, str(tmp_path), list(range(12)))
    for loads in zip(*for_all, strict=True):
        assert [step for step, _ in loads] == [3] * world_size
        assert sum((counts for _, counts in loads), Counter()) == expected


def _failing(me: TestRank, root: str, failing_rank: int, kinds: list[str], seed: int) -> dict[str, tuple[str, str]]:
    """By kind of failure what is raised here, or the step that is loaded, where one rank's third read fails."""
    _small_chunks()
    read, world, told = boxes.BoxFiles.read, make_world(me), {}
    for kind in kinds:
        boxes.BoxFiles.read = _read_that_fails(read, kind) if me.rank == failing_rank else read
        try:
            loaded = load_newest(root, _pieces(me, seed), world)
            assert loaded is not None
            told[kind] = "loaded", str(loaded.step)
        except BaseException as error:
            told[kind] = type(error).__name__, str(error)
    return told


class _Panic(BaseException):
    """What is no Exception, as clients in Rust raise it."""


def _read_that_fails(read, kind: str):
    calls = Counter[str]()

    def fail(files, name, start, num_bytes):
        calls["read"] += 1
        if calls["read"] == 3 and kind == "outage":
            raise StoreError("cannot read: it does not answer", Cause("it does not answer", True, "Wait."))
        if calls["read"] == 3 and kind == "permission":
            raise StoreError("cannot open it: no permission", Cause("no permission", False, "Have its mode changed."))
        if calls["read"] == 3 and kind == "bug":
            raise RuntimeError("something else")
        if calls["read"] == 3 and kind == "panic":
            raise _Panic("called `Option::unwrap()` on a `None` value")
        if calls["read"] == 3 and kind == "damage":
            raise CheckpointError(f"{name} ends early")
        data = read(files, name, start, num_bytes)
        if calls["read"] == 3 and kind == "flip":
            data[0] ^= 1
        return data

    return fail


KINDS = ["damage", "flip", "outage", "permission", "bug", "panic"]


@pytest.mark.parametrize("failing_rank", [0, 2])
def test_a_rank_that_cannot_read_is_told_by_all_and_hangs_nobody(tmp_path: Path, failing_rank: int) -> None:
    _save(tmp_path, 1, seed=1)
    _save(tmp_path, 2, seed=2)
    told = run_ranks(_failing, 3, str(tmp_path), failing_rank, KINDS, 7)
    assert [of_rank["damage"] for of_rank in told] == [("loaded", "1")] * 3
    assert [of_rank["flip"] for of_rank in told] == [("loaded", "1")] * 3
    for rank, of_rank in enumerate(told):
        for kind, cause in (("outage", "it does not answer"), ("permission", "no permission")):
            name, words = of_rank[kind]
            assert name == "StoreError" and cause in words and "step_0000002 cannot be read and may be whole" in words
        for kind, name, words in (("bug", "RuntimeError", "something else"), ("panic", "_Panic", "Option::unwrap")):
            assert of_rank[kind][0] == (name if rank == failing_rank else "CollectiveError")
            assert words in of_rank[kind][1]


def _changed(me: TestRank, change: str) -> list[StatePiece]:
    pieces = _pieces(me, 7)
    if change == "renamed" and me.rank == 1:
        names = {"model.a": "model.other", "model.b": "model.another"}
        return [StatePiece(names.get(p.name, p.name), p.shape, p.box, p.data) for p in pieces]
    if change == "shape":
        return [StatePiece(p.name, (64, 1) if p.name == "model.c" else p.shape, p.box, p.data) for p in pieces]
    if change == "type":
        return [StatePiece(p.name, p.shape, p.box, p.data.to(torch.bfloat16)) for p in pieces]
    assert change in ("renamed", "fewer")
    return [piece for piece in pieces if change != "fewer" or piece.name not in ("optimizer.a", "model.one")]


def _refused(me: TestRank, root: str, changes: list[str]) -> list[str]:
    told = []
    for change in changes:
        pieces = _changed(me, change)
        with pytest.raises(CheckpointError) as caught:
            load_newest(root, pieces, make_world(me))
        assert all((piece.data == -1).all() for piece in pieces)
        told.append(str(caught.value))
    return told


def test_another_model_is_refused_with_the_first_names_on_every_rank(tmp_path: Path) -> None:
    _save(tmp_path, 2, seed=2)
    words = {
        "renamed": "it has no tensor model.other, model.another",
        "shape": "model.c is float32[64] there and float32[64, 1] here",
        "type": "model.a is float32[37, 11] there and bfloat16[37, 11] here",
        "fewer": "only it has optimizer.a, model.one",
    }
    for of_rank in run_ranks(_refused, 2, str(tmp_path), list(words)):
        for told, expected in zip(of_rank, words.values(), strict=True):
            assert "is of another model" in told and expected in told
            assert ("only it has" in told) == expected.startswith("only"), "what both have is no difference"


def test_a_box_that_several_ranks_read_has_its_checksum_from_all(tmp_path: Path) -> None:
    """One box of one tensor, wanted by all of four ranks: each reads a quarter, and a flipped bit is seen by all."""
    data = torch.arange(4096, dtype=torch.float32)
    for step in (1, 2):
        folder = tmp_path / f"step_{step:07d}"
        folder.mkdir()
        write_alone(folder, step, [StatePiece("model.a", (4096,), Box((0,), (4096,)), data + step)], {})
    told = run_ranks(_load_one, 4, str(tmp_path))
    assert [step for step, _ in told] == [2] * 4
    assert [num_bytes for _, num_bytes in told] == [4096] * 4
    path = tmp_path / "step_0000002/__0_0.distcp"
    (stored,) = read_manifest(path.parent).tensors["model.a"].boxes
    raw = bytearray(path.read_bytes())
    raw[stored.start + 9000] ^= 1
    path.write_bytes(raw)
    assert [step for step, _ in run_ranks(_load_one, 4, str(tmp_path))] == [1] * 4


def _load_one(me: TestRank, root: str) -> tuple[int, int]:
    _small_chunks()
    read, count = boxes.BoxFiles.read, Counter[str]()

    def counted(files, name, start, num_bytes):
        count["bytes"] += num_bytes
        return read(files, name, start, num_bytes)

    boxes.BoxFiles.read = counted
    piece = StatePiece("model.a", (4096,), Box((0,), (4096,)), torch.zeros(4096))
    loaded = load_newest(locate(root), [piece], make_world(me))
    assert loaded is not None and torch.equal(piece.data, torch.arange(4096) + float(loaded.step))
    return loaded.step, count["bytes"]


def test_gaps_are_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 2, seed=2)
    real = needs.plan_load

    def with_gap(stored, *args, **more):
        stored.sizes[0, 0] -= 1
        return real(stored, *args, **more)

    monkeypatch.setattr(needs, "plan_load", with_gap)
    with pytest.raises(CheckpointError, match="none can be read"):
        load_newest(tmp_path, _pieces(Alone(), 1), make_world(Alone()))  # type: ignore[arg-type]


def test_foreign_files_are_no_checkpoints_and_are_left(tmp_path: Path) -> None:
    """Files of other programs and people beside checkpoints and in them, and folders that only look like one."""
    for step in (1, 2):
        _save(tmp_path, step, seed=step)
    (tmp_path / "step_0000009").write_text("notes on step 9")
    (tmp_path / "step_0000008").mkdir()
    (tmp_path / "step_0000008" / "model.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "step_0000007").symlink_to(tmp_path / "gone")
    (tmp_path / "step_0000006").mkdir()
    (tmp_path / "step_0000006" / "manifest.json").write_text('{"of": "another program"}')
    (tmp_path / "step_abc").mkdir()
    (tmp_path / "README").write_text("mine")
    (tmp_path / "step_0000002" / ".nfs000000000000001").write_bytes(b"left by a file server")
    (tmp_path / "step_0000002" / "__9_0.distcp").write_bytes(b"a shard of somebody else's")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    assert [steps[0][0] for steps in run_ranks(_load, 2, str(tmp_path), [3])] == [2, 2]
    prune(locate(tmp_path), 2, keep=1)
    left = sorted(str(path) for path in tmp_path.rglob("*"))
    assert left == [path for path in before if "step_0000001" not in path]
