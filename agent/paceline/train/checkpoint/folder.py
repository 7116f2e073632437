"""A directory of checkpoints, in which a checkpoint is either whole or not there."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_WHOLE = re.compile(r"step-(\d{9,})")
_UNFINISHED = re.compile(r"\.step-\d{9,}\.(new|old)")


class Folder:
    """The checkpoints of one training. Only rank 0 changes the directory.

    A checkpoint is written under a hidden name and then renamed. Before it is deleted it is renamed
    back. So a process that is killed at any time leaves whole checkpoints, and hidden directories
    that `clear` deletes.

    Args:
        path: the directory; `make` makes it.
        keep: how many checkpoints stay, 1 or more.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self.keep = path, keep

    def make(self) -> None:
        """Makes the directory if need be, and deletes what killed processes left."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.clear()

    def steps(self) -> list[int]:
        """How many steps training had made at each whole checkpoint, ascending."""
        matches = [_WHOLE.fullmatch(entry.name) for entry in self.path.iterdir()]
        return sorted(int(match[1]) for match in matches if match)

    def newest(self) -> int | None:
        """The steps of the newest whole checkpoint; None: there is none."""
        return max(self.steps(), default=None)

    def whole(self, steps: int) -> Path:
        """Where the whole checkpoint of that many steps is."""
        return self.path / f"step-{steps:09d}"

    def unfinished(self, steps: int) -> Path:
        """Where the checkpoint of that many steps is written."""
        return self.path / f".step-{steps:09d}.new"

    def finish(self, steps: int) -> None:
        """Makes a written checkpoint a whole one, and deletes those that are too many."""
        written = self.unfinished(steps)
        _flush(written)
        self._remove(steps)  # of an earlier training that came this far
        written.rename(self.whole(steps))
        _flush(self.path)
        for old in self.steps()[: -self.keep]:
            self._remove(old)

    def clear(self) -> None:
        """Deletes what is not a whole checkpoint but was to be one, or was one."""
        for entry in list(self.path.iterdir()):
            if _UNFINISHED.fullmatch(entry.name):
                shutil.rmtree(entry)

    def _remove(self, steps: int) -> None:
        whole = self.whole(steps)
        if whole.exists():
            old = self.path / f".step-{steps:09d}.old"
            whole.rename(old)
            shutil.rmtree(old)


def _flush(directory: Path) -> None:
    """Waits until the disk has the names in a directory."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
