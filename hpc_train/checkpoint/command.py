"""`hpc-train ckpt ls`, `verify`, `convert`, `prune` and `set-aside`: call, print, exit code."""

from __future__ import annotations

import json
import re
import sys
import time
from argparse import Namespace
from typing import TYPE_CHECKING

from hpc_train.errors import CheckpointError, ConfigError, ExitCode

if TYPE_CHECKING:
    from hpc_train.checkpoint.stores.caller import Bound
    from hpc_train.checkpoint.stores.location import Location

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bound_of(args: Namespace) -> Bound:
    """How long a store may give nothing."""
    from hpc_train.checkpoint.stores.caller import Bound

    return Bound(args.timeout, "Look at the file system; where one call of it may take that long, raise --timeout")


def run_ckpt_command(args: Namespace) -> int:
    """Carry out what `arguments.add_ckpt_parser` parsed; gives the exit code."""
    commands = {
        "ls": ls_command,
        "verify": verify_command,
        "convert": convert_command,
        "prune": prune_command,
        "set-aside": set_aside_command,
    }
    return commands[args.ckpt_command](args)


def ls_command(args: Namespace) -> int:
    from hpc_train.checkpoint.folders.verify import list_checkpoints

    root = _folder_of_checkpoints(_located(args, args.run))
    listed = list_checkpoints(root)
    if args.json:
        tree = [{**vars(item), "path": str(item.path)} for item in listed]
        print(json.dumps(tree, indent=1))
        return ExitCode.DONE
    if not listed:
        print(f"no checkpoints in {root}")
    for item in listed:
        written = "time not known     "
        if item.written_at is not None:
            written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.written_at))
        state = item.problem or f"{item.num_bytes / 2**20:.1f} MiB, {item.num_tensors} tensors"
        print(f"{item.path.name}  {written}  {state}{'  (latest)' if item.is_latest else ''}")
    return ExitCode.DONE


def verify_command(args: Namespace) -> int:
    from hpc_train.checkpoint.folders.find import checkpoints_folder, find_checkpoint, is_checkpoint
    from hpc_train.checkpoint.folders.folder import NO_FOLDER, named_newest_first

    path = _located(args, args.path)
    every: list[tuple[Location, bool]] = []
    if path.is_folder() and not is_checkpoint(path):
        root = checkpoints_folder(path)
        every = [(root / entry.name, entry.is_folder) for _, entry in named_newest_first(root)]
    bad = 0
    for checkpoint, is_folder in every or [(find_checkpoint(path), True)]:
        verdict, problems = _verified(checkpoint) if is_folder else ("no checkpoint", [f"it {NO_FOLDER}"])
        bad += bool(problems)
        print(f"{checkpoint}: {verdict}", flush=True)
        for problem in problems:
            print(f"  {problem}")
        if not problems and not args.all:
            break  # the newest one that is sound, which a run would go on from
    return ExitCode.CHECKPOINT if bad else ExitCode.DONE


def _verified(checkpoint: Location) -> tuple[str, list[str]]:
    """In a word what a checkpoint is, all of which is read, and why it cannot be used.

    Raises:
        StoreError: the store does not answer.
    """
    from hpc_train.checkpoint.folders.folder import MisnamedError, read_committed
    from hpc_train.checkpoint.folders.verify import verify
    from hpc_train.checkpoint.format.manifest import NewerFormatError, read_manifest
    from hpc_train.checkpoint.progress import Progress
    from hpc_train.checkpoint.stores.cause import is_outage, is_unread

    try:
        with Progress(f"reading {checkpoint.name}") as progress:
            problems = list(verify(checkpoint, progress))
        if not problems and read_manifest(checkpoint).step > 0:  # a conversion is of step 0, whatever its name
            read_committed(checkpoint)
    except NewerFormatError as error:
        return "of a newer version", [str(error)]
    except MisnamedError as error:
        return "misnamed", [str(error)]
    except CheckpointError as error:
        if is_outage(error):
            raise
        if is_unread(error):
            return "cannot be read", [str(error)]
        problems = [str(error)]
    return "damaged" if problems else "sound", problems


def convert_command(args: Namespace) -> int:
    from hpc_train.checkpoint.convert.convert_hf import convert
    from hpc_train.checkpoint.progress import Progress

    start = time.monotonic()
    with Progress(f"writing {args.target}") as progress:
        done = convert(
            _located(args, args.source),
            _located(args, args.target),
            dtype=args.dtype,
            max_shard_bytes=parse_size(args.max_shard_size) if args.max_shard_size else None,
            config=args.config,
            tokenizer=_located(args, args.tokenizer) if args.tokenizer else None,
            ignore=args.ignore,
            to=args.to,
            progress=progress,
        )
    seconds = time.monotonic() - start
    if args.json:
        tree = {
            "target": str(done.target),
            "direction": done.direction,
            "model": done.spec.model.model_dump(mode="json"),
            "seq_len": done.spec.max_seq_len,
            "num_parameters": done.num_parameters,
            "num_bytes": done.num_bytes,
            "dtypes": done.dtypes,
            "carried": done.carried,
            "checkpoint": str(done.checkpoint) if done.checkpoint is not None else None,
        }
        print(json.dumps(tree, indent=1))
        return ExitCode.DONE
    of_checkpoint = f" of {done.checkpoint}" if done.checkpoint is not None else ""
    print(
        f"{done.target}: {done.spec.model.family} {done.direction}{of_checkpoint}, "
        f"{done.num_parameters / 1e6:.2f} M parameters, {' and '.join(done.dtypes)}, "
        f"{done.num_bytes / 2**20:.1f} MiB in {seconds:.1f} s"
    )
    print(f"carried along: {', '.join(done.carried) or 'no tokenizer file'}", file=sys.stderr)
    return ExitCode.DONE


def prune_command(args: Namespace) -> int:
    from hpc_train.checkpoint.folders.pruning import carry_out, plan_pruning
    from hpc_train.checkpoint.progress import Progress

    root = _folder_of_checkpoints(_located(args, args.run))
    with Progress("reading the newest one") as progress:
        pruning = plan_pruning(root, args.keep, args.every, progress)
    if not args.dry_run:
        carry_out(pruning)
    if args.json:
        tree = {
            "kept": [str(path) for path in pruning.kept],
            "removed": [str(path) for path in pruning.removed],
            "damaged": {str(path): problem for path, problem in pruning.damaged},
            "dry_run": args.dry_run,
        }
        print(json.dumps(tree, indent=1))
        return ExitCode.DONE
    if not (pruning.kept or pruning.damaged or pruning.removed):
        print(f"no checkpoints in {root}")
    for path in pruning.kept:
        print(f"kept     {path.name}")
    for path, problem in pruning.damaged:
        print(f"left     {path.name}, which cannot be used: {problem}")
    for path in pruning.removed:
        print(f"{'to go' if args.dry_run else 'removed':8} {path.name}")
    return ExitCode.DONE


def set_aside_command(args: Namespace) -> int:
    from hpc_train.checkpoint.folders.set_aside import put_back, set_aside

    path = _located(args, args.checkpoint)
    if args.undo:
        print(f"{path} is {put_back(path).name} again")
    else:
        print(f"{path} is {set_aside(path).name} now: no run goes on from it or removes it (back again with --undo)")
    return ExitCode.DONE


def _located(args: Namespace, place: str) -> Location:
    """A path or URL of the command, each call on which is waited for as long as --timeout says."""
    from hpc_train.checkpoint.stores.location import locate
    from hpc_train.checkpoint.stores.store import Patience

    return locate(place, Patience(bound=bound_of(args)))


def _folder_of_checkpoints(path: Location) -> Location:
    """Where a run's checkpoints are.

    Raises:
        CheckpointError: it is no folder, or a checkpoint itself.
    """
    from hpc_train.checkpoint.folders.find import checkpoints_folder, is_checkpoint

    if not path.is_folder():
        found = "is not a folder" if path.is_file() else "does not exist"
        raise CheckpointError(f"{path} {found}; give a run folder, or one with checkpoints")
    if is_checkpoint(path):
        raise CheckpointError(f"{path} is one checkpoint; give its run folder, or the folder that it lies in")
    root = checkpoints_folder(path)
    if not root.is_folder():
        raise CheckpointError(
            f"{root}, where {path} says that its checkpoints are, is not a folder; mount its file system, if it is not"
        )
    return root


def parse_size(text: str) -> int:
    """Bytes of 5GB, 500MB, 2GiB or a plain number."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]I?B|)", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise ConfigError(f"--max-shard-size {text} is not a size; write 5GB, 500MB, 2GiB or a number of bytes")
    return size
