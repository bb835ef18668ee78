"""Through libhdfs, in a process of its own: started by test_hdfs.py, which says where the HDFS is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from hpc_train.checkpoint.stores.cause import StoreError
from hpc_train.checkpoint.stores.location import Location, locate
from hpc_train.checkpoint.stores.store import Patience
from hpc_train.errors import ConfigError
from tests.checkpoint import plain_state
from tests.checkpoint.plain_state import Alone
from tests.checkpoint.stores.store_contract import StoreContract

ELEMENTS = 2 << 20


@pytest.fixture(scope="module", autouse=True)
def terms() -> Iterator[list[int]]:
    """TERMs that have come, listened for since before there was Java in this process."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Iterator[Location]:
    place = locate(f"{os.environ['HPC_TRAIN_TEST_LIBHDFS']}/{request.node.name.replace('[', '-').replace(']', '-')}")
    place.make_folder()
    yield place
    place.remove()


class TestLibHdfs(StoreContract):
    def test_a_child_process_opens_a_connection_of_its_own(self, folder: Location) -> None:
        """FC-72: it cannot here, and says so instead of hanging."""
        (folder / "file").write_text("seen by one")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(20)
                with pytest.raises(ConfigError, match="Java does not live on in a fork"):
                    (folder / "file").read_text()
                with pytest.raises(ConfigError, match="Java does not live on in a fork"):
                    locate(str(folder)).entries()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert (folder / "file").read_text() == "seen by one"


def test_a_checkpoint_is_saved_and_loaded(folder: Location) -> None:
    for step in (1, 2, 3):
        plain_state.save(Alone(), folder, step, ELEMENTS, keep=2)
    assert plain_state.load(Alone(), folder, ELEMENTS) == 3
    assert [entry.name for entry in folder.entries()] == ["latest", "step_0000002", "step_0000003"]


def test_what_java_alone_can_say_is_looked_for_in_its_words(capfd: pytest.CaptureFixture[str]) -> None:
    """A folder whose quota is spent: this libhdfs tells no more than a number."""
    place = locate(f"{os.environ['HPC_TRAIN_TEST_LIBHDFS']}/without-room", Patience(total_s=1))
    with pytest.raises(StoreError, match="has said why on standard error alone"):
        (place / "file").write_text("more than nothing")
    assert "QuotaExceededException" in capfd.readouterr().err


def test_signals_stay_those_of_this_process(folder: Location, terms: list[int]) -> None:
    """Java takes TERM for itself where it is let, and a run that is to save would end."""
    (folder / "file").write_text("through Java")
    os.kill(os.getpid(), signal.SIGTERM)
    assert terms == [signal.SIGTERM]
