"""One run on this node, from its first process to the report of its end.

An agent or `paceline run` creates a `Supervisor` for each launch and polls it. The supervisor
starts a launcher process (`elastic.launcher`), which starts the ranks.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from paceline import observation
from paceline.core import driver
from paceline.core.errors import InputError
from paceline.node import private, rundir
from paceline.node.delivery import Delivery
from paceline.node.health.ending import Ending
from paceline.node.link import Link
from paceline.node.machine import address_towards
from paceline.node.processes import die_with_parent
from paceline.node.rundir import LauncherStatus, Record
from paceline.wire import EndRanks, JoinRendezvous, Kill, Launch, RunState, State
from paceline.wire.bus import is_loopback

# Seconds from a stop to killing the launcher; the launcher itself gives its ranks 25 s to end.
_KILL_LAUNCHER_AFTER_S = 28.0
# Variables of Paceline that ranks inherit from this process. Other variables of Paceline contain
# secrets, such as a token, or are set by the supervisor.
_PASSED_ON = (
    "PACELINE_CA_FILE",
    "PACELINE_EMULATE",
    "PACELINE_LOG_FORMAT",
    "PACELINE_SPOOL_BYTES",
)
_log = logging.getLogger(__name__)


def check(launch: Launch) -> None:
    """Reject a launch that cannot work.

    Raises:
        InputError: script or working directory is missing, a number is out of range, a variable's
            name is invalid, a text contains a NUL character, or a driver should run on several
            nodes.
    """
    for name in launch.env:
        if not name or "=" in name:
            raise InputError(f"env: {name!r} is not a valid variable name")
    texts = [launch.script, launch.cwd or "", *launch.args, *launch.env, *launch.env.values()]
    for text in texts:
        if "\0" in text:
            raise InputError(f"script, args, cwd and env: {text!r} contains a NUL character")
    cwd = Path(launch.cwd or Path.cwd())
    if not cwd.is_dir():
        raise InputError(f"cwd: there is no directory {cwd}")
    if not (cwd / launch.script).is_file():
        raise InputError(f"script: there is no file {cwd / launch.script}")
    if launch.nproc < 1:
        raise InputError(f"nproc: {launch.nproc} ranks cannot train; give 1 or more")
    if not 1 <= launch.nodes_min <= launch.nodes_max:
        raise InputError(
            f"nodes: {launch.nodes_min} to {launch.nodes_max}; the minimum must be at least 1, "
            "and not above the maximum"
        )
    if launch.env.get(driver.VARIABLE) and launch.nodes_max > 1:
        raise InputError(
            f"nodes: {driver.VARIABLE} is set, so the script starts its ranks itself, on nodes "
            "that it chooses: leave out --nodes"
        )
    for name in ("max_restarts", "attempt"):
        if (number := getattr(launch, name)) < 0:
            raise InputError(f"{name}: {number} is negative; give 0 or more")


@dataclass(frozen=True)
class RankAccess:
    """The ranks' access to the bus."""

    # URL of the bus.
    bus: str = field(repr=False)
    # Key for MACs; None: there is no session.
    key: bytes | None = field(default=None, repr=False)


class Supervisor:
    """A run's launcher process on this node: starts, polls and ends it, and reports its states.

    No method except `close` waits for a process: call `poll` a few times a second until `settled`.
    Make all calls from one thread that lives as long as the run, because the kernel kills the
    launcher when this thread ends.

    Args:
        launch: the script, its arguments and its environment.
        data: the data directory, in which the run's directory is created.
        record: the run and its supervisor.
        link: connection to the bus; None: ranks train without a control plane, and nothing is
            reported.
        ranks: the ranks' access to the bus; None: the access of `link`.

    Raises:
        InputError: `check` rejects the launch, or the record has no valid run id.
        OSError: the run's directory cannot be written.
    """

    def __init__(
        self,
        launch: Launch,
        data: Path,
        record: Record,
        link: Link | None,
        ranks: RankAccess | None = None,
    ) -> None:
        check(launch)
        self.run = record.run
        self.directory = rundir.directory_of(data, record.run)
        self.delivery = Delivery(self.directory, record, link)
        # The newest reported state.
        self.last: RunState | None = None
        self._launch = launch
        self._link = link
        self._ranks = ranks or (
            RankAccess(link.url, link.session.key) if link is not None else None
        )
        self._launcher: subprocess.Popen[bytes] | None = None
        # Reason why the run is being stopped; None: it is not.
        self._stopping: str | None = None
        self._kill_at = 0.0
        # The newest attempt that the launcher has begun. It may have ended before it was reported.
        self._reached = 0
        self._ending: Ending | None = None
        # Listening socket on which this node can serve the rendezvous, until the launcher starts.
        self._door: socket.socket | None = None

    @property
    def running(self) -> bool:
        """True if the run has not ended."""
        return not self.delivery.ended

    @property
    def settled(self) -> bool:
        """True if the run has ended and nothing is left to deliver."""
        return self.delivery.settled or (self._link is None and not self.running)

    @property
    def attempt(self) -> int:
        """The ranks' current attempt."""
        reported = self.last.attempt if self.last else self._launch.attempt
        return max(reported, self._reached)

    def start(self) -> None:
        """Start the processes; if the launcher cannot be started, the run fails.

        On one of several nodes the launcher starts when the control plane sends the rendezvous
        address.
        """
        try:
            if self._launch.nodes_max > 1:
                self._door = self._opened_door()
                place = self._door.getsockname()[:2]
                self.last = self.delivery.report_start(self._launch.attempt, place)
            else:
                self.last = self.delivery.report_start(self._launch.attempt)
                self._start()
        # ValueError: a text cannot be passed to a process as an argument or variable, or a run on
        # several nodes has no session with a key.
        except (OSError, ValueError) as error:
            self._end(State.FAILED, None, f"the run cannot be started: {error}")

    def poll(self) -> None:
        """Report changes of the processes, kill a launcher that ends late, and deliver reports."""
        if self.running and self._launcher is not None:
            if self._stopping is not None and time.monotonic() > self._kill_at:
                self.kill()
            self._ending = None if self._ending is None or self._ending.done() else self._ending
            # The exit code is read before the status, because the launcher writes the status and
            # then exits.
            code = self._launcher.poll()
            status = rundir.read(self.directory / "launcher.json", LauncherStatus)
            if code is not None:
                self._reached = status.attempt if status is not None else 0
                self._ended(code, status)
            elif status is not None and self._is_new(status):
                self.last = self.delivery.report(
                    State.RUNNING, status.attempt, message=status.message
                )
            elif status is None and self._has_just_arrived():
                attempt = self._launch.attempt
                self.last = self.delivery.report_start(attempt, arrived=True)
        self.delivery.pump()

    def obey(self, command: Kill | EndRanks | JoinRendezvous) -> None:
        """Execute a command of the control plane, unless it is for an earlier launch or attempt."""
        if isinstance(command, JoinRendezvous):
            self._join_rendezvous(command)
        elif isinstance(command, EndRanks):
            self._end_ranks(command)
        elif command.meant(self._launch.attempt):
            self.stop(command.reason, leaves=command.leaves)
        else:
            _log.error("run %s: a command for an earlier launch is ignored", self.run)

    def stop(self, reason: str, *, leaves: bool = False) -> None:
        """Request that the ranks end; ranks that still run after 25 s are killed. Idempotent.

        With `leaves`, only this node leaves the run. If the run has other nodes, all of its ranks
        end after the same step, and the run then continues on the other nodes.
        """
        if self._launcher is None and self._door is not None and self.running:
            self._shut_door()
            self._end(State.STOPPED, None, reason)
        elif self._stopping is None and self._launcher is not None and self.running:
            _log.info("stopping run %s: %s", self.run, reason)
            self._stopping = reason
            in_order = leaves and self._launch.nodes_max > 1 and self._trains()
            self._kill_at = time.monotonic() + _KILL_LAUNCHER_AFTER_S
            self._launcher.send_signal(signal.SIGINT if in_order else signal.SIGTERM)

    def kill(self) -> None:
        """Kill the launcher now; the kernel then kills the ranks."""
        if self._launcher is not None and self._launcher.poll() is None:
            self._stopping = self._stopping or "killed"
            self._launcher.kill()

    def close(self) -> None:
        """Kill processes of the run that still run, and release the run's directory."""
        self._shut_door()
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()
        if self.running and self.last is not None:
            by = self.delivery.record.supervisor
            self._end(State.STOPPED, None, self._stopping or f"{by} ended")
        self.delivery.close()

    def _end_ranks(self, order: EndRanks) -> None:
        if self._launcher is None or not self.running or self._stopping or self._ending:
            return
        self._ending = Ending.begin(self.directory, self.run, self._launcher.pid, order)

    def _opened_door(self) -> socket.socket:
        if self._link is None or self._ranks is None or self._ranks.key is None:
            raise ValueError(
                "a run on several nodes needs a control plane and a session with a key"
            )
        address = self._link.address()
        if address is None:
            raise OSError(
                "the bus is unreachable, so this node's address for the others is unknown"
            )
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family)

    def _join_rendezvous(self, command: JoinRendezvous) -> None:
        if self._door is None or self._launcher is not None or not self.running:
            return
        if command.first_attempt != self._launch.attempt:
            return
        address, port = self._door.getsockname()[:2]
        serves = (command.address, command.port) == (address, port)
        try:
            # This node reaches the bus at the loopback interface, so its address in that connection
            # is of no use to other nodes.
            if not serves and is_loopback(address):
                address = address_towards(command.address)
            self._start(
                "--nodes",
                str(self._launch.nodes_min),
                str(self._launch.nodes_max),
                *("--address", address, "--store", f"{command.address}:{command.port}"),
                *(("--door", str(self._door.fileno())) if serves else ()),
            )
        except (OSError, ValueError) as error:
            self._end(State.FAILED, None, f"the run cannot be started: {error}")
        self._shut_door()

    def _shut_door(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None

    def _start(self, *several: str) -> None:
        rundir.forget_launcher(self.directory)
        with (self.directory / "launcher.log").open("ab") as log:
            self._launcher = _spawn(
                [
                    "paceline.node.elastic.launcher",
                    *("--run", self.run, "--directory", str(self.directory)),
                    *("--node", self.delivery.record.node),
                    *("--nproc", str(self._launch.nproc)),
                    *("--max-restarts", str(self._launch.max_restarts)),
                    *("--first-attempt", str(self._launch.attempt)),
                    *several,
                    *(self._launch.script, *self._launch.args),
                ],
                log,
                door=self._door,
                cwd=self._launch.cwd,
                env=self._environment(),
            )

    def _environment(self) -> dict[str, str]:
        # A control plane chooses the policy of its runs.
        passed_on = _PASSED_ON if self._ranks is not None else (*_PASSED_ON, "PACELINE_POLICY")
        env = {
            name: value
            for name, value in os.environ.items()
            if name in passed_on or not name.startswith("PACELINE_")
        }
        if self._launch.nproc > 1 and driver.VARIABLE not in self._launch.env:
            # As under torchrun, each rank gets one thread, because the ranks share the cores.
            env.setdefault("OMP_NUM_THREADS", "1")
        env.update(self._launch.env)
        if (umask := private.given_umask()) >= 0:
            # The launcher creates private files. Ranks create files with the user's own umask.
            env["PACELINE_UMASK"] = f"{umask:o}"
        if self._ranks is not None:
            env["PACELINE_RUN"] = self.run
            env["PACELINE_BUS"] = self._ranks.bus
            if self._ranks.key is not None:
                env["PACELINE_KEY"] = self._ranks.key.hex()
            env["PACELINE_SPOOL"] = str(self.directory / "spool")
        env["PACELINE_FIRST_ATTEMPT"] = str(self._launch.attempt)
        env["PACELINE_MEMORY"] = str(self.directory / "memory")
        # On several nodes there is no directory for checkpoints, as they may share no file system.
        if self._launch.nodes_max == 1:
            env["PACELINE_CHECKPOINTS"] = str(self.directory / "checkpoints")
        if self._ranks is not None and observation.observed(env):
            env = observation.extended(env)
        return env

    def _trains(self) -> bool:
        """Return True if the launcher has started ranks; until then it does not handle SIGINT."""
        return rundir.read(self.directory / "launcher.json", LauncherStatus) is not None

    def _is_new(self, status: LauncherStatus) -> bool:
        assert self.last is not None
        known = self.last.state is State.RUNNING and self.last.attempt == status.attempt
        return status.exit_code is None and not known

    def _has_just_arrived(self) -> bool:
        reported = self.last is not None and self.last.arrived
        return not reported and (self.directory / "arrived").exists()

    def _ended(self, code: int, status: LauncherStatus | None) -> None:
        exit_code = status.exit_code if status is not None else None
        # The ranks' end counts as the run's end, because the launcher ends later.
        at = status.ended_at if status is not None else None
        # The launcher's exit code shows success even if a full disk prevented it from writing its
        # status.
        if code == 0:
            exit_code = 0
        if self._stopping is not None:
            self._end(State.STOPPED, exit_code, self._stopping, at)
        elif exit_code is None:
            what = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"ended with code {code}"
            )
            log = self.directory / "launcher.log"
            message = f"the launcher {what}; log: {log}\n{rundir.last_lines(log)}"
            self._end(State.FAILED, None, message.rstrip("\n"))
        elif status is not None and exit_code:
            self._end(State.FAILED, exit_code, status.message, at)
        else:
            self._end(State.FINISHED, 0, None, at)

    def _end(
        self, state: State, exit_code: int | None, message: str | None, at: float | None = None
    ) -> None:
        assert state.final
        self.last = self.delivery.report(state, self.attempt, exit_code, message, at=at)


def _spawn(
    module_and_arguments: list[str],
    log: IO[bytes],
    *,
    door: socket.socket | None = None,
    cwd: str | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # -P: modules in the script's directory must not shadow modules of Paceline.
        [sys.executable, "-P", "-m", *module_and_arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=cwd,
        env=env,
        pass_fds=() if door is None else (door.fileno(),),
        # The launcher has its own session, so that Ctrl-C reaches only this process, which then
        # ends the ranks cleanly.
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
