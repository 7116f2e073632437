"""Start of a rank: the process replaces itself by ``python -u script args…`` (exec).

Before that, it asks the kernel to kill it when the launcher ends; the request survives the exec.
This file is run by path, ``python -P rank.py LAUNCHER_PID script args…``, so that it imports
nothing of the package. A driver (`paceline.core.driver`) is not a rank. It gets none of a rank's
variables, because the processes that it starts would inherit them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_OF_RANK = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
}

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the launcher died before the request to the kernel, this process must end itself.
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
    # Restore the user's own umask for files that the script writes.
    if umask := os.environ.pop("PACELINE_UMASK", ""):
        os.umask(int(umask, 8))
    if os.environ.get("PACELINE_DRIVER"):
        for name in list(os.environ):
            if name in _OF_RANK or name.startswith("TORCHELASTIC_"):
                del os.environ[name]
        os.environ["PACELINE_DRIVER"] = str(os.getpid())
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv[2:]])
