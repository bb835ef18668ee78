"""The sbatch script of a run, as a pure function of values."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_train.errors import ConfigError, ExitCode
from hpc_train.launch.run_folder import REQUEST_FILE, SUBMIT_FILE
from hpc_train.launch.slurm_flags import verbatim_value
from hpc_train.launch.templates import fill_template, read_template
from hpc_train.plan.run_files import CONFIG_REQUEST_FILE


@dataclass(frozen=True)
class BatchValues:
    """All that a script depends on.

    name: of the run and, unless flags say otherwise, of the job. flags: long sbatch names without dashes to
    values. runs_dir, run_dir, python: absolute paths; run_dir None means a folder by the job's number.
    config_yaml, request_json: the files it carries. mpi: what --mpi of `run` is given, or None. verbatim:
    what sbatch is given besides, for the record. stop_signal, requeue, max_requeues: launch's settings; a job of a
    chain has "chain" for requeue.
    """

    name: str
    flags: Mapping[str, str]
    runs_dir: str
    run_dir: str | None
    config_yaml: str
    request_json: str
    python: str
    version: str
    modules: tuple[str, ...] = ()
    mpi: str | None = None
    verbatim: tuple[str, ...] = ()
    stop_signal: str = "USR2"
    requeue: str = "interrupted"
    max_requeues: int = 100


def batch_script(values: BatchValues) -> str:
    """The whole text of the script.

    Raises:
        ConfigError: a value has a line break where a script cannot hold one.
    """
    run_dir = (
        shlex.quote(values.run_dir) if values.run_dir else f'{shlex.quote(f"{values.runs_dir}/{values.name}")}/"$job"'
    )
    note = f"# sbatch was also given: {shlex.join(values.verbatim)}\n" if values.verbatim else ""
    options = f" --mpi {shlex.quote(values.mpi)}" if values.mpi else ""
    filled = {
        "DIRECTIVES": "\n".join(directives(values)),
        "VERSION": values.version,
        "NOTE": _one_line(note.rstrip("\n"), "an sbatch argument") + "\n" if note else "",
        "EXIT_LAUNCH": str(int(ExitCode.LAUNCH)),
        "RUN_DIR": _one_line(run_dir, "the run folder"),
        "CONFIG_FILE": CONFIG_REQUEST_FILE,
        "REQUEST_FILE": REQUEST_FILE,
        "SUBMIT_FILE": SUBMIT_FILE,
        "STOP_SIGNAL": values.stop_signal,
        "REQUEUE": values.requeue,
        "MAX_REQUEUES": str(values.max_requeues),
        "REQUEUE_FUNCTIONS": _requeue_functions(),
        "DELIMITER": _delimiter(values.config_yaml + "\n" + values.request_json),
        "CONFIG": values.config_yaml.rstrip("\n"),
        "REQUEST": values.request_json.rstrip("\n"),
        "MODULES": _modules(values.modules),
        "PYTHON": shlex.quote(values.python),
        "RUN_OPTIONS": options,
    }
    return fill_template(read_template("submit.sh.in"), filled)


def is_array(values: BatchValues) -> bool:
    """Whether sbatch is asked for an array, by a flag or verbatim."""
    return "array" in values.flags or verbatim_value(values.verbatim, "array", "-a") is not None


def output_pattern(values: BatchValues) -> str:
    """Where Slurm puts what is printed before the run folder exists."""
    # Slurm replaces %x patterns in this path; %% is a percent sign.
    folder = f"{values.runs_dir}/{values.name}".replace("%", "%%")
    return f"{folder}/slurm-{'%A_%a' if 'array' in values.flags else '%j'}.out"


def directives(values: BatchValues) -> list[str]:
    """The #SBATCH lines."""
    given = {
        "job-name": values.name,
        "output": output_pattern(values),
        "open-mode": "append",
        **values.flags,
    }
    if values.requeue in ("interrupted", "failed") and not {"requeue", "no-requeue"} & set(values.flags):
        given["requeue"] = ""
    return [_directive(long, value) for long, value in given.items()]


def _requeue_functions() -> str:
    """requeue.sh without the words on how to use it elsewhere."""
    return read_template("requeue.sh").partition("\n\n")[2].rstrip("\n")


def _directive(long: str, value: str) -> str:
    value = _one_line(value, f"--{long}")
    # Slurm takes quotes in #SBATCH lines apart much as a shell does.
    return f"#SBATCH --{long}={shlex.quote(value)}" if value else f"#SBATCH --{long}"


def _one_line(text: str, what: str) -> str:
    if "\n" in text or "\r" in text or "\0" in text:
        raise ConfigError(f"{what} has a line break in it, which a batch script cannot hold: {text!r}")
    return text


def _delimiter(text: str) -> str:
    """An end mark for here-documents that is no line of the text."""
    lines = set(text.split("\n"))
    delimiter, number = "END_OF_FILE", 1
    while delimiter in lines:
        number += 1
        delimiter = f"END_OF_FILE_{number}"
    return delimiter


def _modules(modules: tuple[str, ...]) -> str:
    if not modules:
        return ""
    loads = [_load(_one_line(name, "launch.modules")) for name in modules]
    lines = [
        "",
        "# A batch shell is no login shell, so `module` may have to be defined first.",
        "for file in /etc/profile.d/lmod.sh /etc/profile.d/modules.sh /usr/share/modules/init/bash; do",
        '    type module >/dev/null 2>&1 || { [ -r "$file" ] && . "$file"; }',
        "done",
        *loads,
        "",
    ]
    return "\n".join(lines)


def _load(name: str) -> str:
    return f"module load {shlex.quote(name)} || stop {shlex.quote(f'the module {name} cannot be loaded')}"
