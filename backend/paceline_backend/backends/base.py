"""What a training backend does, and when each of its methods is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import redis

from paceline.core.errors import PacelineError
from paceline_backend.store.new_runs import NewRun


class NewRunError(PacelineError):
    """A field of a new run does not fit its backend. The message says how to mend it.

    Args:
        field: its name.
        message: what is wrong.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class NoNodeError(PacelineError):
    """No node can start the run at present."""


class Backend(Protocol):
    """One kind of place where runs train. Objects keep no state: runs stand in the store."""

    name: ClassVar[str]  # in the column `runs.backend`
    plans_itself: ClassVar[bool]  # whether no controller plans its runs

    def check(self, new: NewRun, *, launch: bool) -> None:
        """Called first, before anything is written or published.

        Args:
            new: the run that somebody asks for.
            launch: whether the control plane starts it; else who asks does.

        Raises:
            NewRunError: the run does not fit this backend.
        """

    def place(self, new: NewRun, nodes: Sequence[Mapping[str, Any]]) -> str | None:
        """Called within the transaction that records the run, if the control plane starts it.

        Args:
            new: the run.
            nodes: rows of `store.nodes.listed`.

        Returns:
            The node that starts the run; None where runs have no node.

        Raises:
            NoNodeError: no node can.
        """

    def start(self, bus: redis.Redis, run: str, new: NewRun) -> None:
        """Called after the run was recorded, if the control plane starts it.

        Args:
            bus: answers.
            run: public id of the run.
            new: the run, with the node that `place` chose.

        Raises:
            redis.RedisError: the bus is away; the caller fails the run.
        """
