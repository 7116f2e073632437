"""`paceline agent`: registers this node and supervises the runs that are started on it.

The agent's loop reads commands, polls the supervisors of its runs, sends heartbeats, and delivers
reports that earlier processes left undelivered. Ranks are not children of the agent: each run has
a launcher process, which starts them.
"""

from __future__ import annotations

import fcntl
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec

from paceline.core import logs
from paceline.core.errors import PacelineError
from paceline.node import answering, machine, rundir
from paceline.node.delivery import Delivery
from paceline.node.duty import Duty
from paceline.node.health.check import Checker
from paceline.node.health.gpus import Gpus
from paceline.node.health.notice import Notices
from paceline.node.link import Command, Commands, Link
from paceline.node.output import Output
from paceline.node.rundir import Record
from paceline.node.session import BusSession
from paceline.node.supervisor import RankAccess, Supervisor
from paceline.wire import Ask, CheckNode, Launch, NodeState, RunState, State
from paceline.wire.bus import at_address
from paceline.wire.sealing import SealError, unseal

HEARTBEAT_S = 2.0
_TICK_S = 0.2
# Maximum pause between two ticks of an agent without runs. A command or a signal ends the pause.
_IDLE_TICK_S = 1.0
# Seconds between two searches for reports that other processes left undelivered.
_RECOVER_S = 10.0
# Maximum number of seconds for the last deliveries after the runs were stopped.
_LAST_DELIVERY_S = 10.0
_log = logging.getLogger(__name__)


class _Interrupted(BaseException):
    """A signal arrived while an agent without runs waited for commands."""


class _ReplayedError(PacelineError):
    """An error because a launch was sent again after the agent had executed it."""


class Agent:
    """The supervisor of all runs of one node.

    All work is done in one thread, because the kernel kills a launcher when the thread that started
    it ends.

    Args:
        link: connection to the bus.
        name: the node's name.
        data: the data directory. A PacelineError is raised if another agent uses it.
        find_session: function that is called during an outage of the bus. It returns the newest
            session, or None if there is none. None instead of a function: the session never
            changes.
        duty: the only run to supervise; None: all runs that the control plane launches here.
        notices: source of the cloud provider's notices that it reclaims this machine; None: there
            is no source.
    """

    def __init__(
        self,
        link: Link,
        name: str,
        data: Path,
        find_session: Callable[[], BusSession | None] | None = None,
        duty: Duty | None = None,
        *,
        notices: Notices | None = None,
    ) -> None:
        self._link = link
        self._notices = notices
        self._data = data
        self._find_session = find_session
        self._duty = duty
        self._outputs: dict[Supervisor, Output] = {}
        self._commands = Commands(link)
        self._node = machine.describe(name)
        self._checker = Checker(data)
        self._gpus = Gpus()
        self._runs: dict[str, Supervisor] = {}
        self._left_over: dict[str, Delivery] = {}
        # Directories of runs whose reports cannot be delivered; each was logged.
        self._unreadable: set[Path] = set()
        self._signal: int | None = None
        # True while a signal should end the wait for commands.
        self._interruptible = False
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
        """Supervise runs until SIGTERM, SIGINT or a provider's notice; return the exit code.

        An agent with a duty also ends when its run no longer needs this node. A second signal kills
        the runs.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            while self._signal is None and self._taken_back is None and not self._is_done():
                self._tick()
            self._leave()
        finally:
            self._checker.close()
            if self._notices is not None:
                self._notices.close()
            for supervisor in self._runs.values():
                supervisor.close()
            for delivery in self._left_over.values():
                delivery.close()
            self._lock.close()
        return 128 + signal.SIGINT if self._signal == signal.SIGINT else 0

    @property
    def _taken_back(self) -> str | None:
        return None if self._notices is None else self._notices.words()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._signal is not None:
            for supervisor in self._runs.values():
                supervisor.kill()
        self._signal = number
        if self._interruptible:
            self._interruptible = False
            raise _Interrupted

    def _tick(self) -> None:
        for run, command in self._read():
            if isinstance(command, Launch):
                self._launch(run, command)
            elif isinstance(command, Ask):
                answering.answer(self._link, self._node.node, self._data, run, command)
            elif isinstance(command, CheckNode):
                self._checker.due = True
            elif run in self._runs:
                self._runs[run].obey(command)
        if self._signal is not None:
            # The sender of the signal may also be ending the runs' processes. `_leave` must first
            # mark the runs as stopped, or `_poll_runs` would report them as failed.
            return
        if not self._link.up:
            # Without the bus, reading commands does not wait, so the loop must pause here.
            time.sleep(_TICK_S)
        self._poll_runs()
        if self._commands.started:
            self._checker.poll(idle=not self._busy())
        self._beat()
        if time.monotonic() >= self._recover_at:
            self._recover_at = time.monotonic() + _RECOVER_S
            self._recover()

    def _read(self) -> list[tuple[str, Command]]:
        if self._runs or self._left_over or self._duty is not None:
            return self._commands.read(_TICK_S)
        until_beat_s = self._beat_at - time.monotonic()
        try:
            try:
                self._interruptible = True
                if self._signal is not None:
                    return []
                return self._commands.read(max(_TICK_S, min(until_beat_s, _IDLE_TICK_S)))
            finally:
                self._interruptible = False
        except _Interrupted:
            # The bus may still answer the interrupted request, so replace the connection.
            self._link.move(self._link.session)
            return []

    def _is_done(self) -> bool:
        if self._duty is None:
            return False
        if self._runs or self._left_over:
            self._duty.busy()
            return False
        return self._commands.started and self._duty.is_done()

    def _beat(self) -> None:
        if not self._commands.started or time.monotonic() < self._beat_at:
            return
        self._beat_at = time.monotonic() + HEARTBEAT_S
        self._heartbeat()
        if not self._link.up and self._find_session is not None:
            session = self._find_session()
            if session is not None and session != self._link.session:
                self._link.move(session)
                _log.info("the bus is now %s", self._link.place)

    def _poll_runs(self) -> None:
        for run, supervisor in list(self._runs.items()):
            # Polling a supervisor drains a spool, which may take long, so a heartbeat may be due.
            self._beat()
            supervisor.poll()
            if self._duty is not None and self._duty.shows_output:
                if supervisor not in self._outputs:
                    self._outputs[supervisor] = Output(supervisor.directory)
                self._outputs[supervisor].pump(supervisor.attempt)
            if supervisor.settled:
                supervisor.close()
                self._outputs.pop(supervisor, None)
                del self._runs[run]
        for run, delivery in list(self._left_over.items()):
            self._beat()
            delivery.pump()
            if delivery.settled:
                delivery.close()
                del self._left_over[run]

    def _launch(self, run: str, launch: Launch) -> None:
        if run in self._runs and self._runs[run].running:
            self._refuse_second(run, launch, self._runs[run])
            return
        self._let_go(run)
        record = Record(run, self._node.node, "the agent", self._link.session.control)
        try:
            launch, ranks = self._opened(run, launch)
            logs.hide_environment(launch.env)
            _log.info("launching run %s: %s", run, launch.script)
            supervisor = Supervisor(launch, self._data, record, self._link, ranks)
        except _ReplayedError as error:
            _log.error("run %s: %s", run, error)
            return
        except (PacelineError, OSError, SealError) as error:
            self._fail(run, launch, str(error))
            return
        self._runs[run] = supervisor
        supervisor.start()

    def _refuse_second(self, run: str, launch: Launch, first: Supervisor) -> None:
        """Reject the launch of a run that this node still supervises.

        If this node was cut off from the control plane, the run may have been resumed elsewhere
        while its processes here continued.
        """
        if launch.attempt <= first.attempt:
            _log.error("run %s is already running on this node; ignoring its second launch", run)
            return
        why = (
            f"its earlier processes still run on {self._node.node}: resume the run once they have "
            "ended, or restart the agent on that node, which ends them"
        )
        self._fail(run, launch, why)

    def _fail(self, run: str, launch: Launch, why: str) -> None:
        _log.error("run %s cannot be launched: %s", run, why)
        now, node = time.time(), self._node.node
        self._link.report(RunState(State.FAILED, now, node, launch.attempt, message=why), run)

    def _let_go(self, run: str) -> None:
        """Close an ended run before it is launched again; its new supervisor delivers the spool."""
        for kept in (self._runs.pop(run, None), self._left_over.pop(run, None)):
            if kept is not None:
                kept.close()

    def _opened(self, run: str, launch: Launch) -> tuple[Launch, RankAccess]:
        session = self._link.session
        if not launch.sealed:
            return launch, RankAccess(session.bus)
        if session.key is None:
            raise PacelineError(
                "its secrets are encrypted, and this agent has no key to decrypt them"
            )
        secrets = unseal(launch.sealed, session.key)
        if not rundir.note_launch(rundir.directory_of(self._data, run), launch.sealed):
            raise _ReplayedError("ignoring a launch that was sent twice")
        # The ranks reach the bus at the same address as this agent.
        bus = at_address(secrets.bus, session.bus)
        return msgspec.structs.replace(launch, env=secrets.env), RankAccess(bus, secrets.key)

    def _heartbeat(self, left: bool = False) -> None:
        state: NodeState = msgspec.structs.replace(
            self._node,
            at=time.time(),
            runs=self._busy(),
            left=left,
            check=self._checker.newest,
            gpu_states=self._gpus.read(),
        )
        self._link.report(state)

    def _busy(self) -> list[str]:
        return [run for run, supervisor in self._runs.items() if supervisor.running]

    def _recover(self) -> None:
        """Deliver reports that ended agents and `paceline run` processes left undelivered."""
        for directory in sorted((self._data / "runs").glob("*")):
            run = directory.name
            if run in self._runs or run in self._left_over or not directory.is_dir():
                continue
            try:
                delivery = Delivery.resume(directory, self._link)
            except OSError as error:
                if directory not in self._unreadable:
                    self._unreadable.add(directory)
                    _log.error("cannot deliver the remaining reports of run %s: %s", run, error)
                continue
            if delivery is not None:
                _log.info("delivering the remaining reports of run %s", run)
                self._left_over[run] = delivery

    def _leave(self) -> None:
        why = "the agent was stopped"
        if self._signal is None and self._taken_back is not None:
            why = f"the provider reclaims {self._node.node}: {self._taken_back}"
            _log.warning("%s; its runs leave this node", why)
        for supervisor in self._runs.values():
            supervisor.stop(why, leaves=True)
        # Time limit of the delivery; set once all runs have ended.
        deadline = None
        while self._runs:
            self._poll_runs()
            ended = not any(supervisor.running for supervisor in self._runs.values())
            if ended and deadline is None:
                deadline = time.monotonic() + _LAST_DELIVERY_S
            if deadline is not None and (not self._link.up or time.monotonic() > deadline):
                break
            time.sleep(0.05)
        self._heartbeat(left=True)
