"""Looks after one run on a node that an engine started for it."""

from __future__ import annotations

import logging
import time

from paceline.core.errors import PacelineError
from paceline.node.client import Client, ServerUnreachable
from paceline.wire import State

_log = logging.getLogger(__name__)

_ASK_S = 2.0
PATIENCE_S = 600.0  # without an answer, and without processes of the run: then the node goes


class Duty:
    """Asks the control plane for a part in a run, whenever the node has no processes of it.

    Args:
        client: of the server.
        run: its id.
        node: this node's name.
        host: what the engine calls this machine; empty: it does not say.
    """

    def __init__(self, client: Client, run: str, node: str, host: str = "") -> None:
        self._client = client
        self._path = f"/runs/{run}/nodes/{node}/join"
        self._run = run
        self._params = {"host": host} if host else None
        self._ask_at = 0.0
        self._answered_at = time.monotonic()
        self._problem = ""
        self.exit_code = 1  # 0 once the run has finished, or the node was asked to leave it

    def over(self) -> bool:
        """Whether the node may go. Called often while it has nothing to do; asks now and then."""
        if time.monotonic() < self._ask_at:
            return False
        self._ask_at = time.monotonic() + _ASK_S
        try:
            answer = self._client.call("POST", self._path, params=self._params)
        except ServerUnreachable as error:
            return self._unanswered(error)
        except PacelineError as error:  # this node, or its token, is not wanted any more
            _log.error("run %s: %s", self._run, error)
            return True
        self._answered_at, self._problem = time.monotonic(), ""
        if answer["needed"]:
            return False
        _log.info("run %s does not need this node: %s", self._run, answer["message"])
        state = State(answer["state"])
        self.exit_code = 0 if state is State.FINISHED or not state.final else 1
        return True

    def busy(self) -> None:
        """Notes that the node has processes of the run."""
        self._answered_at = time.monotonic()

    def _unanswered(self, error: PacelineError) -> bool:
        if self._problem != (problem := str(error)):
            self._problem = problem
            _log.warning("run %s: %s; waiting for it", self._run, problem)
        return time.monotonic() - self._answered_at > PATIENCE_S
