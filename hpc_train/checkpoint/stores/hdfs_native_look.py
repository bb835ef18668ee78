"""Why hdfs-native gives no bytes of a block: it tells its log alone, so a process of its own reads them once more.

The client raises one error whether data nodes are down or their replicas have rotted. Its log, which goes to standard
error as RUST_LOG asks, has the name node's answer and what came of each replica. What is not understood there, such as
the words of another version, is not known.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping

from hpc_train.checkpoint.stores.hdfs_replicas import LocatedBlock, reported_rot

_LOOK_S = 60.0
"""For all of it; assumed: Python's start from a busy file system, and the client's own limits for data nodes."""
_LOG = "off,hdfs_native::hdfs::protocol=debug,hdfs_native::hdfs::block_reader=warn"
_PROGRAM = """\
import json, sys
import hdfs_native
url, path, start, end = json.loads(sys.argv[1])
client = hdfs_native.Client(url)
status = client.get_file_info(path)
print(status.replication, flush=True)
file = client.read(path)
end = min(end, len(file))
while start < end:
    stop = min(end, start - start % status.blocksize + status.blocksize)
    print(f"reading {start} to {stop}", file=sys.stderr, flush=True)
    file.read_range(start, stop - start)
    start = stop
"""
# cited: hdfs-native 0.14.7, the messages of hdfs/protocol.rs and hdfs/block_reader.rs.
_LOCATED = "getBlockLocations response: "
_BLOCK = re.compile(
    r"LocatedBlockProto \{ b: ExtendedBlockProto \{ [^}]*?num_bytes: Some\((\d+)\) \}, offset: (\d+), "
    r"locs: \[(.*?)\], corrupt: (true|false), .*?block_indices: (None|Some)"
)
_REPLICA = "DatanodeInfoProto {"
_BAD_CHECKSUM = "Error occurred while reading from DataNode: ChecksumError"
_READING = re.compile(r"^reading (\d+) to (\d+)$", re.MULTILINE)


def look_for_rot(url: str | None, path: str, span: range, env: Mapping[str, str]) -> str | None:
    """Read the bytes of a span in a process of its own: in words the block that has rotted; None if none is known to.

    url: of the client; None: what Hadoop's configuration says. env: this process's environment.
    """
    asked = json.dumps([url, path, span.start, span.stop])
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, asked],
            env={**env, "RUST_LOG": _LOG, "RUST_LOG_STYLE": "never"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LOOK_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return known_rot(done.stdout, done.stderr) if done.returncode else None


def known_rot(replication: str, log: str) -> str | None:
    """As `look_for_rot`, from what the process has said: the file's replication, and the client's log of a read."""
    if not replication.strip().isdecimal():
        return None
    wanted, blocks = int(replication), _blocks(log)
    if (told := reported_rot(blocks, wanted)) is not None:
        return told
    *_, last = [None, *_READING.finditer(log)]
    if last is None:
        return None
    start, end = int(last[1]), int(last[2])
    num_bad = log.count(_BAD_CHECKSUM, last.end())
    for block in blocks:
        if block.start <= start and end <= block.start + block.num_bytes:
            is_rotten = block.names_all(wanted) and num_bad == block.num_replicas
            return block.rotted("by their checksums") if is_rotten else None
    return None


def _blocks(log: str) -> list[LocatedBlock]:
    """Of the name node's last answer."""
    answer = log.rpartition(_LOCATED)[2].partition("\n")[0]
    return [
        LocatedBlock(int(start), int(num_bytes), replicas.count(_REPLICA), corrupt == "true", indices == "Some")
        for num_bytes, start, replicas, corrupt, indices in _BLOCK.findall(answer)
    ]
