"""Learns a rank's memory limit when its memory runs out, for the run's later attempts.

The script runs the training loop, so Paceline cannot repeat a batch that did not fit: running out
of memory ends the rank. The launcher restarts all ranks from the checkpoint. `Memory` stores the
learned limit in a file of the run on the rank's node, because the limit is a property of the
device, and a rank may get another device. `LearnedLimits` applies the limits of earlier attempts to
a session with a token budget.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from paceline.core.batch_limits.budget import Budget, shown
from paceline.core.errors import PacelineError
from paceline.node import rundir
from paceline.train.batch_limits.budgeting import refuse_limits
from paceline.train.feature import Feature
from paceline.train.profile import Limits, out_of_memory
from paceline.train.startup import Startup, gathered
from paceline.train.state import TrainingState
from paceline.train.timing import RunningStep
from paceline.wire import RankDevice

logger = logging.getLogger(__name__)

# Maximum of the new limit, as a fraction of the load that did not fit. The margin is needed because
# memory is fragmented, and batches with the same load need different amounts of memory.
_LIMIT_FRACTION = 0.9


class LearnedLimits(Feature):
    """Feature that lowers token limits to those that ranks learned in earlier attempts."""

    def __init__(self, state: TrainingState, budget: Budget) -> None:
        self._state, self._budget = state, budget
        self._memory: Memory | None = None

    def connect(self) -> None:
        state = self._state
        startup, before = state.startup, state.context.limits
        self._memory = Memory(state.context.environment.memory, startup.process)
        learned = learned_by(startup, self._memory.known)
        limits = with_learned(before, learned, self._budget, state.findings.devices)
        state.context = replace(state.context, limits=limits)
        if startup.leads and limits != before:
            logger.warning(
                "memory ran out in earlier attempts: token_limits is %s now", limits.tokens
            )

    def turn_ended(self, running: RunningStep, closing: bool) -> None:
        if self._memory is not None and not closing:
            self._memory.fitted(running.step.load)

    def end_epoch(self, ran_out: bool, raised: bool) -> None:
        running = self._state.current.running
        if self._memory is not None and raised and running is not None:
            self._memory.left(running.step.load)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()


class Learned(msgspec.Struct, frozen=True):
    """Learned capacity of a device, in the unit of the sizes.

    `limit` is the maximum load that a rank may compute at once from now on. `ran_out` is the load
    of the batch in which memory ran out. `held` is the largest load of a batch that fitted earlier
    in the same attempt; 0 if there was none.
    """

    limit: float
    ran_out: float
    held: float

    @staticmethod
    def of(ran_out: float, held: float) -> Learned:
        """Derive the limit from a load that did not fit, and the largest load that did.

        The limit is at least half of the load that did not fit, so that small batches in the first
        steps of a run do not limit all later ones.
        """
        return Learned(min(max(held, ran_out / 2), _LIMIT_FRACTION * ran_out), ran_out, held)


def learned_by(startup: Startup, known: Learned | None) -> list[Learned | None]:
    """Return what each rank or group learned, [W]. Collective.

    `known` is what this rank learned. If several ranks share each batch, a group's limit is the
    smallest limit that its ranks learned.
    """
    if startup.lanes is None:
        return gathered(startup.world, known)
    lanes = startup.lanes.ranks
    words = gathered(startup.world * len(lanes), known)
    groups = ([words[rank] for rank in group] for group in zip(*lanes, strict=True))
    return [min(filter(None, group), key=lambda each: each.limit, default=None) for group in groups]


def with_learned(
    limits: Limits,
    learned: Sequence[Learned | None],
    budget: Budget,
    devices: Sequence[RankDevice] = (),
) -> Limits:
    """Reduce the limits to those that ranks learned when memory ran out in earlier attempts.

    With micro-batches, a learned limit applies to all ranks with an equal device, so that they do
    not run out of memory, too. Their steps may then have more micro-batches. If a learned limit
    is below the size of the largest sample, it is raised to this size, unless memory ran out with a
    load of this size or less.

    Without micro-batches, a learned limit applies only to the rank that learned it: the other ranks
    need room for the samples that no longer fit on this rank.

    `learned` and `devices` have one entry per rank, [W].

    Raises:
        PacelineError: some steps do not fit into the ranks' memory with these limits.
    """
    known = {rank: word for rank, word in enumerate(learned) if word is not None}
    if not known:
        return limits
    longest = float(budget.sizes.max())
    # Without a limit, a rank's local batch holds at most the whole budget.
    tokens = list(limits.tokens) or [budget.tokens] * len(learned)
    for by, word in known.items():
        alike, fits = [by], word.limit
        if limits.micro_batches:
            alike += [rank for rank, each in enumerate(devices) if _same(each, devices[by])]
            fits = max(fits, longest) if word.ran_out > longest else fits
        for rank in alike:
            tokens[rank] = min(tokens[rank], fits)
    try:
        refuse_limits(tokens, longest, budget.tokens, limits.micro_batches)
    except ValueError as error:
        raise PacelineError(
            f"memory ran out in earlier attempts, on ranks {list(known)}. {error}"
        ) from error
    return replace(limits, tokens=tokens)


def _same(device: RankDevice, other: RankDevice) -> bool:
    named = (device.kind, device.name, device.memory_bytes)
    return named == (other.kind, other.name, other.memory_bytes)


class Memory:
    """Record of one rank's loads, which learns a limit when memory runs out. Not thread-safe.

    Call `fitted` after each iteration, `left` when an exception ends the loop, and `close` at the
    session's end. `path` is the file with this device's limit; None: limits are not stored.
    """

    def __init__(self, path: Path | None, rank: int) -> None:
        self._path, self._rank = path, rank
        self.known = _read(path) if path is not None else None
        self._held = 0.0
        self._left: float | None = None

    def fitted(self, load: float) -> None:
        self._held = max(self._held, load)
        self._left = None

    def left(self, load: float) -> None:
        self._left = load

    def close(self) -> None:
        """Learn a limit on batches if running out of memory ended the loop and ends the script.

        The exception that ends the script is the one being handled, or the last one that the
        interpreter reported.
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
