"""Files that only their owner may read: databases, logs, spools and tokens hold secrets."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from paceline.core.errors import InputError, PacelineError

OTHERS = 0o077  # permission bits of everybody but the owner

_given = -1  # the user's own umask; -1: `files` was not called, and nothing has changed


def files() -> None:
    """From now on what this process makes is its user's alone: 0600, directories 0700."""
    global _given
    before = os.umask(OTHERS)
    if _given == -1:
        _given = before


def given_umask() -> int:
    """The umask for programs of the user, for `subprocess.Popen`: what they make is theirs."""
    return _given


def check_data(folder: Path) -> None:
    """Refuse a data directory in which another user may have planted something.

    The directory, what lies in it, and what lies in its `bus` and `runs` must belong to this user
    or to root. Below that, only who owns those directories can have made anything.

    Args:
        folder: the data directory; nothing is refused if it does not exist.

    Raises:
        PacelineError: another user owns one of them.
        OSError: one of them cannot be read.
    """
    if not folder.exists():
        return
    nested = (folder / name for name in ("bus", "runs"))
    folders = [folder, *(each for each in nested if each.is_dir())]
    entries = [folder.resolve(), *(entry for each in folders for entry in each.iterdir())]
    for path in entries:
        try:
            owner = path.lstat().st_uid
        except FileNotFoundError:  # removed meanwhile by a process of this data directory
            continue
        if owner not in (0, os.geteuid()):
            raise PacelineError(
                f"--data: {path} belongs to another user ({_name(owner)}), who may have planted "
                "it: choose another data directory, or check what is there and chown it"
            )


def _name(owner: int) -> str:
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return f"uid {owner}"


def secret(option: str, path: Path) -> str:
    """The secret in a file: its text without the white space around it.

    Args:
        option: that names the file, for messages.
        path: of the file.

    Raises:
        InputError: it cannot be read, is empty, or others may read it.
    """
    check(option, path)
    if text := path.read_text().strip():
        return text
    raise InputError(f"{option}: {path} is empty")


def check(option: str, path: Path) -> None:
    """Refuses a file that cannot be read, or that others may read.

    Raises:
        InputError: the message names the option and the file.
    """
    try:
        mode = path.stat().st_mode
        with path.open("rb"):
            pass
    except OSError as error:
        raise InputError(f"{option}: {path} cannot be read: {error.strerror}") from error
    if mode & OTHERS:
        raise InputError(f"{option}: other users may read {path}; run chmod 600 {path}")
