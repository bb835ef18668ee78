"""The JSON file beside a dataset: what `data build` knew about it and the token files do not say."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, final

from hpc_train.errors import DataError

_HASH_BLOCK_BYTES = 1 << 20


@final
@dataclass(frozen=True)
class Sidecar:
    """Facts about PREFIX.bin and PREFIX.idx, in PREFIX.json."""

    hpc_train_version: str
    tokenizer: str
    tokenizer_sha256: str
    tokenizer_file: str | None  # relative to the folder of the dataset
    vocab_size: int
    eod_id: int
    max_token_id: int
    num_documents: int
    num_tokens: int
    num_supervised_tokens: int | None  # None: built without --loss-mask
    unigram_entropy_nats: float
    idx_sha256: str
    bin_bytes: int
    skipped: dict[str, int]

    def to_text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def read_sidecar(prefix: str | Path) -> Sidecar | None:
    """Read PREFIX.json; None if there is none, or if it is some other program's.

    Raises:
        DataError: it is ours and damaged.
    """
    path = Path(f"{prefix}.json")
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}. Remove it, or build the dataset again.") from error
    if not isinstance(value, dict) or "hpc_train_version" not in value:
        return None
    try:
        return Sidecar(**{field.name: value[field.name] for field in fields(Sidecar)})
    except KeyError as error:
        raise DataError(f"{path} lacks {error}. Remove it, or build the dataset again.") from error


def sha256_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
