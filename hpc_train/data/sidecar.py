"""The JSON file beside a dataset: what `data build` knew about it and the token files do not say."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import final

from hpc_train.errors import DataError
from hpc_train.plan.json_object import Kinds, check_kind, parse_object

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


_KINDS: dict[str, Kinds] = {
    "hpc_train_version": (str,), "tokenizer": (str,), "tokenizer_sha256": (str,), "tokenizer_file": (str, None),
    "vocab_size": (int,), "eod_id": (int,), "max_token_id": (int,), "num_documents": (int,), "num_tokens": (int,),
    "num_supervised_tokens": (int, None), "unigram_entropy_nats": (float,), "idx_sha256": (str,), "bin_bytes": (int,),
    "skipped": (dict,),
}  # fmt: skip
assert _KINDS.keys() == {field.name for field in fields(Sidecar)}


def read_sidecar(prefix: str | Path) -> Sidecar | None:
    """Read PREFIX.json; None if there is none, or if it is some other program's: an object without any of our keys.

    Raises:
        DataError: it is ours and damaged, or no object.
    """
    path = Path(f"{prefix}.json")
    try:
        text = path.read_text(encoding="utf-8")
        if not _KINDS.keys() & parse_object(text).keys():
            return None
        value = parse_object(text, _KINDS)
        for reason, count in value["skipped"].items():
            check_kind(f"skipped.{reason}", count, (int,))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}. Remove it, or build the dataset again.") from error
    return Sidecar(**{key: value[key] for key in _KINDS})


def sha256_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
