"""`hpc-train ckpt` as typed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from hpc_train.checkpoint.command import parse_size
from hpc_train.checkpoint.convert import hf_folder
from hpc_train.checkpoint.folders.find import find_checkpoint
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.checkpoint.stores.location import locate
from hpc_train.cli import main
from hpc_train.cluster.limits import require_free_bytes
from hpc_train.errors import ConfigError, ExitCode
from tests.checkpoint.convert.hf_folders import SPECS, make_hf_folder, weights, write_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints, the newer of which lacks a byte."""
    root = tmp_path / "run/checkpoints"
    for step in (3, 12):
        write_checkpoint(root / f"step_{step:07d}", SPECS["llama"], weights(SPECS["llama"]), step=step)
    (root / "latest").write_text("step_0000012\n")
    (data,) = (root / "step_0000012").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    return tmp_path / "run"


def test_ls_shows_what_is_there_and_what_is_wrong_with_it(run, capsys):
    assert main(["ckpt", "ls", str(run)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step_0000003  20")
    assert first.endswith("MiB, 21 tensors")
    assert second.startswith("step_0000012  20")
    assert "the manifest says" in second
    assert second.endswith("(latest)")
    assert main(["ckpt", "ls", "--json", str(run / "checkpoints")]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert [(item["step"], item["is_latest"], item["problem"] is None) for item in tree] == [
        (3, False, True), (12, True, False),
    ]  # fmt: skip


def test_ls_shows_what_has_a_checkpoint_s_name_and_is_none(run, capsys):
    root = run / "checkpoints"
    shutil.copytree(root / "step_0000003", root / "step_0000100")
    (root / "step_0000012").rename(root / "step_0000012.set-aside")
    (root / "step_0000020").write_text("notes")
    (root / "step_0000030").symlink_to("nowhere")
    assert main(["ckpt", "ls", str(run)]) == 0
    _, aside, file, link, copied = capsys.readouterr().out.splitlines()
    assert aside.startswith("step_0000012.set-aside  20") and "set aside: no run goes on from it" in aside
    assert "is no folder" in file and "is no folder" in link
    assert copied.startswith("step_0000100") and "holds step 3, and not the one of its name" in copied


def test_verify_and_a_search_name_what_has_a_checkpoint_s_name_and_is_none(run, capsys):
    """The link may have led to a file system that is not mounted."""
    root = run / "checkpoints"
    shutil.rmtree(root / "step_0000012")
    (root / "step_0000002").write_text("notes")
    (root / "step_0000030").symlink_to("nowhere")
    told = "is no folder but a file, or a link that leads nowhere"
    assert main(["ckpt", "verify", str(run), "--all"]) == ExitCode.CHECKPOINT
    newest, _, sound, oldest, _ = said = capsys.readouterr().out.splitlines()
    assert newest.endswith("step_0000030: no checkpoint") and oldest.endswith("step_0000002: no checkpoint")
    assert said[1] == said[4] == f"  it {told}" and sound.endswith("step_0000003: sound")
    assert find_checkpoint(run) == locate(root / "step_0000003")
    assert f"step_0000030 skipped: it {told}" in capsys.readouterr().err
    assert main(["ckpt", "prune", str(run), "--keep", "1"]) == 0
    assert capsys.readouterr().out == "kept     step_0000003\n"
    assert (root / "step_0000002").is_file() and (root / "step_0000030").is_symlink()


def test_ls_and_prune_of_nothing(tmp_path, capsys):
    for words in (["ls"], ["prune", "--keep", "1"]):
        assert main(["ckpt", *words, str(tmp_path)]) == 0
        assert capsys.readouterr().out == f"no checkpoints in {tmp_path}\n"
    assert main(["ckpt", "ls", str(tmp_path / "nowhere")]) == ExitCode.CHECKPOINT
    assert "nowhere does not exist; give a run folder" in capsys.readouterr().err


def test_a_file_is_no_checkpoint(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for words in (["verify", str(tmp_path / "file")], ["convert", str(tmp_path / "file"), str(tmp_path / "out")]):
        assert main(["ckpt", *words]) == ExitCode.CHECKPOINT
        assert "file is no folder. Give a checkpoint (a folder with manifest.json)" in capsys.readouterr().err


def test_ls_and_prune_ask_for_a_folder_of_checkpoints(run, capsys):
    (run / "file").write_text("x")
    checkpoint = run / "checkpoints/step_0000003"
    for words in (["ls"], ["prune", "--keep", "1"]):
        assert main(["ckpt", *words, str(run / "file")]) == ExitCode.CHECKPOINT
        assert "file is not a folder; give a run folder" in capsys.readouterr().err
        assert main(["ckpt", *words, str(checkpoint)]) == ExitCode.CHECKPOINT
        assert "step_0000003 is one checkpoint; give its run folder" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["file/out", "loop/out", "x" * 300, "x" * 240])
def test_a_place_that_cannot_be_is_told_in_words(place, tmp_path, capsys):
    hf = make_hf_folder(tmp_path, "gpt")
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    assert main(["ckpt", "convert", str(hf), str(tmp_path / place)]) == ExitCode.CHECKPOINT
    told = capsys.readouterr().err
    assert told.startswith("hpc-train: error: cannot ")
    assert "hoose another" in told or "Choose a shorter one" in told


def test_verify_reads_every_byte(run, capsys):
    assert main(["ckpt", "verify", str(run)]) == ExitCode.CHECKPOINT, "the newest one is not sound"
    said = capsys.readouterr().out
    assert "step_0000012: damaged" in said and "step_0000003: sound" in said
    shutil.copytree(run / "checkpoints/step_0000003", run / "two/checkpoints/step_0000003")
    (run / "two/checkpoints/step_0000002").mkdir()
    assert main(["ckpt", "verify", str(run / "two")]) == 0
    assert "step_0000002" not in capsys.readouterr().out
    assert main(["ckpt", "verify", str(run), "--all"]) == ExitCode.CHECKPOINT
    said = capsys.readouterr().out
    assert "step_0000012: damaged" in said
    assert "step_0000003: sound" in said
    older = run / "checkpoints/step_0000003"
    (box,) = read_manifest(older).tensors["model.head.weight"].boxes
    with open(older / box.file, "r+b") as file:
        file.seek(box.start + box.num_bytes - 1)
        file.write(b"\x11")
    assert main(["ckpt", "verify", str(older)]) == ExitCode.CHECKPOINT
    assert f"model.head.weight: the bytes at {box.start} of" in capsys.readouterr().out


def test_verify_tells_a_newer_version_and_another_name_from_damage(run, capsys):
    root = run / "checkpoints"
    shutil.copytree(root / "step_0000003", root / "step_0000100")
    path = root / "step_0000012/manifest.json"
    tree = json.loads(path.read_text())
    del tree["checksum"]
    path.write_text(json.dumps({**tree, "format_version": 99}))
    assert main(["ckpt", "verify", str(run), "--all"]) == ExitCode.CHECKPOINT
    told = capsys.readouterr().out
    assert "step_0000100: misnamed\n  " in told and "name it step_0000003, or move it away" in told
    assert "step_0000012: of a newer version\n  " in told and "step_0000003: sound" in told


def test_convert_says_what_it_wrote(tmp_path, capsys):
    hf = make_hf_folder(tmp_path, "gpt")
    assert main(["ckpt", "convert", str(hf), str(tmp_path / "ours"), "--dtype", "bf16"]) == 0
    assert "gpt from Hugging Face, 0.01 M parameters, bfloat16" in capsys.readouterr().out
    target = str(tmp_path / "back")
    assert main(["ckpt", "convert", str(tmp_path / "ours"), target, "--max-shard-size", "4KB", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["direction"] == "to Hugging Face"
    assert told["model"]["hidden_size"] == 16
    assert (tmp_path / "back/model.safetensors.index.json").exists()
    assert main(["ckpt", "convert", str(hf), target]) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith(f"hpc-train: error: {target} exists")


def test_sizes() -> None:
    assert [parse_size(text) for text in ("5GB", "1.5 kb", "2GiB", "77")] == [5 * 10**9, 1500, 2**31, 77]
    for text in ("", "five", "-1GB", "0", "5TB", "1e3"):
        with pytest.raises(ConfigError, match="is not a size"):
            parse_size(text)


def test_ls_and_verify_leave_torch_alone(run):
    code = (
        "import sys\nfrom hpc_train.cli import main\n"
        "assert main(['ckpt', 'ls', sys.argv[1]]) == 0\n"
        "assert main(['ckpt', 'verify', sys.argv[1] + '/checkpoints/step_0000003']) == 0\n"
        "found = sorted({'torch', 'mpi4py'} & set(sys.modules))\nassert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code, str(run)], check=True, capture_output=True, timeout=60)


def test_a_conversion_that_does_not_fit_is_refused_before_anything_is_written(tmp_path, capsys, monkeypatch):
    hf = make_hf_folder(tmp_path, "gpt")
    full = os.statvfs_result((4096, 4096, 1000, 0, 0, 1000, 1000, 1000, 0, 255))
    monkeypatch.setattr(hf_folder, "require_free_bytes", partial(require_free_bytes, statvfs=lambda path: full))
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["ckpt", "convert", str(hf), str(tmp_path / "ours")]) == ExitCode.CHECKPOINT
    assert "the checkpoint" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == before
