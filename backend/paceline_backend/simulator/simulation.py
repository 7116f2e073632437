"""One run of a virtual cluster, segment by segment."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from paceline.core.cost import Features
from paceline.core.emulation import Emulation
from paceline.wire import ALLREDUCE, Hello, Segment
from paceline.wire.synchronisation import Synchronisation
from paceline_backend import policies
from paceline_backend.planning.feedback import COLUMNS, Window
from paceline_backend.planning.history import History
from paceline_backend.planning.offer import offer
from paceline_backend.policies import Plan, Policy
from paceline_backend.policies.base import Floats, Ints
from paceline_backend.simulator import sync as synchronisers
from paceline_backend.simulator.dealing import Batches
from paceline_backend.simulator.scenario import Change, Failure, Scenario
from paceline_backend.simulator.sync import Costs, Round, Work

Communication = Callable[[int, Features], Floats]  # step, batches [W] → seconds, [W]


@dataclass(frozen=True)
class Ran:
    """A segment that was trained: what the ranks would report; arrays are [S, W].

    S is the number of steps that were trained: less than the segment has where a failure or the
    simulation's end came before its own.
    """

    segment: Segment
    plan: Plan
    features: Features
    data_s: Floats
    compute_s: Floats
    wait_s: Floats  # for other ranks, after computing
    communication_s: Floats  # 0 where a rank computes on meanwhile
    started_at: Floats  # virtual time
    begins_at: float = 0.0  # virtual time, also where no step was trained
    attempt: int = 0
    plan_s: float = 0.0  # what planning took here: real time, which `segment.plan_s` leaves out
    rounds: list[Round] = field(default_factory=list)  # their `ended_at` is virtual time
    goes_on: bool = False  # without all meeting at its end, unless an epoch ends

    @property
    def rank_step_s(self) -> Floats:
        """How long each rank's steps took."""
        return self.data_s + self.compute_s + self.wait_s + self.communication_s

    @property
    def step_s(self) -> Floats:
        """How long each step took, [S]: where ranks go their own ways, in the mean of them."""
        return np.asarray(self.rank_step_s.mean(axis=1))

    @property
    def evened_s(self) -> Floats:
        """How long each step took, [S], however far ranks are apart.

        `step_s` with the wait for all at a relaxed segment's end spread over its steps. Where ranks
        do not meet there: from when the last rank is through with a step to the next one, as all
        wait for the slowest when the epoch ends.
        """
        step_s = self.step_s
        if self.goes_on and len(step_s):
            ended_at = (self.started_at + self.rank_step_s).max(axis=1)
            return np.diff(ended_at, prepend=self.started_at[0].max())
        if self.rounds:
            met_s = float(self.wait_s[-1].mean())
            step_s[-1] -= met_s
            step_s += met_s / len(step_s)
        return step_s

    @property
    def ett_s(self) -> Floats | None:
        """What the plan expected `compute_s` to be; None: the models were not known.

        NaN where the batch was another than planned.
        """
        if not self.segment.ett_s:
            return None
        steps = len(self.started_at)
        ett_s = np.array(self.segment.ett_s[:steps]).reshape(self.compute_s.shape)
        return np.where(self.features.samples == self.plan.batches.counts[:steps], ett_s, np.nan)


class Simulation:
    """Trains on emulated devices, planned as a controller plans real training.

    A segment is planned from what the steps before tell, without the newest `lag` steps: a real
    controller plans while the last segment still runs. Planning takes no virtual time. The same
    arguments give the same segments and times. For one thread.

    Args:
        hello: what the leader would introduce itself with.
        devices: the ranks' speeds.
        policy: to begin with.
        communication: how long the all-reduce takes; None: no time.
        costs: what the exchanges of relaxed synchronisers take, by the number of ranks; likewise.
        lag: see above.
        started_at: virtual time of the first step.
        steps: the step to end before; None: at the end of the last epoch.
        switches: what to do on the way, in the order of their steps.
        failures: likewise. After one, `hello`, `devices` and `history` are the next attempt's.
    """

    def __init__(
        self,
        hello: Hello,
        devices: Emulation,
        policy: Policy,
        *,
        communication: Communication | None = None,
        costs: Callable[[int], Costs] | None = None,
        lag: int = 1,
        started_at: float = 0.0,
        steps: int | None = None,
        switches: Iterable[Change] = (),
        failures: Iterable[Failure] = (),
    ) -> None:
        self.policy = policy
        self.version = 0
        self.switches = deque(switches)  # still to come
        self._failures = deque(failures)
        self._communication = communication
        self._costs = costs
        self._lag = lag
        self._steps = steps
        self._begin(hello, devices, started_at)

    @staticmethod
    def of(scenario: Scenario) -> Simulation:
        """What a scenario describes, from virtual time 0 on.

        Raises:
            ScenarioError: its file of sizes cannot be read.
        """

        def communication(step: int, batches: Features) -> Floats:
            world = len(batches.samples)
            return np.full(world, scenario.communication.seconds(world))

        return Simulation(
            scenario.hello(),
            scenario.emulation(),
            policies.make(scenario.policy, scenario.parameters),
            communication=communication,
            costs=scenario.communication.costs,
            steps=scenario.steps,
            switches=scenario.switches,
            failures=scenario.failures,
        )

    def _begin(self, hello: Hello, devices: Emulation, now: float) -> None:
        """An attempt: nothing is known of the ones before but which samples they used."""
        self.hello = hello
        self.devices = devices
        self.history = History(hello)
        self.window = Window(hello.world, hello.attempt)
        self._untold: list[tuple[int, Floats]] = []  # rows of steps that the planner shall not see
        self._data_s = np.array(devices.data_s or [0.0] * hello.world)
        self._clocks = np.full(hello.world, now)  # when each rank is done with its newest step
        self._together = ALLREDUCE  # the synchroniser in force, and its model
        self._model = self._model_of(ALLREDUCE, 0)

    @property
    def now(self) -> float:
        """Virtual time: no rank has got further."""
        return float(self._clocks.max())

    @property
    def finished(self) -> bool:
        """Whether all is trained."""
        return self.history.finished or (self._steps is not None and self.step >= self._steps)

    @property
    def step(self) -> int:
        """The next step."""
        return self.history.step

    def switch(self, policy: Policy, version: int | None = None) -> None:
        """Another policy from the next segment on; its version, if it has one already."""
        self.policy = policy
        self.version = self.version + 1 if version is None else version

    def advance(self) -> Ran:
        """Plans the next segment and trains it, or as much of it as a failure lets."""
        while self.switches and self.switches[0].step <= self.step:
            change = self.switches.popleft()
            self.switch(policies.make(change.policy, change.parameters))
        began = time.perf_counter()
        made = offer(self.history, self.window, self.policy, self.version)
        plan_s = time.perf_counter() - began
        # The only thing in a plan that another run of the same scenario would not repeat.
        segment = msgspec.structs.replace(made.segment, plan_s=0.0)
        end = segment.first_step + segment.steps
        if self._steps is not None:
            end = min(end, self._steps)
        failure = None
        if self._failures and self._failures[0].step < end:
            failure = self._failures.popleft()
            end = max(failure.step, segment.first_step)
        ran = self._train(segment, made.plan, end - segment.first_step)
        ran = replace(ran, plan_s=plan_s)
        if failure is not None:
            self._restart(failure, ran)
            return ran
        if segment.shuffled:
            self.history.shuffled(self.version, made.plan)
        self.history.adopt(segment)
        self._tell(ran)
        return ran

    def _train(self, segment: Segment, plan: Plan, steps: int) -> Ran:
        counts = plan.batches.counts[:steps]
        sizes = self.history.sizes[plan.batches.samples[: counts.sum()]]
        costs = Costs() if self._costs is None else self._costs(self.hello.world)
        own_s = 0.0 if segment.synchroniser == ALLREDUCE else costs.own_s
        data_s = np.tile(self._data_s + own_s, (steps, 1))
        begun, starts = self._clocks, self._met(segment, costs)
        begins_at = float(begun[0])  # the leader's: it adopts the segment when it needs it
        # Where ranks go on from segment to segment, none has the next one before the leader adopts
        # it; and a rank gets it with its first batch.
        data_s[:1] += np.maximum(begins_at - starts, 0.0)
        batches = Batches(
            self.devices,
            segment.first_step,
            sizes,
            counts,
            data_s,
            np.array(segment.threads) if segment.threads else 1,
            self.hello.limits,
        )
        work = Work(
            segment.first_step,
            data_s + batches.compute_s,
            counts,
            self._all_reduce_s(segment.first_step, batches, counts),
            costs,
            segment.epoch_end and steps == segment.steps,
            batches,
        )
        base, goes_on = float(starts.min()), self._model.goes_on
        timeline = self._model.run(starts - base, work)
        timeline.wait_s[:1] += starts - begun
        parts_s = data_s + batches.compute_s + timeline.wait_s + timeline.communication_s
        ends = begun + np.cumsum(parts_s, axis=0)
        started_at = np.concatenate([begun[None], ends[:-1]])[:steps]
        if steps:
            self._clocks = ends[-1]
        if not self._model.goes_on:  # all ranks have met; sums are rounded
            self._clocks = np.full(len(begun), self._clocks.max())
        return Ran(
            segment,
            plan,
            batches.features,
            data_s,
            batches.compute_s,
            timeline.wait_s,
            timeline.communication_s,
            started_at,
            begins_at,
            self.hello.attempt,
            rounds=[replace(one, ended_at=base + one.ended_at) for one in timeline.rounds],
            goes_on=goes_on,
        )

    def _all_reduce_s(self, first_step: int, batches: Batches, counts: Ints) -> Floats:
        """What an all-reduce of each step takes, [S, W]."""
        found = np.zeros(counts.shape)
        if self._communication is not None:
            for at in range(len(counts)):
                found[at] = self._communication(first_step + at, batches.step(at))
        return found

    def _met(self, segment: Segment, costs: Costs) -> Floats:
        """When each rank can begin the segment, under whose synchroniser all are from now on."""
        clocks, what = self._clocks, segment.synchroniser
        if self._model.goes_on:
            if what == self._together:
                return clocks
            clocks = np.full(len(clocks), self._model.meet(clocks, costs))
        self._together, self._model = what, self._model_of(what, segment.seq)
        return clocks

    def _model_of(self, what: Synchronisation, seq: int) -> synchronisers.Synchroniser:
        return synchronisers.make(what, self.hello.world, self.hello.seed + seq)

    def _tell(self, ran: Ran) -> None:
        columns = {
            **ran.features._asdict(),
            "compute_s": ran.compute_s,
            "step_s": ran.rank_step_s,
        }
        table = np.stack([columns[name] for name in COLUMNS], axis=2).astype(np.float64)
        self._untold += [(ran.segment.first_step + k, rows) for k, rows in enumerate(table)]
        told = max(len(self._untold) - self._lag, 0)
        for step, rows in self._untold[:told]:
            self.window.put_step(step, rows)
        self._untold = self._untold[told:]

    def _restart(self, failure: Failure, ran: Ran) -> None:
        """The next attempt, from the step in which a rank died: as from a checkpoint before it."""
        old = self.hello
        alive = failure.alive(old.world)
        trained = ran.plan.batches.samples[: ran.features.samples.sum()]
        used = np.concatenate([self.history.used, trained]).astype("<u4")
        now = self.now + failure.restart_s
        hello = msgspec.structs.replace(
            old,
            attempt=old.attempt + 1,
            world=len(alive),
            epoch=self.history.epoch,
            step=ran.segment.first_step + len(ran.started_at),
            used=used.tobytes(),
            started_at=now,
            profiles=[old.profiles[rank] for rank in alive] if old.profiles else [],
            limits=[old.limits[rank] for rank in alive] if old.limits else [],
        )
        self._begin(hello, remaining(self.devices, alive), now)


def remaining(devices: Emulation, alive: list[int]) -> Emulation:
    """The devices of some ranks, which count anew from 0."""
    now = {rank: at for at, rank in enumerate(alive)}

    def of(values: list[float]) -> list[float]:
        return [values[rank] for rank in alive] if values else []

    return msgspec.structs.replace(
        devices,
        a_s=of(devices.a_s),
        b_s=of(devices.b_s),
        c_s=of(devices.c_s),
        data_s=of(devices.data_s),
        slowdowns=[
            msgspec.structs.replace(slow, ranks=[now[rank] for rank in slow.ranks if rank in now])
            for slow in devices.slowdowns
        ],
    )
