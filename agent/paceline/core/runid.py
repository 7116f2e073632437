"""A run's id as people give it: whole, or a beginning that no other run's id has."""

from __future__ import annotations

import re
from collections.abc import Iterable

from paceline.core.errors import InputError

_LISTED = 10


def checked(given: str) -> str:
    """What may be an id or its beginning: other text would change the path of a request or file.

    Raises:
        InputError: it cannot be one.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", given):
        raise InputError(f"RUN {given}: an id has letters, digits, - and _; `paceline runs` lists")
    return given


def chosen(given: str, ids: Iterable[str]) -> str:
    """The one id that begins with `given`, or is it.

    Raises:
        InputError: there is none, or there are several; the message lists them.
    """
    matches = sorted({run for run in ids if run.startswith(given)})
    if given in matches or len(matches) == 1:
        return given if given in matches else matches[0]
    if not matches:
        raise InputError(f"RUN {given}: no run's id begins with it; `paceline runs` lists them")
    listed = ", ".join(matches[:_LISTED]) + (", …" if len(matches) > _LISTED else "")
    raise InputError(f"RUN {given}: {len(matches)} runs begin with it: {listed}; give more of it")
