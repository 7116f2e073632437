"""Files with the token that a server creates if the configuration has none.

A file that cannot be written raises `PacelineError`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.node import tokens

log = logging.getLogger(__name__)


def write(path: Path, token: str) -> None:
    """Write a token to a file that only this user can read."""
    part = path.with_suffix(".new")
    try:
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{token}\n")
        part.replace(path)
    except OSError as error:
        raise PacelineError(f"the token file {path} cannot be written: {error}") from error


@contextmanager
def kept(server: str, token: str, data: Path | None) -> Iterator[None]:
    """Let clients of this user find the token while the server runs.

    `data` is a directory that gets the file `token`, which stays there. If neither this file nor
    that of the user can be written, no client could ever log in, so the function raises an error.
    """
    if data is not None:
        write(data / "token", token)
    with ExitStack() as held:
        try:
            held.enter_context(tokens.keeping(server, token))
        except OSError as error:
            if data is None:
                raise PacelineError(f"the server's token cannot be written: {error}") from error
            log.warning("clients need --token-file %s: %s", data / "token", error)
        yield
