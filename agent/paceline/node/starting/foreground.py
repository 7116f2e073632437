"""`paceline run`: runs a script's ranks in the foreground, like torchrun.

`train` registers a run if a server answers, and trains; `supervise` runs the ranks; `Foreground` is
the loop that polls the supervisor and shows the output. `paceline resume` uses `supervise`, too.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from paceline import observation
from paceline.core import driver
from paceline.core.emulation import Emulation
from paceline.core.errors import InputError, PacelineError
from paceline.node.client import Client
from paceline.node.link import Commands, Link
from paceline.node.output import Output
from paceline.node.rundir import Record
from paceline.node.session import check_bus, of_run
from paceline.node.starting.progress import ProgressPoller
from paceline.node.starting.screen import Screen, shown
from paceline.node.supervisor import Supervisor, check
from paceline.planning.policy_in_force import FIRST_POLICY, PolicyInForce
from paceline.wire import OBSERVED, EndRanks, Kill, Launch, State

# Name of this supervisor in a `Record`.
SUPERVISOR = "paceline run"
# The policy of a run if none is given, with and without a control plane.
_DEFAULT = "paceline"
_TICK_S = 0.1
# Maximum number of seconds to wait for the bus to accept further reports after the run has ended.
_DELIVER_S = 10.0
# Maximum number of seconds to wait until the server knows that the run has ended.
_NOTICE_S = 3.0


def emulation(
    slowdown: str, seconds_per_unit: float, seconds_per_step: float, nproc: int | None
) -> dict[str, list[float]]:
    """Return the value of ``PACELINE_EMULATE`` for ranks with the factors in `slowdown`.

    For each rank, ``a_s`` is the rank's factor times `seconds_per_unit`, and ``b_s`` is
    `seconds_per_step`. Raise an InputError if the number of factors is not `nproc`, if a factor is
    not positive, or if a time is negative.
    """
    try:
        factors = [float(part) for part in slowdown.split(",")]
    except ValueError:
        factors = []
    if not factors or not all(0 < factor < math.inf for factor in factors):
        raise InputError(f"--slowdown {slowdown}: give factors above 0, such as 1,1,1.5,3")
    if nproc is not None and nproc != len(factors):
        raise InputError(
            f"--slowdown {slowdown}: {len(factors)} factors for --nproc {nproc}; give "
            "one factor for each rank"
        )
    for option, value in (("unit", seconds_per_unit), ("step", seconds_per_step)):
        if not 0 <= value < math.inf:
            raise InputError(f"--seconds-per-{option} {value}: give seconds, 0 or more")
    return {
        "a_s": [seconds_per_unit * factor for factor in factors],
        "b_s": [seconds_per_step] * len(factors),
    }


def whole_emulation(given: str, nproc: int | None) -> dict[str, Any]:
    """Return the value of ``PACELINE_EMULATE``, from an `Emulation` in JSON.

    `given` is the JSON, or the path of a file that contains it. `nproc` None: the number of ranks
    is the length of the field `a_s`. If a field is invalid, an InputError names it.
    """
    text = given
    if not given.lstrip().startswith("{"):
        try:
            text = Path(given).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"--emulate {given}: {error}; give a JSON object, or a file that holds one"
            ) from error
    try:
        made = msgspec.json.decode(text, type=Emulation)
    except msgspec.DecodeError as error:
        raise InputError(
            f"--emulate: {error}; give at least the fields a_s and b_s, each a list of seconds "
            "with a number for each rank"
        ) from error
    if defect := made.defect(nproc or max(1, len(made.a_s))):
        raise InputError(f"--emulate: {defect}")
    return made.as_dict()


def train(
    launch: Launch,
    client: Client,
    choice: Mapping[str, Any],
    *,
    node: str,
    data: Path,
    required: bool,
) -> int:
    """Register a run with the server, train, and report the end; return the exit code.

    Args:
        launch: the script, its arguments and its environment.
        client: a client of the server.
        choice: further fields of ``POST /runs``, such as `policy` and `restart_hung_s`.
        node: this machine's name.
        data: the data directory.
        required: True if a server must answer. If False and no server of this protocol version
            answers, the ranks train without a server.

    Raises:
        InputError: the script cannot be launched, the server rejected the run, or no server answers
            and an option needs a server.
        PacelineError: a required server does not answer, or uses another protocol version.
    """
    check(launch)
    with ExitStack() as stack:
        record = Record(f"local-{secrets.token_hex(4)}", node, SUPERVISOR, "")
        link = None
        try:
            check_bus(client, client.version())
        # If the user named no server, the ranks train without one.
        except PacelineError as error:
            if required:
                raise
            launch = _with_policy(launch, choice, error)
        else:
            record.run = register(client, launch, {**choice, "node": node, "launch": False})
            if (policy := choice.get("policy")) != OBSERVED:
                first = {policy or _DEFAULT: choice.get("parameters") or {}}
                env = {**launch.env, FIRST_POLICY: msgspec.json.encode(first).decode()}
                launch = msgspec.structs.replace(launch, env=env)
            session = of_run(client, record.run)
            record.control = session.control
            link = stack.enter_context(Link(session))
            say(f"watch the run on {client.server}/runs/{record.run}")
        watch = None if link is None else ProgressPoller(client, record.run)
        code = supervise(launch, Supervisor(launch, data, record, link), link, watch)
        if watch is not None and watch.now.step is None:
            print_notice(client, record.run)
        return code


def register(client: Client, launch: Launch, choice: Mapping[str, Any]) -> str:
    """Register a run with the server; return its id.

    `choice` has further fields of ``POST /runs``, such as `launch`.
    """
    # Fields of a launch that the REST API accepts.
    names = ("script", "args", "nproc", "env", "cwd", "max_restarts")
    body = {name: getattr(launch, name) for name in names}
    # Do not send this variable: at each start of the run, the server derives it from the policy.
    body["env"] = {n: v for n, v in launch.env.items() if n != observation.VARIABLE}
    return str(client.call("POST", "/runs", {**body, **choice})["id"])


def supervise(
    launch: Launch, supervisor: Supervisor, link: Link | None, watch: ProgressPoller | None
) -> int:
    """Run the ranks in the foreground and report the end; return the exit code.

    `link` and `watch` are None if there is no control plane.
    """
    emulated = launch.env.get("PACELINE_EMULATE") or os.environ.get("PACELINE_EMULATE")
    if emulated:
        say(f"THE RANKS' DEVICE SPEEDS ARE EMULATED: {emulated}")
    whose, follows = ("the ranks'", "rank 0's output follows")
    if driver.VARIABLE in launch.env:
        whose, follows = (
            "the script's",
            "it follows, including what the script prints for its ranks",
        )
    say(f"{whose} output is in {supervisor.directory / 'logs'}; {follows}")
    with shown(watch) as screen:
        code = Foreground(supervisor, link, screen).run()
    assert supervisor.last is not None
    if supervisor.last.message is not None:
        say(_unseen(supervisor.last.message))
    if not supervisor.settled:
        say(
            f"the bus is unreachable: undelivered reports are in {supervisor.directory}; "
            "`paceline agent` with the same --data delivers them"
        )
    return code


def _with_policy(launch: Launch, choice: Mapping[str, Any], away: PacelineError) -> Launch:
    """Return the launch with the chosen policy in its environment, for planning on rank 0.

    `away` is the error that says why there is no control plane.
    """
    if "restart_hung_s" in choice:
        raise InputError(f"--restart-hung needs a control plane, but {away}") from away
    name, parameters = choice.get("policy"), choice.get("parameters") or {}
    if name == OBSERVED:
        say(f"{away}: training without a control plane, and unobserved")
        return launch
    env = dict(launch.env)
    if name is not None or parameters:
        policy = {name or _DEFAULT: parameters}
        try:
            PolicyInForce.of(policy, "--policy")
        except ValueError as error:
            raise InputError(str(error)) from error
        env["PACELINE_POLICY"] = msgspec.json.encode(policy).decode()
    say(f"{away}: training without a control plane")
    return msgspec.structs.replace(launch, env=env)


def _unseen(message: str) -> str:
    """Return a run's message without the lines of rank 0's log, which the terminal has shown."""
    return message.partition("\n")[0] if message.startswith(("rank 0 ", "the driver ")) else message


def print_notice(client: Client, run: str) -> None:
    """Print why the server has no steps of a run that has ended, if it gives a reason."""
    deadline = time.monotonic() + _NOTICE_S
    with suppress(PacelineError):
        while not State((now := client.call("GET", f"/runs/{run}"))["state"]).final:
            if time.monotonic() > deadline:
                return
            time.sleep(_TICK_S)
        if now["attempt"] is None and now.get("notice"):
            say(now["notice"])


def say(line: str) -> None:
    """Write one of Paceline's own lines to standard error."""
    sys.stderr.write(f"paceline: {line}\n")
    sys.stderr.flush()


class Foreground:
    """The loop of one supervised run, which shows rank 0's output. Signals end the run."""

    def __init__(self, supervisor: Supervisor, link: Link | None, screen: Screen) -> None:
        self._supervisor = supervisor
        self._screen = screen
        self._link = link
        self._commands = Commands(link) if link is not None else None
        self._signals: list[int] = []

    def run(self) -> int:
        """Poll the run until it ends; return the script's exit code, or 128 + a signal's number."""
        supervisor = self._supervisor
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        output = Output(supervisor.directory, self._screen.writer)
        try:
            supervisor.start()
            while supervisor.running:
                self._obey()
                before = supervisor.attempt
                supervisor.poll()
                self._report_restart(before)
                output.pump(supervisor.attempt)
                self._screen.tick()
                time.sleep(_TICK_S)
            output.pump(supervisor.attempt)
            self._deliver()
        finally:
            supervisor.close()
        if self._signals:
            return 128 + self._signals[0]
        assert supervisor.last is not None
        code = supervisor.last.exit_code
        return 1 if code is None or supervisor.last.state is State.STOPPED else code

    def _report_restart(self, before: int) -> None:
        last, attempt = self._supervisor.last, self._supervisor.attempt
        if attempt > before and last is not None and last.message and not last.state.final:
            say(last.message)
            say(f"restarting all ranks: attempt {attempt}")

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)
        if len(self._signals) == 1:
            self._supervisor.stop("interrupted")
        else:
            self._supervisor.kill()

    def _obey(self) -> None:
        if self._commands is None:
            return
        for run, command in self._commands.read(0.001):
            if isinstance(command, Kill | EndRanks) and run == self._supervisor.run:
                self._supervisor.obey(command)

    def _deliver(self) -> None:
        """Deliver reports until none are left, or the bus accepts none for `_DELIVER_S` seconds.

        An agent delivers the remaining reports later.
        """
        deadline, sent = time.monotonic() + _DELIVER_S, 0
        while (
            self._link is not None
            and self._link.up
            and not self._supervisor.settled
            and time.monotonic() < deadline
        ):
            self._supervisor.poll()
            if self._supervisor.delivery.sent > sent:
                deadline, sent = time.monotonic() + _DELIVER_S, self._supervisor.delivery.sent
            time.sleep(0.02)
