"""Building a dataset: the same files for any number of workers, bad input named by file and line."""

import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.data.build import BuildOptions, build, entropy_nats
from hpc_train.data.encode import is_heldout, supervised_tokens, worker_environment
from hpc_train.data.index import TokenFile
from hpc_train.data.sidecar import read_sidecar, sha256_of_file
from hpc_train.data.tokenizer import load_tokenizer, train_bpe
from hpc_train.errors import ConfigError, DataError

BYTE = load_tokenizer("byte")
ONE = BuildOptions(num_workers=1)


def make(sources, out, tokenizer=BYTE, **options):
    return build(sources, tokenizer, out, BuildOptions(**{"num_workers": 1, **options}))


def texts_of(prefix, tokenizer=BYTE) -> list[str]:
    """The documents, each checked to end with the end-of-document token and to have no other."""
    tokens = TokenFile.open(prefix)
    texts = []
    for i in range(tokens.num_documents):
        ids = tokens.read_document(i).tolist()
        assert ids.index(tokenizer.eod_id) == len(ids) - 1
        texts.append(tokenizer.decode(ids[:-1]))
    return texts


def write_jsonl(path: Path, rows) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture
def tree(tmp_path) -> Path:
    """A source tree with everything that lies about in one."""
    root = tmp_path / "tree"
    for name, data in {
        "b.py": b"print(1)\n",
        "a/z.py": b"z = 1\n",
        "a/b.txt": "naïve\n".encode(),
        "a/empty.py": b"",
        "c.bin": b"\x7fELF\0\0",
        "latin.txt": b"na\xefve",
        "bom.txt": b"\xef\xbb\xbfbom\n",
        ".git/config": b"[core]\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "a" / "loop").symlink_to(root)
    (root / "again.py").symlink_to(root / "a" / "z.py")
    (root / "broken").symlink_to(root / "nowhere")
    os.mkfifo(root / "pipe")
    return root


def test_a_source_tree_is_walked_in_order_and_what_is_no_text_is_counted(tree, tmp_path):
    report = make([tree], tmp_path / "set")
    assert texts_of(tmp_path / "set") == ["naïve\n", "", "z = 1\n", "print(1)\n", "bom\n"]
    assert report.skipped == {
        "binary": 1, "hidden": 1, "not_a_file": 1, "not_utf8": 1, "seen_twice": 2, "unreadable": 1,
    }  # fmt: skip


def test_suffixes_choose_files_of_folders_only(tree, tmp_path):
    extra = tmp_path / "notes.md"
    extra.write_text("# notes\n")
    make([tree, extra], tmp_path / "set", suffixes=(".py",))
    assert texts_of(tmp_path / "set") == ["", "z = 1\n", "print(1)\n", "# notes\n"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_each_row_of_jsonl_is_a_document(tmp_path, name):
    texts = ["one", "", "zwei\r\n drei\u2028", "\N{GRINNING FACE}"]
    path = write_jsonl(tmp_path / name, [{"id": i, "content": text} for i, text in enumerate(texts)])
    make([path], tmp_path / "set", text_field="content")
    assert texts_of(tmp_path / "set") == texts


def test_blank_lines_are_no_documents(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n\n  \r\n{"text": "b"}')
    make([tmp_path / "rows.jsonl"], tmp_path / "set")
    assert texts_of(tmp_path / "set") == ["a", "b"]


def test_half_surrogate_pairs_in_json_do_not_end_the_build(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a\\ud83d b"}\n')
    make([tmp_path / "rows.jsonl"], tmp_path / "set")
    assert texts_of(tmp_path / "set") == ["a? b"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """More than one work item of each kind: many files, and a JSONL file above the size of an item."""
    root = tmp_path_factory.mktemp("corpus")
    (root / "files").mkdir()
    for i in range(150):
        (root / "files" / f"{i:03}.txt").write_text(f"file {i} " * (i % 7))
    write_jsonl(root / "rows.jsonl", [{"text": f"row {i} " * 40, "keep": i % 3 == 0} for i in range(6000)])
    return root


def test_the_files_do_not_depend_on_the_number_of_workers(corpus, tmp_path):
    for workers in (1, 3):
        out = tmp_path / f"w{workers}" / "set"
        make([corpus / "files", corpus / "rows.jsonl"], out, num_workers=workers, heldout_fraction=0.1)
    names = sorted(path.name for path in (tmp_path / "w1").iterdir())
    assert names == ["set.bin", "set.idx", "set.json"] + [f"set_heldout.{e}" for e in ("bin", "idx", "json")]
    for name in names:
        assert (tmp_path / "w1" / name).read_bytes() == (tmp_path / "w3" / name).read_bytes()
    assert len(texts_of(tmp_path / "w3" / "set") + texts_of(tmp_path / "w3" / "set_heldout")) == 6150


def test_the_sidecar_says_what_was_written(corpus, tmp_path):
    tokenizer = train_bpe([f"row {i} file" for i in range(99)], 270, tmp_path / "tok.json")
    report = make([corpus / "files"], tmp_path / "set", tokenizer)
    sidecar, tokens = read_sidecar(tmp_path / "set"), TokenFile.open(tmp_path / "set")
    ids = np.concatenate(list(tokens.blocks()))
    shares = np.unique(ids, return_counts=True)[1] / len(ids)
    assert sidecar.unigram_entropy_nats == pytest.approx(-(shares * np.log(shares)).sum(), rel=1e-12)
    assert sidecar.max_token_id == report.train.max_token_id == ids.max()
    assert (sidecar.num_documents, sidecar.num_tokens) == (150, len(ids))
    assert (sidecar.vocab_size, sidecar.eod_id) == (tokenizer.vocab_size, tokenizer.eod_id)
    assert sidecar.idx_sha256 == sha256_of_file(tmp_path / "set.idx")
    assert sidecar.bin_bytes == (tmp_path / "set.bin").stat().st_size
    assert (tmp_path / sidecar.tokenizer_file).read_text() == (tmp_path / "tok.json").read_text()
    assert sidecar.tokenizer_sha256 == sha256_of_file(tmp_path / "tok.json")


# Held-out documents


def test_held_out_documents_are_chosen_by_text_so_copies_stay_together(tmp_path):
    rows = [{"text": f"document {i % 200}"} for i in range(1000)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    report = make([tmp_path / "rows.jsonl"], tmp_path / "set", heldout_fraction=0.2)
    train, heldout = texts_of(tmp_path / "set"), texts_of(tmp_path / "set_heldout")
    assert sorted(train + heldout) == sorted(row["text"] for row in rows)
    assert not set(train) & set(heldout)
    assert 0.1 < len(heldout) / 1000 < 0.3
    assert report.heldout.num_documents == len(heldout)
    assert all(is_heldout(text, 0.2) for text in heldout)


def test_a_side_without_documents_is_refused(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", [{"text": "only one"}])
    with pytest.raises(DataError, match=r"--heldout 0\.01 of 1 documents leaves the held-out side empty"):
        make([tmp_path / "rows.jsonl"], tmp_path / "set", heldout_fraction=0.01)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


# Loss mask


def mask_of(prefix) -> list[list[int]]:
    mask = TokenFile.open(f"{prefix}_loss_mask")
    assert mask.dtype == np.uint8
    assert mask.lengths.tolist() == TokenFile.open(prefix).lengths.tolist()
    return [mask.read(i).tolist() for i in range(mask.num_sequences)]


def test_supervised_characters_become_supervised_tokens(tmp_path):
    rows = [
        {"text": "abcd", "learn": [[1, 3]]},
        {"text": "abcd", "learn": [[2, 4]]},  # reaches the end, so the end of the document is learnt
        {"text": "abcd", "learn": []},
        {"text": "aéb", "learn": [[1, 2]]},
        {"text": "abc", "learn": True},
        {"text": "abc", "learn": False},
        {"text": "", "learn": True},
        {"text": "abcdef", "learn": [[0, 1], [3, 4], [3, 5]]},
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    report = make([path], tmp_path / "set", loss_mask_field="learn")
    assert mask_of(tmp_path / "set") == [
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1],
        [0, 0, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [1, 1, 1, 1],
        [0, 0, 0, 0],
        [1],
        [1, 0, 0, 1, 1, 0, 0],
    ]
    assert report.train.num_supervised_tokens == read_sidecar(tmp_path / "set").num_supervised_tokens == 15


def test_the_mask_of_a_bpe_follows_its_tokens(tmp_path):
    tokenizer = train_bpe(["question answer " * 50], 290, tmp_path / "tok.json")
    text = "question answer question"
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": text, "learn": [[9, 15]]}])
    make([path], tmp_path / "set", tokenizer, loss_mask_field="learn")
    ids, mask = TokenFile.open(tmp_path / "set").read(0), np.array(mask_of(tmp_path / "set")[0])
    assert tokenizer.decode(ids[mask == 1]).strip() == "answer"


def test_masks_follow_their_documents_to_the_held_out_side_and_through_workers(corpus, tmp_path):
    make([corpus / "rows.jsonl"], tmp_path / "set", heldout_fraction=0.3, loss_mask_field="keep", num_workers=2)
    for prefix in (tmp_path / "set", tmp_path / "set_heldout"):
        for text, mask in zip(texts_of(prefix), mask_of(prefix), strict=True):
            assert set(mask) == {int(int(text.split()[1]) % 3 == 0)}


@given(
    spans=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted), max_size=4),
    cuts=st.lists(st.integers(0, 12), max_size=6).map(sorted),
)
def test_a_token_is_supervised_when_one_of_its_characters_is(spans, cuts):
    edges = [0, *cuts, 12]
    offsets = list(itertools.pairwise(edges))
    inside = {at for start, end in spans for at in range(start, end)}
    expected = [bool(inside & set(range(start, max(end, start + 1)))) for start, end in offsets] + [11 in inside]
    assert supervised_tokens(12, spans, offsets).tolist() == list(map(int, expected))


# Bad input


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": "cut', r"rows\.jsonl, line 3: not JSON"),
        ("[1, 2]", r"rows\.jsonl, line 3: a list and not a JSON object"),
        ('{"body": "a"}', r"rows\.jsonl, line 3: the field 'text' is missing; the row has 'body'.*--text-field"),
        ('{"text": 7}', r"rows\.jsonl, line 3: the field 'text' is a int and not a string"),
        ('{"text": null}', r"line 3: the field 'text' is a NoneType"),
        ("[" * 100000, r"line 3: not JSON"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, line, message):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n\n' + line + '\n{"text": "b"}\n')
    with pytest.raises(DataError, match=message):
        make([tmp_path / "rows.jsonl"], tmp_path / "set")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_bad_row_that_a_worker_finds_is_named_too(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text"\n')
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: not JSON"):
        make([tmp_path / "rows.jsonl"], tmp_path / "set", num_workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    "mask, message",
    [
        (None, "is missing"),
        ("yes", "is 'yes'"),
        ([[0, 5]], r"the span \[0, 5\] of 'm' does not lie in the text of 4 characters"),
        ([[3, 2]], "span"),
        ([[-1, 2]], "span"),
        ([[0, 1, 2]], "span"),
        ([[0, True]], "span"),
        ([0, 1], "span"),
        (1, "is 1"),
    ],
)
def test_a_bad_loss_mask_is_named_by_file_and_line(tmp_path, mask, message):
    row = {"text": "abcd"} if mask is None else {"text": "abcd", "m": mask}
    write_jsonl(tmp_path / "rows.jsonl", [{"text": "abcd", "m": True}, row])
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2: .*{message}"):
        make([tmp_path / "rows.jsonl"], tmp_path / "set", loss_mask_field="m")


def test_a_truncated_gzip_is_named(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl.gz", [{"text": f"{i} " * 50} for i in range(200)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz is not a whole gzip file"):
        make([path], tmp_path / "set")
    path.write_bytes(b"plain text")
    with pytest.raises(DataError, match="not a whole gzip file"):
        make([path], tmp_path / "set")


def test_sources_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"the source .*none does not exist"):
        make([tmp_path / "none"], tmp_path / "set")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no file in"):
        make([tmp_path / "empty"], tmp_path / "set")
    (tmp_path / "named.txt").write_bytes(b"\0\0")
    with pytest.raises(DataError, match=r"named\.txt cannot be used as text: binary"):
        make([tmp_path / "named.txt"], tmp_path / "set")
    (tmp_path / "rows.jsonl").write_bytes(b"\n")
    with pytest.raises(DataError, match="hold no document"):
        make([tmp_path / "rows.jsonl"], tmp_path / "set")


def test_options_that_do_not_fit_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    for options, message in [
        ({"heldout_fraction": 1.0}, "--heldout 1.0"),
        ({"heldout_fraction": -0.1}, "--heldout -0.1"),
        ({"num_workers": 0}, "--workers 0"),
        ({"loss_mask_field": "m"}, "--loss-mask m needs JSONL sources"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make([tmp_path / "a.txt"], tmp_path / "set", **options)


# Output


def test_an_existing_dataset_is_kept_or_replaced_whole(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": f"t{i}", "m": True} for i in range(50)])
    out = tmp_path / "out" / "set"
    make([path], out, loss_mask_field="m", heldout_fraction=0.3)
    with pytest.raises(DataError, match=r"set\.idx exists.*--overwrite"):
        make([path], out)
    make([path], out, overwrite=True)
    assert sorted(file.name for file in out.parent.iterdir()) == ["set.bin", "set.idx", "set.json"]


def test_no_space_left_is_said_and_leaves_nothing(tmp_path):
    """A real limit on the size of files stands for the disk."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("text " * 400_000)
    code = """
        import resource, sys
        from hpc_train.data.build import BuildOptions, build
        from hpc_train.data.tokenizer import load_tokenizer
        from hpc_train.errors import DataError
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            build([sys.argv[1]], load_tokenizer("byte"), sys.argv[2], BuildOptions(num_workers=1))
        except DataError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "in"), str(tmp_path / "set")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "no space left for" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


# Workers


def test_building_and_importing_leave_mpi_torch_and_cuda_alone():
    """FC-72, and a login node may have none of them."""
    code = (
        "import sys, hpc_train.data.build, hpc_train.data.show, hpc_train.data.command\n"
        "print(*sorted({'torch', 'mpi4py', 'cupy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == ""


LAUNCHER_VARIABLES = ("PMI_RANK", "PMIX_RANK", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


@pytest.fixture
def running_build(tmp_path):
    """`data build` with workers, in the middle of a corpus that takes long; gives it and its folder."""
    rows = [{"text": "some text " * 5000}] * 40
    for i in range(40):
        write_jsonl(tmp_path / f"{i:02}.jsonl", rows)
    (tmp_path / "out").mkdir()
    code = """
        import sys
        from hpc_train.cli import main
        if __name__ == "__main__":
            sys.exit(main(sys.argv[1:]))
    """
    (tmp_path / "go.py").write_text(textwrap.dedent(code))
    arguments = [
        "data",
        "build",
        ".",
        "--suffix",
        ".jsonl",
        "--tokenizer",
        "byte",
        "--out",
        "out/set",
        "--workers",
        "2",
    ]
    launcher = dict.fromkeys(LAUNCHER_VARIABLES, "3")
    env = {**os.environ, **launcher, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "go.py", *arguments], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (list((tmp_path / "out").glob("set.bin.tmp-*")) and len(children_of(process.pid)) >= 3):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield process, tmp_path / "out"
    process.kill()
    process.wait()
    process.stderr.close()


def wait_until_gone(pids) -> None:
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() and _state(pid) != "Z" for pid in pids):
        assert time.monotonic() < deadline, "workers outlive the build"
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_a_terminated_build_removes_its_files_and_workers(running_build):
    """Slurm sends TERM to every process of a job; only the parent acts on it."""
    process, out = running_build
    workers = children_of(process.pid)
    for pid in [*workers, process.pid]:
        os.kill(pid, signal.SIGTERM)
    assert process.wait(30) == 1
    assert "stopped by SIGTERM before the dataset was complete; nothing was written" in process.stderr.read()
    assert list(out.iterdir()) == []
    wait_until_gone(workers)


def test_workers_see_no_launcher_variables(running_build):
    """FC-72: a worker that took itself for a rank would abort in MPI's initialisation."""
    process, _ = running_build
    for pid in children_of(process.pid):
        # A child that has not come to its exec yet still shows its parent's, and none in the middle of it.
        while b"go.py" in (command := Path(f"/proc/{pid}/cmdline").read_bytes()) or not command:
            time.sleep(0.02)
        while "PATH" not in (names := environment_of(pid)):
            time.sleep(0.02)
        assert not names & set(LAUNCHER_VARIABLES)


def environment_of(pid: int) -> set[str]:
    """The names in it."""
    return {entry.partition("=")[0] for entry in Path(f"/proc/{pid}/environ").read_text().split("\0")}


def inherited() -> dict[str, str]:
    """The environment that a child gets."""
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def test_only_children_started_meanwhile_have_another_environment(monkeypatch):
    """FC-72"""
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    before = inherited()
    with worker_environment(dict(os.environ)):
        assert os.environ["PMI_RANK"] == "3"
        meanwhile = inherited()
        assert "PMI_RANK" not in meanwhile
        assert (meanwhile["OMP_NUM_THREADS"], meanwhile["RAYON_NUM_THREADS"]) == ("1", "1")
    assert inherited() == before
    with worker_environment(None):
        assert inherited() == before


def test_workers_end_when_their_parent_is_killed(running_build):
    process, _ = running_build
    workers = children_of(process.pid)
    process.kill()
    process.wait()
    wait_until_gone(workers)


# Reporting


class Clock:
    """Stands still, or moves by so much at each look."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s = 100.0, step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


@pytest.mark.parametrize("step_s", [0.0, -1.0, 3.0])
def test_progress_survives_any_clock(corpus, tmp_path, step_s):
    """FC-97"""
    lines: list[str] = []
    build([corpus / "files"], BYTE, tmp_path / "set", ONE, lines.append, clock=Clock(step_s))
    assert ("n/a MB/s" in lines[-1]) == (step_s <= 0)
    assert lines[-1].startswith("done: 150 documents")
    assert (len(lines) > 1) == (step_s > 0)
    assert not any("\r" in line or "\x1b" in line for line in lines)


def test_a_report_is_strict_json(corpus, tmp_path):
    """FC-97"""
    report = make([corpus / "files"], tmp_path / "set")
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["train"]["num_documents"] == 150


def test_entropy_of_known_frequencies():
    assert entropy_nats(np.array([5, 0, 5])) == pytest.approx(np.log(2))
    assert entropy_nats(np.array([0, 7])) == 0.0
    assert entropy_nats(np.array([0, 0])) == 0.0
