"""Learns what fits into a rank's memory when it runs out, for the run's later attempts.

The script owns the training loop, so running out of memory ends the rank. The launcher restarts all
ranks, and they repeat that step from the checkpoint. `Memory` stores the learned limit in a file of
the run on the rank's node, because memory belongs to a device and not to a rank.
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

# Maximum of the new limit, as a fraction of the load that did not fit: memory is fragmented, and
# batches with the same load differ.
_MARGIN = 0.9


class Learned(msgspec.Struct, frozen=True):
    """Learned capacity of a device, in the unit of the sizes.

    `limit` is the load that a rank may hold at once from now on. `ran_out` is the load of the batch
    in which memory ran out, `held` the largest load before that, in the same attempt; 0: none.
    """

    limit: float
    ran_out: float
    held: float

    @staticmethod
    def of(ran_out: float, held: float) -> Learned:
        """Derive the limit from a load that did not fit, and the largest one that did.

        The limit is at least half of the load that did not fit, so that small batches in the first
        steps of a run do not limit all later ones.
        """
        return Learned(min(max(held, ran_out / 2), _MARGIN * ran_out), ran_out, held)


def learned_by(meeting: Meeting, known: Learned | None) -> list[Learned | None]:
    """Return what each worker of the plan learned, [W], given what this rank knows. Collective.

    Among ranks that share each batch, the one with the smallest limit decides.
    """
    if meeting.lanes is None:
        return gathered(meeting.world, known)
    lanes = meeting.lanes.ranks
    words = gathered(meeting.world * len(lanes), known)
    groups = ([words[rank] for rank in group] for group in zip(*lanes, strict=True))
    return [min(filter(None, group), key=lambda each: each.limit, default=None) for group in groups]


class Memory:
    """Record of one rank's loads, which learns a limit when memory runs out. For one thread.

    The loop calls `fitted` after each iteration, `left` when an exception ended the loop, and
    `close`, which learns if that exception reports that memory ran out. `path` is the file of this
    rank's device; None outside of a run.
    """

    def __init__(self, path: Path | None, rank: int) -> None:
        self._path, self._rank = path, rank
        self.known = _read(path) if path is not None else None
        self._held = 0.0
        self._left: float | None = None

    def fitted(self, load: float) -> None:
        """Take the load of a batch that this rank has computed."""
        self._held = max(self._held, load)
        self._left = None

    def left(self, load: float) -> None:
        """Take the load of a batch in which an exception ended the loop over the loader."""
        self._left = load

    def close(self) -> None:
        """Learn a limit if the exception that ended the loop is now ending the script.

        That exception is the one being handled, or the last one that the interpreter reported.
        """
        load, self._left = self._left, None
        error = sys.exception() or getattr(sys, "last_value", None)
        if not load or not _says_so(error):
            return
        learned = Learned.of(load, self._held)
        logger.error(
            "rank %d ran out of memory with a batch of %s, in the unit of the sizes; batches of up "
            "to %s fitted. %s",
            self._rank,
            shown(load),
            shown(self._held),
            f"Give Session token_limits: {shown(learned.limit)} for this rank"
            if self._path is None
            else f"When the run resumes, this rank gets at most {shown(learned.limit)}",
        )
        if self._path is not None:
            _write(self._path, learned)


def _says_so(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, reports that memory ran out."""
    while error is not None:
        if out_of_memory(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _read(path: Path) -> Learned | None:
    try:
        return rundir.read(path, Learned)
    except (OSError, msgspec.DecodeError) as error:
        logger.warning(
            "%s cannot be read, so memory limits of earlier attempts are unknown: %s", path, error
        )
        return None


def _write(path: Path, learned: Learned) -> None:
    try:
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        rundir.write(path, learned)
    except OSError as error:
        logger.error("%s cannot be written, so memory may run out again: %s", path, error)
