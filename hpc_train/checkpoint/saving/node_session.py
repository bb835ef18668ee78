"""One start of a run as the agent of a node sees it: its ranks, their memory, and a thread that writes their saves.

Needs no torch, and imports what writes when there is something to write.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from hpc_train.checkpoint.saving.begun_save import BegunSave
from hpc_train.cluster.agent_service import Peer

if TYPE_CHECKING:
    import mmap

    from hpc_train.checkpoint.copies.copy_keeper import Copying, NodeCopies
    from hpc_train.checkpoint.copies.copy_service import CopyService
    from hpc_train.checkpoint.files.parts import Part
    from hpc_train.checkpoint.format.placed import WrittenBox
    from hpc_train.checkpoint.saving.node_save import Target

Log = Callable[[str], None]


@final
class Session:
    """One start of a run on this node: its ranks' memory, one save at a time, and a thread that writes it.

    Messages are taken by the agent's thread, which never waits here.
    """

    def __init__(self, name: str, message: Mapping[str, Any], log: Log, copies: CopyService | None) -> None:
        from hpc_train.checkpoint.saving.node_save import Target
        from hpc_train.checkpoint.stores.location import locate

        spec = message["target"]
        self._target: Target = Target(
            locate(spec["root"]),
            int(spec["keep"]),
            spec["bytes_per_s"],
            Path(spec["note_dir"]) if spec["note_dir"] is not None else None,
            spec["attempt"],
            int(message["node_rank"]),
            int(message["num_nodes"]),
        )
        self._trial: str | None = message["trial"]
        self._finish_s, self._count, self._log = float(message["finish_s"]), int(message["count"]), log
        self._name, self._copies = name, copies
        self._changed = threading.Condition()
        self._members: dict[Peer, int] = {}
        self._welcome: dict[str, Any] | None = None
        self._parts: dict[int, Part] = {}
        self._index: mmap.mmap | None = None
        self._save: BegunSave | None = None
        self._before: BegunSave | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {name}", daemon=True)
        self._thread.start()

    def join(self, peer: Peer, message: Mapping[str, Any], memories: Sequence[mmap.mmap]) -> None:
        """A rank has come. memories: what it copies into, and of rank 0 torch's index of the whole checkpoint.

        It is answered when it is known whether the store can be seen.
        """
        from hpc_train.checkpoint.files.parts import Part
        from hpc_train.checkpoint.format.placed import PlacedBox

        rank = int(message["rank"])
        placed = tuple(PlacedBox.from_plain(tree) for tree in message["placed"])
        with self._changed:
            if rank in self._parts or len(memories) != 1 + (rank == 0):
                raise ValueError(f"rank {rank} has come already, or not with its memory")
            self._parts[rank] = Part(placed, tuple(message["offsets"]), memories[0])
            if rank == 0:
                self._index = memories[1]
            self._members[peer] = rank
            if self._welcome is not None:
                peer.send(self._welcome)

    def begin(self, token: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """Whether the save before is done (`busy` tells how far it is) and whether it failed; and of its copies.

        message: `step`; `hurry`: what is written from now on is bound by no rate, and waits for one removal of an older
        one at most; `is_for_store`, unless it is: a save to the store does not wait for copies of the one before, also
        those not begun; `is_sure`: asked again, it goes on, so that these copies are given up.
        """
        from hpc_train.checkpoint.files.write import Flow

        step, hurry = int(message["step"]), bool(message["hurry"])
        with self._changed:
            save = self._save
            if save is not None and save.token != token:
                is_for_store = bool(message.get("is_for_store", True))
                if not is_for_store and save.copying is not None:
                    save.copying.give_up_if_hanging()
                if not (save.can_make_way if is_for_store else save.is_free):
                    if hurry:
                        save.flow.hurry()
                        save.is_urgent = True
                    num_bytes = sum(part.num_bytes for part in self._parts.values())
                    told = {"step": save.step, "written_bytes": save.flow.num_bytes, "num_bytes": num_bytes}
                    return {"busy": told, "failed": self._failed(save)}
                self._before, save = save, None
            elif save is not None and self._before is not None and bool(message.get("is_sure")):
                self._before.make_way(f"the save of step {step} to the store goes first")
            if save is None:
                self._save = BegunSave(token, step, Flow(None if hurry else self._target.bytes_per_s), hurry)
                if len(self._members) < self._count:
                    self._save.fail("a rank of this node has ended")
                    self._changed.notify_all()
            copies = self._node_copies
            told_of_copies = {} if copies is None else {"copies": copies.told()}
            return {"busy": None, "failed": self._failed(self._before), **told_of_copies}

    def cancel(self, token: str) -> None:
        """The ranks do not go on with a save that they have begun: the one before is the last again."""
        with self._changed:
            if self._save is not None and self._save.token == token and not self._save.taken:
                self._save, self._before = self._before, None
                self._changed.notify_all()

    def take(self, peer: Peer, token: str, message: Mapping[str, Any]) -> None:
        """A rank's copy is whole.

        message: `values`, of rank 0, the plain values of the manifest; `copy`, what node-local copies have to know,
        where some are to be made (rank 0 alone knows all of it); `is_for_store`, unless it is.
        """
        with self._changed:
            save = self._current(token)
            save.taken.add(self._members[peer])
            if "values" in message:
                save.values = message["values"]
            if save.copy is None or "values" in message:
                save.copy = message.get("copy")
            save.is_for_store = bool(message.get("is_for_store", True))
            if len(save.taken) == self._count:
                save.begin = time.monotonic()
                self._changed.notify_all()

    def outcome(self, token: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """What has become of a save, if that is known yet; else how far it is, with `moved`, which changes meanwhile.

        message: `commit`: of all of it, and not of this node's part alone.
        """
        with self._changed:
            save = self._current(token)
            if not (save.is_done or (save.is_node_done and not message["commit"])):
                # The store's: also while older checkpoints are removed, before this one or in front of it.
                moved_at = max(save.flow.moved_at, self._target.root.store.moved_at)
                moved = [moved_at, len(save.taken), save.is_taken_up, save.is_node_done]
                num_bytes = sum(part.num_bytes for part in self._parts.values())
                so_far = {"written_bytes": save.flow.num_bytes, "num_bytes": num_bytes}
                return {"is_known": False, "moved": moved, **so_far}
            told = [*save.told]
            return {"is_known": True, "failed": save.failure, "step": save.step, "seconds": save.seconds, "told": told}

    def abandon(self, token: str, reason: str) -> None:
        """Another node's part does not come."""
        with self._changed:
            self._current(token).fail(reason)
            self._changed.notify_all()

    def leave(self, peer: Peer) -> None:
        """A rank has gone; the last one lets the thread end behind what it has to write."""
        with self._changed:
            rank = self._members.pop(peer)
            save = self._save
            if save is not None and rank not in save.taken:
                save.fail(f"rank {rank} ended before its part of step {save.step} was copied")
            self._is_closing = self._is_closing or not self._members
            self._changed.notify_all()

    def close(self) -> None:
        """End, after what is whole here is written, and copied where it is to be."""
        deadline = time.monotonic() + self._finish_s
        with self._changed:
            self._is_closing = True
            save = self._save
            if save is not None and len(save.taken) < self._count:
                save.fail(f"the node agent ended before step {save.step} was copied")
            if save is not None and not save.is_done:
                self._log(f"checkpoint: step {save.step} is written to its end first")
                save.flow.hurry()
            self._changed.notify_all()
        self._thread.join(self._finish_s)
        if self._thread.is_alive():
            self._log(f"checkpoint: given up after {self._finish_s:g} s")
        elif save is not None and save.copying is not None:
            save.copying.wait(max(0.0, deadline - time.monotonic()))

    def _current(self, token: str) -> BegunSave:
        for save in (self._save, self._before):
            if save is not None and save.token == token:
                return save
        raise ValueError(f"the node agent knows of no save {token}")

    @staticmethod
    def _failed(save: BegunSave | None) -> list[str] | None:
        return None if save is None or save.failure is None else [save.token, save.failure]

    def _run(self) -> None:
        """The writing thread."""
        from hpc_train.checkpoint.saving import node_save

        self._look_for_trial()
        while (save := self._next()) is not None:
            is_good = False
            try:
                if save.is_for_store:
                    self._carry_out(save)
                is_good = save.is_for_store
            except BaseException as problem:
                # All of them: a client in Rust that panics raises what is no Exception, and ranks wait for an end.
                self._fail(save, problem)
            with self._changed:
                save.is_done = True
                if is_good:
                    save.failure = None  # it was given up too late
                copies = self._node_copies if save.copy is not None and len(save.taken) == self._count else None
                if copies is not None:
                    # Whatever the store has said: what ranks have copied is all here.
                    save.copying = self._copy(save, copies)
            if is_good and self._is_first:
                node_save.thin_out(self._target, save.step, self._log, self._is_next_urgent)
        with self._changed:
            self._parts.clear()
            self._index = None

    def _is_next_urgent(self) -> bool:
        """Whether ranks have begun a save in a hurry, such as before a time limit, behind the one that is done."""
        with self._changed:
            return self._save is not None and not self._save.is_done and self._save.is_urgent

    def _look_for_trial(self) -> None:
        """See whether the store shows what rank 0 has put there, and tell the ranks."""
        from hpc_train.checkpoint.saving import node_save

        welcome: dict[str, Any] = {"ok": True}
        try:
            if self._trial is not None:
                node_save.look_for_trial(self._target, self._trial, lambda: not self._is_closing)
        except BaseException as problem:  # as in `_run`
            welcome = {"error": node_save.describe(problem, self._target)}
        with self._changed:
            self._welcome = welcome
            for peer in self._members:
                peer.send(welcome)

    def _next(self) -> BegunSave | None:
        """The next save that is whole here or has failed, waiting for it; None at the end."""
        with self._changed:
            while True:
                save = self._save
                is_open = save is not None and not save.is_done
                if save is not None and is_open and (len(save.taken) == self._count or save.failure is not None):
                    save.is_taken_up = True
                    return save
                if self._is_closing and not is_open:
                    return None
                self._changed.wait()

    def _carry_out(self, save: BegunSave) -> None:
        from hpc_train.checkpoint.saving import node_save

        save.flow.check()
        target, where = self._target, (save.step, save.token)
        parts = [self._parts[rank] for rank in sorted(self._parts)]
        write = node_save.write_first_node if self._is_first else node_save.write_node
        written: list[WrittenBox] = write(target, *where, parts, save.flow, self._log)
        save.seconds = time.monotonic() - save.begin
        self._log(
            f"checkpoint: step {save.step}, {sum(part.num_bytes for part in parts) / 2**20:.1f} MiB of {len(parts)} "
            f"ranks written in {save.seconds:.2f} s"
        )
        if self._index is None:
            return  # and is done: who is told that may begin the next one
        with self._changed:
            save.is_node_done = True

        def tell(line: str) -> None:
            self._log(line)
            save.told.append(line)

        node_save.commit(target, *where, written, save.values, memoryview(self._index), save.flow, self._log, tell)
        save.seconds = time.monotonic() - save.begin
        self._log(f"checkpoint: step {save.step} is committed after {save.seconds:.2f} s")

    def _copy(self, save: BegunSave, copies: NodeCopies) -> Copying:
        assert save.copy is not None
        parts = [self._parts[rank] for rank in sorted(self._parts)]
        # What was committed now is in the store too, which rank 0 could not know when it began.
        is_stored = save.is_for_store and save.failure is None
        order = {**save.copy, "store_step": save.step} if is_stored else save.copy
        return copies.start(save.step, save.token, parts, save.values if self._is_first else None, order)

    @property
    def _node_copies(self) -> NodeCopies | None:
        return None if self._copies is None else self._copies.of(self._name)

    @property
    def _is_first(self) -> bool:
        return self._index is not None

    def _fail(self, save: BegunSave, problem: BaseException) -> None:
        """Note why, and clear up; raises nothing."""
        from hpc_train.checkpoint.saving import node_save

        why = save.failure or node_save.describe(problem, self._target)
        self._log(f"checkpoint: step {save.step} is not saved: {why}")
        with self._changed:
            save.fail(why)
        try:
            if self._is_first:
                node_save.give_up(self._target, save.step, save.token)
            else:
                node_save.write_failure(self._target, save.step, save.token, why, self._log)
        except BaseException as more:  # as in `_run`
            self._log(f"checkpoint: what was written of step {save.step} is left: {type(more).__name__}: {more}")
