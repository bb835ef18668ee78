"""The whole command with parallel.hdp: documents shared by rings of ranks train as they do on one rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpc_train.data.index_writer import TokenFileWriter
from tests.faults.plan import FaultPlan
from tests.train.forked_runs import train_forked
from tests.train.runs import VOCAB, hpc_train, metrics, write_config

pytestmark = pytest.mark.mpi
LONGEST = 384


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Documents of 3 to 384 tokens, mostly short; a rank that holds 128 shares the longest with two others."""
    writer = TokenFileWriter(tmp_path / "corpus", np.uint16)
    for document in range(120):
        length = LONGEST - document if document % 11 == 0 else 3 + document * 37 % 60
        writer.add_document((np.arange(length) + document * 11) % VOCAB)
    writer.finish()
    write_config(tmp_path)
    return tmp_path


def _run(folder: Path, name: str, num_ranks: int, capacity: int, *overrides: str, faults: FaultPlan | None = None):
    return hpc_train(
        ["run", folder / "config.yaml", "-n", num_ranks, "--run-dir", folder / name, *_words(capacity, *overrides)],
        env=faults.environment() if faults else None,
        timeout_s=240.0,
    )


def _words(capacity: int, *overrides: str) -> list[str]:
    return [f"data.seq_len={LONGEST}", f"parallel.hdp.capacity_tokens={capacity}", *overrides]


def _figures(folder: Path, name: str) -> list[list[float]]:
    keys = ("loss", "grad_norm", "tokens", "supervised_tokens", "eval_loss")
    return [[float(line.get(key, 0.0)) for key in keys] for line in metrics(folder / name)]  # type: ignore[arg-type]


LATER = [pytest.param(name, marks=pytest.mark.long) for name in ("static", "balanced")]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("planner", ["naive", *LATER])
def test_three_ranks_that_share_documents_train_as_one_that_has_them_whole(folder: Path, planner: str) -> None:
    """Losses, norms and held-out losses to 1e-5 in fp32."""
    done = _run(folder, "shared", 3, 128, f"parallel.hdp.planner={planner}")
    assert done.returncode == 0, done.stdout + done.stderr
    train_forked(folder, "alone", 1, *_words(LONGEST, f"parallel.hdp.planner={planner}"))
    np.testing.assert_allclose(_figures(folder, "shared"), _figures(folder, "alone"), rtol=1e-5)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_that_shares_documents_goes_on_where_it_was_killed(folder: Path) -> None:
    assert _run(folder, "alone", 3, 128, "parallel.hdp.planner=naive").returncode == 0
    killed = _run(folder, "killed", 3, 128, "parallel.hdp.planner=naive", faults=FaultPlan().kill(rank=1, step=4))
    assert killed.returncode not in (0, 2)
    again = _run(folder, "killed", 3, 128, "parallel.hdp.planner=naive")
    assert again.returncode == 0, again.stdout + again.stderr
    assert metrics(folder / "killed") == metrics(folder / "alone")
