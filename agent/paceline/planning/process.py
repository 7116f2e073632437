"""Planning process of rank 0, in which an attempt is planned while no controller plans it.

The process gets an attempt over a socket: a `Begin`, then what the ranks report and the leader
adopts. It sends back encoded plans. It is a process and not a thread so
that rank 0, which trains, does not share an interpreter with it. It ends when rank 0 closes the
socket or ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from paceline import policies
from paceline.planning.feedback import Window
from paceline.planning.followed import Followed
from paceline.planning.history import History
from paceline.planning.planner import Planner
from paceline.policies.jit import interpret_until
from paceline.policies.streams import problem_of
from paceline.wire import LOCAL, Hello, Plan, StepBatch

# Interval at which the process checks that rank 0 is alive.
_ALIVE_S = 1.0
# The ranks need the cores, so segments are planned again less often than by a controller.
_SPARE = 25.0
# The policy whose segments a leader makes without plans: equal local batches, in the epoch's order.
PLAIN = "bsp"
# Variable of a rank's environment: the policy with which the control plane started the run.
FIRST_POLICY = "PACELINE_FIRST_POLICY"

_plans = msgspec.msgpack.Decoder(Plan)
_batches = msgspec.msgpack.Decoder(StepBatch)


@dataclass(frozen=True)
class PolicyInForce:
    """A policy's name, its parameters that are not the defaults, and the run's policy version."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    version: int = 0

    @staticmethod
    def of(given: object, what: str) -> PolicyInForce:
        """Return a policy given as its name, or as {name: parameters}.

        Raises:
            ValueError: no such policy is installed, or a parameter is wrong. The message begins
                with `what`, the name of the argument.
            TypeError: `given` is neither of the two.
        """
        name: object = given
        parameters: object = {}
        if isinstance(given, Mapping) and len(given) == 1:
            [(name, parameters)] = given.items()
        if not isinstance(name, str) or not isinstance(parameters, Mapping):
            raise TypeError(f"{what}={given!r}: give the name of a policy, or {{name: parameters}}")
        try:
            policies.make(name, parameters)
        except ValueError as error:
            raise ValueError(f"{what}={given!r}: {error}") from None
        return PolicyInForce(name, dict(parameters))

    @property
    def profiles(self) -> bool:
        """True if the ranks of a run that begins with this policy are profiled before training."""
        return self.name == "lbb" and self.parameters.get("profile", "auto") == "auto"


@dataclass(frozen=True)
class Begin:
    """The first message to the process: the attempt, and the policy.

    Args:
        hello: description of the attempt.
        followed: summary of the attempt's adopted segments.
        measured: the ranks' newest records, as encoded `StepBatch`es.
        policy: the policy in force.
    """

    hello: Hello
    followed: Followed
    measured: list[bytes]
    policy: PolicyInForce


@dataclass(frozen=True)
class Segment:
    """The leader has adopted a segment, an encoded `Plan`."""

    plan: bytes


@dataclass(frozen=True)
class Measured:
    """Ranks have reported steps, an encoded `StepBatch`."""

    batch: bytes


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
        policy = policies.make(begin.policy.name, begin.policy.parameters, begin.hello.world)
        refused = policies.unsuited(policy, begin.hello.token_budget)
        if begin.hello.stream:
            refused = refused or problem_of(policy)
        if refused is not None:
            raise ValueError(refused)
    except ValueError as error:
        rank.send(Failed(str(error), for_good=True))
        return
    interpret_until(policies.warm_up)
    planner = Planner(*_attempt(begin), source=LOCAL, spare=_SPARE)
    planner.use(policy, begin.policy.version)
    heard: SimpleQueue[Segment | Measured] = SimpleQueue()
    # A thread reads, because rank 0 does not read plans while it waits to write.
    threading.Thread(target=_read, args=[rank, heard], daemon=True).start()
    while True:
        while not (planner.is_due() and heard.empty()):
            try:
                message = heard.get(timeout=_ALIVE_S)
            except Empty:
                # Another process may hold rank 0's side of the socket: then no end of file comes.
                if os.getppid() != parent:
                    return
                continue
            _hear(planner, message)
        try:
            made = planner.plan()
        # Policies are plug-ins, so any error can occur.
        except Exception as error:
            rank.send(Failed(f"{type(error).__name__}: {error}"))
        else:
            rank.send(msgspec.msgpack.encode(made))


def _read(rank: Connection, heard: SimpleQueue[Segment | Measured]) -> None:
    try:
        while True:
            heard.put(rank.recv())
    # Rank 0 has closed its side, or has ended. A plan that is being made is of no use any more.
    except (EOFError, OSError):
        os._exit(0)


def _attempt(begin: Begin) -> tuple[History, Window]:
    window = Window(begin.hello.world, begin.hello.attempt)
    for packed in begin.measured:
        window.add(_batches.decode(packed).records)
    return begin.followed.history(begin.hello), window


def _hear(planner: Planner, message: Segment | Measured) -> None:
    if isinstance(message, Segment):
        planner.adopt(_plans.decode(message.plan))
    else:
        planner.add(_batches.decode(message.batch).records)
