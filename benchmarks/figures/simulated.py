"""Virtual training for the ledger: a run of a scenario as arrays with a row per step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline import policies
from paceline.core.cost import Features
from paceline_backend.simulator import Scenario, Simulation, TrainedSegment
from paceline_backend.simulator.sync import SimulatedRound

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """Simulated training of S steps on W workers.

    Args:
        epoch: epoch of each step, [S].
        features: batches of the workers, [S, W].
        compute_s: seconds of computing, [S, W].
        wait_s: seconds of waiting for others, [S, W].
        step_s: seconds of each step, including the exchange, [S].
        ett_s: expected seconds of computing, NaN if unknown, [S, W].
        parts: indices of the samples of each worker in each step, [S][W].
        rounds: rounds of a relaxed synchroniser.
        plans: for each segment, the real seconds of planning, and True if samples were reshuffled.
        ended_s: virtual time at which all workers were done.
        sizes: sizes of all samples, [N].
    """

    epoch: Ints
    features: Features
    compute_s: Floats
    wait_s: Floats
    step_s: Floats
    ett_s: Floats
    parts: list[list[Ints]]
    rounds: list[SimulatedRound]
    plans: list[tuple[float, bool]]
    ended_s: float
    sizes: Floats

    @property
    def epochs_s(self) -> list[float]:
        """Seconds of each epoch."""
        return [float(self.step_s[self.epoch == e].sum()) for e in np.unique(self.epoch)]

    def share(self) -> Floats:
        """Return each worker's share of the samples of each step, [S, W]."""
        samples = self.features.samples
        return np.asarray(samples / samples.sum(axis=1, keepdims=True))

    def samples_s(self) -> float:
        """Return the trained samples per second over the whole run."""
        return float(self.features.samples.sum() / self.ended_s)


def run(
    testbed: Scenario,
    policy: str,
    parameters: Mapping[str, Any] | None = None,
    *,
    uneven_steps: bool = True,
) -> Run:
    """Run a scenario under a policy, which learns the workers' speeds as in a real run.

    Without `uneven_steps`, all workers make equally many steps: under relaxed synchronisation, fast
    workers take over no batches of slow ones.
    """
    changed = msgspec.structs.replace(testbed, policy=policy, parameters=dict(parameters or {}))
    if uneven_steps:
        return trained(Simulation.of(changed))
    hello = msgspec.structs.replace(changed.hello(), uneven_steps=False)
    made = policies.make(policy, changed.parameters)
    return trained(Simulation(hello, changed.emulation(), made, network=changed.communication))


def trained(simulation: Simulation) -> Run:
    """Run a simulation to its end."""
    ran: list[TrainedSegment] = []
    while not simulation.finished:
        ran.append(simulation.advance())
    ran = [each for each in ran if len(each.started_at)]
    columns = (np.concatenate(c) for c in zip(*(each.features for each in ran), strict=True))
    parts: list[list[Ints]] = []
    for each in ran:
        parts += [list(step) for step in each.plan.assignment.parts[: len(each.started_at)]]
    return Run(
        np.repeat([each.plan.epoch for each in ran], [len(each.step_s) for each in ran]),
        Features(*columns),
        np.concatenate([each.compute_s for each in ran]),
        np.concatenate([each.wait_s for each in ran]),
        np.concatenate([each.evened_s for each in ran]),
        np.concatenate([_expected(each) for each in ran]),
        parts,
        [round_ for each in ran for round_ in each.rounds],
        [(each.plan_s, bool(each.plan.shuffled)) for each in ran],
        simulation.now,
        np.asarray(simulation.history.sizes, np.float64),
    )


def _expected(each: TrainedSegment) -> Floats:
    return np.full(each.compute_s.shape, np.nan) if each.ett_s is None else each.ett_s


def with_sizes(testbed: Scenario, **changes: Any) -> Scenario:
    """Return a scenario with other sizes."""
    sizes = msgspec.structs.replace(testbed.sizes, **changes)
    return msgspec.structs.replace(testbed, sizes=sizes)


def with_devices(testbed: Scenario, **changes: Any) -> Scenario:
    """Return a scenario with other devices."""
    devices = msgspec.structs.replace(testbed.devices, **changes)
    return msgspec.structs.replace(testbed, devices=devices)


def labelled(names: Iterable[str], values: Iterable[float]) -> dict[str, float]:
    """Return values by their labels."""
    return {name: float(value) for name, value in zip(names, values, strict=True)}
