"""What fits into a rank's memory, learned where it ran out, for the run's later attempts.

The script owns the loop, so the step in which memory runs out ends the rank. The launcher starts
all ranks again, and they train that step again from the checkpoint. `Memory` keeps what was learned
in a file of the run on the rank's node, because memory is a device's and not a rank's.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import msgspec

from paceline.core.amounts.budget import shown
from paceline.node import rundir
from paceline.train.meeting import Meeting, gathered
from paceline.train.profile import out_of_memory

logger = logging.getLogger(__name__)

_MARGIN = 0.9  # of what did not fit, at most: memory is in pieces, and not each batch is alike


class Learned(msgspec.Struct, frozen=True):
    """What a device's memory holds of a step, in the unit of the sizes."""

    limit: float  # what a rank may hold there at once from now on
    ran_out: float  # what it held when memory ran out
    held: float  # the most that it had held before, in the same attempt; 0: nothing

    @staticmethod
    def of(ran_out: float, held: float) -> Learned:
        """What is learned from memory that ran out.

        What was held before fits. If that is less than half of what did not fit, half of it is
        tried, so that the first steps of a run do not bind all others.
        """
        return Learned(min(max(held, ran_out / 2), _MARGIN * ran_out), ran_out, held)


def learned_by(meeting: Meeting, known: Learned | None) -> list[Learned | None]:
    """What each worker of the plan learned, [W]; each rank calls it.

    Of ranks that share each batch, the one whose memory holds the least decides.

    Args:
        meeting: of the ranks.
        known: what this rank learned; None: nothing.
    """
    if meeting.lanes is None:
        return gathered(meeting.world, known)
    lanes = meeting.lanes.ranks
    words = gathered(meeting.world * len(lanes), known)
    groups = ([words[rank] for rank in group] for group in zip(*lanes, strict=True))
    return [min(filter(None, group), key=lambda each: each.limit, default=None) for group in groups]


class Memory:
    """What one rank learns of its memory. For one thread.

    The loop calls `fitted` for each turn that ran to its end, `left` where an exception ended the
    loop, and `close`, which learns if that exception says that memory ran out.

    Args:
        path: the file of this rank's device; None: there is none, as outside of a run.
        rank: this rank.
    """

    def __init__(self, path: Path | None, rank: int) -> None:
        self._path, self._rank = path, rank
        self.known = _read(path) if path is not None else None
        self._held = 0.0
        self._left: float | None = None

    def fitted(self, load: float) -> None:
        """This rank has computed a batch whose sizes sum up to `load`."""
        self._held = max(self._held, load)
        self._left = None

    def left(self, load: float) -> None:
        """An exception has ended the loop over the loader, in a batch of `load`."""
        self._left = load

    def close(self) -> None:
        """Learns, if the exception that ended the loop is ending the script.

        It is the one that is handled now, or the one for which the interpreter ends.
        """
        load, self._left = self._left, None
        error = sys.exception() or getattr(sys, "last_value", None)
        if not load or not _says_so(error):
            return
        learned = Learned.of(load, self._held)
        logger.error(
            "rank %d ran out of memory with %s in a batch, in the unit of the sizes; up to %s "
            "fitted. %s",
            self._rank,
            shown(load),
            shown(self._held),
            f"Give Session token_limits: {shown(learned.limit)} for this rank"
            if self._path is None
            else f"When the run goes on, this rank holds at most {shown(learned.limit)}",
        )
        if self._path is not None:
            _write(self._path, learned)


def _says_so(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that memory ran out."""
    while error is not None:
        if out_of_memory(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _read(path: Path) -> Learned | None:
    try:
        return rundir.read(path, Learned)
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("%s cannot be read, so nothing is known of memory: %s", path, error)
        return None


def _write(path: Path, learned: Learned) -> None:
    try:
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        rundir.write(path, learned)
    except OSError as error:
        logger.error("%s cannot be written, so memory may run out again: %s", path, error)
