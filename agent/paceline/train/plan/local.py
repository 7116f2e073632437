"""Planning on rank 0 while no controller plans the run.

Each rank sends the records of its steps through a queue in the ranks' store
(`paceline.train.times_queue`). On rank 0 the thread of a `LocalPlanner` reads the queue and follows
the adopted segments. If there is no controller, or none that answers, the thread starts a planning
process (`paceline.planning.process`), and offers its plans to the leader. Once a controller plans
again, the thread ends the process. Without a control plane, the process also reports each epoch,
and the thread prints the report as one line.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch.distributed import DistError

from paceline.core.epoch_report import sentence
from paceline.core.terms import PLAIN
from paceline.planning.followed import Followed
from paceline.planning.policy_in_force import PolicyInForce
from paceline.planning.process import (
    Begin,
    Ended,
    Failed,
    Measured,
    Reported,
    ReportsEnded,
    Segment,
)
from paceline.train.plan.proposals import Proposals
from paceline.train.times_queue import QUEUE, opened
from paceline.wire import CONTROLLER, Adopted, Hello, Plan, Proposal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

# Interval at which rank 0 reads the queue while it plans, and while a controller does.
_READ_S, _IDLE_READ_S = 0.1, 1.0
# A controller is away if it has proposed nothing for this many seconds after a segment began.
AWAY_S = 1.5
# A controller that has proposed segments for this many seconds gets the planning back, even if each
# proposal came too late.
_BACK_S = 5.0
# Pause before another planning process is started after one ended: first pause, and longest pause.
_RETRY_S, _MOST_RETRY_S = 2.0, 60.0
_CLOSE_S = 2.0
# Once training has ended, the thread waits at most this many seconds for the last epoch's report.
_LAST_REPORT_S = 3.0
# Size of the newest entries of the queue that are kept for each rank: over 100 records.
_KEPT_BYTES = 16_384
# A proposal shows that a controller plans if its segment is at most this many segments before the
# newest adopted one.
_LATE = 2
# `-P` keeps the current directory, which may have modules named like Python's, off the path.
_PROGRAM = [sys.executable, "-P", "-c", "from paceline.planning.process import main; main()"]
# Planning uses one core: the ranks need the others.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

_plans = msgspec.msgpack.Decoder(Plan)


class LocalPlanner:
    """Rank 0's planner, which plans while no controller does.

    Args:
        store: the ranks' store.
        key: the key with which ranks sign their records.
        hello: description of the attempt.
        proposals: gets the plans.
        policy: the policy to begin with; None: the policy of the first controller that proposes a
            segment.
        alone: True if the run has no control plane.
        reports: file for the reports of the epochs; None: epochs are not reported.
    """

    def __init__(
        self,
        store: Store,
        key: bytes,
        hello: Hello,
        proposals: Proposals,
        policy: PolicyInForce | None,
        *,
        alone: bool,
        reports: Path | None = None,
    ) -> None:
        self._store: Any = store.clone()  # type: ignore[attr-defined]
        self._key = key
        self._hello = hello
        self._proposals = proposals
        self._policy = policy
        self._alone = alone
        self._reports = reports
        # The last epoch that was reported.
        self._reported_epoch = -1
        self._followed = Followed(hello)
        # Entries of the queue, and their total size.
        self._measured: deque[bytes] = deque()
        self._measured_bytes = 0
        # Adopted segments, each with the time of its adoption.
        self._new: deque[tuple[float, Plan]] = deque()
        # The controller's last proposal that was at most `_LATE` segments late, and its time.
        self._answer: Proposal | None = None
        self._answered_at = 0.0
        # Time of the first segment that was adopted after that proposal.
        self._unanswered_at: float | None = None
        # Time at which a controller proposed a segment again while this rank planned.
        self._back_at: float | None = None
        self._child: _Child | None = None
        self._retry_s, self._retry_at = _RETRY_S, 0.0
        # The policy that cannot be used here.
        self._unusable: PolicyInForce | None = None
        self._warned: set[str] = set()
        # A pipe that wakes the thread.
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="paceline-planning", daemon=True)
        self._thread.start()

    def adopted(self, adopted: Adopted) -> None:
        """Add a segment that the leader has adopted. Thread-safe."""
        self._new.append((time.monotonic(), adopted.plan))
        self._wake_up()

    def _wake_up(self) -> None:
        # If the pipe is full, the thread will wake up anyway.
        with suppress(BlockingIOError):
            os.write(self._wake, b"x")

    def close(self) -> None:
        """End the thread and the process."""
        self._closing = True
        self._wake_up()
        self._thread.join(_CLOSE_S + _LAST_REPORT_S)
        if not self._thread.is_alive():
            os.close(self._wake)
            os.close(self._woken)

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            # Training goes on without plans; the leader repeats the last split. Go on reading, so
            # that the queue does not grow.
            except Exception as error:
                self._lost(f"{type(error).__name__}: {error}")
                time.sleep(_READ_S)
        self._wait_for_report()
        self._end_child()

    def _wait_for_report(self) -> None:
        """Wait a moment for the report of the last epoch, which the script may have left early."""
        if not self._report_pending():
            return
        until = time.monotonic() + _LAST_REPORT_S
        self._send(Ended())
        while self._report_pending() and time.monotonic() < until:
            try:
                self._turn()
            # Reports are not worth an error at the end of training.
            except Exception as error:
                logger.debug("the last epoch is not reported: %s", error)
                return

    def _report_pending(self) -> bool:
        """Return True if the process will still report the newest epoch."""
        newest, child = self._newest, self._child
        if newest is None or child is None or not child.reports:
            return False
        return newest.epoch > self._reported_epoch

    def _turn(self) -> None:
        self._start_or_end()
        sources: list[Any] = [self._woken]
        if self._child is not None:
            sources.append(self._child.connection)
        ready = wait(sources, _READ_S if self._child is not None else _IDLE_READ_S)
        if self._woken in ready:
            os.read(self._woken, 4096)
        self._read_adopted()
        self._read_times()
        if self._child is not None:
            self._receive(self._child)

    def _read_adopted(self) -> None:
        while self._new:
            at, plan = self._new.popleft()
            self._followed.adopt(plan)
            if self._unanswered_at is None or self._unanswered_at < self._answered_at:
                self._unanswered_at = at
            if self._child is not None:
                self._send(Segment(msgspec.msgpack.encode(plan)))

    def _read_times(self) -> None:
        # Only this thread takes entries.
        try:
            entries = [
                self._store.queue_pop(QUEUE, False) for _ in range(self._store.queue_len(QUEUE))
            ]
        # Ranks may have closed the store.
        except (DistError, RuntimeError) as error:
            self._warn(f"the ranks' times cannot be read: {error}")
            return
        for entry in entries:
            packed = opened(entry, self._key)
            if packed is None:
                self._warn("a record is ignored: it was not written by a rank")
                continue
            self._measured.append(packed)
            self._measured_bytes += len(packed)
            while self._measured_bytes > _KEPT_BYTES * self._hello.world:
                self._measured_bytes -= len(self._measured.popleft())
            self._send(Measured(packed))

    def _must_plan(self) -> bool:
        """Return True if no controller plans the next segment, or an epoch must be reported."""
        newest = self._newest
        if newest is not None:
            epochs = self._hello.epochs
            at_end = newest.epoch_end and epochs is not None and newest.epoch + 1 >= epochs
            # Plans are ignored if local batches must be equal.
            if newest.source == "equal":
                return False
            if at_end:
                return self._report_pending()
        if self._alone:
            return True
        asked_at = self._unanswered_at
        if asked_at is None or self._answered_at >= asked_at:
            return False
        return time.monotonic() - asked_at > AWAY_S

    @property
    def _newest(self) -> Plan | None:
        return self._followed.newest[-1] if self._followed.newest else None

    def _read_controller(self) -> None:
        proposal, newest = self._proposals.by_controller, self._newest
        if proposal is None or proposal is self._answer:
            return
        plan = proposal.plan
        self._policy = PolicyInForce(plan.policy, proposal.parameters, plan.version)
        # After an outage, a controller that still reads old records plans segments that have run.
        if newest is None or plan.seq >= newest.seq - _LATE:
            self._answer, self._answered_at = proposal, self._proposals.controller_at

    def _start_or_end(self) -> None:
        """Start the planning process if no controller plans, and end it if one does."""
        self._read_controller()
        must, child, now, newest = self._must_plan(), self._child, time.monotonic(), self._newest
        if child is None:
            policy = self._policy
            useful = policy is not None and policy != self._unusable
            # A leader without plans goes on with the last policy: under `bsp` it needs none.
            if policy is not None and policy.name == PLAIN:
                useful = useful and newest is not None and newest.policy != PLAIN
            if must and useful and now >= self._retry_at:
                self._start(policy)
        elif must:
            self._back_at = None
            # A controller has proposed a segment of another policy before it went away again.
            if child.policy != self._policy:
                self._end_child()
        else:
            self._back_at = self._back_at or now
            source = "" if newest is None or newest.seq <= child.started_at else newest.source
            if source in (CONTROLLER, "equal") or now - self._back_at > _BACK_S:
                logger.info("rank 0 stops planning")
                self._end_child()

    def _start(self, policy: PolicyInForce | None) -> None:
        assert policy is not None
        if not self._alone:
            words = f"no controller has planned for {AWAY_S:g} s: rank 0 plans"
            self._warn(f"{words}, with policy {policy.name}")
        self._back_at = None
        started_at = -1 if self._newest is None else self._newest.seq
        self._child = _Child(policy, started_at, reports=self._reports is not None)
        measured = list(self._measured)
        self._send(Begin(self._hello, self._followed, measured, policy, self._reports))

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child = self._back_at = None

    def _send(self, message: object) -> None:
        if self._child is None:
            return
        try:
            self._child.connection.send(message)
        except OSError as error:
            self._lost(f"rank 0's planning process ended: {error}")

    def _receive(self, child: _Child) -> None:
        try:
            while self._child is child and child.connection.poll():
                self._take(child, child.connection.recv())
            # Another process may have inherited the other end, so that no end of file comes.
            if self._child is child and child.has_ended():
                raise EOFError
        except (EOFError, OSError) as error:
            self._lost(f"rank 0's planning process ended: {error or 'unexpectedly'}")

    def _take(self, child: _Child, answer: bytes | Failed | Reported | ReportsEnded) -> None:
        if isinstance(answer, Reported):
            self._reported_epoch = answer.report.epoch
            _print(sentence(answer.report))
            if answer.problem:
                self._warn(f"epochs are not kept for `paceline report --local`: {answer.problem}")
            return
        if isinstance(answer, ReportsEnded):
            child.reports = False
            if answer.problem:
                self._warn(f"epochs are not reported: {answer.problem}")
            return
        if isinstance(answer, Failed):
            what = f"rank 0 cannot plan with {child.policy.name}: {answer.reason}"
            self._warn(f"{what}: it repeats the last split")
            if answer.for_good:
                self._unusable = child.policy
                self._end_child()
            return
        self._retry_s = _RETRY_S
        plan = _plans.decode(answer)
        self._proposals.offer(
            Proposal(self._hello.attempt, plan, "on rank 0", child.policy.parameters)
        )

    def _lost(self, reason: str) -> None:
        """End the process, and start another after a pause."""
        self._warn(reason)
        self._end_child()
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _MOST_RETRY_S)

    def _warn(self, words: str) -> None:
        if words not in self._warned:
            self._warned.add(words)
            logger.warning("%s", words)


def _print(line: str) -> None:
    """Log a line if the script has set up logging; otherwise write it to standard error."""
    if logger.hasHandlers() or logging.getLogger("paceline").level:
        logger.info("%s", line)
    elif sys.stderr is not None:
        # The script may have closed standard error, or its reader has ended.
        with suppress(OSError, ValueError):
            sys.stderr.write(f"paceline: {line}\n")
            sys.stderr.flush()


class _Child:
    """A planning process.

    Args:
        policy: the policy in force.
        started_at: number of the newest segment when the process is started; -1: there is none.
        reports: True while the process reports epochs.
    """

    def __init__(self, policy: PolicyInForce, started_at: int, *, reports: bool) -> None:
        self.policy = policy
        self.started_at = started_at
        self.reports = reports
        self.connection, of_child = Pipe()
        number = of_child.fileno()
        try:
            self._process = subprocess.Popen(
                [*_PROGRAM, str(number)],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_ONE_THREAD},
            )
        finally:
            of_child.close()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """End the process at once, even if it is making a plan."""
        self.connection.close()
        self._process.kill()
        self._process.wait()
