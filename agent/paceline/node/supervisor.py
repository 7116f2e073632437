"""One run on this node, from its first process to the report of its end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import IO

from paceline.core.errors import InputError
from paceline.node import rundir
from paceline.node.delivery import Delivery
from paceline.node.link import Link
from paceline.node.processes import die_with_parent
from paceline.node.rundir import LauncherStatus, Record
from paceline.wire import Launch, RunState, State

_KILL_AFTER_S = 8.0  # the launcher gives its ranks 5 s
# Variables that only the supervisor sets. The script must not see the token.
_OWN_ENV = ("PACELINE_RUN", "PACELINE_BUS", "PACELINE_SPOOL", "PACELINE_TOKEN")
_log = logging.getLogger(__name__)


def check(launch: Launch) -> None:
    """Refuses a launch that cannot work.

    Raises:
        InputError: script or working directory is missing, there are no ranks, or a text holds a
            NUL character.
    """
    for name in launch.env:
        if not name or "=" in name:
            raise InputError(f"env: {name!r} is no name of a variable")
    texts = [launch.script, launch.cwd or "", *launch.args, *launch.env, *launch.env.values()]
    for text in texts:
        if "\0" in text:
            raise InputError(f"script, args, cwd and env: {text!r} holds a NUL character")
    cwd = Path(launch.cwd or Path.cwd())
    if not cwd.is_dir():
        raise InputError(f"cwd: there is no directory {cwd}")
    if not (cwd / launch.script).is_file():
        raise InputError(f"script: there is no file {cwd / launch.script}")
    if launch.nproc < 1:
        raise InputError(f"nproc: {launch.nproc} ranks cannot train; give 1 or more")
    if launch.max_restarts < 0:
        raise InputError(f"max_restarts: {launch.max_restarts} is negative; give 0 or more")


class Supervisor:
    """Starts a run's rendezvous and launcher, watches them, reports, and ends them.

    No method blocks: call `poll` a few times a second until `settled`. Make all calls from one
    thread that lives as long as the run, because the kernel ends the launcher with this thread.

    Args:
        launch: what to run.
        data: the data directory, in which the run's directory is made.
        record: the run and its supervisor.
        link: to the bus; None: the ranks train without a control plane and nothing is reported.

    Raises:
        InputError: as `check`; or the record's run is no run's id.
        OSError: the run's directory cannot be written.
    """

    def __init__(self, launch: Launch, data: Path, record: Record, link: Link | None) -> None:
        check(launch)
        self.run = record.run
        self.directory = rundir.directory_of(data, record.run)
        self.delivery = Delivery(self.directory, record, link)
        self.last: RunState | None = None  # the newest report
        self._launch = launch
        self._link = link
        self._launcher: subprocess.Popen[bytes] | None = None
        self._rendezvous: subprocess.Popen[bytes] | None = None
        self._stopping: str | None = None
        self._kill_at = 0.0

    @property
    def running(self) -> bool:
        """Whether the run has not ended."""
        return not self.delivery.ended

    @property
    def settled(self) -> bool:
        """Whether the run has ended and nothing is left to deliver."""
        return self.delivery.settled or (self._link is None and not self.running)

    @property
    def attempt(self) -> int:
        """The ranks' current attempt."""
        return self.last.attempt if self.last else 0

    def start(self) -> None:
        """Starts the processes; a launcher that cannot be started is a failed run."""
        self.last = self.delivery.report(State.STARTING)
        try:
            self._start()
        except (OSError, ValueError) as error:  # ValueError: text that no process can be given
            self._end(State.FAILED, None, f"the run cannot be started: {error}")

    def poll(self) -> None:
        """Checks the processes, reports changes, kills what does not stop in time, delivers."""
        if self.running and self._launcher is not None:
            if self._stopping is not None and time.monotonic() > self._kill_at:
                self.kill()
            # Ask for the code before the status: the launcher writes the status, then exits.
            code = self._launcher.poll()
            status = rundir.read(self.directory / "launcher.json", LauncherStatus)
            if code is not None:
                self._ended(code, status)
            elif status is not None and self._is_news(status):
                self.last = self.delivery.report(State.RUNNING, status.attempt)
        self.delivery.pump()

    def stop(self, reason: str) -> None:
        """Asks the ranks to end; ranks that still run after 8 s are killed. Idempotent."""
        if self._stopping is None and self._launcher is not None and self.running:
            _log.info("stopping run %s: %s", self.run, reason)
            self._stopping = reason
            self._kill_at = time.monotonic() + _KILL_AFTER_S
            self._launcher.terminate()

    def kill(self) -> None:
        """Kills all processes of the run now; the kernel ends the ranks with the launcher."""
        if self._launcher is not None and self._launcher.poll() is None:
            self._stopping = self._stopping or "killed"
            self._launcher.kill()

    def close(self) -> None:
        """Kills all processes that still run and releases the run's directory."""
        for process in (self._launcher, self._rendezvous):
            if process is not None:
                process.kill()
                process.wait()
        if self.running and self.last is not None:
            by = self.delivery.record.supervisor
            self._end(State.STOPPED, None, self._stopping or f"{by} ended")
        self.delivery.close()

    def _start(self) -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as listening,
            (self.directory / "launcher.log").open("ab") as log,
        ):
            # The port accepts connections before the store runs, so both processes start at once.
            port = listening.getsockname()[1]
            fd = listening.fileno()
            self._rendezvous = _spawn(
                ["paceline.node.elastic.rendezvous", "--fd", str(fd), "--port", str(port)],
                log,
                pass_fds=[fd],
            )
            self._launcher = _spawn(
                [
                    "paceline.node.elastic.launcher",
                    *("--run", self.run, "--directory", str(self.directory)),
                    *("--store", f"127.0.0.1:{port}", "--nproc", str(self._launch.nproc)),
                    *("--max-restarts", str(self._launch.max_restarts)),
                    *(self._launch.script, *self._launch.args),
                ],
                log,
                cwd=self._launch.cwd,
                env=self._environment(),
            )

    def _environment(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if name not in _OWN_ENV}
        if self._launch.nproc > 1:
            env.setdefault("OMP_NUM_THREADS", "1")  # like torchrun: ranks share the cores
        env.update(self._launch.env)
        if self._link is not None:
            env["PACELINE_RUN"] = self.run
            env["PACELINE_BUS"] = self._link.url
            env["PACELINE_SPOOL"] = str(self.directory / "spool")
        return env

    def _is_news(self, status: LauncherStatus) -> bool:
        assert self.last is not None
        known = self.last.state is State.RUNNING and self.last.attempt == status.attempt
        return status.exit_code is None and not known

    def _ended(self, code: int, status: LauncherStatus | None) -> None:
        exit_code = status.exit_code if status is not None else None
        if self._stopping is not None:
            self._end(State.STOPPED, exit_code, self._stopping)
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
            self._end(State.FAILED, exit_code, status.message)
        else:
            self._end(State.FINISHED, 0, None)

    def _end(self, state: State, exit_code: int | None, message: str | None) -> None:
        assert state.final
        self.last = self.delivery.report(state, self.attempt, exit_code, message)
        if self._rendezvous is not None:
            self._rendezvous.kill()
            self._rendezvous.wait()


def _spawn(
    module_and_arguments: list[str],
    log: IO[bytes],
    *,
    cwd: str | None = None,
    env: dict[str, str] | None = None,
    pass_fds: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # -P: a script directory's own modules must not shadow ours.
        [sys.executable, "-P", "-m", *module_and_arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=cwd,
        env=env,
        pass_fds=pass_fds,
        start_new_session=True,  # Ctrl-C reaches only this process, which ends the ranks in order
        preexec_fn=die_with_parent,
    )
