"""Whether a message may be what it says: asked before anything else sees it.

Anybody with a run's address on the bus can write what looks like telemetry. A message of a run is
taken if the run is known, and if its attempt, its ranks and its samples are those that the run can
have. A record may come before its attempt's Hello: then it is checked against what the run was
started with, which allows no more ranks than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from paceline.wire import (
    Adopted,
    DataEpoch,
    Evaluation,
    Fallback,
    Hello,
    HelloPart,
    LongPhase,
    Message,
    MetricBatch,
    NodeState,
    RoundBatch,
    StepBatch,
)
from paceline.wire.parts import MOST_SAMPLES
from paceline_backend import backends
from paceline_backend.store import Store, runs, telemetry

MOST_OF_STREAM = 10**8  # samples of an epoch
MOST_ATTEMPT = 2**15 - 1
_KNOWN = 10_000  # runs that are remembered
_MOST_RECORDS = 10_000  # of a message, or one of each rank: what simulators send


@dataclass(frozen=True)
class _Attempt:
    world: int
    samples: int  # at most, where the data is a stream


@dataclass
class _Run:
    """What a run's messages are checked against."""

    terms: runs.TelemetryTerms
    attempts: dict[int, _Attempt] = field(default_factory=dict)  # whose Hello is known

    def world(self, attempt: int) -> int:
        """How many ranks an attempt has; before its Hello: at most."""
        known = self.attempts.get(attempt)
        return self.terms.most_ranks if known is None else known.world

    @cached_property
    def last_attempt(self) -> int:
        """The highest attempt that it may come to."""
        # A scenario has its own failures, and a launcher that is not ours its own restarts.
        if backends.plans_itself(self.terms.backend) or self.terms.observed:
            return MOST_ATTEMPT
        return min(self.terms.last_attempt, MOST_ATTEMPT)


class Checks:
    """What is known of runs, to check their messages. For one thread.

    Args:
        store: that has the runs.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._runs: dict[str, _Run] = {}

    def most_ranks(self, run: str) -> int:
        """Return how many ranks a run may have; 0: the store does not have it.

        Raises:
            StoreError: or one of its kinds.
        """
        self._read({run} - self._runs.keys())
        return self._runs[run].terms.most_ranks if run in self._runs else 0

    def reasons(
        self, messages: Sequence[tuple[str, Message]], *, sound: bool = False
    ) -> list[str | None]:
        """Why each message is not taken; None: it is.

        The Hellos among them count before the others, as `telemetry.write` has it.

        Args:
            messages: public run id and message.
            sound: `problem` was asked, and says nothing against them.

        Raises:
            StoreError: or one of its kinds.
        """
        if len(self._runs) > _KNOWN:
            self._runs.clear()  # now: not once it is known which of these messages' runs to read
        self._read({run for run, _ in messages} - self._runs.keys())
        reasons: list[str | None] = [None] * len(messages)
        order = sorted(range(len(messages)), key=lambda i: not isinstance(messages[i][1], Hello))
        for place in order:
            reasons[place] = self._reason(*messages[place], sound)
        refused = [place for place in order if reasons[place] is not None]
        # What the run may do has perhaps changed since it was read: somebody resumed it.
        if again := {messages[place][0] for place in refused} & self._runs.keys():
            self._read(again)
            for place in refused:
                reasons[place] = self._reason(*messages[place], sound)
        return reasons

    def _read(self, ids: set[str]) -> None:
        if not ids:
            return
        with self._store.read() as connection:
            known = runs.terms(connection, ids)
        for run, terms in known.items():
            before = self._runs.get(run)
            kept = self._runs[run] = _Run(terms, {} if before is None else before.attempts)
            if terms.attempt is not None and terms.world is not None:
                most = MOST_OF_STREAM if terms.samples is None else terms.samples
                kept.attempts[terms.attempt] = _Attempt(terms.world, most)

    def unknown(self, messages: Sequence[tuple[str, Message]]) -> set[str]:
        """The runs that the store does not have, after `reasons` was asked of these messages."""
        ids = {run for run, message in messages if not isinstance(message, NodeState)}
        return ids - self._runs.keys()

    def _reason(self, run: str, message: Message, sound: bool) -> str | None:
        if isinstance(message, NodeState):
            return problem(message)
        known = self._runs.get(run)
        if known is None:
            return f"unknown run {run!a}"
        reason = _of_run(known, message, sound)
        if reason is None and isinstance(message, Hello):
            most = MOST_OF_STREAM if message.samples is None else message.samples
            known.attempts[message.attempt] = _Attempt(message.world, most)
        return None if reason is None else f"run {run}: {reason}"


def problem(message: Message, world: int | None = None, samples: int | None = None) -> str | None:
    """As `telemetry.problem`, whatever anybody may have written into the message."""
    try:
        return telemetry.problem(message, world, samples)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


_OF_ATTEMPT = (Hello, HelloPart, Adopted, Evaluation, Fallback, LongPhase, DataEpoch)
_OF_RANK = (Evaluation, LongPhase, DataEpoch)


def _of_run(run: _Run, message: Message, sound: bool) -> str | None:
    if isinstance(message, StepBatch | RoundBatch):
        return _of_records(run, message)
    if isinstance(message, MetricBatch):
        return problem(message) or _of_records(run, message)
    known = run.attempts.get(message.attempt) if isinstance(message, Adopted) else None
    terms = (None, None) if known is None else (known.world, known.samples)
    if not sound and (reason := problem(message, *terms)):
        return reason
    number = message.attempt if isinstance(message, _OF_ATTEMPT) else 0
    if number > run.last_attempt:
        return _too_late(run, type(message).__name__, number)
    if isinstance(message, Hello):
        return _of_hello(run, message)
    if isinstance(message, _OF_RANK) and message.rank >= (world := run.world(message.attempt)):
        return f"rank {message.rank} is out of range: attempt {message.attempt} has {world} ranks"
    if isinstance(message, Adopted) and len(message.segment.counts[0]) > run.terms.most_ranks:
        ranks = len(message.segment.counts[0])
        return f"Adopted.segment: counts are of {ranks} ranks; the run has {run.terms.most_ranks}"
    return None


def _of_hello(run: _Run, hello: Hello) -> str | None:
    if hello.world > run.terms.most_ranks:
        return f"Hello.world is {hello.world}: the run has {run.terms.most_ranks} ranks"
    if hello.samples is not None and hello.samples > MOST_SAMPLES:
        return f"Hello.sizes are {hello.samples:,}: a data set has at most {MOST_SAMPLES:,} samples"
    return None


def _of_records(run: _Run, batch: StepBatch | MetricBatch | RoundBatch) -> str | None:
    """In few operations: this is asked of every row."""
    most = max(_MOST_RECORDS, run.terms.most_ranks)
    if len(batch.records) > most:
        name, count = type(batch).__name__, len(batch.records)
        return f"{name}.records are {count:,}: a message of this run has at most {most:,}"
    for attempt, rank in {(record.attempt, record.rank) for record in batch.records}:
        if not 0 <= attempt <= run.last_attempt:
            return _too_late(run, type(batch).__name__, attempt)
        if not 0 <= rank < run.world(attempt):
            world = run.world(attempt)
            return f"rank {rank} is out of range: attempt {attempt} has {world} ranks"
    return None


def _too_late(run: _Run, name: str, attempt: int) -> str:
    return (
        f"{name}.attempt is {attempt}: by the run's starts, resumes and max_restarts its "
        f"last attempt is {run.last_attempt}; resume the run to allow further ones"
    )
