"""End of a rank's process when nodes join or leave the run (`paceline.core.reform`).

The leader ends the plan, and all ranks leave their loop after the same step. Before the processes
end, declared checkpoints are saved (`features.checkpoints`). The launchers restart all ranks on
other nodes. The script could not continue, because its process group and its wrapped models belong
to the previous nodes. No code of the script runs after that, as if a launcher had killed the rank.
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
    """End of this rank if nodes join or leave.

    Args:
        state: shows if the plan ended for this reason.
        path: the file whose creation shows the launcher that the exit is no failure.
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
    for last_word in (path.touch, logging.shutdown, sys.stdout.flush, sys.stderr.flush):
        # The disk may be full, or the script may have closed the stream.
        with suppress(OSError, ValueError):
            last_word()
    os._exit(reform.EXIT_CODE)
