"""Turn a corpus into token files: read, tokenise in parallel, write in the corpus's order.

The parent cuts the corpus into work items, workers read and tokenise them, and the parent appends the
results in order. So the files depend on the sources and the tokenizer, and not on the number of workers.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hpc_train.data.encode import Encoded, Work, encode_all
from hpc_train.data.index import bin_path, dtype_for_vocab, index_path, loss_mask_prefix, sidecar_path
from hpc_train.data.index_writer import TokenFileWriter, explain_write_error
from hpc_train.data.sidecar import Sidecar, sha256_of_file
from hpc_train.data.sources import (
    RowFields,
    batches,
    describe_skipped,
    find_files,
)
from hpc_train.data.tokenizer import Tokenizer, write_text_whole
from hpc_train.errors import ConfigError, DataError
from hpc_train.record import quotient

_PROGRESS_EVERY_S = 2.0
Say = Callable[[str], None]


@final
@dataclass(frozen=True)
class BuildOptions:
    """How a corpus is read and split."""

    text_field: str = "text"
    loss_mask_field: str | None = None
    # Of files in folders; none means every file.
    suffixes: tuple[str, ...] = ()
    # Share of the documents, chosen by a hash of their text, that goes to OUT_heldout.
    heldout_fraction: float = 0.0
    # None: one for each core that this process may use.
    num_workers: int | None = None
    overwrite: bool = False


@final
@dataclass(frozen=True)
class PairReport:
    """What one .bin/.idx pair holds."""

    prefix: str
    num_documents: int
    num_tokens: int
    max_token_id: int
    unigram_entropy_nats: float
    num_supervised_tokens: int | None


@final
@dataclass(frozen=True)
class BuildReport:
    """What `build` did."""

    train: PairReport
    heldout: PairReport | None
    tokenizer: str
    vocab_size: int
    dtype: str
    skipped: dict[str, int]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def build(
    sources: Sequence[str | Path],
    tokenizer: Tokenizer,
    out: str | Path,
    options: BuildOptions = BuildOptions(),
    progress: Say | None = None,
    *,
    env: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> BuildReport:
    """Write the corpus as OUT.bin and OUT.idx, with OUT.json and the tokenizer beside them.

    With a held-out share a second pair OUT_heldout is written, with a loss mask one more pair of each,
    named *_loss_mask: a byte for each token, 1 where the token is a target. An end-of-document token closes
    each document; it is supervised if the whole document or its last character is.

    Args:
        env: This process's environment, whose launcher variables (PMI, PMIx, Open MPI) the workers must not
            see if this process is a rank of an MPI program. None: they inherit everything.

    Raises:
        ConfigError: options that do not fit each other or the sources.
        DataError: a source is missing or damaged, a row is bad, nothing is left, the output exists, no space.
    """
    started = clock()
    _check_options(options)
    files, skipped = find_files(sources, options.suffixes)
    if options.loss_mask_field is not None and (other := [file.path for file in files if not file.is_jsonl]):
        raise ConfigError(
            f"--loss-mask {options.loss_mask_field} needs JSONL sources, and {other[0]} is a text file "
            f"(one of {len(other)}). Leave them out (--suffix .jsonl), or build them apart."
        )
    prefixes = [str(out)] + ([f"{out}_heldout"] if options.heldout_fraction else [])
    _prepare_output(str(out), options.overwrite)
    work = Work(tokenizer, RowFields(options.text_field, options.loss_mask_field), options.heldout_fraction)
    total_bytes = sum(file.size_bytes for file in files)
    report = _Progress(total_bytes, progress, clock)
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(_PairWriter(prefix, work, options.overwrite)) for prefix in prefixes]
        for encoded in encode_all(work, batches(files), _num_workers(options), env):
            for side, pair in enumerate(pairs):
                pair.add(encoded, side)
            skipped.update(encoded.skipped)
            report.advance(encoded)
        _refuse_empty(pairs, options, skipped)
        for pair in pairs:
            pair.complete()
        _remove_output(str(out))
        reports = [pair.publish(str(out), skipped) for pair in pairs]
    report.finish()
    return BuildReport(
        train=reports[0],
        heldout=reports[1] if len(reports) > 1 else None,
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        dtype=dtype_for_vocab(tokenizer.vocab_size).name,
        skipped=dict(sorted(skipped.items())),
        seconds=round(clock() - started, 3),
    )


def _check_options(options: BuildOptions) -> None:
    if not 0 <= options.heldout_fraction < 1:
        raise ConfigError(
            f"--heldout {options.heldout_fraction}: it is a share of the documents, from 0 up to below 1."
        )
    if options.num_workers is not None and options.num_workers < 1:
        raise ConfigError(f"--workers {options.num_workers}: at least 1 is needed.")


def _num_workers(options: BuildOptions) -> int:
    return options.num_workers or len(os.sched_getaffinity(0))


def _refuse_empty(pairs: Sequence[_PairWriter], options: BuildOptions, skipped: Counter[str]) -> None:
    total = sum(pair.num_documents for pair in pairs)
    if not total:
        raise DataError(f"the sources hold no document (passed over: {describe_skipped(skipped)}).")
    for pair, side in zip(pairs, ("training", "held-out"), strict=False):
        if not pair.num_documents:
            raise DataError(
                f"--heldout {options.heldout_fraction} of {total} documents leaves the {side} side empty. "
                "Choose another share, or give more documents."
            )


# Output


@final
class _PairWriter:
    """One output: the token file, its loss mask, and what the sidecar says about them."""

    def __init__(self, prefix: str, work: Work, overwrite: bool) -> None:
        self.prefix, self._tokenizer = prefix, work.tokenizer
        self._tokens = TokenFileWriter(prefix, dtype_for_vocab(work.tokenizer.vocab_size), overwrite=overwrite)
        self._mask = None
        self._counts = np.zeros(work.tokenizer.vocab_size, dtype=np.int64)
        self._num_supervised = 0
        if work.fields.loss_mask is not None:
            try:
                self._mask = TokenFileWriter(loss_mask_prefix(prefix), np.uint8, overwrite=overwrite)
            except DataError:
                self._tokens.discard()
                raise

    def __enter__(self) -> _PairWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers():
            writer.__exit__()

    @property
    def num_documents(self) -> int:
        return self._tokens.num_documents

    def add(self, encoded: Encoded, side: int) -> None:
        chosen = encoded.sides == side
        of_token = np.repeat(chosen, encoded.lengths)
        tokens, lengths = encoded.tokens[of_token], encoded.lengths[chosen]
        self._tokens.add_documents(tokens, lengths)
        self._counts += np.bincount(tokens, minlength=len(self._counts))
        if self._mask is not None and encoded.mask is not None:
            mask = encoded.mask[of_token]
            self._mask.add_documents(mask, lengths)
            self._num_supervised += int(mask.sum())

    def complete(self) -> None:
        for writer in self._writers():
            writer.complete()

    def publish(self, out: str, skipped: Counter[str]) -> PairReport:
        """Give all files their names, the sidecar last. The tokenizer lies beside `out`, for all pairs."""
        for writer in self._writers():
            writer.publish()
        report = self._report()
        tokenizer_file = None
        if (text := self._tokenizer.file_text()) is not None:
            path = Path(f"{out}.tokenizer.json")
            tokenizer_file = path.name
            if self.prefix == out:
                write_text_whole(path, text)
        write_text_whole(sidecar_path(self.prefix), self._sidecar(report, tokenizer_file, skipped).to_text())
        return report

    def _writers(self) -> list[TokenFileWriter]:
        return [self._tokens] + ([self._mask] if self._mask is not None else [])

    def _report(self) -> PairReport:
        return PairReport(
            prefix=self.prefix,
            num_documents=self.num_documents,
            num_tokens=int(self._counts.sum()),
            max_token_id=int(np.flatnonzero(self._counts)[-1]),
            unigram_entropy_nats=entropy_nats(self._counts),
            num_supervised_tokens=None if self._mask is None else self._num_supervised,
        )

    def _sidecar(self, report: PairReport, tokenizer_file: str | None, skipped: Counter[str]) -> Sidecar:
        from hpc_train import __version__

        return Sidecar(
            hpc_train_version=__version__,
            tokenizer=self._tokenizer.name,
            tokenizer_sha256=self._tokenizer.sha256,
            tokenizer_file=tokenizer_file,
            vocab_size=self._tokenizer.vocab_size,
            eod_id=self._tokenizer.eod_id,
            max_token_id=report.max_token_id,
            num_documents=report.num_documents,
            num_tokens=report.num_tokens,
            num_supervised_tokens=report.num_supervised_tokens,
            unigram_entropy_nats=report.unigram_entropy_nats,
            idx_sha256=sha256_of_file(index_path(self.prefix)),
            bin_bytes=bin_path(self.prefix).stat().st_size,
            skipped=dict(sorted(skipped.items())),
        )


def entropy_nats(counts: NDArray[np.int64]) -> float:
    """Entropy of the token frequencies: the loss of a model that knows only how often each token occurs."""
    shares = counts[counts > 0] / max(1, int(counts.sum()))
    return float(-(shares * np.log(shares)).sum()) + 0.0


def _output_paths(out: str) -> list[Path]:
    """Every file that some build may have made under this name."""
    paths = []
    for prefix in (out, f"{out}_heldout"):
        for pair in (prefix, loss_mask_prefix(prefix)):
            paths += [index_path(pair), bin_path(pair)]
        paths.append(sidecar_path(prefix))
    return [*paths, Path(f"{out}.tokenizer.json")]


def _prepare_output(out: str, overwrite: bool) -> None:
    existing = [path for path in _output_paths(out) if path.exists()]
    if existing and not overwrite:
        raise DataError(
            f"{existing[0]} exists, and a running job may have it mapped. Choose another --out, or give --overwrite."
        )
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_write_error(error, Path(out), 0) from error


def _remove_output(out: str) -> None:
    """Remove an older build whole, so that no mask or held-out pair of it stays beside the new one."""
    for path in _output_paths(out):
        path.unlink(missing_ok=True)


# Progress


@final
class _Progress:
    """A line now and then; plain text, since it mostly goes into the log of a batch job."""

    def __init__(self, total_bytes: int, say: Say | None, clock: Callable[[], float]) -> None:
        self._total_bytes, self._say, self._clock = total_bytes, say, clock
        self._started = self._last = clock()
        self._documents = self._tokens = self._bytes = 0

    def advance(self, encoded: Encoded) -> None:
        self._documents += len(encoded.lengths)
        self._tokens += len(encoded.tokens)
        self._bytes += encoded.read_bytes
        if self._clock() - self._last >= _PROGRESS_EVERY_S:
            self._last = self._clock()
            self._print("tokenised")

    def finish(self) -> None:
        self._print("done:")

    def _print(self, verb: str) -> None:
        if self._say is None:
            return
        share = f"{100 * self._bytes / self._total_bytes:.0f} %" if self._total_bytes else "n/a"
        rate = quotient(self._bytes / 1e6, self._clock() - self._started)
        self._say(
            f"{verb} {self._documents} documents, {self._tokens} tokens, {self._bytes / 1e6:.1f} of "
            f"{self._total_bytes / 1e6:.1f} MB ({share}), {'n/a' if rate is None else f'{rate:.1f}'} MB/s"
        )
