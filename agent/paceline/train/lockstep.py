"""Ranks in step: no reduction pairs two steps, and a rank that is out of step is named everywhere.

The loop reports each step, each reduction that begins, and each loop that the script leaves. A
thread of each rank publishes that once a second in the ranks' store. Rank 0's thread compares what
all ranks have published (`paceline.core.lockstep`); if some rank can never match the others again,
it stores the reason, and every rank's thread logs it. None of this needs a control plane.

Reductions cost nothing as long as they come in a regular rhythm, such as one in each step. The
ranks agree on all earlier reductions, so they expect the same step and model for the next one. A
reduction that comes as expected therefore pairs with the right ones. Before any other reduction,
after a step without a backward pass, and before a collective that follows a loop which the script
left early, a rank waits until all ranks have come to the same point. If one of them cannot come,
the comparison finds that, and the wait ends with an error.

A rank that is blocked in a collective, in C++, cannot raise. Where the failed rank's process ends,
the collective fails, and `Lockstep.explained` says which rank it was. Otherwise the thread ends the
process after `GRACE_S`.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from torch.distributed import DistError

from paceline.core import lockstep
from paceline.core.errors import PacelineError
from paceline.core.lockstep import Progress
from paceline.wire import Phase

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from paceline.train.watch import Activity

logger = logging.getLogger(__name__)

TICK_S = 1.0  # between two publications
LONG_S = 30.0  # ranks that are waited for so long are named
GRACE_S = 10.0  # for a rank that has to raise; then its process ends
_LOOK_S = 0.002  # between two looks while the rank waits for the others
_SEARCH_S = 0.05  # between two comparisons after a collective failed
_EXPLAIN_S = 8.0  # after a collective failed
_SILENT_S = 4.0  # without a publication: the process or its node is gone
_MOST_SKIPS = 5  # that are logged
_WAITS = (Phase.SYNC, Phase.PLAN)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Progress)
_NAMESPACE = Path("/proc/self/ns/pid")


class Lockstep:
    """Keeps one rank in step with the others. One thread trains; another one is made here.

    Args:
        store: the ranks'.
        rank: this rank.
        world: W.
        place: where this process runs; processes in the same place see each other's numbers.
        activity: returns the step and the phase of this rank; the thread calls it.
        fail: called in the thread with the reason when ranks are out of step.
        end: called in rank 0's thread when some rank has asked for the end of the plan.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        place: str,
        activity: Callable[[], Activity],
        fail: Callable[[PacelineError], None],
        end: Callable[[], None],
    ) -> None:
        self._rank, self._world = rank, world
        self._activity, self._fail, self._end = activity, fail, end
        self._asked = False  # this rank asks for the end of the plan
        self._progress = Progress(place=f"{place} {_namespace()}", process=os.getpid())
        self._since: tuple[object, float] = (None, 0.0)  # an activity, and when it began
        # The descriptor of a reduction: steps since the previous one, and the model.
        self._previous = (-1, -1)
        self._follows: dict[tuple[int, int], tuple[int, int]] = {}
        self._reduced_in = -1  # step of the newest reduction
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._point: str | None = None  # that this rank has come to, and waits at
        self._failure: str | None = None
        self._explaining = False
        self._closing = False
        self._lost = False  # the store has ended
        # Of the thread.
        self._counted: str | None = None  # the point at which this rank is counted
        self._passed: str | None = None  # the newest point that all ranks have passed
        self._heard: dict[int, tuple[int, float]] = {}  # newest beat of each rank, and when it came
        self._notes = 0  # that were logged
        self._noted: set[object] = set()  # on rank 0: what there is a note of
        self._stored = 0  # on rank 0: notes that were stored
        self._failed_at = 0.0
        self._thread = threading.Thread(
            target=self._run, args=(store,), name="paceline-lockstep", daemon=True
        )
        self._thread.start()

    def begin_epoch(self, epoch: int) -> None:
        """Note that this rank enters the loop over the loader."""
        self._progress.epoch, self._progress.in_loop = epoch, True

    def begin_step(self, step: int, *, relaxed: bool) -> None:
        """Note that this rank begins a step.

        Raises:
            PacelineError: ranks are out of step.
        """
        self._refuse()
        self._progress.relaxed = relaxed
        self._progress.step = step

    def reducing(
        self, step: int, model: int, waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Note that this rank begins a reduction; wait for the others if it comes unexpectedly.

        Args:
            step: the current step.
            model: number of the wrapped model.
            waiting: returns a context around waiting for other ranks.

        Raises:
            PacelineError: ranks are out of step.
        """
        kind = (step - self._reduced_in, model)
        expected = self._follows.get(self._previous) == kind
        self._progress.reduce(step, model)
        if not expected:
            with waiting():
                self._meet(f"reduction/{self._progress.reductions}/{step}/{model}")
            self._follows[self._previous] = kind
        self._previous, self._reduced_in = kind, step

    def end_body(self, step: int, *, passes: bool, relaxed: bool) -> None:
        """Note that the body of a step has ended. Without a backward pass, wait for the others.

        Args:
            step: the current step.
            passes: there was a backward pass.
            relaxed: gradients are not reduced in each step, so there is nothing to wait for.

        Raises:
            PacelineError: ranks are out of step.
        """
        if not passes:
            self._progress.skip(step)
        self._progress.through = max(self._progress.through, step)
        if not passes and not relaxed:
            self._meet(f"body/{step}")
        self._refuse()

    def leave(self, *, raised: bool, waits: bool = False) -> None:
        """Note that the script has left its loop.

        Args:
            raised: an error ended the loop.
            waits: wait until all ranks have left after the same step, as a collective follows.

        Raises:
            PacelineError: ranks are out of step.
        """
        self._progress.leave(raised)
        self._progress.in_loop = False
        self._wake.set()
        if waits and self._failure is None:
            self._meet(f"left/{self._progress.epoch}/{self._progress.step}")

    def end_epoch(self) -> None:
        """Note that the loop over the loader has come to its end."""
        self._progress.in_loop = False

    def explained(self, error: BaseException, most_s: float = _EXPLAIN_S) -> PacelineError:
        """Return an error that names the rank because of which a collective failed.

        Args:
            error: of the collective.
            most_s: how long to look for the signs.
        """
        with self._changed:
            self._explaining = True
            self._wake.set()
            self._changed.wait_for(self._is_over, most_s)
            self._explaining = False
        if self._failure is not None:
            return PacelineError(self._failure)
        if self._lost:
            return PacelineError(self._without_store())
        return PacelineError(f"the exchange with other ranks failed: {error}")

    def ask_to_end(self) -> None:
        """Ask rank 0 to end the plan. A signal's handler may call it."""
        self._asked = True

    @property
    def failed(self) -> bool:
        """Whether ranks are out of step, or a rank has failed."""
        return self._failure is not None

    def end(self) -> None:
        """Publish that the session is closed; the thread continues."""
        if self._progress.in_loop:
            self._progress.leave(raised=False)
        self._progress.closed, self._progress.in_loop = True, False
        self._wake.set()

    def close(self) -> None:
        """End the thread. Rank 0, whose store it is, leaves the others time to read the reason."""
        if self._rank == 0 and self._failure is not None:
            time.sleep(max(0.0, self._failed_at + 2 * TICK_S - time.monotonic()))
        self._closing = True
        self._wake.set()
        self._thread.join(2.0)

    def _without_store(self) -> str:
        own = self._progress
        return (
            "rank 0 is out of step: it ended or closed its session, and the ranks' store with it, "
            f"while rank {self._rank} was in epoch {own.epoch}, after step {own.through}"
        )

    def _is_over(self) -> bool:
        return self._failure is not None or self._lost

    def _refuse(self) -> None:
        if self._failure is not None:
            raise PacelineError(self._failure)

    def _meet(self, point: str) -> None:
        """Wait until all ranks have come to a point.

        Raises:
            PacelineError: a rank cannot come to it.
        """
        with self._changed:
            self._point = point
            self._wake.set()
            while self._point is not None and not self._is_over():
                self._changed.wait(1.0)
            self._point = None
        self._refuse()
        if self._lost:
            raise PacelineError(self._without_store())

    # The thread.

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
                    due = now + (_SEARCH_S if searching else TICK_S)
                if self._point is not None:
                    self._look(store, self._point)
                rest_s = max(0.0, due - time.monotonic())
                self._wake.wait(rest_s if self._point is None else _LOOK_S)
            self._publish(store)
        except DistError as error:
            logger.debug("the ranks' store has ended: %s", error)
            self._lost = True
            with self._changed:
                self._changed.notify_all()
            # Rank 0 may just have been quicker at the end of the last epoch.
            while self._progress.in_loop and not self._closing:
                self._observe()
                waits = self._progress.phase in _WAITS and self._progress.since_s >= GRACE_S
                if waits and self._failure is None:
                    self._fell_out(self._without_store())
                self._end_process_if_stuck()
                time.sleep(TICK_S)
        finally:
            with self._changed:
                self._changed.notify_all()

    def _tick(self, store: Store) -> None:
        self._publish(store)
        if self._rank == 0 or self._explaining:
            self._compare(store)
        if self._asked:
            store.set(_key("end"), "")
        if self._rank == 0 and store.check([_key("end")]):
            self._end()
        if self._failure is None and store.check([_key("failure")]):
            self._fell_out(store.get(_key("failure")).decode())
        while store.check([_key(f"note/{self._notes}")]):
            logger.warning("%s", store.get(_key(f"note/{self._notes}")).decode())
            self._notes += 1
        self._end_process_if_stuck()

    def _fell_out(self, failure: str) -> None:
        """Ranks are out of step: names the rank in the log, and ends what waits."""
        self._failure, self._failed_at = failure, time.monotonic()
        logger.error("%s", failure)
        self._fail(PacelineError(failure))
        with self._changed:
            self._changed.notify_all()

    def _observe(self) -> None:
        at, now = self._activity(), time.monotonic()
        if self._since[0] != at:
            self._since = at, now
        self._progress.phase, self._progress.since_s = str(at[1]), now - self._since[1]

    def _publish(self, store: Store) -> None:
        self._observe()
        self._progress.beat += 1
        store.set(_key(f"rank/{self._rank}"), _ENCODER.encode(self._progress))  # type: ignore[arg-type]

    def _look(self, store: Store, point: str) -> None:
        """Counts this rank at a point, and lets it continue once all ranks are there."""
        if self._counted != point:
            self._counted = point
            store.add(_key(point), 1)
        if store.add(_key(point), 0) < self._world:
            return
        if self._rank == 0 and self._passed is not None:
            store.delete_key(_key(self._passed))  # all have left it before they came here
        self._passed = point
        with self._changed:
            self._point = None
            self._changed.notify_all()

    def _compare(self, store: Store) -> None:
        """Compares what ranks have published, and stores what there is to say."""
        keys = [_key(f"rank/{rank}") for rank in range(self._world)]
        here = list(range(self._world))
        if not store.check(keys):  # some ranks have not begun yet
            here = [rank for rank in here if store.check([keys[rank]])]
        values = store.multi_get([keys[rank] for rank in here])
        of = {rank: _DECODER.decode(value) for rank, value in zip(here, values, strict=True)}
        now = time.monotonic()
        for rank, progress in of.items():
            if self._heard.get(rank, (-1, 0.0))[0] != progress.beat:
                self._heard[rank] = progress.beat, now
        failure = lockstep.conflict(of)
        if failure is None:
            failure = self._dead(of) or (self._missing(of, now) if self._explaining else None)
        if failure is not None:
            store.compare_set(_key("failure"), "", failure)
        if self._rank == 0:
            self._note(store, of)

    def _dead(self, of: dict[int, Progress]) -> str | None:
        """A rank on this machine whose process has ended, and that others still need."""
        newest = max((each.epoch for each in of.values() if each.in_loop), default=-1)
        for rank, progress in of.items():
            here = progress.place == self._progress.place and not progress.closed
            needed = progress.in_loop or newest > progress.epoch
            if here and needed and not _is_alive(progress.process):
                where = lockstep.described(rank, progress)
                return f"rank {rank} failed: its process has ended; when last seen, {where}"
        return None

    def _missing(self, of: dict[int, Progress], now: float) -> str | None:
        """The rank because of which a collective has failed, as far as there are signs."""
        for rank, progress in of.items():
            if rank == self._rank:
                continue
            if progress.departures and not progress.in_loop:
                how = "an error ended" if progress.departures[-1].raised else "it left"
                return f"rank {rank} failed: {how} its loop in step {progress.step}"
            where = lockstep.described(rank, progress)
            ended = progress.place == self._progress.place and not _is_alive(progress.process)
            if progress.closed and ended:
                return f"rank {rank} has ended before the others: {where}"
            silent_s = now - self._heard[rank][1]
            if silent_s >= _SILENT_S:
                return (
                    f"rank {rank} failed: no sign of life for {silent_s:.0f} s, so its process or "
                    f"its node is gone; when last seen, {where}"
                )
        return None

    def _note(self, store: Store, of: dict[int, Progress]) -> None:
        """On rank 0, stores notes for the logs of all ranks."""
        for rank, step in lockstep.skips(of):
            seen = sum(isinstance(noted, tuple) for noted in self._noted)
            if (rank, step) not in self._noted and seen < _MOST_SKIPS:
                self._noted.add((rank, step))
                self._tell(
                    store,
                    f"rank {rank} made no backward pass in step {step}, and other ranks did: its "
                    "batch of that step counts for nothing",
                )
        late = lockstep.laggards(of, _WAITS, LONG_S)
        missing = [rank for rank in range(self._world) if rank not in of]
        if missing and not late and any(progress.since_s >= LONG_S for progress in of.values()):
            late = missing
        elif not late:
            return
        steps = frozenset((rank, of[rank].step if rank in of else -1) for rank in late)
        if steps in self._noted:
            return
        self._noted.add(steps)
        names = [lockstep.described(rank, of.get(rank, Progress())) for rank in late]
        self._tell(
            store,
            f"the other ranks have been waiting for {LONG_S:.0f} s: {'; '.join(names[:8])} "
            "(`paceline hang RUN --stacks` shows what all ranks do, if a server knows the run)",
        )

    def _tell(self, store: Store, note: str) -> None:
        store.set(_key(f"note/{self._stored}"), note)
        self._stored += 1

    def _end_process_if_stuck(self) -> None:
        """Ends a rank that is still blocked in a collective long after ranks fell out of step."""
        if self._failure is None or not self._progress.in_loop or self._progress.closed:
            return
        if time.monotonic() - max(self._failed_at, self._since[1]) < GRACE_S:
            return
        logger.critical(
            "rank %d is blocked in step %d and ends: %s",
            self._rank,
            self._progress.step,
            self._failure,
        )
        _record(self._failure)
        logging.shutdown()
        os._exit(1)


def _key(name: str) -> str:
    return f"lockstep/{name}"


def _namespace() -> str:
    try:
        return str(_NAMESPACE.readlink())
    except OSError:
        return ""


def _is_alive(process: int) -> bool:
    """Return whether a process runs. One that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return not Path("/proc/self/stat").exists()  # without /proc nothing is known
    except (OSError, IndexError):
        return True
    return state not in ("Z", "X")


def _record(failure: str) -> None:
    """Writes the reason where TorchElastic looks for that of a rank that ends."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": "", "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": failure, "extraInfo": extra}}))
