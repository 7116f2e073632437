"""The end of a rank's process where nodes join or leave the run (`paceline.core.reform`)."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from paceline.core import reform


def end_process(path: Path) -> NoReturn:
    """Ends this rank's process: the launchers start all ranks anew, on other nodes.

    The script could not go on, because its process group and its wrapped models are those of the
    nodes before. Nothing of it runs any more, as where a launcher ends ranks by a signal.

    Args:
        path: the file that tells the launcher that this exit is no failure.
    """
    for last_word in (path.touch, logging.shutdown, sys.stdout.flush, sys.stderr.flush):
        with suppress(OSError, ValueError):  # the disk may be full, or the script has closed it
            last_word()
    os._exit(reform.EXIT_CODE)
