"""Detects ranks that have ended, are silent, left the loop or are out of step, and names them.

No reduction may combine gradients of two different steps, and no rank may wait for a lost rank. On
each rank a thread publishes the rank's steps, reductions and loop exits once a second
(`PUBLISH_INTERVAL_S`) in the ranks' store, and rank 0's thread compares the entries of all ranks.
If a rank is lost, the thread that detects this stores the reason in the store. Then every rank's
thread logs the reason and ends the waits of its rank.

Each comparison checks:

- whether the entries prove that the reductions of some rank can never match those of the other
  ranks again (`core.rank_progress.conflict`);
- whether the process of a rank on the same machine has ended (`_dead`).

After a failed collective, `RankMonitor.explained` searches for the rank that caused the failure. On
each rank that calls it, the thread compares all ranks every 0.05 s, for at most 8 s (`_EXPLAIN_S`).
Only these comparisons (`_missing`) use two further signs, because both may be harmless as long as
no collective has failed:

- a rank that left its loop, or that closed its session and has ended;
- a missing heartbeat: no new entry of a rank for 4 s (`_NO_BEAT_S`), so its process or node is
  gone.

Three limits apply to waits:

- 30 s (`LONG_WAIT_S`): if ranks have waited this long, the log names the ranks that they wait for,
  and nothing else happens; rank 0 checks this at each comparison;
- 10 s (`BLOCKED_S`): a rank that is blocked in a collective, in C++, cannot raise. If the lost
  rank's process ends, the collective fails, and `explained` names that rank. If not, the thread
  ends the blocked process 10 s after the reason became known;
- 10 s (`BLOCKED_S`): the store ends with rank 0. After that, a rank that has waited for other ranks
  for 10 s fails with an error that names rank 0. A rank detects the end of the store at its next
  publication.

Reductions in a regular sequence, such as one in each step, are not delayed. The ranks have
agreed on all earlier reductions, so they expect the same step and model for the next reduction. In
three other cases a rank waits at a point of the program until all ranks have reached this point:
before an unexpected reduction, after a step without a backward pass, and before a collective that
follows a loop which the script left early. If a rank cannot reach the point, the comparison of the
ranks shows this, and the wait ends with an error.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from torch.distributed import DistError

from paceline.core import rank_progress
from paceline.core.errors import PacelineError
from paceline.core.rank_progress import RankProgress
from paceline.train.feature import Feature
from paceline.train.plan_shard import LocalStep
from paceline.train.startup import place
from paceline.train.state import TrainingState
from paceline.train.timing import RunningStep
from paceline.wire import Phase

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

PUBLISH_INTERVAL_S = 1.0
LONG_WAIT_S = 30.0
BLOCKED_S = 10.0
_POLL_S = 0.002
_SEARCH_S = 0.05
_EXPLAIN_S = 8.0
# Maximum number of seconds of the search for the failed rank after this rank's script raised.
_NAMED_S = 0.5
_NO_BEAT_S = 4.0
# Maximum number of log messages about ranks that skipped the backward pass of a step.
_MOST_SKIPS = 5
_WAITS = (Phase.SYNC, Phase.PLAN)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(RankProgress)
_NAMESPACE = Path("/proc/self/ns/pid")


class RankMonitor(Feature):
    """Monitor of several ranks; its thread publishes this rank's progress and compares all ranks.

    The training thread calls the public methods. `begin_step`, `end_turn`, `end_epoch` and a
    model's reductions raise a PacelineError if ranks are out of step.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._rank, self._world = state.startup.rank, state.startup.world
        # Processes with the same `place` are in the same PID namespace, so they can look up each
        # other's PIDs.
        self._progress = RankProgress(place=f"{place()} {_namespace()}", process=os.getpid())
        # This rank's newest activity, and the monotonic time at which it began.
        self._since: tuple[object, float] = (None, 0.0)
        # Kind of the newest reduction: the number of steps since the reduction before it, and the
        # index of the wrapped model. `_follows` maps each kind to the kind of the reduction that
        # followed it last.
        self._previous = (-1, -1)
        self._follows: dict[tuple[int, int], tuple[int, int]] = {}
        self._reduced_in = -1
        self._changed = threading.Condition()
        self._wake = threading.Event()
        # Name of the point at which this rank waits for the other ranks; None: it does not wait.
        self._point: str | None = None
        self._failure: str | None = None
        self._explaining = False
        self._closing = False
        self._store_ended = False
        # Except for `_thread`, only the monitor's thread changes the attributes below.
        # The newest point at which the thread has counted this rank as present.
        self._counted: str | None = None
        self._passed: str | None = None
        # The newest publication of each rank: its number, and the time at which this rank read it.
        self._beats: dict[int, tuple[int, float]] = {}
        # Rank 0 stores notes, which every rank logs. `_notes` is the number of notes that this rank
        # has logged, `_stored` the number that rank 0 has stored.
        self._notes = 0
        # On rank 0, the events for which a note was stored: skipped steps, and sets of late ranks.
        self._noted: set[object] = set()
        self._stored = 0
        self._failed_at = 0.0
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        if self._thread is not None:
            return
        current = self._state.current
        current.reducing, current.explained = self._reducing, self.explained
        self._state.is_out_of_step = lambda: self._failure is not None
        self._thread = threading.Thread(
            target=self._run,
            args=(self._state.startup.store,),
            name="paceline-rank-monitor",
            daemon=True,
        )
        self._thread.start()

    def begin_epoch(self, epoch: int) -> None:
        self._progress.epoch, self._progress.in_loop = epoch, True

    def begin_step(self, step: LocalStep) -> None:
        """Record that this rank begins a step; raise a PacelineError if ranks are out of step."""
        if self._failure is not None:
            self._refuse()
        progress = self._progress
        progress.relaxed, progress.step = self._state.gate.relaxed is not None, step.step

    def _reducing(self, running: RunningStep, model: int) -> None:
        """Record that this rank begins a reduction; if it is unexpected, wait for all ranks."""
        step = running.step.step
        kind = (step - self._reduced_in, model)
        expected = self._follows.get(self._previous) == kind
        self._progress.reduce(step, model)
        if not expected:
            with running.in_collective():
                self._wait_at(f"reduction/{self._progress.reductions}/{step}/{model}")
            self._follows[self._previous] = kind
        self._previous, self._reduced_in = kind, step

    def end_turn(self, running: RunningStep) -> None:
        """Record that the loop's body has ended for a step.

        If the body ran no backward pass, wait for the other ranks. Under relaxed synchronisation,
        do not wait, because gradients are not reduced in each step.
        """
        if running.step.more:
            return
        step, gate = running.step.step, self._state.gate
        passes = running.passes or not gate.models
        # `_progress.skip` must come first. The monitor's thread may publish `_progress` between the
        # two statements, and other ranks must not read that this step ended with a backward pass.
        if not passes:
            self._progress.skip(step)
        if step > self._progress.finished:
            self._progress.finished = step
        if not passes and gate.relaxed is None:
            with running.waiting():
                self._wait_at(f"body/{step}")
        if self._failure is not None:
            self._refuse()

    def end_epoch(self, ran_out: bool, raised: bool) -> None:
        if raised:
            self._leave(raised=True)
            # Give the thread time to find and log a lost rank that may have made the script fail.
            self.explained(PacelineError(), _NAMED_S)
        elif ran_out:
            self._progress.in_loop = False
        elif self._state.failure is None:
            self._leave(raised=False)
            # From here on ranks exchange only BatchNorm statistics, which requires that all ranks
            # left after the same step.
            waits = self._state.statistics.differ and self._state.gate.relaxed is None
            if waits and self._failure is None:
                self._wait_at(f"left/{self._progress.epoch}/{self._progress.step}")

    def _leave(self, *, raised: bool) -> None:
        self._progress.leave(raised)
        self._progress.in_loop = False
        self._wake.set()

    def explained(self, error: BaseException, most_s: float = _EXPLAIN_S) -> PacelineError:
        """Search for the rank that made a collective fail; return an error that names this rank.

        The search ends after `most_s` seconds. If it finds no rank, the error repeats `error`.
        """
        with self._changed:
            self._explaining = True
            self._wake.set()
            self._changed.wait_for(self._is_over, most_s)
            self._explaining = False
        if self._failure is not None:
            return PacelineError(self._failure)
        if self._store_ended:
            return PacelineError(self._without_store())
        return PacelineError(f"the exchange with other ranks failed: {error}")

    def close(self) -> None:
        """Publish that the session is closed; the thread continues."""
        if self._progress.in_loop:
            self._progress.leave(raised=False)
        self._progress.closed, self._progress.in_loop = True, False
        self._wake.set()

    def disconnect(self) -> None:
        """End the thread.

        After a failure, rank 0 first gives the other ranks time to read the reason in the store,
        because the store ends with rank 0.
        """
        if self._thread is None:
            return
        if self._rank == 0 and self._failure is not None:
            time.sleep(max(0.0, self._failed_at + 2 * PUBLISH_INTERVAL_S - time.monotonic()))
        self._closing = True
        self._wake.set()
        self._thread.join(2.0)

    def _without_store(self) -> str:
        own = self._progress
        return (
            "rank 0 is out of step: it ended or closed its session, and with it the ranks' "
            f"key-value store, while rank {self._rank} was in epoch {own.epoch}, after step "
            f"{own.finished}"
        )

    def _is_over(self) -> bool:
        return self._failure is not None or self._store_ended

    def _refuse(self) -> None:
        if self._failure is not None:
            raise PacelineError(self._failure)

    def _wait_at(self, point: str) -> None:
        """Wait until all ranks have reached a point; raise a PacelineError if a rank cannot."""
        with self._changed:
            self._point = point
            self._wake.set()
            while self._point is not None and not self._is_over():
                self._changed.wait(1.0)
            self._point = None
        self._refuse()
        if self._store_ended:
            raise PacelineError(self._without_store())

    # The monitor's thread calls the methods below.

    def _run(self, own: Store) -> None:
        try:
            store = own.clone()  # type: ignore[attr-defined]
            due, searching = 0.0, False
            while not self._closing:
                self._wake.clear()
                now = time.monotonic()
                changed = self._point is not None and self._counted != self._point
                if self._explaining and not searching:
                    due = now
                searching = self._explaining
                if now >= due or changed or not self._progress.in_loop:
                    self._tick(store)
                    due = now + (_SEARCH_S if searching else PUBLISH_INTERVAL_S)
                if self._point is not None:
                    self._arrive(store, self._point)
                rest_s = max(0.0, due - time.monotonic())
                self._wake.wait(rest_s if self._point is None else _POLL_S)
            self._publish(store)
        except DistError as error:
            logger.debug("the ranks' store has ended: %s", error)
            self._store_ended = True
            with self._changed:
                self._changed.notify_all()
            # The end of the store alone is not a failure: rank 0 may have finished the last epoch
            # before this rank. So this rank fails only if it waits for other ranks for too long.
            while self._progress.in_loop and not self._closing:
                self._observe()
                waits = self._progress.phase in _WAITS and self._progress.since_s >= BLOCKED_S
                if waits and self._failure is None:
                    self._fail_waits(self._without_store())
                self._end_process_if_stuck()
                time.sleep(PUBLISH_INTERVAL_S)
        finally:
            with self._changed:
                self._changed.notify_all()

    def _tick(self, store: Store) -> None:
        self._publish(store)
        if self._rank == 0 or self._explaining:
            self._compare(store)
        if self._state.asked_to_end:
            store.set(_key("end"), "")
        if self._rank == 0 and store.check([_key("end")]):
            self._state.end_plan()
        if self._failure is None and store.check([_key("failure")]):
            self._fail_waits(store.get(_key("failure")).decode())
        while store.check([_key(f"note/{self._notes}")]):
            logger.warning("%s", store.get(_key(f"note/{self._notes}")).decode())
            self._notes += 1
        self._end_process_if_stuck()

    def _fail_waits(self, failure: str) -> None:
        self._failure, self._failed_at = failure, time.monotonic()
        logger.error("%s", failure)
        self._state.fail_waits(PacelineError(failure))
        with self._changed:
            self._changed.notify_all()

    def _observe(self) -> None:
        at, now = self._state.activity(), time.monotonic()
        if self._since[0] != at:
            self._since = at, now
        self._progress.phase, self._progress.since_s = str(at[1]), now - self._since[1]

    def _publish(self, store: Store) -> None:
        self._observe()
        self._progress.beat += 1
        store.set(_key(f"rank/{self._rank}"), _ENCODER.encode(self._progress))  # type: ignore[arg-type]

    def _arrive(self, store: Store, point: str) -> None:
        """Count this rank as present at a point; end its wait once all ranks are present."""
        if self._counted != point:
            self._counted = point
            store.add(_key(point), 1)
        if store.add(_key(point), 0) < self._world:
            return
        if self._rank == 0 and self._passed is not None:
            # All ranks have left the previous point, so its key is no longer needed.
            store.delete_key(_key(self._passed))
        self._passed = point
        with self._changed:
            self._point = None
            self._changed.notify_all()

    def _compare(self, store: Store) -> None:
        keys = [_key(f"rank/{rank}") for rank in range(self._world)]
        here = list(range(self._world))
        if not store.check(keys):
            here = [rank for rank in here if store.check([keys[rank]])]
        values = store.multi_get([keys[rank] for rank in here])
        of = {rank: _DECODER.decode(value) for rank, value in zip(here, values, strict=True)}
        now = time.monotonic()
        for rank, progress in of.items():
            if self._beats.get(rank, (-1, 0.0))[0] != progress.beat:
                self._beats[rank] = progress.beat, now
        failure = rank_progress.conflict(of)
        if failure is None:
            failure = self._dead(of) or (self._missing(of, now) if self._explaining else None)
        if failure is not None:
            store.compare_set(_key("failure"), "", failure)
        if self._rank == 0:
            self._note(store, of)

    def _dead(self, of: dict[int, RankProgress]) -> str | None:
        """Describe a rank on this machine whose process has ended while other ranks need it."""
        newest = max((each.epoch for each in of.values() if each.in_loop), default=-1)
        for rank, progress in of.items():
            here = progress.place == self._progress.place and not progress.closed
            needed = progress.in_loop or newest > progress.epoch
            if here and needed and not _is_alive(progress.process):
                where = rank_progress.described(rank, progress)
                return f"rank {rank} failed: its process has ended; last seen: {where}"
        return None

    def _missing(self, of: dict[int, RankProgress], now: float) -> str | None:
        """Describe the rank that probably caused the failed collective; None if no rank did."""
        for rank, progress in of.items():
            if rank == self._rank:
                continue
            if progress.departures and not progress.in_loop:
                how = "an error ended" if progress.departures[-1].raised else "it left"
                return f"rank {rank} failed: {how} its loop in step {progress.step}"
            where = rank_progress.described(rank, progress)
            ended = progress.place == self._progress.place and not _is_alive(progress.process)
            if progress.closed and ended:
                return f"rank {rank} has ended before the others: {where}"
            silent_s = now - self._beats[rank][1]
            if silent_s >= _NO_BEAT_S:
                return (
                    f"rank {rank} failed: no heartbeat for {silent_s:.0f} s, so its process or its "
                    f"node is gone; last seen: {where}"
                )
        return None

    def _note(self, store: Store, of: dict[int, RankProgress]) -> None:
        for rank, step in rank_progress.skips(of):
            seen = sum(isinstance(noted, tuple) for noted in self._noted)
            if (rank, step) not in self._noted and seen < _MOST_SKIPS:
                self._noted.add((rank, step))
                self._store_note(
                    store,
                    f"rank {rank} ran no backward pass in step {step}, but other ranks did: its "
                    "batch of that step has no effect",
                )
        late = rank_progress.laggards(of, _WAITS, LONG_WAIT_S)
        missing = [rank for rank in range(self._world) if rank not in of]
        if (
            missing
            and not late
            and any(progress.since_s >= LONG_WAIT_S for progress in of.values())
        ):
            late = missing
        elif not late:
            return
        steps = frozenset((rank, of[rank].step if rank in of else -1) for rank in late)
        if steps in self._noted:
            return
        self._noted.add(steps)
        names = [rank_progress.described(rank, of.get(rank, RankProgress())) for rank in late]
        self._store_note(
            store,
            f"the other ranks have been waiting for {LONG_WAIT_S:.0f} s: {'; '.join(names[:8])} "
            "(`paceline hang RUN --stacks` shows what all ranks are doing, if the run is on a "
            "server)",
        )

    def _store_note(self, store: Store, note: str) -> None:
        store.set(_key(f"note/{self._stored}"), note)
        self._stored += 1

    def _end_process_if_stuck(self) -> None:
        if self._failure is None or not self._progress.in_loop or self._progress.closed:
            return
        if time.monotonic() - max(self._failed_at, self._since[1]) < BLOCKED_S:
            return
        logger.critical(
            "rank %d is blocked in step %d; ending its process: %s",
            self._rank,
            self._progress.step,
            self._failure,
        )
        _record(self._failure)
        logging.shutdown()
        os._exit(1)


def _key(name: str) -> str:
    return f"rank-monitor/{name}"


def _namespace() -> str:
    try:
        return str(_NAMESPACE.readlink())
    except OSError:
        return ""


def _is_alive(process: int) -> bool:
    """Return True if a process runs; a zombie does not count."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        # Without /proc, the state of a process is unknown, so the process counts as alive.
        return not Path("/proc/self/stat").exists()
    except (OSError, IndexError):
        return True
    return state not in ("Z", "X")


def _record(failure: str) -> None:
    """Write into the error file why this process ends; TorchElastic reads that file."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": "", "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": failure, "extraInfo": extra}}))
