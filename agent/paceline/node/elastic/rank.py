"""Becomes a rank: ties its life to the launcher's, then turns into ``python -u script args…``.

It is run by path, ``python -P rank.py LAUNCHER_PID script args…``, so that it imports nothing of
the package. The kernel keeps the request across the exec. The script starts as under plain Python.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # the launcher died before the request to the kernel
        sys.exit(1)
    if umask := os.environ.pop("PACELINE_UMASK", ""):  # what the script writes is the user's
        os.umask(int(umask, 8))
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv[2:]])
