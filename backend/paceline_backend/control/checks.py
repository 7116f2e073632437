"""Plausibility checks of telemetry, which ingest makes before it stores or forwards a message.

Every client that may write to a run's stream can write entries that look like telemetry. Ingest
accepts a message only if its run is known, and if the attempt, ranks and samples in the message are
possible for that run. A record can arrive before the Hello of its attempt. `Checks` then compares
the record with the options that the run was started with, which bound the number of ranks.
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

# Maximum number of samples of an epoch of streamed data.
MOST_OF_STREAM = 10**8  # samples
MOST_ATTEMPT = 2**15 - 1
# Maximum number of runs in the cache.
_KNOWN = 10_000  # runs
# Maximum number of records in a message. A simulator sends one record per rank in a message, so a
# run with more ranks may send as many records as it has ranks.
_MOST_RECORDS = 10_000


@dataclass(frozen=True)
class _Attempt:
    world: int
    # Size of the data set; for a stream, the maximum number of samples of an epoch.
    samples: int


@dataclass
class _Run:
    """Limits against which a run's messages are checked."""

    terms: runs.TelemetryTerms
    # Attempts whose Hello is known, by number.
    attempts: dict[int, _Attempt] = field(default_factory=dict)

    def world(self, attempt: int) -> int:
        """Return an attempt's number of ranks; before the attempt's Hello, the run's maximum."""
        known = self.attempts.get(attempt)
        return self.terms.most_ranks if known is None else known.world

    @cached_property
    def last_attempt(self) -> int:
        # A simulated scenario has its own failures, and an observed run can have another launcher
        # with its own restarts. So `max_restarts` does not bound the attempts of such a run.
        if backends.plans_itself(self.terms.backend) or self.terms.observed:
            return MOST_ATTEMPT
        return min(self.terms.last_attempt, MOST_ATTEMPT)


class Checks:
    """Cache of runs' limits, against which ingest checks messages. Not thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._runs: dict[str, _Run] = {}

    def most_ranks(self, run: str) -> int:
        """Return the maximum number of ranks of a run, or 0 if the store does not have the run."""
        self._read({run} - self._runs.keys())
        return self._runs[run].terms.most_ranks if run in self._runs else 0

    def reasons(
        self, messages: Sequence[tuple[str, Message]], *, sound: bool = False
    ) -> list[str | None]:
        """Return, for each message, the reason to reject it, or None to accept it.

        Hellos are applied before the other messages, in the order that `telemetry.write` uses.

        Args:
            messages: pairs of public run id and message.
            sound: True if the messages have already passed `defect`.
        """
        # Clear the cache before `_read` fills it with the runs of these messages.
        if len(self._runs) > _KNOWN:
            self._runs.clear()
        self._read({run for run, _ in messages} - self._runs.keys())
        reasons: list[str | None] = [None] * len(messages)
        order = sorted(range(len(messages)), key=lambda i: not isinstance(messages[i][1], Hello))
        for place in order:
            reasons[place] = self._reason(*messages[place], sound)
        refused = [place for place in order if reasons[place] is not None]
        # The cached limits may be stale, for example because an operator has resumed the run.
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
        """Return the runs that the store does not have. Call `reasons` on these messages first."""
        ids = {run for run, message in messages if not isinstance(message, NodeState)}
        return ids - self._runs.keys()

    def _reason(self, run: str, message: Message, sound: bool) -> str | None:
        if isinstance(message, NodeState):
            return defect(message)
        known = self._runs.get(run)
        if known is None:
            return f"unknown run {run!a}"
        reason = _of_run(known, message, sound)
        if reason is None and isinstance(message, Hello):
            most = MOST_OF_STREAM if message.samples is None else message.samples
            known.attempts[message.attempt] = _Attempt(message.world, most)
        return None if reason is None else f"run {run}: {reason}"


def defect(message: Message, world: int | None = None, samples: int | None = None) -> str | None:
    """Return the defect of a message, or None; an error during the check counts as a defect."""
    try:
        return telemetry.defect(message, world, samples)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


_OF_ATTEMPT = (Hello, HelloPart, Adopted, Evaluation, Fallback, LongPhase, DataEpoch)
_OF_RANK = (Evaluation, LongPhase, DataEpoch)


def _of_run(run: _Run, message: Message, sound: bool) -> str | None:
    if isinstance(message, StepBatch | RoundBatch):
        return _of_records(run, message)
    if isinstance(message, MetricBatch):
        return defect(message) or _of_records(run, message)
    known = run.attempts.get(message.attempt) if isinstance(message, Adopted) else None
    terms = (None, None) if known is None else (known.world, known.samples)
    if not sound and (reason := defect(message, *terms)):
        return reason
    number = message.attempt if isinstance(message, _OF_ATTEMPT) else 0
    if number > run.last_attempt:
        return _too_late(run, type(message).__name__, number)
    if isinstance(message, Hello):
        return _of_hello(run, message)
    if isinstance(message, _OF_RANK) and message.rank >= (world := run.world(message.attempt)):
        return f"rank {message.rank} is out of range: attempt {message.attempt} has {world} ranks"
    if isinstance(message, Adopted) and len(message.plan.counts[0]) > run.terms.most_ranks:
        ranks = len(message.plan.counts[0])
        return (
            f"Adopted.plan has counts of {ranks} ranks; the run has at most {run.terms.most_ranks}"
        )
    return None


def _of_hello(run: _Run, hello: Hello) -> str | None:
    if hello.world > run.terms.most_ranks:
        return f"Hello.world is {hello.world}: the run has at most {run.terms.most_ranks} ranks"
    if hello.samples is not None and hello.samples > MOST_SAMPLES:
        return (
            f"Hello.sizes has {hello.samples:,} entries: a data set has at most {MOST_SAMPLES:,} "
            "samples"
        )
    return None


def _of_records(run: _Run, batch: StepBatch | MetricBatch | RoundBatch) -> str | None:
    # This check is executed for every record, so it uses few operations.
    most = max(_MOST_RECORDS, run.terms.most_ranks)
    if len(batch.records) > most:
        name, count = type(batch).__name__, len(batch.records)
        return f"{name}.records has {count:,} entries: a message of this run has at most {most:,}"
    for attempt, rank in {(record.attempt, record.rank) for record in batch.records}:
        if not 0 <= attempt <= run.last_attempt:
            return _too_late(run, type(batch).__name__, attempt)
        if not 0 <= rank < run.world(attempt):
            world = run.world(attempt)
            return f"rank {rank} is out of range: attempt {attempt} has {world} ranks"
    return None


def _too_late(run: _Run, name: str, attempt: int) -> str:
    return (
        f"{name}.attempt is {attempt}: with the run's starts, resumes and max_restarts, its last "
        f"attempt is {run.last_attempt}; resume the run to allow more attempts"
    )
