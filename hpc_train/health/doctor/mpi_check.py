"""MPI: which library mpi4py loads, which of srun's plugins it speaks to, and a trial that proves it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_train.cluster.long_lines import joined_pieces
from hpc_train.cluster.mpi_match import require_match
from hpc_train.cluster.mpi_site import MpiLibrary, choose_mpi, find_mpi_library
from hpc_train.errors import LaunchError
from hpc_train.health.doctor.answers import Answer, ask, complaint, last_line
from hpc_train.health.doctor.findings import Finding

TRIAL_MODULE = "hpc_train.comm.mpi_trial"
_MARK = "hpc_train_mpi_trial"
# Open MPI prints which transport connects whom when it is told so; MPICH prints its provider.
TRIAL_VARIABLES = {"OMPI_MCA_hook_comm_method_display": "mpi_init", "MPIR_CVAR_DEBUG_SUMMARY": "1"}
_NO_PMI = ("none", "openmpi", "cray_shasta")
_TRIAL_S = 60.0


@dataclass(frozen=True)
class Trial:
    """One start of two tasks. tasks: what each printed; plugin is None under mpirun."""

    plugin: str | None
    asked: int
    answer: Answer
    tasks: tuple[Mapping[str, Any], ...]

    @property
    def connects(self) -> bool:
        return (
            self.answer.is_good
            and sorted(task.get("rank", -1) for task in self.tasks) == list(range(self.asked))
            and all(task.get("size") == self.asked for task in self.tasks)
        )


def library_findings(env: Mapping[str, str]) -> tuple[MpiLibrary | None, list[Finding]]:
    """Find the library, and load it by mpi4py in a process of its own (FC-92)."""
    try:
        library = find_mpi_library(env)
    except LaunchError as error:
        return None, [
            Finding("mpi.library", "error", str(error), "load the site's MPI module again, or unset MPI4PY_LIBMPI")
        ]
    answer = ask([sys.executable, "-m", TRIAL_MODULE, "--no-init"], env=env, timeout_s=30.0)
    return library, [loading_finding(library, answer)]


def loading_finding(library: MpiLibrary, answer: Answer) -> Finding:
    """What came of loading the library without starting it."""
    tasks = parse_tasks(answer.out)
    found_at = f"{library.path} ({library.reason.partition(', from ')[2] or library.reason})"
    if tasks and "error" not in tasks[0]:
        loaded = [path for path in tasks[0]["libraries"] if "/libmpi" in path]
        told = f"mpi4py {tasks[0]['mpi4py']} loads {_version(tasks[0]['library'])}"
        where = f" from {loaded[0]}" if loaded else ""
        return Finding("mpi.library", "ok", told + where)
    if tasks:
        why = " ".join(str(tasks[0]["error"]).split())
    else:
        why = last_line(answer.err) or f"exit code {answer.code}"
    return Finding(
        "mpi.library",
        "error",
        f"mpi4py cannot load an MPI library: {why}. The library found is {found_at if library.path else 'none'}",
        "load the site's MPI module and set MPI4PY_LIBMPI to its libmpi.so (of the brand and version mpi4py was built "
        "for), or `pip install 'hpc_train[local]'`",
    )


def choice_finding(plugins: Sequence[str], library: MpiLibrary, forced: str | None) -> tuple[str | None, Finding]:
    """The plugin that `run` would take, and why; or that it would refuse."""
    try:
        plugin, why = choose_mpi(plugins, library.kind, None, forced)
    except LaunchError as error:
        offered = ", ".join(plugins) or "nothing"
        cure = f"choose one of those that are offered ({offered}) by launch.mpi=NAME; a trial tells which connects"
        return None, Finding("mpi.plugin", "error", str(error), cure)
    try:
        require_match(library, plugin)
    except LaunchError as error:
        cure = "use the plugin that it names, or load the MPI module of another brand; a trial tells which connects"
        return plugin, Finding("mpi.plugin", "error", str(error), cure)
    return plugin, Finding("mpi.plugin", "ok", f"srun --mpi={plugin} would be used: {why}")


def candidates(chosen: str | None, plugins: Sequence[str]) -> list[str]:
    """The plugins to try: the chosen one, then the others that could connect tasks, each kind once."""
    found = [chosen] if chosen is not None else []
    for plugin in sorted(plugins, key=lambda name: not name.startswith("pmix")):
        kind = re.sub(r"_v[0-9]+$", "", plugin)
        if plugin not in _NO_PMI and kind not in [re.sub(r"_v[0-9]+$", "", name) for name in found]:
            found.append(plugin)
    return found


def run_trial(
    argv: Sequence[str], env: Mapping[str, str], *, python: Sequence[str], plugin: str | None, asked: int
) -> Trial:
    """Start the trial's tasks by argv, which ends with the launcher's own options. python: words before `-m`."""
    filled = {**env, **{name: value for name, value in TRIAL_VARIABLES.items() if name not in env}}
    answer = ask([*argv, *python, "-m", TRIAL_MODULE], env=filled, timeout_s=_TRIAL_S)
    return Trial(plugin, asked, answer, parse_tasks(answer.out))


def try_plugins(names: Sequence[str], start: Callable[[str], Trial]) -> list[Trial]:
    """Try one plugin after another until one connects."""
    trials = []
    for name in names:
        trials.append(start(name))
        if trials[-1].connects:
            break
    return trials


def parse_tasks(text: str) -> tuple[Mapping[str, Any], ...]:
    """What the trial's tasks say, among whatever else a launcher prints."""
    return tuple(json.loads(answer) for answer in joined_pieces(_MARK, text))


def trial_findings(trials: Sequence[Trial], chosen: str | None, forced: str | None = None) -> list[Finding]:
    """What the trials showed; the first is the one with the chosen plugin, where there is one."""
    good = next((trial for trial in trials if trial.connects), None)
    failed = [trial for trial in trials if not trial.connects]
    if good is None:
        words = "; ".join(f"{_launcher(trial)}: {_failure(trial)}" for trial in failed)
        return [
            Finding(
                "mpi.trial",
                "error",
                f"no two tasks could be connected: {words}",
                "load the site's own MPI module and set MPI4PY_LIBMPI to its libmpi.so; `srun --mpi=list` and the "
                "site's page on MPI say which belongs to which",
            )
        ]
    told = f"{_library(good)} and {_launcher(good)} connect {good.asked} tasks on {_hosts(good)}{_transport(good)}"
    cure = f"use `hpc-train run --mpi {good.plugin}`, or set launch.mpi={good.plugin}"
    if good.plugin == chosen:
        return [Finding("mpi.trial", "ok", told)]
    if chosen is None:
        # That nothing fits, or that what was asked for is not offered, is a finding of its own.
        return [Finding("mpi.trial", "ok", told, cure)]
    by = "asked for" if forced else "chosen for this library"
    first = f"{_launcher(failed[0])}, {by}, does not connect the tasks: {_failure(failed[0]).rstrip('.')}. "
    return [Finding("mpi.trial", "error", f"{first}{told}", cure)]


def _launcher(trial: Trial) -> str:
    return "mpirun" if trial.plugin is None else f"--mpi={trial.plugin}"


def _failure(trial: Trial) -> str:
    if trial.answer.code is None:
        return trial.answer.err
    if errors := [" ".join(str(task["error"]).split()) for task in trial.tasks if "error" in task]:
        return errors[0]
    sizes = sorted({task["size"] for task in trial.tasks if "size" in task})
    if sizes == [1]:
        return f"each of the {len(trial.tasks)} tasks is a world of its own (the library does not speak this PMI)"
    return f"exit code {trial.answer.code}, {complaint(trial.answer)}"


def _library(trial: Trial) -> str:
    return ", ".join(sorted({_version(task["library"]) for task in trial.tasks}))


def _version(line: str) -> str:
    """`Open MPI v5.0.11` or `MPICH 5.0.2` of the first line of a library's description."""
    return " ".join(line.partition(", package")[0].replace("Version:", "").split())


def _hosts(trial: Trial) -> str:
    hosts = sorted({str(task["host"]) for task in trial.tasks})
    return " and ".join(hosts)


def _transport(trial: Trial) -> str:
    """Open MPI's own table where it printed one, MPICH's provider, else the libraries that were loaded."""
    is_remote = len({task["host"] for task in trial.tasks}) > 1
    where = "off-host" if is_remote else "on-host"
    if match := re.search(rf"^\s*{where}:\s+all connections are (\S+)", trial.answer.text, re.MULTILINE):
        return f" over {match[1]}"
    if match := re.search(r"^=+ (\w+) netmod Capability", trial.answer.text, re.MULTILINE):
        return f" over {match[1].lower()}"
    if match := re.search(r"^\s*provider: (\S+)", trial.answer.text, re.MULTILINE):
        return f" over {match[1].split(',')[0]}"
    loaded = sorted({name for task in trial.tasks for name in task.get("loaded", ())})
    return f" (loaded: {', '.join(loaded)})" if loaded else ""
