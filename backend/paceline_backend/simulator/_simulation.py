"""One run of a virtual cluster, segment by segment."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from paceline.cost import Features, features
from paceline.emulation import Emulation
from paceline.wire import Hello, Segment
from paceline_backend import policies
from paceline_backend.controller.history import COLUMNS, History, Window
from paceline_backend.controller.planner import offer
from paceline_backend.policies import Plan, Policy
from paceline_backend.policies._base import Floats
from paceline_backend.simulator.scenario import Change, Failure, Scenario

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
    wait_s: Floats  # from the end of computing until the slowest rank is ready
    communication_s: Floats
    started_at: Floats  # [S] virtual time
    begins_at: float = 0.0  # virtual time, also where no step was trained
    attempt: int = 0
    plan_s: float = 0.0  # what planning took here: real time, which `segment.plan_s` leaves out

    @property
    def step_s(self) -> Floats:
        """How long each step took, [S]."""
        parts = self.data_s + self.compute_s + self.wait_s + self.communication_s
        return np.asarray(parts.max(axis=1))

    @property
    def ett_s(self) -> Floats | None:
        """What the plan expected `compute_s` to be; None: the models were not known."""
        ett_s = self.segment.ett_s[: len(self.started_at)]
        return np.array(ett_s).reshape(self.compute_s.shape) if self.segment.ett_s else None


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
        lag: int = 1,
        started_at: float = 0.0,
        steps: int | None = None,
        switches: Iterable[Change] = (),
        failures: Iterable[Failure] = (),
    ) -> None:
        self.policy = policy
        self.version = 0
        self.now = started_at
        self.switches = deque(switches)  # still to come
        self._failures = deque(failures)
        self._communication = communication
        self._lag = lag
        self._steps = steps
        self._begin(hello, devices)

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
            steps=scenario.steps,
            switches=scenario.switches,
            failures=scenario.failures,
        )

    def _begin(self, hello: Hello, devices: Emulation) -> None:
        """An attempt: nothing is known of the ones before but which samples they used."""
        self.hello = hello
        self.devices = devices
        self.history = History(hello)
        self.window = Window(hello.world, hello.attempt)
        self._untold: list[tuple[int, Floats]] = []  # rows of steps that the planner shall not see
        self._data_s = np.array(devices.data_s or [0.0] * hello.world)

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
        samples = plan.batches.samples[: counts.sum()]
        of = features(self.history.sizes[samples], counts)
        compute_s, communication_s = np.zeros(counts.shape), np.zeros(counts.shape)
        threads = np.array(segment.threads) if segment.threads else 1
        for k in range(steps):
            step, batch = segment.first_step + k, Features(*(column[k] for column in of))
            compute_s[k] = self.devices.compute_s(step, batch, threads)
            if self._communication is not None:
                communication_s[k] = self._communication(step, batch)
        data_s = np.broadcast_to(self._data_s, counts.shape)
        ready = data_s + compute_s
        wait_s = ready.max(axis=1, keepdims=True) - ready
        step_s = (ready + wait_s + communication_s).max(axis=1)
        started_at = self.now + np.concatenate([[0.0], np.cumsum(step_s)])
        self.now = float(started_at[-1])
        return Ran(
            segment,
            plan,
            of,
            data_s,
            compute_s,
            wait_s,
            communication_s,
            started_at[:-1],
            float(started_at[0]),
            self.hello.attempt,
        )

    def _tell(self, ran: Ran) -> None:
        step_s = np.broadcast_to(ran.step_s[:, None], ran.compute_s.shape)
        columns = {**ran.features._asdict(), "compute_s": ran.compute_s, "step_s": step_s}
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
        self.now += failure.restart_s
        hello = msgspec.structs.replace(
            old,
            attempt=old.attempt + 1,
            world=len(alive),
            epoch=self.history.epoch,
            step=ran.segment.first_step + len(ran.started_at),
            used=used.tobytes(),
            started_at=self.now,
            profiles=[old.profiles[rank] for rank in alive] if old.profiles else [],
            limits=[old.limits[rank] for rank in alive] if old.limits else [],
        )
        self._begin(hello, remaining(self.devices, alive))


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
