"""Permissions of files that hold secrets: databases, logs, spools and tokens.

The command line calls `files` when it starts.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from paceline.core.errors import InputError, PacelineError

# Permission bits of all users except the owner.
OTHERS = 0o077

# The umask that the user had set before `files` was called; -1: `files` was not called.
_given = -1


def files() -> None:
    """Set the umask, so that only this user can access files that this process creates."""
    global _given
    before = os.umask(OTHERS)
    if _given == -1:
        _given = before


def given_umask() -> int:
    """Return the umask that the user had set, for programs that `subprocess.Popen` starts.

    Return -1 if `files` was not called; `subprocess.Popen` then leaves the umask unchanged.
    """
    return _given


def check_data(folder: Path) -> None:
    """Reject a data directory in which another user may have created files.

    The directory, its entries, and the entries of its folders `bus` and `runs` must belong to this
    user or to root. Deeper entries are not checked, because only the owners of the checked folders
    can have created them.

    Raises:
        PacelineError: another user owns a checked entry.
        OSError: a checked entry cannot be read.
    """
    if not folder.exists():
        return
    nested = (folder / name for name in ("bus", "runs"))
    folders = [folder, *(each for each in nested if each.is_dir())]
    entries = [folder.resolve(), *(entry for each in folders for entry in each.iterdir())]
    for path in entries:
        try:
            owner = path.lstat().st_uid
        # A process that uses this data directory has removed the entry meanwhile.
        except FileNotFoundError:
            continue
        if owner not in (0, os.geteuid()):
            raise PacelineError(
                f"--data: {path} belongs to another user ({_name(owner)}), who may have created "
                "it: choose another data directory, or check its contents and chown it"
            )


def _name(owner: int) -> str:
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return f"uid {owner}"


def secret(option: str, path: Path) -> str:
    """Return the secret in a file, without surrounding white space.

    `option` is the command-line option that gave the file, for messages. Raise an InputError if the
    file is empty, or if `check` rejects it.
    """
    check(option, path)
    if text := path.read_text().strip():
        return text
    raise InputError(f"{option}: {path} is empty")


def check(option: str, path: Path) -> None:
    """Raise an InputError if a file cannot be read, or if other users may read it."""
    try:
        mode = path.stat().st_mode
        with path.open("rb"):
            pass
    except OSError as error:
        raise InputError(f"{option}: {path} cannot be read: {error.strerror}") from error
    if mode & OTHERS:
        raise InputError(f"{option}: other users may read {path}; run chmod 600 {path}")
