"""`paceline observe`: runs a command whose ranks are shown as a run; reports the run's states."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path, PurePath
from types import FrameType
from typing import NoReturn

import psutil

from paceline import observation
from paceline.core.errors import InputError, PacelineError
from paceline.node import private, rundir
from paceline.node.client import Client
from paceline.node.delivery import Delivery
from paceline.node.link import Commands, Link
from paceline.node.rundir import Record
from paceline.node.session import check_bus, of_run
from paceline.node.starting.foreground import print_notice, register, say
from paceline.wire import OBSERVED, Kill, Launch, State

# Name of this supervisor in a `Record`.
OBSERVER = "paceline observe"
_TICK_S = 0.1
_DELIVER_S = 10.0
# Seconds after a stop until the processes are killed. It is more than the 30 s that torchrun
# gives its ranks to end.
_KILL_PROCESSES_AFTER_S = 35.0
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORWARDED = (*_INTERRUPTS, signal.SIGUSR1, signal.SIGUSR2)
_PASSED_ON = ("PACELINE_CA_FILE", "PACELINE_LOG_FORMAT", "PACELINE_SPOOL_BYTES")


def observe(
    command: Sequence[str],
    client: Client,
    *,
    name: str | None,
    node: str,
    data: Path,
    required: bool,
) -> int:
    """Register an observed run, run the command and report its end; return its exit code.

    Args:
        command: a launcher with its arguments, such as torchrun.
        client: a client of the server.
        name: name of the run; None: the script's name.
        node: this machine's name.
        data: the data directory.
        required: True if a server must answer. If False and no server of this protocol version
            answers, this process is replaced by the command, which runs unobserved.

    Raises:
        InputError: the command does not exist, or the server rejected the run.
        PacelineError: a required server does not answer, or uses another protocol version.
    """
    script = script_of(command)
    with ExitStack() as stack:
        try:
            check_bus(client, client.version())
        except PacelineError as error:
            if required:
                raise
            say(f"{error}: the script runs unobserved")
            _become(command)
        # Only the arguments after the script are the script's own.
        args = list(command[command.index(script) + 1 :])
        launch = Launch(script, args, 1, {}, str(Path.cwd()))
        choice = {
            "name": name or PurePath(script).stem,
            "node": node,
            "policy": OBSERVED,
            "launch": False,
        }
        run = register(client, launch, choice)
        session = of_run(client, run)
        link = stack.enter_context(Link(session))
        directory = rundir.directory_of(data, run)
        delivery = Delivery(directory, Record(run, node, OBSERVER, session.control), link)
        stack.callback(delivery.close)
        say(f"watch the run on {client.server}/runs/{run}")
        code = Observation(command, delivery, link, node).run()
        print_notice(client, run)
        return code


def script_of(command: Sequence[str]) -> str:
    """Return the training script: the first argument that ends in .py, else the command."""
    if not command:
        raise InputError("observe: give a command, such as -- torchrun --nproc-per-node 2 train.py")
    return next((each for each in command[1:] if each.endswith(".py")), command[0])


class Observation:
    """The process of an observed command: starts and ends it, and reports the run's states.

    The command uses this process's terminal.
    """

    def __init__(self, command: Sequence[str], delivery: Delivery, link: Link, node: str) -> None:
        self._command = command
        self._delivery = delivery
        self._link = link
        self._node = node
        self._commands = Commands(link)
        self._process: subprocess.Popen[bytes] | None = None
        # Signals that arrived before the command had started.
        self._early: list[int] = []
        self._stopping: str | None = None
        # After a stop, the processes that have not ended yet.
        self._tree: list[psutil.Process] = []
        self._kill_at = 0.0

    def run(self) -> int:
        """Run the command to its end; return its exit code, or 128 + a signal's number."""
        delivery = self._delivery
        # Without handlers, a signal would end this process and leave the command running, so set
        # the handlers before the command starts.
        for number in _FORWARDED:
            signal.signal(number, self._on_signal)
        delivery.report(State.STARTING)
        try:
            self._process = process = _started(self._command, self._environment())
        except InputError as error:
            delivery.report(State.FAILED, 0, None, str(error))
            self._deliver()
            raise
        for early in self._early:
            process.send_signal(early)
        delivery.report(State.RUNNING)
        while self._ends() or (code := process.poll()) is None:
            self._obey(process)
            delivery.pump()
            time.sleep(_TICK_S)
        self._report_end(code)
        self._deliver()
        return code if code >= 0 else 128 - code

    def _environment(self) -> dict[str, str]:
        session, env = self._link.session, _environment()
        env["PACELINE_RUN"] = self._delivery.record.run
        env["PACELINE_BUS"] = session.bus
        if session.key is not None:
            env["PACELINE_KEY"] = session.key.hex()
        env["PACELINE_SPOOL"] = str(self._delivery.directory / "spool")
        env[observation.NODE] = self._node
        return observation.extended(env)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number in _INTERRUPTS:
            self._stopping = self._stopping or "interrupted"
        if self._process is None:
            self._early.append(number)
        # Ctrl-C is not forwarded if the terminal has sent it to the command as well.
        elif number != signal.SIGINT or not _in_foreground():
            self._process.send_signal(number)

    def _obey(self, process: subprocess.Popen[bytes]) -> None:
        for run, command in self._commands.read(0.001):
            if isinstance(command, Kill) and run == self._delivery.record.run:
                self._stop(process, command.reason)

    def _stop(self, process: subprocess.Popen[bytes], why: str) -> None:
        """End the command and all its child processes, because a shell does not forward signals."""
        if self._kill_at:
            return
        self._stopping = self._stopping or why
        self._kill_at = time.monotonic() + _KILL_PROCESSES_AFTER_S
        # List all processes before ending any: children of an ended process cannot be found.
        self._tree = _tree_of(process.pid)
        for each in self._tree:
            with suppress(psutil.Error):
                each.terminate()

    def _ends(self) -> bool:
        """Return True if processes still run after a stop; kill them once their time is over."""
        self._tree = [each for each in self._tree if _runs(each)]
        if self._tree and time.monotonic() > self._kill_at:
            for each in self._tree:
                with suppress(psutil.Error):
                    each.kill()
            self._tree = []
        return bool(self._tree)

    def _report_end(self, code: int) -> None:
        exit_code = code if code >= 0 else None
        if self._stopping is not None:
            self._delivery.report(State.STOPPED, 0, exit_code, self._stopping)
        elif code == 0:
            self._delivery.report(State.FINISHED, 0, 0)
        else:
            how = f"ended with code {code}"
            if code < 0:
                how = f"was killed by {signal.Signals(-code).name}"
            message = f"{self._command[0]} {how}; see the output of `paceline observe`"
            self._delivery.report(State.FAILED, 0, exit_code, message)

    def _deliver(self) -> None:
        deadline = time.monotonic() + _DELIVER_S
        while self._link.up and not self._delivery.settled and time.monotonic() < deadline:
            self._delivery.pump()
            time.sleep(0.02)


def _environment() -> dict[str, str]:
    """Return this process's environment without Paceline's variables, which may hold secrets."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED_ON or not name.startswith("PACELINE_")
    }


def _become(command: Sequence[str]) -> NoReturn:
    """Replace this process with the command, as if it had been started without Paceline."""
    if (umask := private.given_umask()) != -1:
        os.umask(umask)
    # Python ignores these signals. The command would ignore them, too, without this reset.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), _environment())
    except OSError as error:
        raise _cannot_start(command, error) from error


def _started(command: Sequence[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, env=env, umask=private.given_umask())
    except OSError as error:
        raise _cannot_start(command, error) from error


def _cannot_start(command: Sequence[str], error: OSError) -> InputError:
    return InputError(f"observe: {command[0]} cannot be started: {error.strerror}")


def _in_foreground() -> bool:
    """Return True if this process is in the foreground of its terminal.

    Then Ctrl-C reaches this process and the command, which is in the same process group.
    """
    try:
        with Path("/dev/tty").open() as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    # There is no terminal.
    except OSError:
        return False


def _tree_of(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
