"""An in-memory cluster: drives `plan()` as controller and leader do, on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.cost import features
from paceline.planning.feedback import COLUMNS, Window
from paceline.policies import Feedback, Policy, Problem, plan
from paceline.wire import Plan

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass
class Cluster:
    """Workers with true speeds, a data set, and what has been trained so far.

    Args:
        sizes: [N].
        a: s per size unit, [W].
        b: s per step, [W].
        noise: relative standard deviation of compute times.
    """

    sizes: Floats
    a: Floats
    b: Floats
    global_batch: int
    seed: int = 0
    noise: float = 0.0
    steps_per_segment: int = 4
    drop_last: bool = False
    epoch: int = 0
    step: int = 0
    used: list[tuple[int, int]] = field(default_factory=list)  # (epoch, sample)
    step_sizes: list[tuple[int, int]] = field(default_factory=list)  # (epoch, samples of a step)
    step_s: list[float] = field(default_factory=list)  # the slowest rank's
    loads: list[Floats] = field(default_factory=list)  # [W] per step
    moved: int = 0

    def __post_init__(self) -> None:
        self.world = len(self.a)
        self.rng = np.random.default_rng(self.seed + 1)
        self.remaining = np.ones(len(self.sizes), bool)
        self.holder = np.arange(len(self.sizes)) % self.world
        self.placement: Ints | None = None
        self.order: Ints | None = None
        self.memory: tuple[Policy | None, dict[str, Any]] = (None, {})
        self.forget_feedback()

    def problem(self, steps: int, *, shuffle: bool, policy: Policy | None = None) -> Problem:
        remaining = np.flatnonzero(self.remaining)
        placed = self.placement is not None and self.order is not None and not shuffle
        return Problem(
            sizes=self.sizes,
            remaining=remaining,
            order=self.order[self.remaining[self.order]]
            if placed and self.order is not None
            else remaining,
            placement=self.placement.copy()
            if placed and self.placement is not None
            else self.holder.copy(),
            memory=self.memory[1] if policy is not None and self.memory[0] is policy else {},
            epoch=self.epoch,
            first_step=self.step,
            steps=steps,
            global_batch=self.global_batch,
            world=self.world,
            seed=self.seed,
            drop_last=self.drop_last,
        )

    def feedback(self) -> Feedback:
        return self.window.feedback()

    def forget_feedback(self) -> None:
        """Another attempt."""
        self.window = Window(self.world, attempt=0)

    def forget_placement(self) -> None:
        """A switch, or another controller: the shuffler runs before the next segment."""
        self.placement = None

    def plan(self, policy: Policy, steps: int | None = None) -> Plan:
        if policy is not self.memory[0]:
            self.forget_placement()
        shuffle = self.placement is None
        steps = steps or self.steps_per_segment
        problem = self.problem(steps, shuffle=shuffle, policy=policy)
        made, shuffled = plan(policy, problem, self.feedback(), shuffle=shuffle)
        self.placement, self.order = shuffled.placement, shuffled.order
        self.memory = (policy, dict(made.memory))
        self.moved += made.moved
        return made

    def run(self, policy: Policy, steps: int | None = None) -> Plan:
        made = self.plan(policy, steps)
        self.train(made.assignment.parts, epoch_end=made.epoch_end)
        return made

    def train(self, assignments: list[list[Ints]], *, epoch_end: bool) -> None:
        for ranks in assignments:
            count = np.array([len(part) for part in ranks])
            of = features(self.sizes[np.concatenate(ranks)], count)
            load = of.load
            noise = 1 + self.noise * self.rng.standard_normal(self.world)
            compute_s = np.where(count > 0, (self.a * load + self.b) * noise, 0.0)
            for rank, part in enumerate(ranks):
                assert self.remaining[part].all(), "a sample twice in an epoch"
                self.remaining[part] = False
                self.holder[part] = rank
                self.used += [(self.epoch, int(sample)) for sample in part]
            columns = {**of._asdict(), "compute_s": compute_s}
            columns["step_s"] = np.full(self.world, compute_s.max())
            columns["sync_s"] = compute_s.max() - compute_s
            columns["recompiles"] = np.zeros(self.world)
            rows = np.stack([columns[name] for name in COLUMNS], axis=1).astype(np.float64)
            self.window.put_step(self.step, rows)
            self.loads.append(load)
            self.step_s.append(float(compute_s.max()))
            self.step_sizes.append((self.epoch, int(count.sum())))
            self.step += 1
        if epoch_end:
            self.epoch += 1
            self.remaining[:] = True
            self.placement = None

    def run_epoch(self, policy: Policy) -> None:
        epoch = self.epoch
        while self.epoch == epoch:
            self.run(policy)

    def over_fluid(self, first_step: int = 0) -> float:
        """Time of the steps from `first_step` on, over the fluid limit of their loads."""
        loads = np.sum(self.loads[first_step:])
        overhead = len(self.loads[first_step:]) * np.average(self.b, weights=1 / self.a)
        limit = float(loads / np.sum(1 / self.a) + overhead)
        return float(np.sum(self.step_s[first_step:])) / limit


def plaid_like(n: int = 860, seed: int = 0) -> Floats:
    """Sizes like those of the PLAID recordings: 100 to 1,344, mean about 400, DIF about 140."""
    rng = np.random.default_rng(seed)
    return np.clip(np.round(rng.gamma(8.2, 49.0, n)), 100, 1344)
