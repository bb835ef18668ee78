"""Tokenizers: bytes, or a `tokenizer.json` of the `tokenizers` library; training of a byte-level BPE."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

from hpc_train.errors import ConfigError, DataError
from hpc_train.plan.out_file import write_out

END_OF_TEXT = "<|endoftext|>"
# Names that published tokenizers give their end-of-document token, in the order in which they are tried.
_END_OF_TEXT_NAMES = (
    END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>", "<|end▁of▁sentence|>",
)  # fmt: skip
_NUM_BYTES = 256

Offsets = list[tuple[int, int]]


class Tokenizer(ABC):
    """Text to token ids and back. Ids run from 0 to vocab_size - 1; added tokens count.

    Text never becomes a special token: a document that spells out the end-of-document token is not cut there.
    """

    name: str
    sha256: str
    vocab_size: int
    eod_id: int

    @abstractmethod
    def encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """Give ids, and for each the characters [start, end) of the text that it stands for."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str: ...

    def file_text(self) -> str | None:
        """The tokenizer's file, to be kept beside a dataset; None if the name says everything."""
        return None


@final
class ByteTokenizer(Tokenizer):
    """UTF-8 bytes, and 256 for the end of a document."""

    def __init__(self) -> None:
        self.name = "byte"
        self.sha256 = hashlib.sha256(b"byte").hexdigest()
        self.vocab_size = _NUM_BYTES + 1
        self.eod_id = _NUM_BYTES

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        ids: list[int] = []
        offsets: Offsets = []
        for at, character in enumerate(text):
            encoded = character.encode()
            ids.extend(encoded)
            offsets.extend([(at, at + 1)] * len(encoded))
        return ids, offsets

    def decode(self, ids: Sequence[int]) -> str:
        runs, run = [], bytearray()
        for token in ids:
            if token < _NUM_BYTES:
                run.append(token)
            else:
                runs.append(run.decode(errors="replace") + END_OF_TEXT)
                run = bytearray()
        return "".join(runs) + run.decode(errors="replace")


@final
class FileTokenizer(Tokenizer):
    """A `tokenizer.json`. Its truncation and padding are switched off: they would cut or fill documents."""

    def __init__(self, text: str, name: str, eod: str | None = None) -> None:
        from tokenizers import Tokenizer as Backend

        try:
            self._backend: Any = Backend.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"{name} is not a tokenizer that the 'tokenizers' library can read: {error}. "
                "Give a tokenizer.json, or make one with 'hpc-train data tokenizer'."
            ) from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        names = (eod,) if eod else _END_OF_TEXT_NAMES
        found = next((vocabulary[token] for token in names if token in vocabulary), None)
        if found is None:
            raise DataError(
                f"{name} has no end-of-document token: looked for {', '.join(names)}. "
                "Name the one it has with --eod TOKEN."
            )
        self._text, self._eod = text, eod
        self.name = name
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        # Not the number of tokens: ids may have gaps.
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod_id = found

    def __reduce__(self) -> tuple[Any, ...]:
        return (FileTokenizer, (self._text, self.name, self._eod))

    def encode(self, text: str) -> list[int]:
        # The batch call is the one that leaves out offsets: a quarter faster, measured on Python sources.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode([int(token) for token in ids], skip_special_tokens=False)
        return text

    def file_text(self) -> str | None:
        return self._text


def load_tokenizer(spec: str | Path, eod: str | None = None) -> Tokenizer:
    """Load "byte" or a `tokenizer.json`.

    Args:
        eod: The end-of-document token, where it has none of the usual names.

    Raises:
        DataError: no such file, not a tokenizer, or no end-of-document token in it.
    """
    if str(spec) == "byte":
        return ByteTokenizer()
    path = Path(spec)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"the tokenizer {spec} does not exist. Give 'byte' or the path of a tokenizer.json.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the tokenizer {spec} cannot be read: {error}.") from error
    return FileTokenizer(text, path.name, eod)


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    out_path: str | Path,
    progress: Callable[[str], None] | None = None,
) -> Tokenizer:
    """Train a byte-level BPE and write it as a `tokenizer.json`; the same texts give the same file.

    A small corpus may give fewer tokens than asked for: see the result's `vocab_size`.

    Raises:
        ConfigError: vocab_size has no room for the 256 bytes and the end-of-document token, or the file cannot be
            written, or must not be.
        DataError: there is no text.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < _NUM_BYTES + 1:
        raise ConfigError(
            f"--vocab-size {vocab_size} is too small: a byte-level BPE needs at least {_NUM_BYTES + 1} "
            "(256 bytes and the end-of-document token)."
        )
    backend: Any = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    counts = {"texts": 0, "characters": 0}

    def counted() -> Iterator[str]:
        for text in texts:
            counts["texts"] += 1
            counts["characters"] += len(text)
            if progress and counts["texts"] % 1000 == 0:
                progress(f"read {counts['texts']} documents, {counts['characters'] / 1e6:.1f} M characters")
            yield without_surrogates(text)

    backend.train_from_iterator(counted(), trainer=trainer)
    if not counts["characters"]:
        raise DataError(
            f"no text to train a tokenizer on: {counts['texts']} documents, 0 characters. Check the sources."
        )
    text: str = backend.to_str(pretty=True)
    write_out(out_path, "--out", text)
    tokenizer = FileTokenizer(text, Path(out_path).name)
    if progress:
        progress(f"trained {tokenizer.vocab_size} tokens on {counts['texts']} documents")
    return tokenizer


def write_text_whole(path: Path, text: str) -> None:
    """Write a small file so that its name never shows half of it."""
    from hpc_train.data.index_writer import explain_write_error

    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise explain_write_error(error, path, 0) from error


def without_surrogates(text: str) -> str:
    """Replace half surrogate pairs, which JSON can spell and UTF-8 cannot, character for character by '?'."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text
