"""Python stacks of a rank, which the agent can request even while the rank hangs.

`faulthandler` writes the stacks in a signal handler, which needs neither the GIL nor a thread of
Paceline. So it writes them even while all threads are blocked, in Python or in C.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sysconfig
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import paceline
from paceline.node import rundir
from paceline.node.health.stacks import ANNOUNCED, WRITTEN, Announcement

# Number of the first signal to consider, relative to SIGRTMIN, because profilers and runtimes use
# the lowest numbers.
_FIRST_SIGNAL = 8
_log = logging.getLogger(__name__)
# Descriptors of the files to which faulthandler writes until the process ends.
_registered: list[int] = []


def register(variables: Mapping[str, str]) -> int | None:
    """Make a signal write the stacks of all threads to a file beside the rank's logs.

    The signal is registered once, and only in a rank that Paceline has launched. It is a real-time
    signal that had no handler before. Errors are logged and not raised, because training does not
    need the stacks. Return the signal's number, or None if no signal was registered.
    """
    errors = variables.get("TORCHELASTIC_ERROR_FILE")
    if _registered or not errors or not variables.get("PACELINE_RUN"):
        return None
    folder = Path(errors).parent
    try:
        number = _free()
        if number is None:
            _log.info("no real-time signal is free: this rank cannot report stacks when it hangs")
            return None
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(folder / WRITTEN, flags, 0o600)
        # Ignore the signal first: otherwise it would end the process once the interpreter has
        # removed faulthandler's handler at exit. Only the main thread may call `signal.signal`.
        with suppress(ValueError):
            signal.signal(number, signal.SIG_IGN)
        faulthandler.register(number, file=handle, all_threads=True, chain=False)
        _registered.append(handle)
        main = threading.main_thread().ident or 0
        announced = Announcement(os.getpid(), number, main, libraries())
        rundir.write(folder / ANNOUNCED, announced)
    except (OSError, RuntimeError) as error:
        _log.warning("this rank cannot report stacks when it hangs: %s", error)
        return None
    return number


def _free() -> int | None:
    lines = Path("/proc/self/status").read_text().splitlines()
    masks = (line.partition(":\t") for line in lines if line[:6] in ("SigCgt", "SigIgn", "SigBlk"))
    used = 0
    for _, _, mask in masks:
        used |= int(mask, 16)
    numbers = range(signal.SIGRTMIN + _FIRST_SIGNAL, signal.SIGRTMAX + 1)
    return next((number for number in numbers if not used >> (number - 1) & 1), None)


def libraries() -> list[str]:
    """Return the folders of libraries; code in other folders is the user's own."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {*(sysconfig.get_path(name) for name in names), str(Path(paceline.__file__).parent)}
    return sorted(f"{folder}{os.sep}" for folder in folders)


def is_users(file: str) -> bool:
    """Return True if a file is the user's: not a library's, and no placeholder like <string>."""
    return not file.startswith((*libraries(), "<"))
