"""`paceline agent`: registers this node and looks after the runs started on it."""

from __future__ import annotations

import fcntl
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec

from paceline.core.errors import PacelineError
from paceline.node import machine
from paceline.node.delivery import Delivery
from paceline.node.link import Commands, Link
from paceline.node.rundir import Record
from paceline.node.supervisor import Supervisor
from paceline.wire import Launch, NodeState, RunState, State

HEARTBEAT_S = 2.0
_TICK_S = 0.2
_RECOVER_S = 10.0
_GOODBYE_S = 10.0  # time to deliver the rest after the runs were stopped
_log = logging.getLogger(__name__)


class Agent:
    """Looks after the runs of one node.

    All work is done in one thread, because the kernel ends launchers with the thread that started
    them.

    Args:
        link: to the bus.
        name: of the node.
        data: the data directory; only one agent may use it at a time.
        control: identifies the control plane across restarts: its id, or the bus's address.
        find_bus: asks the server for the bus's URL while the bus is away; None: the URL is fixed.

    Raises:
        PacelineError: another agent uses the data directory.
    """

    def __init__(
        self,
        link: Link,
        name: str,
        data: Path,
        control: str,
        find_bus: Callable[[], str | None] | None = None,
    ) -> None:
        self._link = link
        self._data = data
        self._control = control
        self._find_bus = find_bus
        self._commands = Commands(link, name)
        self._node = machine.describe(name)
        self._runs: dict[str, Supervisor] = {}
        self._left_over: dict[str, Delivery] = {}
        self._unreadable: set[Path] = set()  # directories whose problem was logged
        self._signal: int | None = None
        self._beat_at = self._recover_at = 0.0
        self._lock = (data / "agent.lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise PacelineError(
                f"another agent uses the data directory {data}; choose another with --data"
            ) from None

    def run(self) -> int:
        """Works until SIGTERM or SIGINT; returns the exit code. A second signal kills the runs."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            while self._signal is None:
                self._tick()
            self._leave()
        finally:
            for supervisor in self._runs.values():
                supervisor.close()
            for delivery in self._left_over.values():
                delivery.close()
            self._lock.close()
        return 128 + signal.SIGINT if self._signal == signal.SIGINT else 0

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._signal is not None:
            for supervisor in self._runs.values():
                supervisor.kill()
        self._signal = number

    def _tick(self) -> None:
        for run, command in self._commands.read(_TICK_S):
            if isinstance(command, Launch):
                self._launch(run, command)
            elif run in self._runs:
                self._runs[run].stop(command.reason)
        if not self._link.up:
            time.sleep(_TICK_S)  # without the bus, reading commands did not wait
        self._look_after()
        if self._commands.started and time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + HEARTBEAT_S
            self._heartbeat()
            if not self._link.up and self._find_bus is not None:
                url = self._find_bus()
                if url is not None and url != self._link.url:
                    self._link.move(url)
                    _log.info("the bus moved to %s", self._link.place)
        if time.monotonic() >= self._recover_at:
            self._recover_at = time.monotonic() + _RECOVER_S
            self._recover()

    def _look_after(self) -> None:
        for run, supervisor in list(self._runs.items()):
            supervisor.poll()
            if supervisor.settled:
                supervisor.close()
                del self._runs[run]
        for run, delivery in list(self._left_over.items()):
            delivery.pump()
            if delivery.settled:
                delivery.close()
                del self._left_over[run]

    def _launch(self, run: str, launch: Launch) -> None:
        if run in self._runs:
            _log.error("run %s is here already; its second launch is ignored", run)
            return
        _log.info("launching run %s: %s", run, launch.script)
        record = Record(run, self._node.node, "the agent", self._control)
        try:
            supervisor = Supervisor(launch, self._data, record, self._link)
        except (PacelineError, OSError) as error:
            _log.error("run %s cannot be launched: %s", run, error)
            message = str(error)
            self._link.tell(RunState(State.FAILED, time.time(), record.node, message=message), run)
            return
        self._runs[run] = supervisor
        supervisor.start()

    def _heartbeat(self, left: bool = False) -> None:
        runs = [run for run, supervisor in self._runs.items() if supervisor.running]
        state: NodeState = msgspec.structs.replace(self._node, at=time.time(), runs=runs, left=left)
        self._link.tell(state)

    def _recover(self) -> None:
        """Takes over runs whose agent or `paceline run` is gone and left something undelivered."""
        for directory in sorted((self._data / "runs").glob("*")):
            run = directory.name
            if run in self._runs or run in self._left_over or not directory.is_dir():
                continue
            try:
                delivery = Delivery.resume(directory, self._control, self._link)
            except OSError as error:
                if directory not in self._unreadable:
                    self._unreadable.add(directory)
                    _log.error("what run %s left cannot be delivered: %s", run, error)
                continue
            if delivery is not None:
                _log.info("delivering what run %s left", run)
                self._left_over[run] = delivery

    def _leave(self) -> None:
        for supervisor in self._runs.values():
            supervisor.stop("the agent was stopped")
        deadline = time.monotonic() + _GOODBYE_S
        while self._runs:
            self._look_after()
            ended = not any(supervisor.running for supervisor in self._runs.values())
            if ended and (not self._link.up or time.monotonic() > deadline):
                break
            time.sleep(0.05)
        self._heartbeat(left=True)
