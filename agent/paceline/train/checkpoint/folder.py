"""A directory of checkpoints, in which a checkpoint is either whole or absent."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_WHOLE = re.compile(r"step-(\d{9,})")
_UNFINISHED = re.compile(r"\.step-\d{9,}\.(new|old)")


class Folder:
    """The newest `keep` checkpoints of one training. Only rank 0 changes the directory.

    A checkpoint is written under a hidden name and then renamed. Before deletion it gets a hidden
    name again. So a process that is killed at any time leaves whole checkpoints, and hidden
    directories that `clear` deletes.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self.keep = path, keep

    def make(self) -> None:
        """Create the directory if needed, and delete leftovers of killed processes."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.clear()

    def steps(self) -> list[int]:
        """Return the number of steps at each whole checkpoint, ascending."""
        matches = [_WHOLE.fullmatch(entry.name) for entry in self.path.iterdir()]
        return sorted(int(match[1]) for match in matches if match)

    def newest(self) -> int | None:
        """Return the number of steps at the newest whole checkpoint, if there is one."""
        return max(self.steps(), default=None)

    def whole(self, steps: int) -> Path:
        """Return the path of the whole checkpoint with that many steps."""
        return self.path / f"step-{steps:09d}"

    def unfinished(self, steps: int) -> Path:
        """Return the path at which the checkpoint with that many steps is written."""
        return self.path / f".step-{steps:09d}.new"

    def finish(self, steps: int) -> None:
        """Turn a written checkpoint into a whole one, and delete the oldest beyond `keep`."""
        written = self.unfinished(steps)
        _flush(written)
        # An earlier training that came this far may have left one.
        self._remove(steps)
        written.rename(self.whole(steps))
        _flush(self.path)
        for old in self.steps()[: -self.keep]:
            self._remove(old)

    def clear(self) -> None:
        """Delete unfinished and half-deleted checkpoints."""
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
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
