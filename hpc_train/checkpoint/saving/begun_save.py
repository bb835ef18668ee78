"""A save as a node agent knows of it, from the moment when ranks begin it. Needs no torch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_train.checkpoint.copies.copy_keeper import Copying
    from hpc_train.checkpoint.files.write import Flow


@dataclass
class BegunSave:
    """A save that ranks have begun. failure: why it does not come.

    is_urgent: a time limit is near: it does not wait until all older ones are removed.
    copy: what node-local copies have to know, where some are to be made; is_for_store: false: it is for these alone.
    is_taken_up: the writing thread has it, which may be busy with what was before for long.
    is_node_done: this node's part is durable. is_done: nothing of it is written to the store any more, here and, on the
    node of rank 0, anywhere, but older ones may still be removed. copying: to the nodes' own disks, which begins then.
    told: what the ranks should say of its commit.
    """

    token: str
    step: int
    flow: Flow
    is_urgent: bool = False
    taken: set[int] = field(default_factory=set)
    values: dict[str, Any] = field(default_factory=dict)
    copy: dict[str, Any] | None = None
    is_for_store: bool = True
    is_taken_up: bool = False
    failure: str | None = None
    is_node_done: bool = False
    is_done: bool = False
    copying: Copying | None = None
    told: list[str] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    @property
    def is_free(self) -> bool:
        """Whether it is neither written nor copied, so that the memory may be filled again."""
        return self.is_done and (self.copying is None or self.copying.is_over)

    @property
    def can_make_way(self) -> bool:
        """Whether it is free, or is copied at most, or waits to be."""
        return self.is_done or not (self.is_for_store or self.is_taken_up)

    def make_way(self, why: str) -> None:
        """Give up its copies, so that a save to the store need not wait for them."""
        if self.copying is not None:
            self.copying.give_up(why)
        elif not (self.is_for_store or self.is_taken_up):
            self.is_done = True  # the thread still removes older checkpoints: nothing of this one is read

    def fail(self, why: str) -> None:
        """It does not come; nothing happens to one that is done."""
        if not self.is_done:
            self.failure = self.failure or why
            self.flow.stop(why)
