"""`hpc-train doctor`: look at the site, at each node and at MPI between them; say what was found.

1. situation: inside a job, on a login node, on a machine by itself; or a job of its own, by salloc
2. site: Slurm's answers, the MPI library, the modules of this shell
3. nodes: one task on each node of the job, or this host alone
4. what only all nodes together tell: networks, Python, rails, the run folder
5. trial: two tasks of MPI, with one plugin after another until one connects them
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.cluster.environment import fill_unset, process_env
from hpc_train.cluster.hostlist import compress_hostlist
from hpc_train.cluster.mpi_site import MpiLibrary
from hpc_train.cluster.process import own_process
from hpc_train.cluster.situation import Found, Situation, find_situation
from hpc_train.cluster.slurm import JobFacts, read_job
from hpc_train.errors import ConfigError, ExitCode, LaunchError
from hpc_train.health.doctor import infiniband, modules, mpi_check, network, python_env, slurm_site, storage
from hpc_train.health.doctor.admin_dump import admin_dump, describe
from hpc_train.health.doctor.answers import ask, complaint
from hpc_train.health.doctor.findings import Finding, format_report, merge, would_stop_a_run
from hpc_train.health.doctor.node import look_at_node, parse_node_lines
from hpc_train.launch.salloc import run_salloc
from hpc_train.launch.site import find_mpirun, mpi_variables, mpirun_needs
from hpc_train.launch.slurm_flags import given_flags
from hpc_train.launch.steps import agents_env

_NODES_S = 120.0
"""For the step that looks at all nodes, beside what is asked for by --watch-errors (assumed)."""


@dataclass(frozen=True)
class Request:
    """What the user asked for, with the settings of the configuration where there is one.

    python: how Python is started on nodes, launch.wrap and launch.rank_python where these are set.
    """

    env: Mapping[str, str]
    runs_dir: str
    mpi: str | None
    interface: str | None
    template: str | None
    hdfs: str | None
    verbose: bool
    trial: bool | None
    watch_s: float
    python: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where we are: a job whose nodes are looked at, or this host. problems: what is wrong with that already."""

    job: JobFacts | None
    overlap: bool
    in_step: bool
    reason: str
    problems: tuple[Finding, ...] = ()


def doctor_command(options: Namespace) -> int:
    """Carry out `doctor`: 3 when a finding would stop a run, else 0.

    Raises:
        HpcTrainError: the fabric cannot be written down.
    """
    if options.admin_dump is not None:
        fabric = admin_dump(options.admin_dump, process_env(), options.cards)
        print("\n".join(describe(fabric, options.admin_dump)))
        return int(ExitCode.DONE)
    if options.cards is not None:
        raise ConfigError("--cards has no effect without --admin-dump; leave it out")
    request = make_request(options, process_env())
    place = find_place(request.env)
    flags = given_flags(options)
    if flags or options.verbatim or (options.trial and place.job is None and slurm_is_here(request.env)):
        return _in_own_job(options, flags, place, request.env)
    findings, nodes = examine(request, place)
    code = int(ExitCode.LAUNCH if would_stop_a_run(findings) else ExitCode.DONE)
    if options.json:
        table = {
            "host": socket.gethostname(),
            "situation": place.reason,
            "nodes": nodes,
            "findings": [finding.as_json() for finding in findings],
            "exit_code": code,
        }
        print(json.dumps(table, indent=1))
    else:
        where = compress_hostlist(place.job.nodes) if place.job is not None else socket.gethostname()
        print(f"hpc-train doctor on {where}: {place.reason}")
        print(format_report(findings, len(nodes)))
    return code


def make_request(options: Namespace, env: Mapping[str, str]) -> Request:
    """Settings of the command line, then of the configuration, then defaults."""
    launch = None
    if options.config:
        from hpc_train.config_read import load_config

        launch = load_config(options.config, options.overrides).launch
        env = fill_unset(env, launch.env)[0]
    trial = True if options.trial else False if options.no_trial else None
    return Request(
        env=env,
        runs_dir=str(Path(options.runs_dir or (launch.runs_dir if launch else "runs")).absolute()),
        mpi=options.mpi or (launch.mpi if launch else None),
        interface=launch.interface if launch else None,
        template=launch.address_template if launch else None,
        hdfs=options.hdfs,
        verbose=options.verbose,
        trial=trial,
        watch_s=options.watch_errors,
        python=(*launch.wrap, launch.rank_python or sys.executable) if launch else (sys.executable,),
    )


def find_place(env: Mapping[str, str]) -> Place:
    """The situation; where it is contradictory, that is a finding and this host is looked at alone."""
    process = own_process()
    try:
        found = find_situation(env, process)
        job = None if found.situation is Situation.LAPTOP else read_job(env, process)
    except LaunchError as error:
        cure = "follow that sentence; if the job has ended, `unset ${!SLURM_*}` or open a new shell"
        problem = Finding("slurm.situation", "error", str(error), cure)
        return Place(None, False, True, "the environment contradicts itself", (problem,))
    return _place(found, job)


def slurm_is_here(env: Mapping[str, str]) -> bool:
    return shutil.which("srun", path=env.get("PATH")) is not None


def examine(request: Request, place: Place) -> tuple[list[Finding], list[str]]:
    """All findings, those of several nodes merged; and the names of the nodes."""
    env = request.env
    facts = slurm_site.gather_slurm(env)
    found = [*place.problems, *slurm_site.slurm_findings(facts, env, in_job=place.job is not None)]
    library, loading = mpi_check.library_findings(env)
    found += loading
    is_stopped = any(item.level == "error" and item.area == "slurm" for item in found)
    job = None if is_stopped else place.job
    answers, problems = _look_at_nodes(request, job, place.overlap)
    found += problems
    found += [Finding.from_json(item) for answer in answers for item in answer["findings"]]
    found += together(answers, request)
    cuda = answers[0]["python"]["torch_cuda"] if answers else None
    found += modules.module_findings(env, library, cuda)
    has_gpus = any(answer["gpus"] for answer in answers)
    if library is not None:
        found += _mpi_findings(
            request, place, job, facts, library, on_cpu=not has_gpus, library_fails=loading[0].level == "error"
        )
    return merge(found), [answer["host"] for answer in answers]


def together(answers: Sequence[Mapping[str, Any]], request: Request) -> list[Finding]:
    """What only the answers of all nodes together tell."""
    if not answers:
        return []
    env = {**request.env, **({"launch.interface": request.interface} if request.interface else {})}
    tables = {answer["host"]: network.from_json(answer["interfaces"]) for answer in answers}
    addresses = {answer["host"]: answer["address"] for answer in answers}
    return [
        *network.common_findings(tables, addresses, env, template=request.template),
        *python_env.common_python_findings({answer["host"]: answer["python"] for answer in answers}),
        *infiniband.differing_ports({answer["host"]: answer["active_ports"] for answer in answers}),
        *storage.shared_findings({answer["host"]: answer["sees_token"] for answer in answers}, request.runs_dir),
    ]


def _place(found: Found, job: JobFacts | None) -> Place:
    if found.situation in (Situation.STEP_TASK, Situation.MPI_TASK, Situation.ELASTIC):
        told = f"{found.reason}, so only this host is looked at, and MPI is not tried"
        cure = "for all nodes of the job type `hpc-train doctor` without srun or mpirun before it"
        return Place(None, False, True, found.reason, (Finding("slurm.step", "note", told, cure),))
    return Place(job, found.overlap, False, found.reason)


def _in_own_job(options: Namespace, flags: Mapping[str, str], place: Place, env: Mapping[str, str]) -> int:
    """Have salloc run this command again inside a job.

    Raises:
        ConfigError: we are in a job already.
        LaunchError: there is no salloc, or it grants nothing.
    """
    given = [f"--{long}={value}" if value else f"--{long}" for long, value in flags.items()]
    given += options.verbatim or []
    if place.job is not None or place.in_step:
        raise ConfigError(f"{' '.join(given)} has no effect inside a job: all its nodes are looked at. Leave it out")
    salloc = shutil.which("salloc", path=env.get("PATH"))
    if salloc is None:
        raise LaunchError(
            f"{' '.join(given) or '--trial'} asks for a job, but salloc is not on PATH. Leave it out to "
            "look at this host"
        )
    # assumed: enough for a look at the nodes and trials of all plugins.
    defaults = {"nodes": "2", "time": "10", "job-name": "hpc-train-doctor"}
    asked = [f"--{name}={value}" for name, value in defaults.items() if name not in flags]
    command = [sys.executable, "-m", "hpc_train", "doctor", *_same_options(options)]
    return run_salloc(salloc, [*asked, *given], command, env)


def _same_options(options: Namespace) -> list[str]:
    words = [*([options.config] if options.config else []), *options.overrides]
    for name in ("json", "verbose", "no_trial"):
        if getattr(options, name):
            words.append(f"--{name.replace('_', '-')}")
    for name in ("mpi", "runs_dir", "hdfs", "watch_errors"):
        if value := getattr(options, name):
            words.append(f"--{name.replace('_', '-')}={value}")
    return words


def _look_at_nodes(request: Request, job: JobFacts | None, overlap: bool) -> tuple[list[dict[str, Any]], list[Finding]]:
    """The answers in the order of the job's nodes; or this host's, where there is no job."""
    asked: dict[str, Any] = {
        "runs_dir": request.runs_dir,
        "token": None,
        "num_nodes": job.num_nodes if job is not None else 1,
        "interface": request.interface,
        "template": request.template,
        "hdfs": request.hdfs,
        "verbose": request.verbose,
        "watch_s": request.watch_s,
    }
    if job is None:
        return [look_at_node(asked, request.env)], []
    with _token(request.runs_dir) as token:
        command = [*request.python, "-m", "hpc_train.health.doctor.node", json.dumps({**asked, "token": token})]
        argv = ["srun", f"--nodes={job.num_nodes}", f"--ntasks={job.num_nodes}", "--ntasks-per-node=1"]
        argv += [f"--nodelist={compress_hostlist(job.nodes)}", "--mpi=none", "--kill-on-bad-exit=0", *_SHARING]
        answer = ask([*argv, *command], env=agents_env(request.env), timeout_s=_NODES_S + request.watch_s)
    by_host = {item["host"]: item for item in parse_node_lines(answer.out)}
    silent = tuple(node for node in job.nodes if node not in by_host)
    problems = []
    if silent:
        why = complaint(answer)
        cure = (
            "see whether this environment's Python is there on the node: `srun -w NODE "
            + " ".join(request.python)
            + " -V`"
        )
        problems.append(Finding("slurm.nodes", "error", f"gave no answer: {why}", cure, silent))
    return [by_host[node] for node in job.nodes if node in by_host], problems


# Steps of ours hold nothing, so that they also start beside a run.
_SHARING = ("--overlap", "--overcommit", "--cpus-per-task=1", "--mem=0", "--export=ALL", "--quiet")


@contextmanager
def _token(runs_dir: str) -> Iterator[str | None]:
    """A file in the run folder for all nodes to find; None where none can be made, which the trial write tells."""
    token = storage.existing_parent(Path(runs_dir)) / f".hpc_train-doctor-{os.getpid()}-{time.time_ns()}"
    try:
        token.touch()
    except OSError:
        yield None
        return
    try:
        yield str(token)
    finally:
        token.unlink(missing_ok=True)


def _mpi_findings(
    request: Request,
    place: Place,
    job: JobFacts | None,
    facts: slurm_site.SlurmFacts,
    library: MpiLibrary,
    *,
    on_cpu: bool,
    library_fails: bool,
) -> list[Finding]:
    """The choice of a plugin, and the trial where one is wanted and possible."""
    env, found = request.env, []
    chosen = None
    if facts.is_here and facts.plugins:
        chosen, finding = mpi_check.choice_finding(facts.plugins, library, request.mpi)
        found.append(finding)
    if request.trial is False or place.in_step:
        return found
    if place.job is None and library_fails:
        return found
    filled = fill_unset(env, mpi_variables(env, library, on_cpu=on_cpu))[0]
    if job is not None:
        names = mpi_check.candidates(chosen, facts.plugins)
        trials = mpi_check.try_plugins(names, lambda name: _srun_trial(name, job, filled, request.python))
        # A forced plugin that is not offered is an error already; the trial says what works instead.
        return [*found, *mpi_check.trial_findings(trials, chosen, request.mpi)]
    if facts.is_here:
        told = "whether library and plugin really speak to each other was not tried"
        return [*found, Finding("mpi.trial", "note", told, "`hpc-train doctor --trial` tries it in a small job")]
    try:
        mpirun = find_mpirun(env, library)
        more, options = mpirun_needs(mpirun, 2, len(os.sched_getaffinity(0)))
    except LaunchError as error:
        return [*found, Finding("mpi.trial", "error", str(error), "`pip install 'hpc_train[local]'`, or load a module")]
    _say("trying MPI with two tasks by mpirun")
    trial = mpi_check.run_trial(
        [mpirun, "-n", "2", *options], {**more, **filled}, python=request.python, plugin=None, asked=2
    )
    return [*found, *mpi_check.trial_findings([trial], None)]


def _srun_trial(plugin: str, job: JobFacts, env: Mapping[str, str], python: Sequence[str]) -> mpi_check.Trial:
    nodes = job.nodes[:2]
    _say(f"trying MPI with two tasks on {compress_hostlist(nodes)} by srun --mpi={plugin}")
    argv = ["srun", f"--nodes={len(nodes)}", "--ntasks=2", f"--ntasks-per-node={2 // len(nodes)}"]
    argv += [f"--nodelist={compress_hostlist(nodes)}", f"--mpi={plugin}", "--kill-on-bad-exit=1", *_SHARING]
    return mpi_check.run_trial(argv, agents_env(env), python=python, plugin=plugin, asked=2)


def _say(text: str) -> None:
    print(f"hpc-train: {text} ...", file=sys.stderr, flush=True)
