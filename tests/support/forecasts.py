"""Simulated training as a forecast sees it: in memory, or stored as ranks would report it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline import policies
from paceline.core.cost import Features
from paceline.core.emulation import Emulation
from paceline.wire import ALLREDUCE, Adopted, Hello, RoundBatch, StepBatch, StepRecord
from paceline_backend.insight.report import WARMUP_STEPS
from paceline_backend.insight.whatif.answer import (
    FORECAST_STEPS,
    Decided,
    Decision,
    PolicyInForce,
    PresetForecast,
)
from paceline_backend.insight.whatif.measured import MeasuredSteps, RelaxedSpan, relaxed_span
from paceline_backend.insight.whatif.state import PlanningState
from paceline_backend.simulator import Simulation, TrainedSegment
from paceline_backend.simulator.broadcast import rounds
from paceline_backend.simulator.scenario import Communication
from paceline_backend.simulator.sync import Costs
from paceline_backend.store import Store, telemetry
from support.records import hello

Floats = npt.NDArray[np.float64]

RING = Communication(bytes=8e6, bandwidth=3e9)
COMMUNICATION_S = 0.004  # of all four ranks

BSP = PolicyInForce("bsp", {}, 0, step_time_s=None, measured_s=None, measured_steps=0)

_PRESET: dict[str, Any] = {
    "parameters": {},
    "step_time_s": 0.2,
    "low_s": 0.19,
    "high_s": 0.21,
    "words": "…",
    "relaxed": False,
    "changes": "nothing",
    "label": "",
    "in_force": False,
    "warnings": [],
    "harmful": False,
    "alone": 0,
    "stale": False,
}
_NO_PRESET: dict[str, Any] = {
    "policy": None,
    "parameters": {},
    "saving": None,
    "low": None,
    "high": None,
}


def preset(policy: str, saving: float, low: float, high: float, **more: Any) -> PresetForecast:
    """A forecast of a preset that saves between `low` and `high` of the time."""
    given = {"saving": saving, "saving_low": low, "saving_high": high, **more}
    return PresetForecast(policy=policy, **{**_PRESET, **given})


def decision(decided: Decided, reason: str = "", **more: Any) -> Decision:
    """A decision of `auto`, about no preset unless one is given."""
    return Decision(decided=decided, reason=reason, **{**_NO_PRESET, **more})


def drawn(samples: int, spread: float, seed: int = 0) -> Floats:
    """Lognormal sizes of mean 150 or so."""
    return np.clip(np.random.default_rng(seed).lognormal(5.0, spread, samples), 1.0, 8192.0)


class Training:
    def __init__(
        self, sizes: Floats, devices: Emulation, global_batch: int = 64, policy: str = "bsp"
    ) -> None:
        self.hello: Hello = hello(
            len(devices.a_s), sizes=sizes.tobytes(), global_batch=global_batch, epochs=None
        )
        self.policy, self.parameters = policy, dict[str, Any]()
        self.simulation = Simulation(
            self.hello,
            devices,
            policies.make(policy),
            network=_Network(),
        )
        self.effective = [0]
        self.ran: list[TrainedSegment] = []
        self.stored = 0  # of those
        self.rounds = 0  # stored

    @property
    def step(self) -> int:
        return self.simulation.step

    def train(self, upto: int) -> None:
        while self.step < upto:
            self.ran.append(self.simulation.advance())

    def switch(self, policy: str) -> None:
        self.policy, self.parameters = policy, {}
        self.simulation.switch(policies.make(policy))
        self.effective.append(self.step)

    def time(self, first: int, end: int) -> float:
        """What a mean step takes, over the steps from `first` on, from their time per load."""
        at = slice(first, end)
        step_s = np.concatenate([trained.evened_s for trained in self.ran])[at]
        load = np.concatenate([trained.evened_load for trained in self.ran])[at]
        sizes = self.hello.sizes_array()
        mean = sizes.sum() / -(-len(sizes) // self.hello.global_batch)
        return float(step_s.sum() / load.sum() * mean)

    def state(self, steps: int = FORECAST_STEPS) -> PlanningState:
        """What `read` would give."""
        ran = self.ran[-steps:]
        step = np.concatenate(
            [trained.plan.first_step + np.arange(len(trained.step_s)) for trained in ran]
        )

        def column(get: Any) -> Any:
            return np.concatenate([get(trained) for trained in ran])[-steps:]

        features = Features(*(column(lambda r, k=k: r.features[k]) for k in range(4)))
        measured = MeasuredSteps(
            step=step[-steps:],
            features=features,
            compute_s=column(lambda r: r.compute_s),
            data_s=column(lambda r: r.data_s),
            sync_s=column(lambda r: r.wait_s + r.communication_s),
            rank_step_s=column(lambda r: r.rank_step_s),
            load=features.load.sum(axis=1),
            relaxed_spans=self._relaxed_spans(step[-steps:]),
            reported_round_s=COMMUNICATION_S,
        ).of_segments([trained.plan for trained in ran])
        return PlanningState(
            self.simulation.version,
            self.policy,
            self.parameters,
            self.simulation.history,
            self.simulation.window,
            measured,
            measured.step >= self.effective[-1] + WARMUP_STEPS,
        )

    def _relaxed_spans(self, step: Any) -> tuple[RelaxedSpan, ...]:
        relaxed = [trained.plan for trained in self.ran if trained.plan.synchroniser != ALLREDUCE]
        spans = [relaxed_span(step, segment) for segment in relaxed]
        return tuple(span for span in spans if span.end > span.first)

    def store(self, store: Store, run: str) -> None:
        """What ranks would have reported since the last call."""
        messages: list[Any] = [] if self.stored else [(run, self.hello)]
        for ran in self.ran[self.stored :]:
            messages.append((run, Adopted(0, ran.plan, 1.0)))
            messages += [(run, StepBatch(_records(ran, r))) for r in range(self.hello.world)]
            round_records = rounds(ran, self.rounds, 1_000.0)
            self.rounds += len(round_records)
            messages.append((run, RoundBatch(round_records)))
        telemetry.write(store, messages)
        self.stored = len(self.ran)


class _Network:
    def all_reduce_s(self, step: int, batches: Features) -> Floats:
        return np.full(len(batches.samples), COMMUNICATION_S)

    def costs(self, world: int) -> Costs:
        return RING.costs(world)


def _records(ran: TrainedSegment, rank: int) -> list[StepRecord]:
    first = ran.plan.first_step
    of = [[column[k, rank] for column in ran.features] for k in range(len(ran.step_s))]
    return [
        StepRecord(
            attempt=0,
            rank=rank,
            seq=first + k,
            step=first + k,
            epoch=ran.plan.epoch,
            segment=ran.plan.seq,
            samples=int(of[k][0]),
            load=float(of[k][1]),
            data_s=float(ran.data_s[k, rank]),
            compute_s=float(ran.compute_s[k, rank]),
            sync_s=float(ran.wait_s[k, rank] + ran.communication_s[k, rank]),
            step_s=float(ran.rank_step_s[k, rank]),
            ended_at=1_000.0 + first + k,
            squares=float(of[k][2]),
            longest=float(of[k][3]),
        )
        for k in range(len(ran.step_s))
    ]
