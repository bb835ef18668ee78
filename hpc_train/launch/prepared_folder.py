"""A run folder that is written beside its place before sbatch is asked, so that a submitted job has one.

Afterwards it is only renamed, by this command or, quicker, by the job, which makes one of its own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hpc_train.errors import ConfigError
from hpc_train.launch.batch_script import BatchValues, batch_script
from hpc_train.launch.file_errors import reason
from hpc_train.launch.run_folder import REQUEST_FILE, SUBMIT_FILE
from hpc_train.plan.run_files import CONFIG_FILE, CONFIG_REQUEST_FILE, LOGS_FOLDER


def prepare_folder(values: BatchValues) -> Path:
    """Write the whole folder under a name of its own, as the job's script would, and return it.

    Raises:
        ConfigError: it cannot be written there, or something else is in the way; nothing is left behind then.
    """
    place = Path(values.run_dir or f"{values.runs_dir}/{values.name}/job")
    if values.run_dir is not None and os.path.lexists(place):
        if not place.is_dir():
            raise ConfigError(f"the run folder {place} cannot be made: a file of that name is in the way")
        if not os.access(place, os.W_OK | os.X_OK):
            raise ConfigError(f"the run folder {place} is not writable; give another one by --run-dir")
    new = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f"{place.name}.new.", dir=place.parent))
        (new / LOGS_FOLDER).mkdir()
        (new / CONFIG_REQUEST_FILE).write_text(values.config_yaml, encoding="utf-8")
        (new / CONFIG_FILE).write_text(values.config_yaml, encoding="utf-8")
        (new / REQUEST_FILE).write_text(values.request_json, encoding="utf-8")
        (new / SUBMIT_FILE).write_text(batch_script(values), encoding="utf-8")
        new.chmod(0o755)
    except OSError as problem:
        if new is not None:
            shutil.rmtree(new, ignore_errors=True)
        what = f"the run folder {place}" if values.run_dir else f"a run folder in {place.parent}"
        raise ConfigError(
            f"{what} cannot be made: {reason(problem)}. Give another place by --run-dir or launch.runs_dir"
        ) from problem
    return new


def place_folder(prepared: Path, folder: Path) -> bool:
    """Move a prepared folder into its place; false if one is there already, and then it stays where it is.

    Raises:
        OSError: it cannot be moved.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.rename(prepared, folder)
    except OSError:
        # A folder with something in it cannot be replaced: the job was quicker, or it is an earlier run's.
        if not folder.is_dir():
            raise
        return False
    return True
