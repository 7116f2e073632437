"""An in-memory cluster: drives `plan()` as controller and leader do, on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline_backend.controller.history import Window
from paceline_backend.policies import Feedback, Plan, Policy, Problem, plan

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
        self.forget_feedback()

    def problem(self, steps: int, *, shuffle: bool) -> Problem:
        return Problem(
            sizes=self.sizes,
            remaining=np.flatnonzero(self.remaining),
            placement=self.holder.copy()
            if shuffle or self.placement is None
            else self.placement.copy(),
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
        shuffle = self.placement is None
        problem = self.problem(steps or self.steps_per_segment, shuffle=shuffle)
        made = plan(policy, problem, self.feedback(), shuffle=shuffle)
        self.placement = made.placement
        self.moved += made.moved
        return made

    def run(self, policy: Policy, steps: int | None = None) -> Plan:
        """Plans a segment and trains it."""
        made = self.plan(policy, steps)
        self.train(made.assignments, epoch_end=made.epoch_end)
        return made

    def train(self, assignments: list[list[Ints]], *, epoch_end: bool) -> None:
        for ranks in assignments:
            load = np.array([self.sizes[part].sum() for part in ranks])
            count = np.array([len(part) for part in ranks])
            noise = 1 + self.noise * self.rng.standard_normal(self.world)
            compute_s = np.where(count > 0, (self.a * load + self.b) * noise, 0.0)
            for rank, part in enumerate(ranks):
                assert self.remaining[part].all(), "a sample twice in an epoch"
                self.remaining[part] = False
                self.holder[part] = rank
                self.used += [(self.epoch, int(sample)) for sample in part]
                values = (len(part), float(load[rank]), float(compute_s[rank]))
                self.window.put(self.step, rank, (*values, float(compute_s.max())))
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
