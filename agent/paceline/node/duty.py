"""The duty of a node that an engine started for one run.

The node takes part in the run until the control plane answers that the run no longer needs it.
"""

from __future__ import annotations

import logging
import time

from paceline.core.errors import PacelineError
from paceline.node.client import Client, ServerUnreachable
from paceline.wire import State

_log = logging.getLogger(__name__)

_ASK_S = 2.0
# Seconds without an answer and without processes of the run until the node gives up.
PATIENCE_S = 600.0


class Duty:
    """Membership of a node in one run: asks the control plane whether the run needs this node.

    The agent asks while it has no processes of the run. `host` is the engine's name of this
    machine; empty: unknown.
    """

    def __init__(self, client: Client, run: str, node: str, host: str = "") -> None:
        self._client = client
        self._path = f"/runs/{run}/nodes/{node}/join"
        self._run = run
        self._params = {"host": host} if host else None
        self._ask_at = 0.0
        self._answered_at = time.monotonic()
        self._problem = ""
        # Becomes 0 once the run has finished, or the node was asked to leave it.
        self.exit_code = 1

    def over(self) -> bool:
        """Return True if the node may end.

        The agent calls this often while it has nothing to do; it asks the server every few seconds.
        """
        if time.monotonic() < self._ask_at:
            return False
        self._ask_at = time.monotonic() + _ASK_S
        try:
            answer = self._client.call("POST", self._path, params=self._params)
        except ServerUnreachable as error:
            return self._unanswered(error)
        # The server no longer accepts this node, or its token.
        except PacelineError as error:
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
        """Record that the node has processes of the run."""
        self._answered_at = time.monotonic()

    def _unanswered(self, error: PacelineError) -> bool:
        if self._problem != (problem := str(error)):
            self._problem = problem
            _log.warning("run %s: %s; retrying", self._run, problem)
        return time.monotonic() - self._answered_at > PATIENCE_S
