"""Read pip's report of a dry run on stdin and say what it would fetch.

    pip install --dry-run --report - torch | python download_size.py             '2 packages, 203 MB'
    pip install --dry-run --report - torch | python download_size.py --is-cuda   exit code 0 if torch brings CUDA

pip's report has addresses but no sizes: a file is looked at, a server is asked for the length alone.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit


def num_bytes(url: str) -> int | None:
    """Size of what lies at `url`; None if nobody says."""
    parts = urlsplit(url)
    try:
        if parts.scheme == "file":
            return Path(unquote(parts.path)).stat().st_size
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10) as answer:
            length = answer.headers["Content-Length"]
            return int(length) if length else None
    except (OSError, ValueError):
        return None


def describe(sizes: list[int | None]) -> str:
    """The total in words, with how many packages did not tell."""
    known = [size for size in sizes if size is not None]
    text = f"{len(sizes)} packages, {sum(known) / 1e6:.0f} MB"
    silent = len(sizes) - len(known)
    return f"{text} and {silent} of unknown size" if silent else text


def main() -> int:
    packages = json.load(sys.stdin)["install"]
    if "--is-cuda" in sys.argv:
        return 0 if any(package["metadata"]["name"].startswith("nvidia-") for package in packages) else 1
    with ThreadPoolExecutor(8) as pool:
        print(describe(list(pool.map(num_bytes, [package["download_info"]["url"] for package in packages]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
