"""Runs a script's `main` on two ranks, with the environment that torchrun gives.

python forked_script.py SCRIPT ARGUMENT…: both ranks are forks of one process that has imported the
script, and with it torch and a framework, which takes longer than the training of a test.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from paceline.node.processes import number_of, reserved_port

WORLD = 2


def main() -> int:
    path = sys.argv[1]
    del sys.argv[0]
    spec = importlib.util.spec_from_file_location("script", path)
    assert spec is not None and spec.loader is not None
    script = sys.modules["script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with reserved_port() as reserved:
        os.environ |= {
            "TORCHELASTIC_RUN_ID": "none",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(number_of(reserved)),
            "WORLD_SIZE": str(WORLD),
            "LOCAL_WORLD_SIZE": str(WORLD),
        }
        ranks = set()
        for rank in range(WORLD):
            ranks.add(pid := os.fork())
            if pid == 0:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                _end(script.main)
        while ranks:
            pid, status = os.wait()
            ranks.remove(pid)
            if status:
                print(f"a rank ended with {os.waitstatus_to_exitcode(status)}", file=sys.stderr)
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
                return 1
    return 0


def _end(main: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
