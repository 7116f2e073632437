"""``python -m paceline.node.elastic.rendezvous``: hosts the store through which launchers meet.

The store has a process of its own, because a run dies with the process that hosts its store.
"""

from __future__ import annotations

import argparse
import signal
from datetime import timedelta


def main() -> None:
    """Serves on an inherited listening socket until a signal ends it."""
    parser = argparse.ArgumentParser(prog="python -m paceline.node.elastic.rendezvous")
    parser.add_argument("--fd", type=int, required=True, help="the listening socket")
    parser.add_argument("--port", type=int, required=True, help="that it listens on")
    options = parser.parse_args()

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        "127.0.0.1",
        options.port,
        is_master=True,
        timeout=timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=options.fd,
    )
    signal.pause()
    del store


if __name__ == "__main__":
    main()
