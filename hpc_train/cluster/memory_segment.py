"""Memory that processes of a node share without a name: a memfd, which its maker passes on as a descriptor.

It is in no folder, so that it is not bound by the size of /dev/shm, nobody sweeps it, and it is gone with the last
process that has it, whatever ended that process. It counts as memory of the job like any other.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from typing import final

from hpc_train.cluster.limits import available_memory_bytes
from hpc_train.errors import HpcTrainError

# What makes a segment of ours to be told from others in /proc/PID/maps and /proc/PID/fd.
LABEL_PREFIX = "hpc_train."
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_READ_ONLY = _FIXED_SIZE | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


@final
class Segment:
    """A descriptor of shared memory and its size. Whoever has one closes it; what was mapped stays."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """Use `create` or `received`."""
        self._descriptor, self.num_bytes = descriptor, num_bytes

    @classmethod
    def create(cls, label: str, num_bytes: int, available_bytes: Callable[[], int | None] | None = None) -> Segment:
        """Take so much memory, filled with zeros. Its size never changes, so that what is mapped is always there.

        label: what it is, for people who look into /proc. available_bytes: asked for the node's free memory.

        Raises:
            HpcTrainError: there is not so much memory.
        """
        # Asked first: the kernel does not refuse, it ends some process of the node when all memory is taken.
        available = (available_bytes or available_memory_bytes)()
        if available is not None and num_bytes > available:
            raise _too_much(label, num_bytes, f"{available / 2**20:.1f} MiB are available")
        descriptor = os.memfd_create(LABEL_PREFIX + label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            if num_bytes:
                # All of it now: a page that cannot be had later would end whoever touches it by SIGBUS.
                os.posix_fallocate(descriptor, 0, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE)
        except OSError as problem:
            os.close(descriptor)
            if problem.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise _too_much(label, num_bytes, str(problem.strerror)) from problem
        return cls(descriptor, num_bytes)

    @classmethod
    def received(cls, descriptor: int) -> Segment:
        """Take over a descriptor that came from another process.

        Raises:
            ValueError: it is no memfd of a fixed size, so that reading it could end this process; it is closed.
        """
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _FIXED_SIZE != _FIXED_SIZE:
                raise ValueError("a descriptor that came is of memory whose size may still change")
        except (OSError, ValueError) as problem:
            os.close(descriptor)
            raise ValueError(f"a descriptor that came is no shared segment: {problem}") from problem
        return cls(descriptor, os.fstat(descriptor).st_size)

    @property
    def descriptor(self) -> int:
        assert self._descriptor >= 0, "the segment is closed"
        return self._descriptor

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Put bytes at a place of a segment that is not sealed; all of them."""
        view = memoryview(data).cast("B")
        assert offset >= 0 and offset + len(view) <= self.num_bytes, "outside the segment"
        while view:
            count = os.pwrite(self.descriptor, view, offset)
            view, offset = view[count:], offset + count

    def seal(self) -> None:
        """From now on nobody can change what is in it; there must be no writable mapping of it left."""
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _READ_ONLY)

    def map(self, *, writable: bool = False, populate: bool = False) -> mmap.mmap:
        """Its memory in this process, until the mapping and all views of it are gone.

        populate: find every page now, and not when it is first touched.
        """
        assert self.num_bytes, "an empty segment cannot be mapped"
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        return mmap.mmap(self.descriptor, self.num_bytes, flags=flags, prot=protection)

    def close(self) -> None:
        """Give the descriptor back. Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _too_much(label: str, num_bytes: int, why: str) -> HpcTrainError:
    return HpcTrainError(
        f"{num_bytes / 2**20:.1f} MiB of memory for {label} are not to be had on this node: {why}. Give the job more "
        "memory (--mem), or lower what the configuration asks for."
    )
