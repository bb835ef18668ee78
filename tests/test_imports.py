"""Who imports whom, who reads the environment, and what stays out of a process that has no need of it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hpc_train"

# Each part of hpc_train, and the parts that it may import beside errors, log and itself.
_CONFIG = ["config", "config_read"]
_BELOW_TRAIN = [*_CONFIG, "record", "cluster", "plan", "comm", "models", "parallel", "data", "checkpoint"]
MAY_IMPORT = {
    "errors": [],
    "log": [],
    "arguments": [],
    "config_text": [],
    "config_faults": [],
    "config_values": [],
    "config": ["config_values"],
    "config_read": ["config", "config_faults", "config_text"],
    "record": [],
    "cluster": ["config"],
    "plan": ["config", "cluster"],
    "launch": ["arguments", *_CONFIG, "cluster", "plan"],
    "health": ["arguments", *_CONFIG, "cluster", "plan", "launch", "record"],
    "observe": ["arguments", *_CONFIG, "plan", "record"],
    "comm": ["config", "cluster", "plan", "record"],
    "models": ["config"],
    "parallel": ["config", "plan", "comm", "models", "record"],
    "data": ["arguments", "config", "cluster", "plan", "comm", "record"],
    "checkpoint": ["arguments", *_CONFIG, "config_text", "config_values", "cluster", "plan", "comm", "record"],
    "train": _BELOW_TRAIN,
    # Data only: recipes are YAML, _share is where slurm/ and env/ go when installed.
    "recipes": [],
    "_share": [],
}
# These start everything else, and import it when called.
FREE = ["__init__", "__main__", "cli", "node_agent"]

# The parts of checkpoint, each of which may import those before it.
PARTS_OF_CHECKPOINT = [
    "arguments",
    "progress",
    "stores",
    "format",
    "files",
    "folders",
    "copies",
    "saving",
    "loading",
    "convert",
    "command",
]

TORCH_FREE_PARTS = [
    "errors",
    "log",
    "arguments",
    "config",
    "config_faults",
    "config_text",
    "config_values",
    "config_read",
    "record",
    "cluster",
    "plan",
    "launch",
    "health",
    "observe",
    "recipes",
]
TORCH_FREE_MODULES = [
    "hpc_train.node_agent",
    *(f"hpc_train.data.{name}" for name in ("build", "index", "tokenizer", "node_reader", "node_steps")),
    *(
        f"hpc_train.checkpoint.{name}"
        for name in (
            "command",
            "convert.hf_config",
            "convert.hf_names",
            "copies.copy_keeper",
            "copies.copy_sender",
            "copies.copy_server",
            "copies.copy_service",
            "copies.copy_wire",
            "copies.lineage",
            "copies.local_folder",
            "copies.local_parts",
            "files.finish",
            "files.parts",
            "files.write",
            "folders.find",
            "folders.folder",
            "folders.pruning",
            "folders.run_location",
            "folders.verify",
            "format.archive",
            "format.opcodes",
            "format.placed",
            "format.torch_index",
            "saving.begun_save",
            "saving.node_save",
            "saving.node_session",
            "saving.node_writer",
            "stores.backend",
            "stores.bounded",
            "stores.caller",
            "stores.cause",
            "stores.hdfs_native_store",
            "stores.local_store",
            "stores.location",
            "stores.store",
            "stores.webhdfs_store",
        )
    ),
]
NOT_ON_A_LOGIN_NODE = ["torch", "mpi4py", "cupy"]


def _sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _part(module: str) -> str:
    """`plan` for hpc_train.plan.mesh; `__init__` for hpc_train itself."""
    return module.split(".")[1] if "." in module else "__init__"


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of all that a file imports, also inside functions and for types only."""
    module = _module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            # `from hpc_train import log` names a part, `from hpc_train.log import say` does not.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def _wrong_imports(path: Path) -> Iterator[str]:
    part = _part(_module_name(path))
    for line, name in _imports(path):
        where = f"{path.relative_to(ROOT)}:{line}: {part} may not import {name}"
        top, _, rest = name.partition(".")
        if top == "hpc_train" and part not in FREE:
            other = rest.partition(".")[0]
            if other not in ["errors", "log", part, *MAY_IMPORT[part]] and not other.startswith("__version"):
                yield where
        if top in NOT_ON_A_LOGIN_NODE and (part in TORCH_FREE_PARTS or _module_name(path) in TORCH_FREE_MODULES):
            yield f"{where}, so that it works on a login node"


def test_every_part_of_the_package_is_in_the_import_table() -> None:
    parts = {_part(_module_name(path)) for path in _sources()}
    assert parts <= {*MAY_IMPORT, *FREE}, "a new part needs its row in MAY_IMPORT"


def test_each_part_imports_only_what_the_table_allows() -> None:
    assert not [wrong for path in _sources() for wrong in _wrong_imports(path)]


def test_the_import_table_has_no_cycle() -> None:
    done: set[str] = set()
    while len(done) < len(MAY_IMPORT):
        ready = {part for part, needs in MAY_IMPORT.items() if part not in done and done.issuperset(needs)}
        assert ready, f"a cycle among {sorted(set(MAY_IMPORT) - done)}"
        done |= ready


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Also not inside functions, nor for types only."""
    imported: dict[str, set[str]] = {_module_name(path): set() for path in _sources()}
    for path in _sources():
        module = _module_name(path)
        for _, name in _imports(path):
            known = name if name in imported else name.rpartition(".")[0]
            if known in imported and known != module:
                imported[module].add(known)
    TopologicalSorter(imported).prepare()


def _part_of_checkpoint(module: str) -> str | None:
    """`stores` for hpc_train.checkpoint.stores.location; None for what is not in checkpoint, or checkpoint itself."""
    top, _, rest = module.partition("hpc_train.checkpoint.")
    return None if top or not rest else rest.partition(".")[0]


def test_each_part_of_checkpoint_imports_only_those_before_it() -> None:
    wrong = []
    for path in (PACKAGE / "checkpoint").rglob("*.py"):
        part = _part_of_checkpoint(_module_name(path))
        allowed = PARTS_OF_CHECKPOINT[: PARTS_OF_CHECKPOINT.index(part) + 1] if part else []
        for line, name in _imports(path):
            if (other := _part_of_checkpoint(name)) is not None and other not in allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {part} may not import {other}")
    assert not wrong


_READS_ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}


def _environment_uses(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        names: set[str] = set()
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            names = {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
        if names & _READS_ENVIRONMENT:
            yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)}"


def test_only_cluster_reads_the_environment() -> None:
    others = [path for path in _sources() if _part(_module_name(path)) != "cluster"]
    assert not [use for path in others for use in _environment_uses(path)]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("import os\nos.environ['A']", 1),
        ("import os\ndef f(env=os.environ): ...", 1),
        ("from os import getenv, path", 1),
        ("import os\nos.getpid()\nenviron = 1", 0),
    ],
)
def test_the_environment_check_sees_every_spelling(text: str, count: int, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "x.py").write_text(text)
    assert len(list(_environment_uses(tmp_path / "x.py"))) == count


@pytest.mark.parametrize(
    ("place", "text", "wrong"),
    [
        ("plan/mesh.py", "from hpc_train.cluster.slurm import read_job", []),
        ("plan/mesh.py", "def f():\n    from hpc_train import comm", ["plan may not import hpc_train.comm"]),
        ("plan/mesh.py", "from ..train.loop import run", ["plan may not import hpc_train.train.loop.run"]),
        ("plan/mesh.py", "from . import batch\nfrom .batch import BatchPlan", []),
        ("plan/__init__.py", "from .mesh import Mesh\nfrom ..launch import x", ["hpc_train.launch.x"]),
        ("launch/local.py", "import torch.distributed", ["launch may not import torch.distributed"]),
        ("data/index.py", "import torch", ["data may not import torch"]),
        ("data/loader.py", "import torch", []),
        ("cli.py", "from hpc_train.train import loop", []),
    ],
)
def test_the_import_check_sees_every_spelling(
    place: str, text: str, wrong: list[str], monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "hpc_train" / place
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = list(_wrong_imports(path))
    assert len(found) == len(wrong)
    assert all(part in line for part, line in zip(wrong, found, strict=True))


def _python(code: str, *arguments: str) -> str:
    """Standard output of a fresh Python; a warning is an error there too."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


_IMPORT_AND_LIST = """
import importlib, sys
forbidden, names = sys.argv[1].split(","), sys.argv[2:]
for name in names:
    importlib.import_module(name)
    found = sorted(set(forbidden) & set(sys.modules))
    assert not found, f"{name} imports {found}"
"""


def test_what_a_login_node_runs_imports_neither_torch_nor_mpi4py_nor_cupy() -> None:
    modules = [_module_name(path) for path in _sources()]
    chosen = [
        name
        for name in modules
        if name in TORCH_FREE_MODULES or (_part(name) in TORCH_FREE_PARTS and not name.endswith("__main__"))
    ]
    assert set(TORCH_FREE_MODULES) <= set(chosen)
    _python(_IMPORT_AND_LIST, ",".join(NOT_ON_A_LOGIN_NODE), *chosen)


@pytest.mark.parametrize("command", [[], ["run"], ["submit"], ["data"], ["plan"], ["trace"]])
def test_help_imports_neither_pydantic_nor_numpy(command: list[str]) -> None:
    code = (
        "import sys\nfrom hpc_train.cli import main\nsys.argv[0] = 'hpc-train'\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code, done.code\n"
        "found = sorted({'pydantic', 'numpy', 'torch', 'yaml', 'mpi4py'} & set(sys.modules))\n"
        "assert not found, found\n"
    )
    assert "usage: hpc-train" in _python(code, *command, "--help")


def test_the_node_agent_has_no_more_than_it_needs() -> None:
    """It stands beside the ranks for as long as they run."""
    modules = "import sys, hpc_train.node_agent, hpc_train.data.node_reader, hpc_train.checkpoint.saving.node_save"
    _python(f"{modules}\nassert 'numpy' not in sys.modules")
    _python(f"{modules}, hpc_train.data.node_steps\nassert not {{'pydantic', 'yaml', 'torch'}} & set(sys.modules)")


def test_importing_the_package_does_no_work() -> None:
    loaded = "sorted({'pydantic', 'numpy', 'torch', 'yaml', 'mpi4py', 'argparse'} & set(sys.modules))"
    code = f"import sys\nimport hpc_train\nprint(hpc_train.__version__, {loaded})"
    version, _, modules = _python(code).partition(" ")
    assert version[0].isdigit()
    assert modules.strip() == "[]"


_TAKE_A_STEP = """
import sys
from tests.ranks import TestRank
from tests.train.trainers import TREES, make_config, make_trainer, sequences
for tree in TREES.values():
    trainer = make_trainer(TestRank(0, 1, None, None), make_config(tree))
    trainer.step(1, sequences(1, 4), lr=1e-3)
found = sorted({"torch._dynamo", "torch.distributed.checkpoint", "sympy"} & set(sys.modules))
assert not found, found
"""


def test_a_training_step_imports_nothing_of_torch_s_compiler() -> None:
    """Several seconds of a processor at each start of each rank."""
    _python(_TAKE_A_STEP)
