"""Lookup of a run by what a user enters: the run's id, or a unique prefix of it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from paceline.core.errors import InputError

_MOST_LISTED = 10


def checked(given: str) -> str:
    """Return the text if it can be a run's id or a prefix of one; else raise an InputError.

    Any other text could change the path of a request or of a file.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", given):
        raise InputError(
            f"RUN {given}: an id has letters, digits, - and _; `paceline runs` lists ids"
        )
    return given


def chosen(given: str, ids: Iterable[str]) -> str:
    """Return the only id that equals `given` or begins with it; else raise an InputError."""
    matches = sorted({run for run in ids if run.startswith(given)})
    if given in matches or len(matches) == 1:
        return given if given in matches else matches[0]
    if not matches:
        raise InputError(f"RUN {given}: no run's id begins with it; `paceline runs` lists ids")
    listed = ", ".join(matches[:_MOST_LISTED]) + (", …" if len(matches) > _MOST_LISTED else "")
    raise InputError(
        f"RUN {given}: {len(matches)} runs begin with it: {listed}; give more characters"
    )
