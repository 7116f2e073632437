"""Becomes a rank: ties its life to the launcher's, then turns into ``python -u script args…``.

Run by path, as ``python -P rank.py LAUNCHER_PID script args…``, so that nothing of the package is
imported: the request to the kernel survives the exec, and the script starts as under plain Python.
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
    if os.getppid() != int(sys.argv[1]):  # it died before the kernel knew
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv[2:]])
