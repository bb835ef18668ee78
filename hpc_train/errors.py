"""The few exceptions that users meet, and the exit codes of every command.

A message says what was asked, in the user's words and numbers; what was needed; what to do. Rank and
host are added in one place, `log.report_failure`.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of hpc-train. All are below 128, where the shell's codes for signals begin."""

    DONE = 0
    INTERNAL = 1
    USAGE = 2
    LAUNCH = 3
    DATA = 4
    CHECKPOINT = 5
    # Of the batch script only:
    REQUEUE = 10
    BAD_NODE = 11
    NO_PROGRESS = 12


class HpcTrainError(Exception):
    """Base of all errors that are the user's to mend; shown without a traceback.

    reporter: where all ranks raise alike, the one rank that prints it; None: whoever raised it.
    """

    exit_code = ExitCode.INTERNAL
    reporter: int | None = None


class ConfigError(HpcTrainError, ValueError):
    """A command line, a configuration or a size that cannot be run."""

    exit_code = ExitCode.USAGE


class LaunchError(HpcTrainError, RuntimeError):
    """Slurm, MPI, PMI, the plan or the network disagree about who takes part."""

    exit_code = ExitCode.LAUNCH


class DataError(HpcTrainError, ValueError):
    """A dataset is missing, damaged, too short or does not fit the model."""

    exit_code = ExitCode.DATA


class CheckpointError(HpcTrainError, RuntimeError):
    """A checkpoint cannot be written, or none of those present can be read."""

    exit_code = ExitCode.CHECKPOINT


class HangError(CheckpointError):
    """A checkpoint store neither answers nor fails, and is not waited for any more."""


class CollectiveError(HpcTrainError, RuntimeError):
    """A collective did not complete: ranks are missing, late or disagree."""

    exit_code = ExitCode.INTERNAL
