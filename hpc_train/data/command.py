"""`hpc-train data build`, `data show` and `data tokenizer`: call, print, exit code."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from hpc_train.errors import ExitCode
from hpc_train.plan.out_file import check_out

_BAR_WIDTH = 40


def run_data_command(args: Namespace, env: Mapping[str, str] | None = None) -> int:
    """Carry out what `arguments.add_data_parser` parsed; gives the exit code. `env`: see `build.build`."""
    if args.data_command == "build":
        return build_command(args, env)
    return show_command(args) if args.data_command == "show" else tokenizer_command(args)


def build_command(args: Namespace, env: Mapping[str, str] | None = None) -> int:
    from hpc_train.data.build import BuildOptions, build
    from hpc_train.data.tokenizer import load_tokenizer

    options = BuildOptions(
        text_field=args.text_field,
        loss_mask_field=args.loss_mask,
        suffixes=tuple(args.suffix),
        heldout_fraction=args.heldout,
        num_workers=args.workers,
        overwrite=args.overwrite,
    )
    with _stopping_cleanly():
        tokenizer = load_tokenizer(args.tokenizer, args.eod)
        report = build(args.sources, tokenizer, args.out, options, _to_stderr, env=env)
    if args.json:
        _print_json(report.to_dict())
        return ExitCode.DONE
    for pair in filter(None, (report.train, report.heldout)):
        supervised = ""
        if pair.num_supervised_tokens is not None:
            supervised = f", {pair.num_supervised_tokens} of them supervised"
        print(
            f"{pair.prefix}: {pair.num_documents} documents, {pair.num_tokens} tokens "
            f"({report.dtype}{supervised}), "
            f"unigram entropy {pair.unigram_entropy_nats:.3f} nats"
        )
    print(f"tokenizer {report.tokenizer}: model.vocab_size={report.vocab_size}")
    if report.skipped:
        print("passed over: " + ", ".join(f"{count} {reason}" for reason, count in report.skipped.items()))
    return ExitCode.DONE


@contextlib.contextmanager
def _stopping_cleanly() -> Iterator[None]:
    """Let a SIGTERM, which is how Slurm ends a job, end this as Ctrl-C does: temporary files are removed first."""

    def stop(signum: int, frame: object) -> None:
        raise KeyboardInterrupt("stopped by SIGTERM before the dataset was complete; nothing was written")

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def show_command(args: Namespace) -> int:
    from hpc_train.data.show import show

    description = show(args.prefix, args.verify)
    if args.json:
        _print_json(description)
    else:
        print("\n".join(_description_lines(description)))
    return ExitCode.DONE


def tokenizer_command(args: Namespace) -> int:
    from hpc_train.data.sources import find_files, read_texts
    from hpc_train.data.tokenizer import train_bpe

    files, _ = find_files(args.sources, tuple(args.suffix))
    check_out(args.out, "--out", inputs=[file.path for file in files])
    tokenizer = train_bpe(read_texts(files, args.text_field), args.vocab_size, args.out, _to_stderr)
    if args.json:
        _print_json({"file": args.out, "vocab_size": tokenizer.vocab_size, "sha256": tokenizer.sha256})
        return ExitCode.DONE
    short = (
        "" if tokenizer.vocab_size == args.vocab_size else f" (the corpus gives no more than that of {args.vocab_size})"
    )
    print(f"{args.out}: {tokenizer.vocab_size} tokens{short}")
    return ExitCode.DONE


def _description_lines(description: dict[str, Any]) -> list[str]:
    lengths = description["lengths"]
    entropy = description["unigram_entropy_nats"]
    lines = [
        f"{description['prefix']}: {description['num_documents']} documents, {description['num_tokens']} "
        "tokens, "
        f"{description['dtype']}, {description['bin_bytes']} bytes",
        f"tokenizer: {description['tokenizer'] or 'unknown'}, vocabulary "
        f"{description['vocab_size'] or 'unknown'}, "
        f"largest id {_or_na(description['max_token_id'])}",
        f"unigram entropy: {'n/a' if entropy is None else f'{entropy:.3f}'} nats a token",
        "lengths: " + ", ".join(f"{name} {_or_na(value)}" for name, value in lengths.items()),
    ]
    lines += _histogram_lines(description["histogram"])
    if description["num_supervised_tokens"] is not None:
        lines.append(f"supervised tokens: {description['num_supervised_tokens']}")
    if description["first_text"] is not None:
        lines.append(f"first text: {description['first_text']!r}")
    else:
        lines.append(f"first tokens: {description['first_tokens']}")
    lines += [f"check, {check['check']}: ok, {check['detail']}" for check in description["checks"]]
    return lines


def _histogram_lines(rows: list[dict[str, int]]) -> list[str]:
    """Documents by length, and which share of the tokens they and all longer ones hold; bars by tokens."""
    header = f"{'length from':>12} {'documents':>12} {'':>7} {'tokens':>14} {'':>7} {'and longer':>10}"
    num_documents, num_tokens = (sum(row[name] for row in rows) for name in ("documents", "tokens"))
    most = max((row["tokens"] for row in rows), default=0)
    lines, left = [header], num_tokens
    for row in rows:
        documents, tokens = row["documents"], row["tokens"]
        lines.append(
            f"{row['from']:>12} {documents:>12} {documents / num_documents:>7.2%} {tokens:>14} "
            f"{tokens / num_tokens:>7.2%} {left / num_tokens:>10.2%} {'#' * (_BAR_WIDTH * tokens // most)}".rstrip()
        )
        left -= tokens
    return lines


def _or_na(value: object) -> object:
    return "n/a" if value is None else value


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=1, allow_nan=False))


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
