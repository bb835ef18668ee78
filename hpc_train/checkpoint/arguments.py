"""The arguments of `hpc-train ckpt`. Only argparse is imported here: `--help` must start at once."""

from __future__ import annotations

import argparse
from typing import Any

from hpc_train.arguments import A_RUN, add_runs_dir, filled, positive, seconds

_EXAMPLES = """\
examples:
  hpc-train ckpt ls runs/llama/123
  hpc-train ckpt verify runs/llama/123                      every stored byte of the newest checkpoint
  hpc-train ckpt convert Llama-2-7b-hf init/llama-7b        from Hugging Face; begin with checkpoint.init_from
  hpc-train ckpt convert runs/llama/123 out/llama --dtype bf16
  hpc-train ckpt convert Llama-2-7b-hf hdfs://nn1:8020/user/me/init/llama-7b
  hpc-train ckpt prune runs/llama/123 --keep 3              all but the newest three
  hpc-train ckpt set-aside runs/llama/123/checkpoints/step_0002000
"""


def add_ckpt_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `ckpt` with its commands; `args.ckpt_command` says which one was given."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "ckpt",
        help="list, check, convert and thin out checkpoints",
        description="List, check, convert, thin out and set aside checkpoints, in folders and at hdfs:// URLs.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="ckpt_command", metavar="COMMAND", required=True)
    _add_ls(commands)
    _add_verify(commands)
    _add_convert(commands)
    _add_prune(commands)
    _add_set_aside(commands)
    return parser


def _add_ls(commands: Any) -> None:
    parser = commands.add_parser(
        "ls",
        help="the checkpoints of a run",
        description="List the checkpoints of a run: step, size, age, and what is wrong with one that is not whole.",
        epilog="example:\n  hpc-train ckpt ls runs/llama/123\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", type=filled, metavar="FOLDER", help=f"run folder, {A_RUN}; or a folder or URL of checkpoints"
    )
    add_runs_dir(parser)
    _add_timeout(parser)
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def _add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="read every byte of a checkpoint and compare checksums",
        description="Read every stored byte of a checkpoint and compare checksums. Ends with code 5 on damage.",
        epilog="examples:\n  hpc-train ckpt verify runs/llama/123\n  hpc-train ckpt verify runs/llama/123 --all\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "path",
        type=filled,
        metavar="PATH",
        help=f"a checkpoint or its URL; or a run folder, {A_RUN}: its newest one and, until one is sound, those before",
    )
    add_runs_dir(parser)
    parser.add_argument("--all", action="store_true", help="all checkpoints of the run")
    _add_timeout(parser)


def _add_convert(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="to and from Hugging Face folders",
        description="Convert a Hugging Face folder (Llama or GPT-2: config.json, safetensors) to a checkpoint, or a "
        "checkpoint of any mesh to a Hugging Face folder; SRC says which way. Memory is bounded by the largest "
        "tensor. Tokenizer files go along.",
        epilog="examples:\n"
        "  hpc-train ckpt convert Llama-2-7b-hf init/llama-7b\n"
        "      then checkpoint.init_from=init/llama-7b, and the model section of init/llama-7b/model.yaml\n"
        "  hpc-train ckpt convert runs/llama/123 out/llama --dtype bf16 --tokenizer Llama-2-7b-hf\n"
        "  hpc-train ckpt convert runs/llama/123/checkpoints/step_0001000 out/llama-1000\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "source",
        type=filled,
        metavar="SRC",
        help=f"Hugging Face folder or checkpoint, or a URL; or a run folder, {A_RUN}: its newest checkpoint",
    )
    add_runs_dir(parser)
    parser.add_argument("target", type=filled, metavar="DST", help="folder or URL to make; it must not exist")
    parser.add_argument(
        "--to",
        choices=["hf", "dcp"],
        help="of a checkpoint: a Hugging Face folder (default), or its weights in one file of torch's layout",
    )
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="type of the weights (default: as stored)")
    parser.add_argument(
        "--max-shard-size",
        type=filled,
        metavar="SIZE",
        help="to Hugging Face: largest file, such as 5GB or 500MB (default: files as the model came in, else 5GB)",
    )
    parser.add_argument(
        "--tokenizer",
        type=filled,
        metavar="PATH",
        help="to Hugging Face: a tokenizer.json, or a folder whose tokenizer files and token ids go along",
    )
    parser.add_argument(
        "--config",
        type=filled,
        metavar="CONFIG",
        help="to Hugging Face: the configuration of a checkpoint outside its run folder",
    )
    parser.add_argument(
        "--ignore",
        type=filled,
        action="append",
        default=[],
        metavar="KEY",
        help="from Hugging Face: a key of config.json that is unknown here and changes nothing",
    )
    _add_timeout(parser)
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def _add_prune(commands: Any) -> None:
    parser = commands.add_parser(
        "prune",
        help="remove old checkpoints of a run",
        description="Remove all but the newest checkpoints of a run. The newest one that has all its checksums always "
        "stays, which is read for that; damaged ones are named and left alone.",
        epilog="examples:\n"
        "  hpc-train ckpt prune runs/llama/123 --keep 3 --dry-run\n"
        "  hpc-train ckpt prune runs/llama/123 --keep 2 --every 10000\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", type=filled, metavar="FOLDER", help=f"run folder, {A_RUN}; or a folder or URL of checkpoints"
    )
    add_runs_dir(parser)
    parser.add_argument("--keep", type=positive, required=True, metavar="N", help="how many of the newest stay")
    parser.add_argument("--every", type=positive, metavar="K", help="steps that are multiples of K stay as well")
    parser.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")
    _add_timeout(parser)
    parser.add_argument("--json", action="store_true", help="print what was done as JSON")


def _add_set_aside(commands: Any) -> None:
    parser = commands.add_parser(
        "set-aside",
        help="take a checkpoint out of a run's way, such as one that cannot be read",
        description="Rename a checkpoint so that no run goes on from it, counts or removes it. Nothing of it is read "
        "or changed, so that it can be put back: for one that a store does not give, and that may be whole.",
        epilog="examples:\n"
        "  hpc-train ckpt set-aside hdfs://nn1:8020/user/me/runs/llama/123/step_0002000\n"
        "  hpc-train ckpt set-aside hdfs://nn1:8020/user/me/runs/llama/123/step_0002000.set-aside --undo\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=filled, metavar="CHECKPOINT", help="folder or URL of the checkpoint")
    parser.add_argument("--undo", action="store_true", help="give back the name to one that was set aside")
    _add_timeout(parser)


def _add_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long nothing may move in a store before the command gives it up (default: 600)",
    )
