"""End of a rank's process when nodes join or leave the run (`paceline.core.reform`)."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from paceline.core import reform


def end_process(path: Path) -> NoReturn:
    """End this rank's process, so that the launchers restart all ranks on other nodes.

    The script could not continue, because its process group and its wrapped models belong to the
    previous nodes. None of its code runs after this call, as when a launcher kills ranks. The file
    `path` shows the launcher that this exit is no failure.
    """
    for last_word in (path.touch, logging.shutdown, sys.stdout.flush, sys.stderr.flush):
        # The disk may be full, or the script may have closed the stream.
        with suppress(OSError, ValueError):
            last_word()
    os._exit(reform.EXIT_CODE)
