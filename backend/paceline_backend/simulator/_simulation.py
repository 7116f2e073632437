"""One run of a virtual cluster, segment by segment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.cost import Features, features
from paceline.emulation import Emulation
from paceline.wire import Hello, Segment
from paceline_backend.controller.history import COLUMNS, History, Window
from paceline_backend.controller.planner import offer
from paceline_backend.policies import Plan, Policy
from paceline_backend.policies._base import Floats

Communication = Callable[[int, Features], Floats]  # step, batches [W] → seconds, [W]


@dataclass(frozen=True)
class Ran:
    """A segment that was trained: what the ranks would report; arrays are [S, W]."""

    segment: Segment
    plan: Plan
    features: Features
    data_s: Floats
    compute_s: Floats
    wait_s: Floats  # from the end of computing until the slowest rank is ready
    communication_s: Floats
    started_at: Floats  # [S] virtual time

    @property
    def step_s(self) -> Floats:
        """How long each step took, [S]."""
        parts = self.data_s + self.compute_s + self.wait_s + self.communication_s
        return np.asarray(parts.max(axis=1))


class Simulation:
    """Trains on emulated devices, planned as a controller plans real training.

    A segment is planned from what the steps before tell, without the newest `lag` steps: a real
    controller plans while the last segment still runs. Deterministic. For one thread.

    Args:
        hello: what the leader would introduce itself with.
        devices: the ranks' speeds.
        policy: to begin with.
        communication: how long the all-reduce takes; None: no time.
        lag: see above.
        started_at: virtual time of the first step.
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
    ) -> None:
        self.hello = hello
        self.devices = devices
        self.policy = policy
        self.version = 0
        self.now = started_at
        self.history = History(hello)
        self.window = Window(hello.world, hello.attempt)
        self._communication = communication
        self._lag = lag
        self._untold: list[tuple[int, Floats]] = []  # rows of steps that the planner shall not see
        self._data_s = np.array(devices.data_s or [0.0] * hello.world)

    @property
    def finished(self) -> bool:
        """Whether all epochs are done."""
        return self.history.finished

    @property
    def step(self) -> int:
        """The next step."""
        return self.history.step

    def switch(self, policy: Policy) -> None:
        """Another policy from the next segment on."""
        self.policy = policy
        self.version += 1

    def advance(self) -> Ran:
        """Plans the next segment and trains it."""
        made = offer(self.history, self.window, self.policy, self.version)
        ran = self._train(made.segment, made.plan)
        if made.segment.shuffled:
            self.history.shuffled(self.version, made.plan)
        self.history.adopt(made.segment)
        self._tell(ran)
        return ran

    def _train(self, segment: Segment, plan: Plan) -> Ran:
        batches = plan.batches
        of = features(self.history.sizes[batches.samples], batches.counts)
        shape = batches.counts.shape
        compute_s, communication_s = np.zeros(shape), np.zeros(shape)
        threads = np.array(segment.threads) if segment.threads else 1
        for k in range(shape[0]):
            step, batch = segment.first_step + k, Features(*(column[k] for column in of))
            compute_s[k] = self.devices.compute_s(step, batch, threads)
            if self._communication is not None:
                communication_s[k] = self._communication(step, batch)
        data_s = np.broadcast_to(self._data_s, shape)
        ready = data_s + compute_s
        wait_s = ready.max(axis=1, keepdims=True) - ready
        step_s = (ready + wait_s + communication_s).max(axis=1)
        started_at = self.now + np.concatenate([[0.0], np.cumsum(step_s)])
        self.now = float(started_at[-1])
        return Ran(segment, plan, of, data_s, compute_s, wait_s, communication_s, started_at[:-1])

    def _tell(self, ran: Ran) -> None:
        step_s = np.broadcast_to(ran.step_s[:, None], ran.compute_s.shape)
        columns = {**ran.features._asdict(), "compute_s": ran.compute_s, "step_s": step_s}
        table = np.stack([columns[name] for name in COLUMNS], axis=2).astype(np.float64)
        self._untold += [(ran.segment.first_step + k, rows) for k, rows in enumerate(table)]
        told = len(self._untold) - self._lag
        for step, rows in self._untold[: max(told, 0)]:
            self.window.put_step(step, rows)
        self._untold = self._untold[max(told, 0) :]
