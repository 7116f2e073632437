"""Runs that somebody starts on nodes of their own, such as within a job of Slurm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import redis

from paceline_backend.backends.base import (
    Credentials,
    NewRunError,
    NoOptions,
    answering,
    launch_on,
)
from paceline_backend.store.new_runs import NewRun


class Adopted:
    """Whoever starts its nodes starts the run, with `paceline node SCRIPT`. A `Backend`.

    Nobody asks for such a run: `requests.adopt` records it when its first node does.
    """

    name: ClassVar[str] = "adopted"
    plans_itself: ClassVar[bool] = False
    options: ClassVar[type[msgspec.Struct]] = NoOptions

    def check(self, new: NewRun, *, launch: bool) -> None:
        """Refuses all: the control plane has no nodes for such a run."""
        raise NewRunError("backend", "`paceline node SCRIPT` on its nodes starts such a run")

    def place(self, new: NewRun, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
        """Those of its nodes that answer."""
        return answering(new, nodes)

    def start(self, bus: redis.Redis, run: str, new: NewRun, credentials: Credentials) -> None:
        """Launches on nodes that are there."""
        launch_on(bus, run, new, credentials, new.where)
