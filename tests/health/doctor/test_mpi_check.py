from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_train.cluster.long_lines import in_pieces
from hpc_train.cluster.mpi_site import MpiLibrary
from hpc_train.health.doctor.answers import Answer, ask
from hpc_train.health.doctor.mpi_check import (
    Trial,
    candidates,
    choice_finding,
    loading_finding,
    parse_tasks,
    trial_findings,
    try_plugins,
)

LIBRARY = MpiLibrary("openmpi5", Path("/opt/lib/libmpi.so.40"), "/opt/lib/libmpi.so.40, from MPI4PY_LIBMPI=/opt/lib")
PLUGINS = ("pmix", "none", "cray_shasta", "pmi2", "pmix_v4")
VERSION = "Open MPI v5.0.11, package: Open MPI me@here"


def trial(plugin: str | None, *tasks: Mapping[str, Any], code: int | None = 0, out: str = "", err: str = "") -> Trial:
    said = [{"host": f"n{index}", "library": VERSION, **task} for index, task in enumerate(tasks, 1)]
    return Trial(plugin, 2, Answer(code, out, err), tuple(said))


GOOD = ({"rank": 0, "size": 2}, {"rank": 1, "size": 2})
ALONE = ({"rank": 0, "size": 1}, {"rank": 0, "size": 1})
TABLE = "Connection summary: (pml)\n  on-host:  all connections are sm\n  off-host: all connections are tcp\n"


def test_a_trial_that_connects_names_library_plugin_hosts_and_transport() -> None:
    (finding,) = trial_findings([trial("pmix", *GOOD, out=TABLE)], "pmix")
    assert finding.level == "ok"
    assert finding.found == "Open MPI v5.0.11 and --mpi=pmix connect 2 tasks on n1 and n2 over tcp"


def test_mpich_names_its_transport_in_its_own_way() -> None:
    tasks = [{**task, "library": "MPICH Version:      5.0.2"} for task in GOOD]
    for out, transport in (("==== UCX netmod Capability ====\n", "ucx"), ("provider: tcp;ofi_rxm, x\n", "tcp;ofi_rxm")):
        (finding,) = trial_findings([trial("pmi2", *tasks, out=out)], "pmi2")
        assert finding.found == f"MPICH 5.0.2 and --mpi=pmi2 connect 2 tasks on n1 and n2 over {transport}"


def test_a_silent_mismatch_names_what_connects_instead() -> None:
    """FC-09: worlds of one, and every exit code is 0."""
    trials = [trial("pmi2", *ALONE), trial("pmix", *GOOD, out=TABLE)]
    assert not trials[0].connects
    (finding,) = trial_findings(trials, "pmi2", forced="pmi2")
    assert finding.level == "error"
    assert (
        "--mpi=pmi2, asked for, does not connect the tasks: each of the 2 tasks is a world of its own" in finding.found
    )
    assert "--mpi=pmix connect 2 tasks" in finding.found
    assert finding.cure == "use `hpc-train run --mpi pmix`, or set launch.mpi=pmix"


def test_when_nothing_connects_each_way_it_failed_is_told() -> None:
    failed = {"error": "RuntimeError: cannot load MPI library"}
    trials = [
        trial("pmix", failed, failed, code=3),
        trial("pmi2", code=16, err="unsupported PMI version PMIx. Aborting.\nsrun: error: n1: task 0: Exited\n"),
        trial("pmi1", code=None, err="srun gave no answer in 60 s"),
    ]
    (finding,) = trial_findings(trials, "pmix")
    assert finding.level == "error"
    for words in (
        "--mpi=pmix: RuntimeError",
        "--mpi=pmi2: exit code 16, unsupported PMI",
        "--mpi=pmi1: srun gave no answer",
    ):
        assert words in finding.found


def test_a_rank_that_is_missing_is_no_connection() -> None:
    assert not trial("pmix", GOOD[0]).connects
    assert not trial("pmix", GOOD[0], GOOD[0]).connects
    assert not trial("pmix", *GOOD, code=1).connects


def test_mpirun_is_named_where_there_is_no_slurm() -> None:
    (finding,) = trial_findings([trial(None, *GOOD)], None)
    assert finding.level == "ok" and "and mpirun connect 2 tasks" in finding.found


def test_trials_go_on_until_one_connects_and_try_each_kind_once() -> None:
    assert candidates("pmi2", PLUGINS) == ["pmi2", "pmix"]
    assert candidates("pmix_v4", PLUGINS) == ["pmix_v4", "pmi2"]
    assert candidates(None, PLUGINS) == ["pmix", "pmi2"]
    tried = []

    def start(name: str) -> Trial:
        tried.append(name)
        return trial(name, *(GOOD if name == "b" else ALONE))

    assert [item.plugin for item in try_plugins(["a", "b", "c"], start)] == ["a", "b"] == tried


def test_a_plugin_that_is_not_offered_is_an_error_with_what_is() -> None:
    chosen, finding = choice_finding(PLUGINS, LIBRARY, "pmi9")
    assert chosen is None and finding.level == "error" and "pmix, none" in finding.cure
    (trial_finding,) = trial_findings([trial("pmix", *GOOD)], None, forced="pmi9")
    assert trial_finding.level == "ok" and "launch.mpi=pmix" in trial_finding.cure
    assert choice_finding(PLUGINS, LIBRARY, None)[0] == "pmix"
    # Offered, but certain not to connect this library: said without a trial, on a login node too.
    chosen, finding = choice_finding(PLUGINS, LIBRARY, "pmi2")
    assert chosen == "pmi2" and finding.level == "error" and "does not speak PMI2" in finding.found


def test_words_between_the_tasks_lines_are_passed_over() -> None:
    text = in_pieces("hpc_train_mpi_trial", "n1:1", json.dumps({"rank": 0}))
    assert parse_tasks(f"module: loaded\n0: {text}junk @hpc_train_mpi_trial") == ({"rank": 0},)


def test_a_library_that_mpi4py_cannot_load_is_told_with_its_path(tmp_path: Path) -> None:
    """FC-92: a stub in place of mpi4py, and the very program that the doctor starts."""
    stub = tmp_path / "mpi4py"
    stub.mkdir()
    (stub / "__init__.py").write_text("class rc: pass\n__version__ = '4.1'\n")
    (stub / "MPI.py").write_text("raise ImportError('libmpi.so.40: undefined symbol: ompi_mpi_info_env')\n")
    root = Path(__file__).parents[3]
    answer = ask(
        [sys.executable, "-m", "hpc_train.comm.mpi_trial", "--no-init"],
        env={"PYTHONPATH": f"{tmp_path}:{root}", "PATH": "/usr/bin:/bin"},
    )
    assert answer.code == 3
    finding = loading_finding(LIBRARY, answer)
    assert finding.level == "error"
    assert "undefined symbol: ompi_mpi_info_env" in finding.found
    assert "/opt/lib/libmpi.so.40 (MPI4PY_LIBMPI=/opt/lib)" in finding.found
    assert "MPI4PY_LIBMPI" in finding.cure


def test_a_program_that_dies_while_loading_is_told_too() -> None:
    finding = loading_finding(LIBRARY, Answer(-11, "", ""))
    assert finding.level == "error" and "exit code -11" in finding.found
