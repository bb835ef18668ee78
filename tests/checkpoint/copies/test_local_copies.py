"""Copies on the nodes' own disks: made beside the store's, gone on from where all parts are at hand, else the store."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from hpc_train.checkpoint.copies import copy_keeper, local_saves
from hpc_train.checkpoint.copies.copy_service import CopyService
from hpc_train.checkpoint.copies.copy_wire import CopyFailed
from hpc_train.checkpoint.copies.lineage import COPIES_FILE, Lineage, note_lineage
from hpc_train.checkpoint.copies.local_folder import NodeFolder, folder_of_run
from hpc_train.checkpoint.copies.local_parts import PartName, sound_parts
from hpc_train.checkpoint.copies.local_saves import LocalCopies, LocalFolder
from hpc_train.checkpoint.folders.attempt import attempt_of
from hpc_train.checkpoint.folders.folder import step_folder, steps_newest_first
from hpc_train.checkpoint.loading import load, local_load
from hpc_train.checkpoint.loading.load import load_newest
from hpc_train.checkpoint.saving import agent_link, agent_saves
from hpc_train.checkpoint.saving import saver as saver_module
from hpc_train.checkpoint.saving.node_writer import CheckpointService
from hpc_train.checkpoint.saving.saver import Saver
from hpc_train.checkpoint.stores.location import locate
from hpc_train.cli import main
from hpc_train.cluster.agent_address import AgentConnection
from hpc_train.cluster.agent_wait import AgentWait
from hpc_train.comm.world import World
from hpc_train.config import CheckpointConfig, LocalCopiesConfig
from hpc_train.errors import ConfigError, HpcTrainError
from tests.agents import served
from tests.checkpoint import plain_state
from tests.checkpoint.plain_state import Alone
from tests.checkpoint.thread_ranks import Ending, end_agent
from tests.ranks import TestRank, run_ranks
from tests.worlds import make_world, single_world

ELEMENTS = 1 << 14

Told = tuple[str, str, list[str]]
"""What a rank is told of a site: its store, its run folder, and the disk of each node."""


class _Site:
    """Nodes with a disk each, and a store."""

    def __init__(self, base: Path, num_nodes: int) -> None:
        self.base, self.run_dir, self.root = base, base / "runs" / "tiny" / "1", base / "store"
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.disks = [base / f"disk{node}" for node in range(num_nodes)]
        for disk in self.disks:
            disk.mkdir(exist_ok=True)

    def copy(self, base: Path) -> _Site:
        """The same site elsewhere, to be damaged."""
        shutil.copytree(self.base, base)
        other = _Site(base, len(self.disks))
        for disk in range(len(self.disks)):
            (other.disks[disk] / self.folder(disk).relative_to(self.disks[disk])).rename(other.folder(disk))
        return other

    def folder(self, disk: int) -> Path:
        return folder_of_run(str(self.disks[disk]), self.run_dir, {})

    def parts(self, disk: int) -> list[tuple[int, int]]:
        """(step, node) of what a disk has that is sound."""
        return sorted((record.name.step, record.name.node) for record in sound_parts(self.folder(disk))[0])

    def part(self, disk: int, step: int, node: int) -> Path:
        names = {path: PartName.of_folder(path.name) for path in self.folder(disk).iterdir()}
        (found,) = [path for path, name in names.items() if name and (name.step, name.node) == (step, node)]
        return found

    def lose(self, *disks: int) -> _Site:
        for disk in disks:
            shutil.rmtree(self.disks[disk])
            self.disks[disk].mkdir()
        return self

    def told(self, disks: Sequence[int] | None = None) -> Told:
        used = range(len(self.disks)) if disks is None else disks
        return str(self.root), str(self.run_dir), [str(self.disks[disk]) for disk in used]


def _world(me: TestRank, num_nodes: int) -> World:
    node, local_rank = divmod(me.rank, me.world_size // num_nodes)
    return replace(
        make_world(me), node=f"n{node}", node_rank=node, num_nodes=num_nodes, local_rank=local_rank,
        local_world_size=me.world_size // num_nodes,
    )  # fmt: skip


def _listen(said: list[str]) -> None:
    for module in (saver_module, agent_saves, agent_link, local_saves, local_load, load):
        for name in ("say", "warn"):
            if hasattr(module, name):
                setattr(module, name, said.append)


class _Rank:
    def __init__(self, me: TestRank, told: Told, key: str, is_sent: bool, **local: Any) -> None:
        """is_sent: copies reach the nodes that keep them."""
        root, run_dir, disks = told
        num_nodes = len(disks)
        self.me, self.said = me, list[str]()
        _listen(self.said)
        world = _world(me, num_nodes)
        config = CheckpointConfig(local={"path": "/", "every": 1, **local})
        assert config.local is not None
        holders = [(node + 1) % num_nodes for node in range(num_nodes)] if num_nodes > 1 else []
        folders = [folder_of_run(disk, Path(run_dir), {}) for disk in disks]
        mine = LocalFolder(folders[world.node_rank], attempt_of(key))
        if me.rank == 0:
            locate(root).make_folder()
            note_lineage(locate(root), Lineage(mine.attempt))
        self._world, self._key = world, key
        self._places = [mine.path, *(folders[node] for node in holders[world.node_rank :][:1] if is_sent)]
        self.copies = LocalCopies(world, config.local, mine, holders, lambda: "127.0.0.1", 20.0)
        self.state = plain_state.state(me, None, ELEMENTS)
        agent = (key, world.node)
        self.saver = Saver(config, locate(root), Path(run_dir), world, agent, lambda seconds: None, self.copies)

    def act(self, what: str, step: int) -> None:
        """A step, and what is done behind it, waited for; "end": of the agent of the node of that number."""
        if what == "end":
            if self.me.rank == 0:
                end_agent(self._key, f"n{step}")
            return self._world.control.barrier()
        for piece, wanted in zip(self.state, plain_state.state(self.me, step, ELEMENTS), strict=True):
            piece.data.copy_(wanted.data)
        values = {"num_updates": step}
        if what == "copy":
            self.saver.open(self.state)
            while not self.saver.copy_locally(step, self.state, values):
                time.sleep(0.005)
        else:
            self.saver.save(step, self.state, values, must_last=what == "last")
            if what != "last":
                assert self.saver._agents is not None
                self.saver._agents.settle()
        while what != "last" and not all(map(self._has_part(step), self._places)):
            time.sleep(0.005)
        self._world.control.barrier()

    def _has_part(self, step: int) -> Callable[[Path], bool]:
        def has(folder: Path) -> bool:
            names = [PartName.of_folder(path.name) for path in folder.iterdir()]
            return any(name and (name.step, name.node) == (step, self._world.node_rank) for name in names)

        return has


def _save(
    me: TestRank, told: Told, key: str, acts: list[tuple[str, int]], is_sent: bool, local: dict[str, Any]
) -> list[str]:
    rank = _Rank(me, told, key, is_sent, **local)
    try:
        for what, step in acts:
            rank.act(what, step)
    except HpcTrainError as error:
        return [f"{type(error).__name__}: {error}"]
    return rank.said


def _load_all(me: TestRank, sites: list[Told], attempt: str) -> list[tuple[int | None, bool, str]]:
    """Of each the step that was gone on from, whether the disks had it, and what was said; all numbers are compared."""
    return [_load(me, told, attempt) for told in sites]


def _load(me: TestRank, told: Told, attempt: str) -> tuple[int | None, bool, str]:
    root, run_dir, disks = told
    said: list[str] = []
    _listen(said)
    world = _world(me, len(disks))
    pieces = plain_state.state(me, None, ELEMENTS)
    mine = LocalFolder(folder_of_run(disks[world.node_rank], Path(run_dir), {}), attempt)
    loaded = load_newest(root, pieces, world, mine)
    if loaded is None:
        assert not any(piece.data.any() for piece in pieces), "what was begun with has changed"
        return None, False, "\n".join(said)
    assert loaded.values == {"num_updates": loaded.step}
    for piece, wanted in zip(pieces, plain_state.state(me, loaded.step, ELEMENTS), strict=True):
        assert torch.equal(piece.data, wanted.data), (loaded.step, piece.name)
    if loaded.local_tokens:
        step_of = {name.token: name.step for path in mine.path.iterdir() if (name := PartName.of_folder(path.name))}
        steps = [step_of.get(token) for token in loaded.local_tokens]  # of parts on other disks: None
        assert steps[-1] in (None, loaded.step)
        said.append(f"gone on from {len(steps)} saves, {'one' if loaded.local_twice else 'none'} kept twice")
    return loaded.step, bool(loaded.local_tokens), "\n".join(said)


@contextmanager
def _agents(num_nodes: int) -> Iterator[str]:
    with ExitStack() as stack:
        key: str | None = None
        for node in range(num_nodes):
            copies = CopyService(lambda text: None)
            ending = Ending()
            services = [CheckpointService(lambda text: None, copies), copies, ending]
            agent = stack.enter_context(served(services, key, node=f"n{node}"))
            key, ending.end = agent.key, agent.stop
        assert key is not None
        yield key


def _saved(
    site: _Site, acts: list[tuple[str, int]], ranks: int | None = None, *, is_sent: bool = True, **local: Any
) -> list[str]:
    """Do so on all nodes; what rank 0 said."""
    with _agents(len(site.disks)) as key:
        said: list[str] = run_ranks(_save, ranks or len(site.disks), site.told(), key, acts, is_sent, local)[0]
    return said


def _loaded(sites: Mapping[str, Told], ranks: int | None = None) -> dict[str, tuple[int | None, bool, str]]:
    """By name what came of each, as rank 0 saw it; all ranks must agree."""
    told = [*sites.values()]
    found = run_ranks(_load_all, ranks or len(told[0][2]), told, secrets.token_hex(8))
    for of_site in zip(*found, strict=True):
        assert len({(step, is_local) for step, is_local, _ in of_site}) == 1
    return dict(zip(sites, found[0], strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> _Site:
    """Three nodes of two ranks: step 2 is in the store and on the disks, step 3 on the disks alone."""
    site = _Site(tmp_path_factory.mktemp("site"), 3)
    said = _saved(site, [("save", 2), ("copy", 3)], ranks=6)
    assert not any("goes on without" in text for text in said)
    return site


def _flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def _damaged(site: _Site, *where: tuple[int, int]) -> _Site:
    """Flip a bit in the data of step 3. where: the disk, and whose part."""
    for disk, node in where:
        _flip(next(site.part(disk, 3, node).glob("*.distcp")), 2000)
    return site


def test_each_disk_has_its_node_s_part_and_another_one_s(saved: _Site) -> None:
    assert [saved.parts(disk) for disk in range(3)] == [
        [(2, 0), (2, 2), (3, 0), (3, 2)],
        [(2, 0), (2, 1), (3, 0), (3, 1)],
        [(2, 1), (2, 2), (3, 1), (3, 2)],
    ]
    assert [step for step, _ in steps_newest_first(locate(saved.root))] == [2]
    assert plain_state.load(Alone(), saved.root, ELEMENTS) == 2


def test_the_newest_save_that_is_whole_and_good_is_gone_on_from_on_disks_or_in_the_store(
    saved: _Site, tmp_path: Path
) -> None:
    def copy(name: str) -> _Site:
        return saved.copy(tmp_path / name)

    record, no_older, gone_back, other_run = copy("record"), copy("no older"), copy("gone back"), copy("other run")
    _flip(record.part(0, 3, 0) / "part.json", 200)
    for disk, node in ((0, 0), (0, 2), (1, 0), (1, 1), (2, 1), (2, 2)):
        shutil.rmtree(no_older.part(disk, 2, node))
    shutil.rmtree(gone_back.root / step_folder(2))
    (other_run.root / COPIES_FILE).unlink()
    sites = {
        "all": saved,
        "one lost": copy("one lost").lose(1),
        "two lost": copy("two lost").lose(1, 2),
        "record": record,
        "data": _damaged(copy("data"), (1, 1)),
        "both": _damaged(copy("both"), (1, 1), (2, 1)),
        "no older": _damaged(no_older, (1, 1), (2, 1)),
        "gone back": gone_back,
        "other run": other_run,
    }
    found = _loaded({name: site.told() for name, site in sites.items()}, ranks=6)
    assert {name: (step, is_local) for name, (step, is_local, _) in found.items()} == {
        "all": (3, True),
        "one lost": (3, True),
        "two lost": (2, False),
        "record": (3, True),
        "data": (3, True),
        "both": (2, True),
        "no older": (2, False),
        "gone back": (None, False),
        "other run": (2, False),
    }
    for name, words in {
        "all": "step 3 is whole on the nodes' own disks: 3 parts\ngone on from 2 saves, one kept twice",
        "one lost": "1 of them on other nodes than before\ngone on from 2 saves, none kept twice",
        "two lost": "step 3 is not whole on the nodes' own disks: 1 of 3 nodes' parts, node 1's first",
        "record": "a part on this node's own disk is left out",
        "data": "a part on the nodes' own disks is left out",
        "both": "node 1's first, are sound on no node of this job",
        "no older": "the checksum of the bytes",
        "other run": "step 3 on the nodes' own disks is left out: it is not of what this run has gone on from since",
        "gone back": "step 2 was in the store when it was copied, which has none now",
    }.items():
        assert words in found[name][2], (name, found[name][2])


def test_no_copy_leads_back_to_a_checkpoint_that_is_set_aside(saved: _Site, tmp_path: Path) -> None:
    """Neither one that was made along with it, nor a newer one; where all of step 4 is there, it may be used."""
    site = saved.copy(tmp_path / "site")
    _saved(site, [("save", 4), ("save", 5), ("copy", 6)], keep=2)
    newest, along = site.root / step_folder(5), site.copy(tmp_path / "along")
    for disk, node in ((0, 0), (0, 2), (1, 0), (1, 1), (2, 1), (2, 2)):
        shutil.rmtree(along.part(disk, 6, node))
    for place in (site, along):
        assert main(["ckpt", "set-aside", str(place.root / step_folder(5))]) == 0
    found = _loaded({"newer": site.told(), "along": along.told()})
    assert [step for step, _, _ in found.values()] == [4, 4]
    for name, step in (("newer", 6), ("newer", 5), ("along", 5)):
        told = "step 5 was in the store when it was copied, which has step 4 as the newest one now"
        assert f"step {step} on the nodes' own disks is left out: {told}" in found[name][2]
    assert main(["ckpt", "set-aside", "--undo", f"{newest}.set-aside"]) == 0
    assert _loaded({"back": site.told()})["back"][:2] == (6, True)


def test_fewer_and_other_nodes_go_on_where_all_parts_are_at_hand(saved: _Site, tmp_path: Path) -> None:
    new = saved.copy(tmp_path / "new").lose(0)
    found = _loaded({"fewer": saved.told([2, 0]), "one is new": new.told([0, 2]), "two are": new.lose(2).told([0, 2])})
    assert {name: entry[:2] for name, entry in found.items()} == {
        "fewer": (3, True),
        "one is new": (2, False),
        "two are": (2, False),
    }


def test_older_copies_make_room_and_all_go_when_the_store_has_the_last_step(saved: _Site, tmp_path: Path) -> None:
    site = saved.copy(tmp_path / "site")
    said = _saved(site, [("save", 5), ("copy", 6), ("copy", 7), ("copy", 8)])
    assert not any("goes on without" in text for text in said)
    assert {step for disk in range(3) for step, _ in site.parts(disk)} == {7, 8}
    newer = site.copy(tmp_path / "newer")
    _saved(site, [("copy", 9), ("last", 10)])
    assert [site.parts(disk) for disk in range(3)] == [[], [], []]
    found = _loaded({"newer": newer.told(), "last": site.told()})
    assert [entry[:2] for entry in found.values()] == [(8, True), (10, False)]


def test_all_copies_go_with_the_last_save_also_where_the_agent_of_a_node_has_ended(
    saved: _Site, tmp_path: Path
) -> None:
    site = saved.copy(tmp_path / "site")
    said = _saved(site, [("copy", 6), ("end", 1), ("last", 7)])
    assert sum("no more copies are made" in text for text in said) == 1
    assert [site.parts(disk) for disk in range(3)] == [[], [], []]


def test_copies_that_another_start_has_taken_over_are_left_to_it_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(local_saves, "warn", said.append)
    folder = tmp_path / "disk/user/run"
    (tmp_path / "disk").mkdir()
    NodeFolder(folder, "the next start", 0)
    part = folder / PartName(3, "a1", 0, 1).folder
    part.mkdir()
    config = LocalCopiesConfig(path="/", every=1)
    copies = LocalCopies(single_world(), config, LocalFolder(folder, "this start"), (), lambda: "", 1.0)
    copies.drop(("no such key", "n1"))
    assert part.is_dir() and len(said) == 1 and said[0].startswith(f"copies stay in {folder} on n1, though the store ")


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_few_nodes_keep_what_they_can(tmp_path: Path, num_nodes: int) -> None:
    site = _Site(tmp_path / "site", num_nodes)
    _saved(site, [("copy", 3)], keep=2)
    other = (3, True) if num_nodes == 2 else (None, False)
    sites = {
        "all": (site, (3, True)),
        "one lost": (site.copy(tmp_path / "lost").lose(0), other),
        "one damaged": (_damaged(site.copy(tmp_path / "one"), (0, 0)), other),
    }
    if num_nodes == 2:  # then it begins as without copies, since the store is empty
        sites["both damaged"] = (_damaged(site.copy(tmp_path / "both"), (0, 0), (1, 0)), (None, False))
    found = _loaded({name: site.told() for name, (site, _) in sites.items()})
    assert {name: entry[:2] for name, entry in found.items()} == {name: entry for name, (_, entry) in sites.items()}


def test_a_folder_that_cannot_be_used_is_refused_at_the_start_on_all_ranks(tmp_path: Path) -> None:
    site = _Site(tmp_path, 2)
    refused = _saved(site, [("copy", 1)], most_bytes=1000)
    assert "local copies need" in refused[0] and "checkpoint.local.most_bytes=1000" in refused[0]
    shutil.rmtree(site.disks[1])
    assert f"{site.disks[1]} is no folder on this node" in _saved(site, [("copy", 1)])[0]
    with pytest.raises(ConfigError, match="SCRATCH is not set on this node"):
        folder_of_run("$SCRATCH/x", tmp_path, {})
    with pytest.raises(ConfigError, match="which is not a path from / on"):
        folder_of_run("$SCRATCH/x", tmp_path, {"SCRATCH": "here"})


class _Agent:
    """An agent with room for one save more, or without."""

    def __init__(self, has_room: bool) -> None:
        self._has_room = has_room

    def ask(self, message: Mapping[str, Any], **more: object) -> tuple[dict[str, Any], list[int]]:
        return {"port": None, "has_room": self._has_room}, []


@pytest.mark.parametrize(("has_room", "kept"), [(True, ["b", "c", "a"]), (False, ["b", "c"])])
def test_the_newest_save_kept_twice_stays_beside_newer_ones_where_there_is_room(
    tmp_path: Path, has_room: bool, kept: list[str]
) -> None:
    config = LocalCopiesConfig(path="/", every=1, keep=2)
    copies = LocalCopies(single_world(), config, LocalFolder(tmp_path / "a/b/c", "start"), (), lambda: "", 1.0)
    copies.open("session", cast(AgentConnection, _Agent(has_room)), 100, AgentWait(("key", "n1"), "the folder", 60.0))

    def hear(*told: tuple[str | None, str | None]) -> list[str]:
        copies.hear([{"copies": {"whole_here": w, "kept_twice": t, "problem": None}} for w, t in told])
        return list(copies.order()["keep"])

    assert hear(("a", "a"), ("a", "a")) == ["a"]
    assert hear(("b", "b"), ("b", None)) == ["a", "b"]
    assert hear(("c", None), ("c", None)) == kept
    assert hear(("d", None), (None, None)) == kept, "it is whole on one node alone"
    assert hear(("e", "e"), ("e", "e")) == ["c", "e"]
    copies.loaded(["x", "y", "z"], "x", None)
    assert copies.order()["keep"] == (["y", "z", "x"] if has_room else ["y", "z"])


def test_copies_that_fail_are_told_once_and_stop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise CopyFailed("no way there")

    site = _Site(tmp_path, 2)
    monkeypatch.setattr(copy_keeper, "send_part", fails)
    said = _saved(site, [("copy", 1), ("copy", 2), ("save", 3), ("copy", 4)], is_sent=False)
    assert [text for text in said if "no way there" in text] == [
        "copies on the nodes' own disks, which training goes on without: node 0: no way there"
    ]
    assert [site.parts(disk) for disk in range(2)] == [[(3, 0), (4, 0)], [(3, 1), (4, 1)]]
    assert _loaded({"own alone": site.told()})["own alone"][:2] == (4, True)
