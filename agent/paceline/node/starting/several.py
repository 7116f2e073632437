"""`paceline run --nodes`: starts a run on several nodes with agents, and shows its progress."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Mapping
from typing import Any

from paceline.core.errors import InputError, PacelineError
from paceline.node.client import Client, ServerUnreachable
from paceline.node.starting import screen as screens
from paceline.node.starting.foreground import register, say
from paceline.node.starting.progress import ProgressPoller
from paceline.node.starting.screen import Screen
from paceline.wire import Launch, State

_RETRY_S = 2.0
_POLL_S = 0.5


def counted(text: str) -> tuple[int, int]:
    """Parse a number of nodes, such as ``3``, or a range, such as ``2:4``: minimum and maximum."""
    match = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", text)
    least, most = (int(part) for part in (match[1], match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise InputError(f"--nodes {text}: give a number, such as 3, or a range, such as 2:4")
    return least, most


class RunView:
    """Display of a run's progress in a terminal, until the run ends."""

    def __init__(self, client: Client, run: str, screen: Screen) -> None:
        self._client = client
        self._screen = screen
        self._run = run
        self._shown: dict[str, str] = {}

    def follow(self) -> int:
        """Wait for the run's end; return its exit code.

        Ctrl-C stops the run; a second one ends only this process.
        """
        try:
            return self._wait()
        except KeyboardInterrupt:
            say(f"stopping run {self._run}; press Ctrl-C again to exit without waiting")
        try:
            self._stop()
            self._wait()
        except KeyboardInterrupt:
            say(f"exiting; run {self._run} may still be running")
        return 128 + signal.SIGINT

    def _stop(self) -> None:
        while (shown := self._poll()) is None or not State(shown["state"]).final:
            try:
                self._client.call(
                    "POST", f"/runs/{self._run}/stop", {"why": "interrupted"}, if_match="*"
                )
            except PacelineError as error:
                say(f"run {self._run} is not stopped yet: {error}")
                time.sleep(_RETRY_S)
            else:
                return

    def _wait(self) -> int:
        while True:
            shown = self._poll()
            if shown is not None and State(shown["state"]).final:
                return _exit_code(shown)
            self._screen.tick()
            time.sleep(_POLL_S)

    def _poll(self) -> Mapping[str, Any] | None:
        # If the server is unreachable, the run continues, so keep waiting.
        with contextlib.suppress(ServerUnreachable):
            shown: Mapping[str, Any] = self._client.call("GET", f"/runs/{self._run}")
            for row in self._client.call("GET", f"/runs/{self._run}/nodes"):
                self._report(row["node"], row["state"], row["message"])
            world = f" with {shown['world']} ranks" if shown["world"] else ""
            self._report("the run", f"{shown['state']}{world}", shown["message"])
            return shown
        return None

    def _report(self, who: str, what: str, why: str | None) -> None:
        if self._shown.get(who) != what:
            self._shown[who] = what
            say(f"{who}: {what}{f': {why}' if why else ''}")


def _exit_code(run: Mapping[str, Any]) -> int:
    if run["state"] == State.FINISHED or (run["state"], run["exit_code"]) == (State.STOPPED, 0):
        return 0
    return int(run["exit_code"] or 1)


def train(client: Client, launch: Launch, nodes: str, choice: Mapping[str, Any]) -> int:
    """Start a run on nodes that the server chooses, and follow it; return its exit code.

    `nodes` is a number or a range, as for `counted`. `choice` has further fields of ``POST /runs``,
    such as `policy`. Raise an InputError if the launch emulates devices.
    """
    if "PACELINE_EMULATE" in launch.env:
        raise InputError("--nodes: leave out --slowdown and --emulate, which work on one node only")
    least, most = counted(nodes)
    run = register(client, launch, {**choice, "nodes_min": least, "nodes_max": most})
    say(f"watch the run on {client.server}/runs/{run}")
    with screens.shown(ProgressPoller(client, run)) as screen:
        return RunView(client, run, screen).follow()
