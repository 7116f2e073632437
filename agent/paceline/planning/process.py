"""Planning process of rank 0, in which an attempt is planned while no controller plans it.

The process gets an attempt over a socket: a `Begin`, then what the ranks report and the leader
adopts. It sends back encoded plans. Without a server it also sends a `Reported` at the end of each
epoch, and a `ReportsEnded` after the last one.
It is a process and not a thread so that rank 0, which trains, does not share an interpreter with
it. It ends when rank 0 closes the socket or ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec

from paceline import policies
from paceline.core.epoch_report import EpochReport, keep
from paceline.planning.epochs import Epochs
from paceline.planning.feedback import Window
from paceline.planning.followed import Followed
from paceline.planning.history import History
from paceline.planning.planner import Planner
from paceline.planning.policy_in_force import PolicyInForce
from paceline.policies.jit import interpret_until
from paceline.wire import LOCAL, Hello, Plan, StepBatch, StepRecord

# After this many seconds without a message the process checks that rank 0 is alive. Once training
# has ended, it then also reports an epoch that the script left early.
_QUIET_S = 1.0
# The ranks need the cores, so segments are planned again less often than by a controller.
_SPARE = 25.0

_plans = msgspec.msgpack.Decoder(Plan)
_batches = msgspec.msgpack.Decoder(StepBatch)


@dataclass(frozen=True)
class Begin:
    """The first message to the process: the attempt, and the policy.

    Args:
        hello: description of the attempt.
        followed: summary of the attempt's adopted segments.
        measured: the ranks' newest records, as encoded `StepBatch`es.
        policy: the policy in force.
        reports: file to which the epochs' reports are appended; None: no reports are made.
    """

    hello: Hello
    followed: Followed
    measured: list[bytes]
    policy: PolicyInForce
    reports: Path | None = None


@dataclass(frozen=True)
class Segment:
    """The leader has adopted a segment, an encoded `Plan`."""

    plan: bytes


@dataclass(frozen=True)
class Measured:
    """Ranks have reported steps, an encoded `StepBatch`."""

    batch: bytes


@dataclass(frozen=True)
class Ended:
    """Training has ended; the ranks' last records may still arrive."""


@dataclass(frozen=True)
class Reported:
    """To rank 0: the report of an epoch. `problem` is why it is not in the file, or empty."""

    report: EpochReport
    problem: str = ""


@dataclass(frozen=True)
class ReportsEnded:
    """To rank 0: no more reports follow. `problem` is the error that ended them, or empty."""

    problem: str = ""


@dataclass(frozen=True)
class Failed:
    """To rank 0: no plan can be made. If `for_good`, the process ends."""

    reason: str
    for_good: bool = False


def main() -> None:
    """Plan an attempt until rank 0 closes the socket, whose descriptor is the argument."""
    parent = os.getppid()
    # Launchers and batch systems send these signals to all processes of a job. Rank 0 may still
    # train then, to save a checkpoint; this process ends with it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # Rank 0 may close its end, or end, at any time.
    with suppress(EOFError, ConnectionError):
        _plan_for(Connection(int(sys.argv[1])), parent)


def _plan_for(rank: Connection, parent: int) -> None:
    begin = rank.recv()
    assert isinstance(begin, Begin)
    try:
        hello = begin.hello
        policy = begin.policy.made(hello.world, hello.token_budget, stream=hello.stream)
    except ValueError as error:
        rank.send(Failed(str(error), for_good=True))
        return
    interpret_until(policies.warm_up)
    planner = Planner(*_attempt(begin), source=LOCAL, spare=_SPARE)
    planner.use(policy, begin.policy.version)
    epochs = None
    if begin.reports is not None:
        epochs = Epochs(hello, planner.history, planner.window, policy.name)
    messages: SimpleQueue[Segment | Measured | Ended] = SimpleQueue()
    # A thread reads, because rank 0 does not read plans while it waits to write.
    threading.Thread(target=_read, args=[rank, messages], daemon=True).start()
    ended = False
    while True:
        while not (planner.is_due() and messages.empty()):
            news, over = None, False
            try:
                message = messages.get(timeout=_QUIET_S)
            except Empty:
                # Another process may hold rank 0's side of the socket: then no end of file comes.
                if os.getppid() != parent:
                    return
                over = ended
            else:
                ended = ended or isinstance(message, Ended)
                news = _receive(planner, message)
            if epochs is not None and begin.reports is not None:
                epochs = _report(rank, epochs, begin.reports, news, over=over)
        try:
            made = planner.plan()
        # Policies are plug-ins, so any error can occur.
        except Exception as error:
            rank.send(Failed(f"{type(error).__name__}: {error}"))
        else:
            rank.send(msgspec.msgpack.encode(made))


def _report(
    rank: Connection,
    epochs: Epochs,
    path: Path,
    news: Plan | list[StepRecord] | None,
    *,
    over: bool,
) -> Epochs | None:
    """Send rank 0 the reports of finished epochs; return None if no more reports follow."""
    problem = ""
    try:
        if isinstance(news, Plan):
            epochs.adopt(news)
        elif news is not None:
            epochs.add(news)
        if over:
            epochs.close()
        for report in epochs.finished():
            rank.send(_kept(path, report))
    # Planning continues without reports.
    except Exception as error:
        over, problem = True, f"{type(error).__name__}: {error}"
    if over:
        rank.send(ReportsEnded(problem))
    return None if over else epochs


def _kept(path: Path, report: EpochReport) -> Reported:
    try:
        keep(path, report)
    except OSError as error:
        return Reported(report, f"{path} cannot be written: {error.strerror or error}")
    return Reported(report)


def _read(rank: Connection, messages: SimpleQueue[Segment | Measured | Ended]) -> None:
    try:
        while True:
            messages.put(rank.recv())
    # Rank 0 has closed its side, or has ended. A plan that is being made is of no use any more.
    except (EOFError, OSError):
        os._exit(0)


def _attempt(begin: Begin) -> tuple[History, Window]:
    window = Window(begin.hello.world, begin.hello.attempt)
    for packed in begin.measured:
        window.add(_batches.decode(packed).records)
    return begin.followed.history(begin.hello), window


def _receive(
    planner: Planner, message: Segment | Measured | Ended
) -> Plan | list[StepRecord] | None:
    """Pass a message to the planner; return its content."""
    if isinstance(message, Segment):
        plan = _plans.decode(message.plan)
        planner.adopt(plan)
        return plan
    if isinstance(message, Measured):
        records = _batches.decode(message.batch).records
        planner.add(records)
        return records
    return None
