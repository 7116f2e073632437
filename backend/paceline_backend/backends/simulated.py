"""Backend `simulated`: runs on a virtual cluster that `paceline simulate --server` drives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import redis

from paceline_backend.backends.base import Credentials, NewRunError, NoOptions, options_of
from paceline_backend.simulator.scenario import Scenario, ScenarioError
from paceline_backend.store.new_runs import NewRun


class Simulated:
    """`Backend` of simulations, which plan themselves. The control plane starts no processes."""

    name: ClassVar[str] = "simulated"
    plans_itself: ClassVar[bool] = True
    options: ClassVar[type[msgspec.Struct]] = NoOptions

    def check(self, new: NewRun, *, launch: bool) -> None:
        """Refuse launches; require a scenario with as many workers as the run has ranks."""
        options_of(self.options, new.backend_options)
        if launch:
            raise NewRunError(
                "launch",
                "give false, and start the run with `paceline simulate SCENARIO --server URL`",
            )
        if new.scenario is None:
            raise NewRunError("scenario", "describe the simulation as in docs/simulator.md")
        if new.nodes_max > 1:
            raise NewRunError("nodes_max", "a simulation has no nodes: omit it")
        try:
            scenario = Scenario.of(new.scenario)
        except ScenarioError as error:
            raise NewRunError("scenario", str(error)) from error
        if scenario.workers != new.nproc:
            raise NewRunError(
                "nproc",
                f"{new.nproc}, but the scenario has {scenario.workers} workers: give that number",
            )

    def place(self, new: NewRun, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return no nodes, because a simulation has none."""
        return []

    def start(self, bus: redis.Redis, run: str, new: NewRun, credentials: Credentials) -> None:
        """Do nothing, because `check` refuses launches."""
