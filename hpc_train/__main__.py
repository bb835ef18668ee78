"""`python -m hpc_train` is `hpc-train`."""

from __future__ import annotations

import sys

from hpc_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
