"""`hpc-train submit --via submitit`: the same batch script, as the child of submitit's process in the job.

Slurm starts submitit, which calls a BatchScript, which runs the script. The script decides as ever whether the job
goes back into the queue, but leaves it to submitit to put it there.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from submitit import SlurmExecutor
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import CommandFunction
from submitit.helpers import DelayedSubmission

from hpc_train.cluster.environment import process_env, scrubbed_for_submission
from hpc_train.errors import ConfigError, LaunchError
from hpc_train.launch.batch_script import BatchValues, batch_script, directives, is_array
from hpc_train.launch.queue import job_id_in
from hpc_train.launch.run_folder import SUBMIT_FILE
from hpc_train.launch.slurm_flags import array_indexes

FOLDER_PREFIX = "submitit-"
_NAME_TO_COME = "RANDOM"
"""In a dry run, where a submission's folder has a name that nobody can guess."""
_REQUEUE_FILE_VARIABLE = "HPC_TRAIN_REQUEUE_FILE"
_YEAR_MIN = 365 * 24 * 60


def submit(values: BatchValues, env: Mapping[str, str]) -> str:
    """Submit the script through submitit and return the job's id.

    Raises:
        ConfigError: the array is given where only sbatch sees it.
        LaunchError: sbatch is missing or refuses.
    """
    tasks = _tasks(values)
    parent = _parent_folder(values)
    if shutil.which("sbatch", path=env.get("PATH")) is None:
        raise LaunchError(
            "sbatch is not on PATH: this machine is no login node of a Slurm cluster, or its module is not loaded"
        )
    # Only its owner may write here: what is in the folder's pickles is executed in the job.
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
    script = folder / SUBMIT_FILE
    script.write_text(batch_script(values), encoding="utf-8")
    try:
        job = _Executor(folder, values, env).submit(BatchScript(str(script), values.stop_signal))
    except RuntimeError as problem:
        raise LaunchError(f"submitit could not submit the job: {str(problem).strip()}") from problem
    pickle = job.paths.submitted_pickle
    for task in tasks:
        # Each task looks for a pickle of its own, and replaces it when it is requeued.
        (folder / pickle.name.replace(job.job_id, f"{job.job_id}_{task}", 1)).symlink_to(pickle.name)
    return str(job.job_id)


def dry_run_text(values: BatchValues) -> str:
    """What submitit would give to sbatch; the folder has no name yet."""
    _tasks(values)
    folder = f"{_parent_folder(values)}/{FOLDER_PREFIX}{_NAME_TO_COME}"
    return submission_text(values, f"{_python()} -u -m submitit.core._submit {shlex.quote(folder)}")


def submission_text(values: BatchValues, command: str) -> str:
    """The script that starts submitit in the job."""
    return "\n".join(
        [
            "#!/bin/bash",
            *directives(values),
            f"# Written by hpc-train {values.version}. submitit runs {SUBMIT_FILE} of the folder below.",
            "export SUBMITIT_EXECUTOR=slurm SUBMITIT_LOG_LEVEL=${SUBMITIT_LOG_LEVEL:-WARNING}",
            "# Python takes a while to set its handlers; until then these would end it.",
            f"trap '' {' '.join(dict.fromkeys(['USR1', 'USR2', values.stop_signal]))}",
            command,
            "",
        ]
    )


class BatchScript(CommandFunction):
    """What submitit calls in the job. It ends with the script's exit code, or by submitit's requeue.

    Unlike its base it leaves the output alone: the script writes its own log.
    """

    def __init__(self, script: str, stop_signal: str) -> None:
        super().__init__(["bash", script], verbose=False)
        self._stop_signal = signal.Signals[f"SIG{stop_signal}"]
        self._pid: int | None = None

    def __call__(self, *args: object, **kwargs: object) -> str:
        self._requeue_file.unlink(missing_ok=True)
        env = {**process_env(), _REQUEUE_FILE_VARIABLE: str(self._requeue_file)}
        submitits = signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]
        passed_on = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, self._stop_signal}
        for number in passed_on - {submitits}:
            signal.signal(number, self._pass_on)
        child = subprocess.Popen(self.command, env=env)
        self._pid = child.pid
        try:
            code = self._wait()
            if self._requeue_file.exists():
                # submitit's handler: it calls checkpoint, requeues and exits.
                signal.raise_signal(submitits)
        except (OSError, subprocess.SubprocessError) as problem:
            code = self._wait()
            self._say(f"but submitit could not put the job back into the queue: {problem}")
        if code:
            sys.exit(code)
        return ""

    def checkpoint(self) -> DelayedSubmission:
        """Called by submitit's signal handler: have the script save and end, then be called again after a requeue."""
        if self._pid is not None:
            os.kill(self._pid, self._stop_signal)
            code = self._wait()
            if not self._requeue_file.exists():
                # The script said why.
                sys.exit(code)
        return DelayedSubmission(self)

    def __getstate__(self) -> dict[str, Any]:
        # The next start has another child.
        return {**self.__dict__, "_pid": None}

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._pid is not None:
            os.kill(self._pid, number)

    def _wait(self) -> int:
        """The script's exit code as a shell gives it. The child stays to be reaped, so a handler may call this too."""
        assert self._pid is not None
        end = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        return end.si_status if end.si_code == os.CLD_EXITED else 128 + end.si_status

    @property
    def _requeue_file(self) -> Path:
        return Path(self.command[1]).with_name(f"{JobEnvironment().job_id}.requeue")

    def _say(self, text: str) -> None:
        """Into the job's log, which the script named in the file."""
        run_dir = Path(self._requeue_file.read_text(encoding="utf-8").strip())
        line = (
            f"hpc-train: {text}. To go on: hpc-train submit ... --run-dir {shlex.quote(str(run_dir))}, or --chain K "
            "from the start\n"
        )
        print(line, end="", flush=True)
        with (run_dir / "logs" / "job.log").open("a", encoding="utf-8") as log:
            log.write(line)


class _Executor(SlurmExecutor):
    """submitit's executor with our #SBATCH lines: its own would add a time limit, a node count and a signal."""

    def __init__(self, folder: Path, values: BatchValues, env: Mapping[str, str]) -> None:
        super().__init__(folder, max_num_timeout=values.max_requeues + 1, python=_python())
        # The script bounds the requeues. submitit counts those that it takes for time limits; in a year there is none.
        self.update_parameters(time=_YEAR_MIN)
        self._values = values
        self._env = env

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return submission_text(self._values, command)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        removed = sorted(set(self._env) - set(scrubbed_for_submission(self._env)))
        without = [word for name in removed for word in ("-u", name)]
        return ["env", *without, "sbatch", "--parsable", *self._values.verbatim, str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: str | bytes) -> str:
        return job_id_in(string.decode() if isinstance(string, bytes) else string)


def _python() -> str:
    # With exec the batch shell becomes submitit, which then gets the signals that Slurm sends to the shell.
    return f"exec {shlex.quote(sys.executable)}"


def _parent_folder(values: BatchValues) -> Path:
    folder = Path(values.runs_dir, values.name)
    for pattern in ("%j", "%t", "%A", "%a"):
        if pattern in str(folder):
            raise ConfigError(
                f"submitit takes {pattern} in {folder} for a job's number; choose another launch.runs_dir, or "
                "--via sbatch"
            )
    return folder


def _tasks(values: BatchValues) -> list[int]:
    """The indexes of an array; none for a plain job."""
    if not is_array(values):
        return []
    if "array" not in values.flags:
        raise ConfigError("with --via submitit give --array before `--`: each of its tasks needs a file")
    return array_indexes(values.flags["array"])
