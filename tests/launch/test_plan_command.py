"""`hpc-train plan` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hpc_train.cli import main
from hpc_train.plan.run import Plan
from tests.plan.reports import make_config


@pytest.fixture(autouse=True)
def outside_of_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    tree = make_config({"pp": 2, "tp": 4}).model_dump(mode="json", exclude_none=True)
    Path("config.yaml").write_text(yaml.safe_dump(tree))


FOUR_HEADS = ("model.num_heads=4", "parallel.tp=2", "parallel.pp=2")
CLOS = "clos:pods=2,nodes=8,ports=8,shuffle=3"


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", "config.yaml", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_table_comes_out_without_data_files_or_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = plan(capsys, "-N", "8", "--fabric", CLOS)
    assert (code, err) == (0, "")
    assert "64 ranks on 8 nodes, pp 2 x dp 8 x cp 1 x tp 4" in out
    assert "Slurm's order" in out and "planned" in out


def test_json_is_a_plan_with_its_hash_and_notes_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = plan(capsys, "-N", "8", "--fabric", CLOS, "--json")
    assert code == 0
    read = Plan.from_json(out)
    assert read.world_size == 64
    assert json.loads(out)["order"] == "auto"
    assert "synthetic" in err


def test_the_page_is_written_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(capsys, "-N", "8", "--fabric", CLOS, "--html", "out.html")[0] == 0
    assert Path("out.html").read_text().rstrip().endswith("</html>")
    code, _, err = plan(capsys, "-N", "8", "--fabric", CLOS, "--html", "nowhere/out.html")
    assert code == 2 and "nowhere/out.html cannot be written" in err


def test_nodes_come_from_the_list_the_number_or_the_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    def nodes(*words: str) -> list[str]:
        code, out, err = plan(capsys, "--fabric", CLOS, "--json", "--order", "slurm", *words)
        assert code == 0, err
        return list(Plan.from_json(out).nodes)

    assert nodes("--nodelist", "n07,n[03,05],n01") == ["n07", "n03", "n05", "n01"]
    assert nodes("-N", "4") == ["n00", "n01", "n02", "n03"]
    assert len(nodes("parallel.dp=4")) == 4
    assert len(nodes("parallel.dp=4", "--ntasks-per-node", "4")) == 8
    assert len(nodes()) == 16


def test_excluded_nodes_get_no_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = plan(capsys, "-N", "8", "--fabric", CLOS, "--json", "fabric.exclude=zzz")
    assert "fabric.exclude names zzz, which the plan has not anyway" in err
    _, out, _ = plan(capsys, "-N", "8", "--fabric", CLOS, "--json")
    first = Plan.from_json(out).nodes[0]
    code, out, _ = plan(capsys, "-N", "8", "--fabric", CLOS, "--json", f"fabric.exclude={first}")
    assert code == 0 and first not in Plan.from_json(out).nodes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-N", "99", "--fabric", CLOS], "99 nodes are asked for, but the fabric from clos:"),
        (["--nodelist", "n1,elsewhere", "--fabric", CLOS], "elsewhere"),
        (["--nodelist", "n01,n02,n01", "--fabric", CLOS], "n01 more than once"),
        (["--nodelist", "n[2-1]", "--fabric", CLOS], "--nodelist: The host list 'n[2-1]' cannot be read"),
        (["-N", "2", "--fabric", CLOS, "fabric.exclude='n[2-'"], "fabric.exclude: The host list"),
        (["--nodelist", "n01", "--fabric", CLOS, "fabric.exclude=n01"], "fabric.exclude=n01 leaves no node"),
        (["-N", "2", "--fabric", "nowhere.yaml"], "nowhere.yaml"),
        (["-N", "2", "--fabric", "a.yaml,"], "has an empty name"),
        (["-N", "2", "--fabric", "clos:pods=1,nodes=2,prefix=a["], "prefix=a[ cannot begin the name of a node"),
        (["-N", "2", "--fabric", CLOS, "--order", "dp,tp"], "--order dp,tp is neither auto nor slurm"),
        (["-N", "2", "--fabric", CLOS, "--groups"], "--groups has no effect without --json"),
        (["-N", "2", "--fabric", CLOS, "--ntasks-per-node", "9"], "more than the 8 GPUs"),
        (["-N", "2", "--fabric", CLOS, "parallel.tp=16", "parallel.pp=1", "model.num_heads=16"], "tp=16"),
        (
            ["--nodelist", "n[1-2]", "--ntasks-per-node", "2", "parallel.pp=1", "model.num_heads=4"],
            "tp=4 does not fit into a node: the largest of the 2 nodes has 2 ranks",
        ),
        (
            ["-N", "2", "--ntasks-per-node", "2", "--order", "slurm", "parallel.pp=1", "model.num_heads=4"],
            "tp=4 does not fit into a node",
        ),
        (["-N", "1000000000", "--ntasks-per-node", "8"], "1000000000 nodes are more than the 1048576 ranks"),
        (["--nodelist", "n[1-2]", "--ntasks-per-node", "500000000"], "a world of 1000000000 ranks is more than"),
        (["-N", "2", "--fabric", CLOS, "parallel.dp=3"], "do not fill"),
        # Neither 7 layers' worth of stages nor tp=7 of 4 heads is advised.
        (
            ["-N", "7", "--ntasks-per-node", "2", "--fabric", CLOS, *FOUR_HEADS],
            "Use parallel.pp=7, or 16 ranks, or",
        ),
        (["-N", "2", "--fabric", CLOS, "train.global_batch_size=3"], "global_batch_size=3"),
        (["-N", "2", "--fabric", CLOS, "fabric.gpu_memory_bytes=9"], "does not fit: a rank of stage"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_words(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    code, out, err = plan(capsys, *words)
    assert (code, out) == (2, "")
    assert said in err


def test_a_job_whose_slurm_conf_is_not_there_is_refused_and_no_command_of_slurm_s_is_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each would try for a minute."""
    (tmp_path / "bin").mkdir()
    for name in ("scontrol", "squeue", "srun"):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    for name, value in {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "16", "SLURM_TASKS_PER_NODE": "8(x2)",
        "SLURM_CONF": str(tmp_path / "none.conf"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    code, out, err = plan(capsys)
    assert (code, out) == (3, "")
    assert "none.conf cannot be read (No such file or directory), and Slurm's commands need it. Correct it" in err
    assert not (tmp_path / "asked").exists()


def test_number_and_list_of_nodes_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        plan(capsys, "-N", "2", "--nodelist", "n1", "--fabric", CLOS)
    assert ended.value.code == 2


def test_a_leaf_without_a_link_upwards_is_refused_only_where_something_has_to_climb(
    capsys: pytest.CaptureFixture[str],
) -> None:
    leaves = '{l0: {nodes: "a[1-2]", uplinks: 0}, l1: {nodes: "b[1-2]"}}'
    text = f"version: 1\nnum_gpus: 8\nlink_bytes_per_s: {{spine: 1000}}\npods: {{p: {{leaves: {leaves}}}}}\n"
    Path("fabric.yaml").write_text(text)
    assert plan(capsys, "--nodelist", "a[1-2]", "--fabric", "fabric.yaml")[0] == 0
    code, _, err = plan(capsys, "--nodelist", "a[1-2],b[1-2]", "--fabric", "fabric.yaml")
    assert code == 2 and "no link leads up from l0 rail 0, as fabric.yaml says" in err
