"""Runs on a virtual cluster, which `paceline simulate --server` drives and plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import redis

from paceline_backend.backends.base import Credentials, NewRunError, NoOptions, options_of
from paceline_backend.simulator.scenario import Scenario, ScenarioError
from paceline_backend.store.new_runs import NewRun


class Simulated:
    """Each run is a simulation that plans itself; the control plane starts nothing. A `Backend`."""

    name: ClassVar[str] = "simulated"
    plans_itself: ClassVar[bool] = True
    options: ClassVar[type[msgspec.Struct]] = NoOptions

    def check(self, new: NewRun, *, launch: bool) -> None:
        """Wants a scenario for as many workers as the run has ranks, and no launch."""
        options_of(self.options, new.backend_options)
        if launch:
            raise NewRunError(
                "launch", "give false and run `paceline simulate SCENARIO --server URL`"
            )
        if new.scenario is None:
            raise NewRunError("scenario", "give what to simulate; docs/simulator.md tells how")
        if new.nodes_max > 1:
            raise NewRunError("nodes_max", "a simulation has no nodes: leave it out")
        try:
            scenario = Scenario.of(new.scenario)
        except ScenarioError as error:
            raise NewRunError("scenario", str(error)) from error
        if scenario.workers != new.nproc:
            raise NewRunError(
                "nproc", f"{new.nproc}, but the scenario has {scenario.workers} workers"
            )

    def place(self, new: NewRun, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
        """No nodes: a simulation has none."""
        return []

    def start(self, bus: redis.Redis, run: str, new: NewRun, credentials: Credentials) -> None:
        """Does nothing: `check` refuses launches."""
