"""End of a rank's process when nodes join or leave the run (`paceline.core.reform`).

The leader ends the plan, and all ranks leave their loop after the same step. Before the processes
end, declared checkpoints are saved (`features.checkpoints`). The launchers restart all ranks on
other nodes. The script cannot continue, because its process group and its wrapped models belong to
the previous nodes. So none of the script's code runs after the save, as if a launcher had killed
the rank.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from paceline.core import reform
from paceline.train.feature import Feature
from paceline.train.state import TrainingState


class Reform(Feature):
    """Feature that ends this rank's process if nodes join or leave.

    Args:
        state: its `reforms` is True if the plan ended because nodes join or leave.
        path: this feature creates the file before the process exits, so that the launcher does not
            count the exit as a failure.
        close: closes the session.
    """

    def __init__(self, state: TrainingState, path: Path, close: Callable[[], None]) -> None:
        self._state, self._path, self._close = state, path, close

    def before_epoch(self) -> None:
        self._end_if_asked()

    def epoch_ended(self, ran_out: bool) -> None:
        if ran_out:
            self._end_if_asked()

    def _end_if_asked(self) -> None:
        if self._state.reforms:
            self._state.finish_step()
            self._close()
            _end_process(self._path)


def _end_process(path: Path) -> NoReturn:
    for last_call in (path.touch, logging.shutdown, sys.stdout.flush, sys.stderr.flush):
        # The disk may be full, or the script may have closed the stream.
        with suppress(OSError, ValueError):
            last_call()
    os._exit(reform.EXIT_CODE)
