"""Runs that an agent starts on its node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import redis

from paceline.wire import COMMANDS_LENGTH, Launch, commands
from paceline.wire.bus import publish
from paceline_backend.backends.base import NewRunError, NoNodeError
from paceline_backend.store.new_runs import NewRun


class Local:
    """Each run trains on one node; controllers plan it. A `Backend`."""

    name: ClassVar[str] = "local"
    plans_itself: ClassVar[bool] = False

    def check(self, new: NewRun, *, launch: bool) -> None:
        """Refuses a scenario: nothing is simulated."""
        if new.scenario is not None:
            raise NewRunError("scenario", 'only for backend "simulated"')

    def place(self, new: NewRun, nodes: Sequence[Mapping[str, Any]]) -> str | None:
        """The node that the run names, or the least busy one of those that answer."""
        alive = [node for node in nodes if node["alive"]]
        if new.node is not None:
            if new.node not in {node["id"] for node in alive}:
                names = ", ".join(node["id"] for node in alive) or "none"
                raise NoNodeError(f"node: {new.node} has no agent that answers; alive are: {names}")
            return new.node
        if not alive:
            raise NoNodeError(
                "no agent answers: start one with `paceline agent` on the machine that shall "
                "train, or use `paceline run`"
            )
        return str(min(alive, key=lambda node: (len(node["runs"]), -node["cores"]))["id"])

    def start(self, bus: redis.Redis, run: str, new: NewRun) -> None:
        """Tells the node's agent to launch the run."""
        assert new.node is not None
        message = Launch(
            new.script, list(new.args), new.nproc, dict(new.env), new.cwd, new.max_restarts
        )
        publish(bus, commands(new.node), message, run, maxlen=COMMANDS_LENGTH)
