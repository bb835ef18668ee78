"""A process that keeps torch's store on a socket that it inherits: python -m hpc_train.comm.store_holder HOST PORT FD.

`hpc-train exec` starts it beside rank 0's program. The task that started it already listens on the socket, so clients
wait in its backlog while torch is imported here. Lives until that task kills it.
"""

from __future__ import annotations

import signal
import sys


def main() -> int:
    host, port, descriptor = sys.argv[1:]
    from torch.distributed import TCPStore

    store = TCPStore(host, int(port), is_master=True, wait_for_workers=False, master_listen_fd=int(descriptor))
    signal.pause()
    del store
    return 1


if __name__ == "__main__":
    sys.exit(main())
