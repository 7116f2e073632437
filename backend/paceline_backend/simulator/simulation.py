"""Simulation of a virtual cluster, segment by segment.

`Simulation.advance` plans a segment with `planning.offer`, as a controller does, computes the
ranks' times with a model in `sync`, and adopts the segment. A simulation uses neither a bus nor a
database; `broadcast` sends its results to a control plane.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from paceline import policies
from paceline.core.cost import Features, features
from paceline.core.emulation import Emulation
from paceline.planning.feedback import COLUMNS, Window
from paceline.planning.history import History
from paceline.planning.offer import offer
from paceline.policies import Policy
from paceline.policies.base import Floats, Ints
from paceline.wire import ALLREDUCE, Hello, Plan
from paceline.wire.synchronisation import Synchronisation
from paceline_backend.simulator import sync as sync_models
from paceline_backend.simulator.scenario import Change, Scenario, WorkerFailure
from paceline_backend.simulator.sync import (
    Bodies,
    Costs,
    Prices,
    SimulatedPool,
    SimulatedRound,
    Work,
)

T = TypeVar("T")
# A plan does not use the records of this many newest steps; see `Simulation`.
_LAG = 1


class Network(Protocol):
    """Durations of exchanges among ranks: `scenario.Communication`, or measured durations."""

    def all_reduce_s(self, step: int, batches: Features) -> Floats:
        """Return the time of a step's all-reduce on each rank, [W]."""
        ...

    def costs(self, world: int) -> Costs:
        """Return the costs of exchanges of relaxed synchronisation among `world` ranks."""
        ...


@dataclass(frozen=True)
class TrainedSegment:
    """A segment that was trained, with the times that ranks would report; arrays are [S, W].

    S is the number of trained steps. If a failure or the simulation's end interrupts the segment, S
    is below the planned number of steps.
    """

    plan: Plan
    features: Features
    data_s: Floats
    compute_s: Floats
    # Time that a rank waits for other ranks after computing.
    wait_s: Floats
    # Time of the exchange of gradients; 0 if a rank computes at the same time.
    communication_s: Floats
    # Virtual time at which each step begins.
    started_at: Floats
    # Virtual time of the segment's start.
    begins_at: float = 0.0
    attempt: int = 0
    # Real time that planning took; `plan.plan_s` is 0.
    plan_s: float = 0.0
    # Reduction rounds of the segment; their `ended_at` is virtual time.
    rounds: list[SimulatedRound] = field(default_factory=list)
    # True if ranks synchronise at the segment's end only where the epoch ends, too.
    goes_on: bool = False

    @property
    def rank_step_s(self) -> Floats:
        """The duration of each rank's steps."""
        return self.data_s + self.compute_s + self.wait_s + self.communication_s

    @property
    def step_s(self) -> Floats:
        """The duration of each step, [S], as the mean over ranks."""
        return np.asarray(self.rank_step_s.mean(axis=1))

    @property
    def evened_s(self) -> Floats:
        """The duration of each step, [S], also if ranks are in different steps at the same time.

        If ranks share batches, they train the batches of a step at different times, so the
        segment's time is spread evenly over its steps. In other relaxed segments at whose end all
        ranks synchronise, the wait at the end is spread over the steps. If ranks do not synchronise
        at the end, a step lasts from the time at which the last rank has ended the previous step to
        the time at which the last rank has ended this step.
        """
        step_s = self.step_s
        if self._pooled:
            return _evened(step_s)
        if self.goes_on and len(step_s):
            ended_at = (self.started_at + self.rank_step_s).max(axis=1)
            return np.diff(ended_at, prepend=self.started_at[0].max())
        if self.rounds:
            met_s = float(self.wait_s[-1].mean())
            step_s[-1] -= met_s
            step_s += met_s / len(step_s)
        return step_s

    @property
    def evened_load(self) -> Floats:
        """The load of each step, [S]; the same in all steps if ranks share batches."""
        load = np.asarray(self.features.load.sum(axis=1))
        return _evened(load) if self._pooled else load

    @property
    def _pooled(self) -> bool:
        return self.plan.pooled

    @property
    def ett_s(self) -> Floats | None:
        """The plan's forecast of `compute_s`; None if the models were unknown.

        The value is NaN where the batch differs from the plan, because ranks took over batches from
        each other.
        """
        if not self.plan.ett_s:
            return None
        steps = len(self.started_at)
        ett_s = np.array(self.plan.ett_s[:steps]).reshape(self.compute_s.shape)
        return np.where(self.features.samples == self.plan.assignment.counts[:steps], ett_s, np.nan)


class Simulation:
    """A training on emulated devices, planned as a controller plans real training.

    A segment is planned from the records of earlier steps, except the newest `_LAG` steps, because
    a real controller plans while the last segment still runs. Planning takes no virtual time. The
    same arguments, switches and failures give the same segments and times. Not thread-safe.

    Args:
        hello: the run's Hello message, as a leader would send it.
        devices: the ranks' speeds.
        policy: the first policy.
        network: durations of exchanges; None: no time.
        steps: number of steps after which the simulation ends; None: it ends with the last epoch.

    Attributes:
        switches: future changes of the policy, sorted by step.
        failures: future failures of workers, sorted by step. After a failure, `hello`, `devices`
            and `history` belong to the next attempt.
    """

    def __init__(
        self,
        hello: Hello,
        devices: Emulation,
        policy: Policy,
        *,
        network: Network | None = None,
        steps: int | None = None,
    ) -> None:
        self.policy = policy
        self.version = 0
        self.switches: deque[Change] = deque()
        self.failures: deque[WorkerFailure] = deque()
        self._network = network
        self._steps = steps
        self._begin(hello, devices, 0.0)

    @staticmethod
    def of(scenario: Scenario) -> Simulation:
        """Make the simulation that a scenario describes, from virtual time 0 on.

        Raises:
            ScenarioError: see `Scenario.hello`.
        """
        made = Simulation(
            scenario.hello(),
            scenario.emulation(),
            policies.make(scenario.policy, scenario.parameters),
            network=scenario.communication,
            steps=scenario.steps,
        )
        made.switches.extend(scenario.switches)
        made.failures.extend(scenario.failures)
        return made

    def _begin(self, hello: Hello, devices: Emulation, now: float) -> None:
        """Begin an attempt at virtual time `now`; the epoch has used the samples `hello.used`."""
        self.hello = hello
        self.devices = devices
        self.history = History(hello)
        self.window = Window(hello.world, hello.attempt)
        # Rows of the newest steps, which plans do not use yet, as pairs (step, rows).
        self._withheld: list[tuple[int, Floats]] = []
        self._pool = SimulatedPool(hello.world)
        self._data_s = np.array(devices.data_s or [0.0] * hello.world)
        # The end of each rank's newest step, [W].
        self._clocks = np.full(hello.world, now)
        self._sync = ALLREDUCE
        self._model = self._model_of(ALLREDUCE, 0)

    @property
    def now(self) -> float:
        """Latest virtual time at which a rank has ended its newest step."""
        return float(self._clocks.max())

    @property
    def finished(self) -> bool:
        """True if all steps are trained."""
        return self.history.finished or (self._steps is not None and self.step >= self._steps)

    @property
    def step(self) -> int:
        """Number of the next step."""
        return self.history.step

    def switch(self, policy: Policy, version: int | None = None) -> None:
        """Switch the policy from the next segment on; if `version` is None, it increases by 1."""
        self.policy = policy
        self.version = self.version + 1 if version is None else version

    def advance(self) -> TrainedSegment:
        """Plan the next segment and train it; a failure in one of its steps ends the segment."""
        while self.switches and self.switches[0].step <= self.step:
            change = self.switches.popleft()
            self.switch(policies.make(change.policy, change.parameters))
        began = time.perf_counter()
        made, shuffle = offer(self.history, self.window, self.policy, self.version)
        plan_s = time.perf_counter() - began
        # Remove `plan_s`, which is real time, so that equal scenarios give equal segments.
        plan = msgspec.structs.replace(made, plan_s=0.0).keeping(made.assignment)
        end = plan.first_step + plan.steps
        if self._steps is not None:
            end = min(end, self._steps)
        failure = None
        if self.failures and self.failures[0].step < end:
            failure = self.failures.popleft()
            end = max(failure.step, plan.first_step)
        trained = self._train(plan, end - plan.first_step)
        trained = replace(trained, plan_s=plan_s)
        if failure is not None:
            self._restart(failure, trained)
            return trained
        if plan.shuffled and shuffle is not None:
            self.history.shuffled(plan, shuffle)
        self.history.adopt(plan)
        self._tell(trained)
        return trained

    def _train(self, plan: Plan, steps: int) -> TrainedSegment:
        counts = plan.assignment.counts[:steps]
        sizes = self.history.sizes[plan.assignment.samples[: counts.sum()]]
        costs = Costs() if self._network is None else self._network.costs(self.hello.world)
        own_s = 0.0 if plan.synchroniser == ALLREDUCE else costs.own_s
        load_s = self._data_s + own_s
        begun, starts = self._clocks, self._begin_times(plan, costs)
        # The leader (rank 0) adopts a segment when the leader itself has ended the previous
        # segment. If ranks do not synchronise between segments, a rank that is ahead of the leader
        # waits for the leader before its first batch.
        begins_at = float(begun[0])
        early_s = np.maximum(begins_at - starts, 0.0)
        limits = self.hello.limits
        batches = DealtBatches(self.devices, plan, sizes, counts, load_s, limits)
        data_s = batches.data_s
        work = Work(
            plan.first_step,
            data_s + batches.compute_s,
            counts,
            self._all_reduce_s(plan.first_step, batches, counts),
            costs,
            plan.epoch_end and steps == plan.steps,
            batches,
        )
        base, goes_on = float(starts.min()), self._model.goes_on
        began = starts + early_s - base
        if plan.pooled:
            timeline = self._pool.run(plan.synchroniser, self._model, began, work)
        else:
            timeline = self._model.run(began, work)
        timeline.wait_s[:1] += starts - begun
        data_s[:1] += early_s
        parts_s = data_s + batches.compute_s + timeline.wait_s + timeline.communication_s
        ends = begun + np.cumsum(parts_s, axis=0)
        started_at = np.concatenate([begun[None], ends[:-1]])[:steps]
        if steps:
            self._clocks = ends[-1]
        # All ranks end at the same time if they synchronise, so remove rounding errors.
        if not self._model.goes_on:
            self._clocks = np.full(len(begun), self._clocks.max())
        return TrainedSegment(
            plan,
            batches.features,
            data_s,
            batches.compute_s,
            timeline.wait_s,
            timeline.communication_s,
            started_at,
            begins_at,
            self.hello.attempt,
            rounds=[replace(round_, ended_at=base + round_.ended_at) for round_ in timeline.rounds],
            goes_on=goes_on,
        )

    def _all_reduce_s(self, first_step: int, batches: DealtBatches, counts: Ints) -> Floats:
        seconds = np.zeros(counts.shape)
        if self._network is not None:
            for at in range(len(counts)):
                seconds[at] = self._network.all_reduce_s(first_step + at, batches.step(at))
        return seconds

    def _begin_times(self, plan: Plan, costs: Costs) -> Floats:
        """Return the time at which each rank can begin a segment, [W]."""
        clocks, synchroniser = self._clocks, plan.synchroniser
        if self._model.goes_on:
            if synchroniser == self._sync:
                return clocks
            clocks = np.full(len(clocks), self._model.synchronise(clocks, costs))
        self._sync, self._model = synchroniser, self._model_of(synchroniser, plan.seq)
        return clocks

    def _model_of(self, synchroniser: Synchronisation, seq: int) -> sync_models.SimulatedSync:
        return sync_models.make(synchroniser, self.hello.world, self.hello.seed + seq)

    def _tell(self, trained: TrainedSegment) -> None:
        columns = {
            **trained.features._asdict(),
            "compute_s": trained.compute_s,
            "sync_s": trained.wait_s + trained.communication_s,
            "step_s": trained.rank_step_s,
            "recompiles": np.zeros_like(trained.compute_s),
        }
        table = np.stack([columns[name] for name in COLUMNS], axis=2).astype(np.float64)
        self._withheld += [(trained.plan.first_step + k, rows) for k, rows in enumerate(table)]
        shown = max(len(self._withheld) - _LAG, 0)
        for step, rows in self._withheld[:shown]:
            self.window.put_step(step, rows)
        self._withheld = self._withheld[shown:]

    def _restart(self, failure: WorkerFailure, trained: TrainedSegment) -> None:
        old = self.hello
        alive = failure.alive(old.world)
        samples = trained.plan.assignment.samples[: trained.features.samples.sum()]
        used = np.concatenate([self.history.used, samples]).astype("<u4")
        now = self.now + failure.restart_s
        hello = msgspec.structs.replace(
            old,
            attempt=old.attempt + 1,
            world=len(alive),
            epoch=self.history.epoch,
            step=trained.plan.first_step + len(trained.started_at),
            used=used.tobytes(),
            started_at=now,
            profiles=[old.profiles[rank] for rank in alive] if old.profiles else [],
            limits=[old.limits[rank] for rank in alive] if old.limits else [],
            token_limits=[old.token_limits[rank] for rank in alive] if old.token_limits else [],
            devices=[old.devices[rank] for rank in alive] if old.devices else [],
        )
        self._begin(hello, remaining(self.devices, alive), now)


def _evened(values: Floats) -> Floats:
    return np.full(len(values), values.mean() if len(values) else 0.0)


def remaining(devices: Emulation, alive: list[int]) -> Emulation:
    """Return the devices of the ranks in `alive`, renumbered from 0."""
    now = {rank: at for at, rank in enumerate(alive)}

    def of(values: list[T]) -> list[T]:
        return [values[rank] for rank in alive] if values else []

    return msgspec.structs.replace(
        devices,
        a_s=of(devices.a_s),
        b_s=of(devices.b_s),
        c_s=of(devices.c_s),
        data_s=of(devices.data_s),
        devices=of(devices.devices),
        slowdowns=[
            msgspec.structs.replace(slow, ranks=[now[rank] for rank in slow.ranks if rank in now])
            for slow in devices.slowdowns
        ],
    )


class DealtBatches:
    """The batches of a segment's S steps on W ranks.

    At first these are the planned batches. Each call of `pool` replaces the batches of some
    successive steps (a span, see `sync.pool`) by those that the ranks trained, including batches
    that they took over.

    Args:
        plan: the plan of the segment; only its first step and the ranks' CPU threads are used.
        sizes: sizes of the segment's samples, sorted by step, then by rank.
        counts: number of samples of each batch, [S, W].
        load_s: each rank's time to load a batch, [W].
        limits: number of samples that fit into each rank's memory; empty: any number.
    """

    def __init__(
        self,
        devices: Emulation,
        plan: Plan,
        sizes: Floats,
        counts: Ints,
        load_s: Floats,
        limits: list[int],
    ) -> None:
        self.features = features(sizes, counts.copy())
        self.data_s = np.tile(load_s, (len(counts), 1))
        self.compute_s = np.zeros(counts.shape)
        self._devices, self._first_step, self._samples = devices, plan.first_step, len(sizes)
        self._threads: Any = np.array(plan.threads) if plan.threads else 1
        self._limits, self._load_s = limits, load_s
        for at in range(len(counts)):
            self.compute_s[at] = self._taken_s(at)

    def step(self, at: int) -> Features:
        """Return the batches of the segment's step `at` (counted from 0), [W]."""
        return Features(*(column[at] for column in self.features))

    def room(self, rank: int) -> int:
        """See `Dealing.room`."""
        return self._limits[rank] if self._limits else self._samples

    def prices(self, at: int) -> Prices:
        """See `Dealing.prices`."""
        rates = self._devices.rates(self._first_step + at, self._threads)
        load = np.asarray(self._devices.cost.load(self.step(at)))
        return Prices(load, rates.load_s, rates.sample_s, rates.batch_s + self._load_s)

    def pool(self, bodies: Bodies) -> None:
        """See `Dealing.pool`."""
        rows, taken = slice(bodies.first, bodies.first + bodies.span), bodies.taken
        for name, column in zip(Features._fields, self.features, strict=True):
            values = bodies.of_planned(column)
            column[rows] = bodies.reported(values, most=name == "longest")
        data_s = np.where(taken, self._load_s, bodies.of_planned(self.data_s))
        compute_s = np.where(taken, bodies.work_s - data_s, bodies.of_planned(self.compute_s))
        self.data_s[rows] = bodies.reported(data_s)
        self.compute_s[rows] = bodies.reported(compute_s)

    def _taken_s(self, at: int) -> Floats:
        return self._devices.compute_s(self._first_step + at, self.step(at), self._threads)
