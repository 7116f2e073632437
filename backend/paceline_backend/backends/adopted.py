"""Backend `adopted`: runs whose nodes a user starts, for example inside a Slurm job."""

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


class AdoptedBackend:
    """`Backend` of runs whose nodes a user starts with `paceline node SCRIPT`.

    These runs are not launched over the API: `requests.adopt` records a run when its first node
    requests it.
    """

    name: ClassVar[str] = "adopted"
    plans_itself: ClassVar[bool] = False
    options: ClassVar[type[msgspec.Struct]] = NoOptions

    def check(self, new: NewRun, *, launch: bool) -> None:
        """Refuse every run, because the control plane has no nodes for it."""
        raise NewRunError(
            "backend", "start an adopted run with `paceline node SCRIPT` on its nodes"
        )

    def place(self, new: NewRun, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the run's nodes that answer."""
        return answering(new, nodes)

    def start(self, bus: redis.Redis, run: str, new: NewRun, credentials: Credentials) -> None:
        """Launch the run on the nodes that have joined it."""
        launch_on(bus, run, new, credentials, new.where)
