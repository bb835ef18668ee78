"""Why a store did not do what was asked, and what follows from that. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from hpc_train.errors import CheckpointError, HangError


@dataclass(frozen=True)
class Cause:
    """Why a call failed: in words, whether waiting may help, and what a person should do.

    is_of_file: the store itself answers, and this file alone it does not give. is_damage: what lies there is known: it
    was read and is damaged, or is no file.
    """

    text: str
    may_pass: bool
    cure: str
    is_of_file: bool = False
    is_damage: bool = False


class StoreError(CheckpointError):
    """A store did not do what was asked; `cause` says why."""

    def __init__(self, message: str, cause: Cause | None = None) -> None:
        super().__init__(message)
        self.cause = cause


@final
class StoreHang(StoreError, HangError):
    """A store that neither answers nor fails, and was waited for as long as it may be still."""

    def __init__(self, message: str, cure: str) -> None:
        super().__init__(message, Cause("the store does not answer", True, cure))
        self.cure = cure


def is_outage(error: Exception) -> bool:
    """Whether a store did not answer at all, so that nothing else in it can be asked for either."""
    cause = error.cause if isinstance(error, StoreError) else None
    return cause is not None and cause.may_pass and not cause.is_of_file


def is_unread(error: Exception) -> bool:
    """Whether a store did not give what lies there, whatever the reason, so that nobody knows whether it is sound."""
    return isinstance(error, StoreError) and not (error.cause is not None and error.cause.is_damage)
