"""What tests of several files of this folder are given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpc_train.data.node_reader import DataService
from tests.agents import ServedAgent, served


@pytest.fixture
def agent() -> Iterator[ServedAgent]:
    """A node agent that reads data; `log` has what it says of that."""
    log: list[str] = []
    with served([DataService(log.append)]) as running:
        running.log = log
        yield running
