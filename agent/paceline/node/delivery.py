"""Delivery of a run's states and spooled telemetry to the control plane.

A supervisor or `paceline observe` creates a `Delivery` for its run. If that process is killed, an
agent resumes the delivery later.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
import redis

from paceline import wire
from paceline.node import rundir, spool
from paceline.node.link import Link
from paceline.node.rundir import Record
from paceline.wire import NodeState, RunState, State

_DELIVERY_INTERVAL_S = 1.0
# Seconds before a spool that could not be read or deleted is tried again.
_SPOOL_RETRY_S = 60.0
# Seconds between two reports of an unchanged state. They show that a run's supervisor is alive.
_STATE_REPEAT_S = 3.0
# Maximum number of seconds for which one call drains a spool, because an agent may have other runs.
_DRAIN_S = 0.2
# Draining pauses while the bus stream has more entries than this, because the control plane
# disconnects a writer that floods the bus.
_MOST_WAITING = 20_000
_log = logging.getLogger(__name__)


class Delivery:
    """The undelivered states and telemetry of one run.

    States and telemetry are stored on disk, and survive outages of the bus and the end of this
    process. A delivery holds the lock of the run's directory until `close`, so that no other
    process delivers the same reports. `link` None: there is no control plane, and nothing is
    delivered. `lock` is the lock of the directory, if the caller already holds it.

    Raises:
        OSError: the directory cannot be written.
        BlockingIOError: another process supervises this run.
    """

    def __init__(
        self, directory: Path, record: Record, link: Link | None, lock: IO[bytes] | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = lock or _lock(directory)
        self.directory = directory
        self.record = record
        # Number of chunks of the spool that were sent.
        self.sent = 0
        self._link = link
        self._next = self._alive_at = self._drain_at = 0.0
        # Chunks of the spool that are left to send; None: the spool must be listed.
        self._chunks: Iterator[tuple[Path, list[dict[bytes, bytes]]]] | None = None
        # True once entries about other runs were found in the spool and logged.
        self._foreign = False
        # True if `record` on disk is up to date.
        self._saved = True
        self._save()

    @classmethod
    def resume(cls, directory: Path, link: Link) -> Delivery | None:
        """Continue the delivery of a run whose supervisor's process has ended.

        If the run's end was not reported, report that the run failed. Return None if everything is
        delivered, if another process supervises the run, if the run belongs to another control
        plane, or if its record is missing or broken.
        """
        path = directory / "run.json"
        try:
            record = rundir.read(path, Record)
        except msgspec.DecodeError as error:
            _log.error("%s cannot be decoded, and is renamed to .bad: %s", path, error)
            path.rename(path.with_suffix(".bad"))
            return None
        if record is None or record.settled or record.control != link.session.control:
            return None
        try:
            lock = _lock(directory)
        except BlockingIOError:
            return None
        # The supervisor may have written the record since it was read above.
        record = rundir.read(path, Record)
        assert record is not None
        delivery = cls(directory, record, link, lock)
        if not delivery.ended:
            attempt = record.states[-1].attempt if record.states else 0
            message = f"{record.supervisor} was killed"
            delivery.report(State.FAILED, attempt, message=message)
        return delivery

    @property
    def ended(self) -> bool:
        """True if the run's end was recorded with `report`, even if it is not yet delivered."""
        return bool(self.record.states) and self.record.states[-1].state.final

    @property
    def settled(self) -> bool:
        """True if the run has ended, everything is delivered, and the record on disk says so."""
        return self.record.settled and self._saved

    def report(
        self,
        state: State,
        attempt: int = 0,
        exit_code: int | None = None,
        message: str | None = None,
        *,
        at: float | None = None,
    ) -> RunState:
        """Record a state and deliver it, at once if the bus is available.

        The arguments are fields of `RunState`. `at` None: the present time.
        """
        node, at = self.record.node, time.time() if at is None else at
        return self._recorded(RunState(state, at, node, attempt, exit_code, message))

    def report_start(
        self, attempt: int, place: tuple[str, int] = ("", 0), *, arrived: bool = False
    ) -> RunState:
        """Record that the run starts, and deliver this state as `report` does.

        `place` is the address and the port at which this node can serve the rendezvous. `arrived`
        is True once this node's launcher has reached the rendezvous.
        """
        address, port = place
        started = RunState(State.STARTING, time.time(), self.record.node, attempt)
        return self._recorded(
            msgspec.structs.replace(started, address=address, port=port, arrived=arrived)
        )

    def _recorded(self, state: RunState) -> RunState:
        lost = spool.dropped(self.directory / "spool")
        entry = msgspec.structs.replace(state, dropped=lost)
        self.record.states = [*self.record.states, entry]
        # The spool must be listed again: once the run has ended, open chunks are also sent.
        self._chunks = None
        self._save()
        self._next = 0.0
        self.pump()
        return entry

    def pump(self) -> None:
        """Deliver states and telemetry, at most once a second. Call it often, until `settled`.

        Also repeat the last state every few seconds, because the server considers a run lost if
        nothing arrives from it.
        """
        if self._link is None or self.settled or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _DELIVERY_INTERVAL_S
        ended, record, link = self.ended, self.record, self._link
        if not self._saved:
            self._save()
        if record.settled:
            return
        try:
            drained = self._drained(link)
        # The link has logged the outage.
        except redis.RedisError:
            return
        before = record.delivered
        # The run's end is delivered only after all reports of its ranks, so it waits for the spool.
        ready = len(record.states) - (ended and drained is False)
        while record.delivered < ready:
            if not link.report(record.states[record.delivered], record.run):
                break
            record.delivered += 1
            self._alive_at = time.monotonic() + _STATE_REPEAT_S
        up_to_date = record.delivered == len(record.states)
        if up_to_date and not ended and record.states and time.monotonic() >= self._alive_at:
            self._alive_at = time.monotonic() + _STATE_REPEAT_S
            link.report(record.states[-1], record.run)
        record.settled = up_to_date and ended and drained is True
        if record.delivered > before or record.settled:
            self._save()

    def close(self) -> None:
        """Release the directory for other processes."""
        self._lock.close()

    def _drained(self, link: Link) -> bool | None:
        """Send some spooled entries. Return True if none are left, False if some are left.

        Return None if the spool cannot be read or deleted; then do not try again for
        `_SPOOL_RETRY_S` seconds. Raise a RedisError during an outage of the bus.
        """
        if time.monotonic() < self._drain_at:
            return None
        try:
            nothing_left = link.attempt(self._drain)
        # Wait before the next try: if a file cannot be deleted, each try sends its records again.
        except OSError as error:
            self._drain_at = time.monotonic() + _SPOOL_RETRY_S
            _log.error("the spool of run %s cannot be sent: %s", self.record.run, error)
            return None
        if nothing_left is None:
            raise redis.ConnectionError(f"the bus {link.place} is unreachable")
        return nothing_left

    def _drain(self, bus: redis.Redis) -> bool:
        assert self._link is not None
        stream = self._link.session.reports
        if int(bus.xlen(stream)) > _MOST_WAITING:
            return False
        directory = self.directory / "spool"
        rest = self._chunks or spool.chunks(directory, include_open=self.ended)
        # If an error is raised below, the next call lists the files again.
        self._chunks = None
        enough_at = time.monotonic() + _DRAIN_S
        for path, entries in rest:
            pipeline = bus.pipeline(transaction=False)
            for fields in self._own(entries):
                pipeline.xadd(stream, dict(fields))  # type: ignore[arg-type]
            pipeline.xlen(stream)
            waiting = pipeline.execute()[-1]
            path.unlink()
            self.sent += 1
            full = waiting > _MOST_WAITING
            if full or time.monotonic() >= enough_at:
                self._chunks = rest
                self._next = self._next if full else 0.0
                return False
        return True

    def _own(self, entries: list[dict[bytes, bytes]]) -> list[dict[bytes, bytes]]:
        run = self.record.run
        own = [fields for fields in entries if _is_about(fields, run)]
        if len(own) < len(entries) and not self._foreign:
            self._foreign = True
            _log.warning("ignoring records of other runs in the spool of run %s", run)
        return own

    def _save(self) -> None:
        try:
            rundir.write(self.directory / "run.json", self.record)
            self._saved = True
        # A full disk must not end training.
        except OSError as error:
            if self._saved:
                _log.error("the state of run %s cannot be saved: %s", self.record.run, error)
            self._saved = False


def is_supervised(directory: Path) -> bool:
    """Return True if a living process supervises the run of this directory."""
    if not directory.is_dir():
        return False
    try:
        _lock(directory).close()
    except BlockingIOError:
        return True
    return False


def _is_about(fields: dict[bytes, bytes], run: str) -> bool:
    """Return True if an entry of a spool is about the given run.

    Entries about other runs must not be sent: the script can write to the spool, and ingest accepts
    a node's entries about all runs of that node.
    """
    try:
        _, message = wire.decode(fields)
    # The entry cannot be decoded. It is sent nevertheless, because ingest records rejected entries.
    except wire.WireError:
        return fields.get(b"run") == run.encode()
    return fields.get(b"run") == run.encode() and not isinstance(message, NodeState)


def _lock(directory: Path) -> IO[bytes]:
    handle = (directory / "lock").open("ab")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise
    return handle
