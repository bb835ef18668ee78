"""`hpc-train plan --batch STEP` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.cli import main
from tests.data.corpora import numbered, write

LENGTHS = [3000, 40, 700, 0, 9000, 1, 12_000, 90, 5000, *[300] * 40]
WORDS = (
    "model.vocab_size=65536", "data.train.0.prefix=set", "data.heldout=[]", "train.eval_every=0", "data.seq_len=8192",
    "train.global_batch_size=4", "train.micro_batch_size=1", "parallel.hdp.capacity_tokens=2048",
)  # fmt: skip
NODES = ("-N", "2", "--ntasks-per-node", "4")


@pytest.fixture(autouse=True)
def outside_of_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    # Compiled code stays where other tests have it, and this process keeps its environment.
    monkeypatch.setattr("hpc_train.cluster.scratch.use_private_caches", lambda: None)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "set", numbered(LENGTHS))


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", "tiny", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_step_is_told_from_the_index_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = plan(capsys, *WORDS, *NODES, "--batch", "1", "--html", "step.html")
    assert code == 0, err
    assert "tiny, step 1: " in out and "on 8 hdp ranks" in out and "static" in out and "planning takes" in out
    assert Path("step.html").read_text().rstrip().endswith("</html>")
    size = Path("set.bin").stat().st_size
    Path("set.bin").write_bytes(b"\xff" * size)
    again = plan(capsys, *WORDS, "model.vocab_size=1000", *NODES, "--batch", "1", "--json")[1]
    hash_of_text = next(line.split()[4] for line in out.splitlines() if line.startswith("hash of the plan"))
    assert json.loads(again)["hash"] == hash_of_text


def test_steps_go_on_where_the_one_before_ended(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [json.loads(plan(capsys, *WORDS, *NODES, "--batch", str(n), "--json")[1])["lengths"] for n in (1, 2)]
    assert all(0 < sum(step) <= 4 * 8192 and max(step) <= 8192 for step in steps)
    # 12,000 and 9,000 tokens are cut at 8,192.
    assert sorted([*steps[0], *steps[1]])[-1] == 8192


def test_rings_are_laid_along_a_fabric(capsys: pytest.CaptureFixture[str]) -> None:
    fabric = "clos:pods=1,nodes=4,ports=8,gpus=2"
    code, out, err = plan(capsys, *WORDS, "-N", "4", "--fabric", fabric, "--batch", "1", "--json")
    assert code == 0, err
    assert "no topology" not in err and "costs: derived" in err
    assert {entry["node"] for entry in json.loads(out)["ranks"]} == {"n0", "n1", "n2", "n3"}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("data.train.0.prefix=none",), 4, "none.idx does not exist"),
        (("parallel.hdp.capacity_tokens=64",), 2, "less than one block of attention"),
        (("parallel.hdp.capacity_tokens=512",), 2, "8 hdp ranks of parallel.hdp.capacity_tokens=512 hold together"),
        (("parallel.hdp.profile=none.json",), 2, "parallel.hdp.profile=none.json cannot be read"),
        (("parallel.hdp=null",), 2, "Give parallel.hdp.capacity_tokens=TOKENS"),
        (("train.micro_batch_size=2",), 2, "micro_batch_size=2 has no effect with parallel.hdp"),
        (("train.steps=3", "--batch", "4"), 2, "--batch 4: the run has steps 1 to 3 (train.steps)"),
        (("--groups", "--json"), 2, "--groups has no effect with --batch"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_words(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, said: str
) -> None:
    found, out, err = plan(capsys, "--batch", "1", *WORDS, *words, *NODES)
    assert (found, out) == (code, "") and said in err


def test_a_whole_plan_knows_the_capacity_and_leaves_the_step_s_time_to_its_lengths(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = plan(capsys, *WORDS, *NODES)
    assert code == 0, err
    assert "see `hpc-train plan --batch STEP`" in out and "memory of a rank" in out
