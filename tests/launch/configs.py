"""A small configuration and data files that satisfy the checks before a start."""

from __future__ import annotations

from pathlib import Path

import yaml

from hpc_train.config import Config
from hpc_train.config_read import load_config


def write_config(folder: Path, name: str = "little", **sections: dict[str, object]) -> Path:
    """A configuration in `folder` whose data files are there (and empty)."""
    for ending in (".bin", ".idx"):
        (folder / f"corpus{ending}").touch()
    tree: dict[str, object] = {
        "name": name,
        "model": {"family": "gpt", "num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": 16},
        "data": {"seq_len": 8, "train": [{"prefix": str(folder / "corpus")}]},
        "train": {"steps": 2, "global_batch_size": 8},
        "optimizer": {"lr": 0.1},
        "launch": {"runs_dir": str(folder / "runs")},
    }
    for section, values in sections.items():
        known = tree.setdefault(section, {})
        assert isinstance(known, dict)
        known.update(values)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def small_config(folder: Path, **sections: dict[str, object]) -> Config:
    return load_config(write_config(folder, **sections))


def write_training_config(folder: Path, name: str = "little", **sections: dict[str, object]) -> Path:
    """A configuration with real data that trains in a second: random documents of a small vocabulary."""
    import numpy as np

    from hpc_train.data.index_writer import TokenFileWriter

    random = np.random.default_rng(0)
    with TokenFileWriter(folder / "tokens", np.uint16) as writer:
        for length in random.integers(5, 60, size=80):
            writer.add_document(random.integers(0, 64, size=length))
        writer.finish()
    model: dict[str, object] = {"hidden_size": 16, "num_heads": 2, "vocab_size": 64, **sections.pop("model", {})}
    data: dict[str, object] = {"seq_len": 16, "train": [{"prefix": str(folder / "tokens")}]}
    return write_config(folder, name, model=model, data=data, **sections)
