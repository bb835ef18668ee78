"""What the node agent does for ranks is done by services; this is what a service and the agent know of each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from hpc_train.errors import HpcTrainError


class Peer(ABC):
    """A connected client: a process of the agent's own user."""

    pid: int

    @abstractmethod
    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message, from any thread and without waiting; nothing happens if the client has gone.

        The descriptors are copied at once, so the caller may close them.
        """


class Service(ABC):
    """Answers the messages whose `say` is its name, or begins with its name and a dot.

    The methods are called by the agent's one thread, which serves everybody: what takes long is done elsewhere and
    sent later.
    """

    name: str
    takes_descriptors = False
    """Whether descriptors of messages are the service's, to be closed by it; else they are closed unseen."""

    @abstractmethod
    def answer(self, peer: Peer, message: Mapping[str, Any], descriptors: Sequence[int]) -> Mapping[str, Any] | None:
        """The answer; None where it is sent later.

        An `HpcTrainError`, ValueError, KeyError or TypeError that it raises is the client's answer.
        """

    @abstractmethod
    def gone(self, peer: Peer) -> None:
        """A client has closed its end, or its process has ended; also one that never spoke to this service."""

    @abstractmethod
    def close(self) -> None:
        """The agent ends."""


def error_answer(problem: BaseException) -> dict[str, Any]:
    """What a client is told of an error; its class has a name that the client knows."""
    text = str(problem) or type(problem).__name__
    if isinstance(problem, KeyError):
        text = f"the message has no {problem}"
    kinds = type(problem).__mro__
    known = next((kind for kind in kinds if kind.__module__ == HpcTrainError.__module__), kinds[0])
    return {"error": text, "kind": known.__name__}
