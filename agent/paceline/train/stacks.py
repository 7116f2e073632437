"""Lets the agent ask this rank for its Python stacks, also while the rank hangs.

`faulthandler` writes them within the handler of a signal, which needs neither the interpreter's
lock nor a thread of ours. So it works while all threads wait, in Python or in C.
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

_FIRST = 8  # above SIGRTMIN; profilers and runtimes use the lowest numbers
_log = logging.getLogger(__name__)
_registered: list[int] = []  # descriptors of files; faulthandler writes there until the end


def register(variables: Mapping[str, str]) -> int | None:
    """Makes a signal write the stacks of all threads to a file beside the rank's logs.

    Only a rank that Paceline has launched does so, once. It takes a real-time signal that has no
    handler. A problem is logged, because training does not need this.

    Args:
        variables: the process's environment.

    Returns:
        The signal's number; None: there is none.
    """
    errors = variables.get("TORCHELASTIC_ERROR_FILE")
    if _registered or not errors or not variables.get("PACELINE_RUN"):
        return None
    folder = Path(errors).parent
    try:
        number = _free()
        if number is None:
            _log.info("no real-time signal is free: this rank gives no stacks when it hangs")
            return None
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(folder / WRITTEN, flags, 0o600)
        # So that the signal does nothing, rather than end the process, once the interpreter has
        # given up its handler at exit. Only the main thread may say so.
        with suppress(ValueError):
            signal.signal(number, signal.SIG_IGN)
        faulthandler.register(number, file=handle, all_threads=True, chain=False)
        _registered.append(handle)
        main = threading.main_thread().ident or 0
        announced = Announcement(os.getpid(), number, main, libraries())
        rundir.write(folder / ANNOUNCED, announced)
    except (OSError, RuntimeError) as error:
        _log.warning("this rank gives no stacks when it hangs: %s", error)
        return None
    return number


def _free() -> int | None:
    """A real-time signal that has its default action."""
    lines = Path("/proc/self/status").read_text().splitlines()
    masks = (line.partition(":\t") for line in lines if line[:6] in ("SigCgt", "SigIgn", "SigBlk"))
    used = 0
    for _, _, mask in masks:
        used |= int(mask, 16)
    numbers = range(signal.SIGRTMIN + _FIRST, signal.SIGRTMAX + 1)
    return next((number for number in numbers if not used >> (number - 1) & 1), None)


def libraries() -> list[str]:
    """Folders of code that is not the user's."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {*(sysconfig.get_path(name) for name in names), str(Path(paceline.__file__).parent)}
    return sorted(f"{folder}{os.sep}" for folder in folders)


def is_users(file: str) -> bool:
    """Whether a file of code is the user's: of no library, nor frozen into Python."""
    return not file.startswith((*libraries(), "<"))
