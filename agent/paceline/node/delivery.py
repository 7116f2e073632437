"""Brings a run's states and spooled telemetry to the control plane."""

from __future__ import annotations

import fcntl
import logging
import time
from pathlib import Path
from typing import IO

import msgspec
import redis

from paceline import wire
from paceline.node import rundir, spool
from paceline.node.link import Link
from paceline.node.rundir import Record
from paceline.wire import RunState, State

_EVERY_S = 1.0
_MEND_S = 60.0  # pause before a spool that cannot be read or deleted is tried again
_ALIVE_S = 3.0  # between two signs of life of a run
_log = logging.getLogger(__name__)


class Delivery:
    """The undelivered states and telemetry of one run.

    They are kept on disk and survive outages of the bus and the end of this process. A delivery
    holds the lock of the run's directory until `close`, so that no other process delivers, too.

    Args:
        directory: of the run, see `paceline.node.rundir`; made if missing.
        record: the run and its states so far.
        link: to the bus; None: there is no control plane, and nothing is delivered.
        lock: on the directory, if the caller holds it already.

    Raises:
        OSError: the directory cannot be written.
        BlockingIOError: another process looks after this run.
    """

    def __init__(
        self, directory: Path, record: Record, link: Link | None, lock: IO[bytes] | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = lock or _lock(directory)
        self.directory = directory
        self.record = record
        self._link = link
        self._next = self._alive_at = self._drain_at = 0.0
        self._save()

    @classmethod
    def resume(cls, directory: Path, control: str, link: Link) -> Delivery | None:
        """Takes over a run whose process is gone, and reports the run's end if that is missing.

        Returns None if everything is delivered, if another process looks after the run, or if the
        run belongs to another control plane.
        """
        path = directory / "run.json"
        try:
            record = rundir.read(path, Record)
        except msgspec.DecodeError as error:  # after a power cut, or written by another release
            _log.error("%s is left alone as .bad: %s", path, error)
            path.rename(path.with_suffix(".bad"))
            return None
        if record is None or record.settled or record.control != control:
            return None
        try:
            lock = _lock(directory)
        except BlockingIOError:
            return None
        record = rundir.read(path, Record)  # the owner may have written before the lock was taken
        assert record is not None
        delivery = cls(directory, record, link, lock)
        if not delivery.ended:
            delivery.report(State.FAILED, message=f"{record.supervisor} was killed")
        return delivery

    @property
    def ended(self) -> bool:
        """Whether the run's last state was reported, if not yet delivered."""
        return bool(self.record.states) and self.record.states[-1].state.final

    @property
    def settled(self) -> bool:
        """Whether the run is over and the control plane has everything about it."""
        return self.record.settled

    def report(
        self,
        state: State,
        attempt: int = 0,
        exit_code: int | None = None,
        message: str | None = None,
    ) -> RunState:
        """Records a state and delivers it, at once if the bus is there."""
        lost = spool.dropped(self.directory / "spool")
        entry = RunState(state, time.time(), self.record.node, attempt, exit_code, message, lost)
        self.record.states = [*self.record.states, entry]
        self._save()
        self._next = 0.0
        self.pump()
        return entry

    def pump(self) -> None:
        """Delivers states and telemetry, at most once a second. Call it often, until `settled`.

        It also repeats the last state as a sign of life: the server takes a silent run for lost.
        """
        if self._link is None or self.settled or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY_S
        ended, record, link = self.ended, self.record, self._link
        drained = False
        if time.monotonic() >= self._drain_at:
            try:
                if link.attempt(lambda bus: self._drain(bus, include_open=ended)) is None:
                    return
                drained = True
            except OSError as error:  # wait: trying again would send the same records again
                self._drain_at = time.monotonic() + _MEND_S
                _log.error("the spool of run %s cannot be drained: %s", record.run, error)
        before = record.delivered
        while record.delivered < len(record.states):
            if not link.tell(record.states[record.delivered], record.run):
                break
            record.delivered += 1
            self._alive_at = time.monotonic() + _ALIVE_S
        up_to_date = record.delivered == len(record.states)
        if up_to_date and not ended and record.states and time.monotonic() >= self._alive_at:
            self._alive_at = time.monotonic() + _ALIVE_S
            link.tell(record.states[-1], record.run)
        record.settled = up_to_date and ended and drained
        if record.delivered > before or record.settled:
            self._save()

    def close(self) -> None:
        """Releases the directory for other processes."""
        self._lock.close()

    def _drain(self, bus: redis.Redis, *, include_open: bool) -> int:
        bus.ping()  # an empty spool says nothing about the bus

        def send(fields: dict[bytes, bytes]) -> None:
            bus.xadd(wire.TELEMETRY, dict(fields))  # type: ignore[arg-type]

        return spool.drain(self.directory / "spool", send, include_open=include_open)

    def _save(self) -> None:
        try:
            rundir.write(self.directory / "run.json", self.record)
        except OSError as error:  # a full disk must not end training
            _log.error("the state of run %s cannot be kept: %s", self.record.run, error)


def _lock(directory: Path) -> IO[bytes]:
    handle = (directory / "lock").open("ab")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise
    return handle
