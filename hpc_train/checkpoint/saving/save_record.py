"""What has become of the saves of one start of a run, and what is said of those that failed."""

from __future__ import annotations

from typing import final

from hpc_train.checkpoint.folders.folder import step_folder
from hpc_train.errors import CheckpointError


@final
class SaveRecord:
    """Kept by every rank, alike but for what was saved, which rank 0 alone is told."""

    def __init__(self) -> None:
        self._last_begun: int | None = None
        self._failures: dict[int, str] = {}
        self._newest: int | None = None
        self._is_new = False

    def found(self, step: int | None) -> None:
        """What the store had at the start."""
        self._newest = step

    def begun(self, step: int) -> None:
        self._last_begun = step

    def failed(self, step: int, why: str) -> None:
        self._failures[step] = why.rstrip(".")

    def saved(self, step: int) -> None:
        self._newest, self._is_new = step, True

    def failures(self) -> str | None:
        """How many saves failed, what was saved last, and why the last of them failed; None where none did."""
        if not self._failures:
            return None
        step, why = list(self._failures.items())[-1]
        count = "1 save" if len(self._failures) == 1 else f"{len(self._failures)} saves"
        return f"{count} failed, and {self._saved_last()}; the last that failed is that of step {step}: {why}"

    def require_last(self) -> None:
        """Raises CheckpointError, for all ranks alike: the last save failed."""
        if self._last_begun in self._failures:
            error = CheckpointError(
                "all steps are taken, but the last save failed, and behind it checkpoint.on_error=continue has nothing "
                f"to go on with: {self.failures()}. When that is mended, start the run again: it takes the steps that "
                "are not saved once more"
            )
            error.reporter = 0
            raise error

    def _saved_last(self) -> str:
        if self._newest is None:
            return "nothing was saved"
        name = step_folder(self._newest)
        return f"{name} was saved last" if self._is_new else f"nothing since the start, so {name} is still the newest"
