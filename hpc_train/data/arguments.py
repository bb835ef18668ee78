"""The arguments of `hpc-train data`. Only argparse is imported here: `--help` must start at once."""

from __future__ import annotations

import argparse
from typing import Any

from hpc_train.arguments import filled

_EXAMPLES = """\
examples:
  hpc-train data build corpus/ --suffix .py --tokenizer byte --out data/code --heldout 0.02
  hpc-train data build chat.jsonl.gz --tokenizer tok.json --out data/chat --loss-mask answer_spans
  hpc-train data show data/code --verify
  hpc-train data tokenizer corpus/ --suffix .py --vocab-size 4096 --out tok.json
"""


def add_data_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `data` with its three commands; `args.data_command` says which one was given."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "data",
        help="make, describe and check token datasets",
        description="Make, describe and check token datasets (Megatron .bin/.idx pairs).",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="data_command", metavar="COMMAND", required=True)
    _add_build(commands)
    _add_show(commands)
    _add_tokenizer(commands)
    return parser


def _add_build(commands: Any) -> None:
    parser = commands.add_parser(
        "build",
        help="turn text, JSONL or source trees into a dataset",
        description="Tokenise text files (a document each), JSONL (also .jsonl.gz; a document a row) and "
        "folders (walked in sorted order) into OUT.bin, OUT.idx and OUT.json. The result does not depend on "
        "--workers.",
        epilog="examples:\n"
        "  hpc-train data build corpus/ --suffix .py .md --tokenizer byte --out data/code --heldout 0.02\n"
        "  hpc-train data build part-*.jsonl.gz --tokenizer tok.json --out data/web --workers 32\n"
        "  hpc-train data build chat.jsonl --tokenizer tok.json --out data/chat --loss-mask answer_spans\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_sources(parser)
    parser.add_argument(
        "--tokenizer", type=filled, required=True, metavar="byte|FILE", help="'byte', or a tokenizer.json"
    )
    parser.add_argument(
        "--eod", type=filled, metavar="TOKEN", help="end-of-document token, where FILE's has no usual name"
    )
    parser.add_argument(
        "--out", type=filled, required=True, metavar="PREFIX", help="path of the dataset, without an ending"
    )
    parser.add_argument(
        "--loss-mask",
        type=filled,
        metavar="FIELD",
        help="JSONL field with the supervised characters: a list of [start, end) pairs, or true or "
        "false for the whole text; written as a second pair PREFIX_loss_mask",
    )
    parser.add_argument(
        "--heldout",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the documents, chosen by their text, that goes to PREFIX_heldout instead (default 0)",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes (default: one for each core that may be used)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset of this name")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_show(commands: Any) -> None:
    parser = commands.add_parser(
        "show",
        help="describe and check a dataset",
        description="Describe a dataset: documents, tokens, lengths with their tail, entropy, first tokens.",
        epilog="example:\n  hpc-train data show data/code --verify\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("prefix", type=filled, metavar="PREFIX", help="path of the dataset, without an ending")
    parser.add_argument("--verify", action="store_true", help="read every token and compare hashes")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_tokenizer(commands: Any) -> None:
    parser = commands.add_parser(
        "tokenizer",
        help="train a byte-level BPE on a corpus",
        description="Train a byte-level BPE with an <|endoftext|> token; the same corpus gives the same file.",
        epilog="example:\n  hpc-train data tokenizer corpus/ --suffix .py --vocab-size 4096 --out tok.json\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_sources(parser)
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="tokens, at least 257")
    parser.add_argument("--out", type=filled, required=True, metavar="FILE", help="the tokenizer.json to write")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources", type=filled, nargs="+", metavar="SRC", help="text file, .jsonl, .jsonl.gz, or folder"
    )
    parser.add_argument(
        "--suffix", type=filled, nargs="+", default=[], metavar=".EXT", help="in folders, only files that end so"
    )
    parser.add_argument(
        "--text-field", type=filled, default="text", metavar="FIELD", help="JSONL field with the text (default: text)"
    )
