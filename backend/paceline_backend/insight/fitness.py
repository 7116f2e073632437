"""Fitness of a preset for a run: warnings about measured conditions that the preset ignores.

    cautions = Fitness(conditions).cautions("chronica", {})
    [caution.words for caution in cautions if caution.harm]

Trials show whether the preset takes longer than plain DDP: a small simulated copy of the run, based
on the models that were fitted to its steps, trains for a few epochs of 32 steps under the preset
and under plain DDP. If the preset takes longer, the warning names likely causes: conditions that
the preset ignores according to its `policies.base.Criteria`. Trials take a fraction of a second,
far less than a forecast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from paceline import policies
from paceline.core.batch_limits.devices import capacities
from paceline.core.cost import features
from paceline.core.dealing import dealt
from paceline.core.emulation import Emulation
from paceline.policies import Models, Policy
from paceline.policies.base import Criteria, Floats, Ints
from paceline.policies.solve import counts as counted
from paceline.wire import RankDevice
from paceline_backend.simulator import Simulation
from paceline_backend.simulator.scenario import hello_of

# --- Thresholds of warnings. docs/benchmarks.md reports, for 100 settings × 16 presets, how many
# warnings of harm were right with these values; tests/unit/insight/test_fitness.py checks the
# values.

# A policy whose time in trials exceeds this multiple of plain DDP's time gets a warning of harm.
HARM = 1.02
# The number of trials, with different draws of sizes and noise.
_TRIALS = 2
# Length of a trial: steps per epoch, and epochs.
_TRIAL_STEPS, _TRIAL_EPOCHS = 32, 4
# Maximum numbers in a trial: ranks, and samples per step.
_TRIAL_RANKS, _TRIAL_SAMPLES = 32, 512
# A policy that balances by numbers of samples gets a warning if rounding them to whole numbers
# lengthens a step by more than this factor.
_COARSE_ROUNDING = 1.1
# A policy that ignores sizes gets a warning if, with equal numbers of samples, the costliest batch
# of a step costs more than this multiple of the mean batch.
_DECIDES = 1.25


@dataclass(frozen=True)
class Conditions:
    """Measured conditions of a run.

    Args:
        models: fitted models of all ranks. `models.cost` shows whether batches are padded, and
            whether a sample's cost grows faster than its length.
        sizes: λ of the data set's samples, [N].
        global_batch: number of samples per step.
        other_s: time of a step in addition to the slowest rank's computing, in seconds.
        noise: relative standard deviation of a rank's time from its model.
        seed: random seed of the trials.
        devices: devices of the ranks, [W]; empty: unknown.
    """

    models: Models
    sizes: Floats
    global_batch: int
    other_s: float = 0.0
    noise: float = 0.02
    seed: int = 0
    devices: Sequence[RankDevice] = ()


@dataclass(frozen=True)
class Caution:
    """Warning about a preset before a switch.

    `harm` means that the policy takes longer than plain DDP.
    """

    words: str
    harm: bool = False


class Fitness:
    """Warnings about presets under the conditions of one run."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions

    def cautions(
        self, preset: str, parameters: Mapping[str, Any], ratio: float | None = None
    ) -> list[Caution]:
        """Return warnings about a preset with these parameters, warnings of harm first.

        `ratio` is the preset's time ÷ plain DDP's time from a forecast; without it, trials measure
        this ratio.

        Raises:
            UnknownPolicyError: no such preset.
            PolicyParameterError: a parameter is unknown, or its value is not legal.
        """
        policy = policies.make(preset, parameters, self._conditions.models.world)
        return [*self._harm(policy, ratio), *self._blind(policy), *changes(policy)]

    def ratio(self, policy: Policy) -> float:
        """Return the time of the trials under a policy ÷ their time under plain DDP."""
        return sum(trial.time_s(policy) for trial in self._trials) / self._plain_s

    @cached_property
    def _trials(self) -> list[_Trial]:
        return [_Trial.of(self._conditions, salt) for salt in range(_TRIALS)]

    @cached_property
    def _plain_s(self) -> float:
        return sum(trial.time_s(policies.make("bsp")) for trial in self._trials)

    def _harm(self, policy: Policy, ratio: float | None) -> list[Caution]:
        criteria, name = policy.criteria, policy.name
        ratio = self.ratio(policy) if ratio is None else ratio
        if ratio <= HARM:
            return []
        times = f"{ratio:.1f} times as long as" if ratio >= 1.5 else f"{ratio - 1:.0%} longer than"
        causes = "; ".join(self._causes(criteria, relaxed=policy.relaxed))
        return [Caution(f"{name} would take about {times} plain DDP (bsp): {causes}", harm=True)]

    def _causes(self, criteria: Criteria, *, relaxed: bool) -> list[str]:
        cost, causes = self._conditions.models.cost, []
        if criteria.cost == "sum" and cost.padded:
            causes.append("it adds up sizes, but batches are padded to their longest sample")
        if criteria.cost == "padded" and not cost.padded:
            causes.append("it assumes padded batches, but batches cost the sum of their sizes")
        if criteria.cost in ("sum", "padded") and cost.kappa > 0:
            causes.append("it ignores that a sample's cost grows faster than its length")
        if criteria.cost == "fitted" and criteria.counts and cost.padded:
            causes.append("it cannot balance padded batches at fixed counts")
        if criteria.capacity:
            causes.append("its capacity does not match the speeds that were measured")
        elif criteria.goes_by_devices and self._by_devices:
            by = self._by_devices
            causes.append(f"capacities by {by} do not match the speeds that were measured")
        if criteria.steps:
            causes.append(
                "it mistakes ranks that got long samples for slow ranks: batches of "
                f"{self._samples_per_rank} vary by {self._spread:.0%}"
            )
        if relaxed and not causes:
            return ["its exchanges take more time than ranks save by waiting less"]
        return causes or ["its batches suit these sizes and ranks less well than equal counts"]

    def _blind(self, policy: Policy) -> list[Caution]:
        """Return warnings about conditions in which the policy can hardly balance the ranks."""
        criteria, of, words = policy.criteria, self._conditions, []
        single = of.global_batch < 2 * of.models.world
        if criteria.cost == "sum" and single and not of.models.cost.padded:
            words.append(
                f"{policy.name} gives some ranks several samples, and adds up their sizes: ranks "
                "have had one sample each, so it is not known whether batches are padded"
            )
        if not criteria.counts:
            return [Caution(each) for each in words]
        if criteria.goes_by_devices and not self._by_devices:
            words.append(
                f"{policy.name} gives all ranks equal batches: the capacities of their devices are "
                "not known"
            )
        if criteria.speeds and self._coarseness > _COARSE_ROUNDING:
            words.append(
                f"{policy.name} can hardly balance these ranks: each has about "
                f"{self._samples_per_rank} samples, and the best whole counts take "
                f"{self._coarseness - 1:.0%} longer than samples that could be divided"
            )
        if criteria.cost is None and self._longest > _DECIDES:
            words.append(
                f"{policy.name} does not look at sizes, but sizes determine a step's time: with "
                f"equal counts the costliest batch of a step costs {self._longest - 1:.0%} more "
                "than the mean"
            )
        return [Caution(each) for each in words]

    @property
    def _by_devices(self) -> str:
        """Return the measure of the devices' capacities, such as "cores"; empty: unknown."""
        return capacities(self._conditions.devices).by

    @property
    def _samples_per_rank(self) -> str:
        return f"{self._conditions.global_batch / self._conditions.models.world:.3g}"

    @cached_property
    def _loads(self) -> Floats:
        """Return each rank's effective load in steps with equal sample counts, [steps, W]."""
        of, trial = self._conditions, self._trials[0]
        rng, equal = np.random.default_rng(of.seed), _equal(trial.batch, trial.models.world)
        drawn = rng.permuted(np.tile(trial.sizes, (2, 1)), axis=1).reshape(-1, trial.batch)
        counts = np.tile(equal, (len(drawn), 1))
        return np.asarray(of.models.cost.load(features(drawn[:, dealt(equal)].ravel(), counts)))

    @cached_property
    def _spread(self) -> float:
        """Return the relative standard deviation of ranks' loads with equal sample counts."""
        return float(self._loads.std() / max(float(self._loads.mean()), 1e-300))

    @cached_property
    def _longest(self) -> float:
        """Return the mean, over steps, of a step's largest load, divided by the mean of all loads.

        All ranks have equal sample counts.
        """
        return float(self._loads.max(axis=1).mean() / max(float(self._loads.mean()), 1e-300))

    @cached_property
    def _coarseness(self) -> float:
        """Return a step's time with whole sample counts ÷ its time with fractional counts."""
        of = self._conditions
        shares = self._speeds
        target = of.global_batch * shares / shares.sum()
        whole, divisible = (
            counted.typical_s(of.models, counts, of.sizes).max()
            for counts in (counted.rounded(target), target)
        )
        return float(whole / divisible) if divisible > 0 else 1.0

    @cached_property
    def _speeds(self) -> Floats:
        """Return the samples per second of each rank for an equal local batch, [W]."""
        of = self._conditions
        share = np.full(of.models.world, max(1, of.global_batch // of.models.world))
        return np.asarray(share / counted.typical_s(of.models, share, of.sizes))


@dataclass(frozen=True)
class _Trial:
    """Small simulated copy of a run, which is trained under one policy after the other.

    If the run has many ranks, the copy has only some of them, evenly spaced from the fastest to the
    slowest, with about the same number of samples per rank.
    """

    models: Models
    # Sizes of an epoch's samples, enough for `_TRIAL_STEPS` steps.
    sizes: Floats
    # Global batch in samples.
    batch: int
    other_s: float
    noise: float
    seed: int
    devices: list[RankDevice]

    @staticmethod
    def of(conditions: Conditions, salt: int) -> _Trial:
        models, world = conditions.models, conditions.models.world
        per_rank = max(1, conditions.global_batch // world)
        ranks = min(world, _TRIAL_RANKS, max(2, _TRIAL_SAMPLES // per_rank))
        order = np.argsort(models.a, kind="stable")
        some = np.sort(order[np.linspace(0, world - 1, ranks).round().astype(np.int64)])
        models = replace(models, a=models.a[some], c=models.c[some], b=models.b[some])
        batch = max(ranks, round(conditions.global_batch * ranks / world))
        rng = np.random.default_rng([conditions.seed, salt])
        enough = len(conditions.sizes) >= _TRIAL_STEPS * batch
        sizes = rng.choice(conditions.sizes, _TRIAL_STEPS * batch, replace=not enough)
        devices = [conditions.devices[rank] for rank in some] if conditions.devices else []
        seed = conditions.seed + salt
        return _Trial(models, sizes, batch, conditions.other_s, conditions.noise, seed, devices)

    def time_s(self, policy: Policy) -> float:
        """Return the total time of all epochs except the first, in which policies learn."""
        world = self.models.world
        hello = hello_of(
            self.sizes,
            world,
            self.batch,
            seed=self.seed,
            epochs=_TRIAL_EPOCHS,
            uneven_steps=True,
            devices=self.devices,
        )
        devices = Emulation(
            a_s=self.models.a.tolist(),
            b_s=(self.models.b + self.other_s).tolist(),
            c_s=self.models.c.tolist(),
            cost=self.models.cost,
            noise=self.noise,
            seed=self.seed,
        )
        simulation, total_s = Simulation(hello, devices, policy), 0.0
        while not simulation.finished:
            trained = simulation.advance()
            if trained.plan.epoch:
                total_s += float(trained.evened_s.sum())
        return total_s


def changes(policy: Policy) -> list[Caution]:
    """Return warnings about changes that a policy makes to the training."""
    if policy.changes == "training":
        return [
            Caution(
                f"{policy.name} changes the training: gradients may be old or dropped, and "
                "replicas may differ"
            )
        ]
    if policy.changes == "batches":
        return [
            Caution(
                f"{policy.name} composes batches: other samples share a global batch than under "
                "plain DDP"
            )
        ]
    return []


def _equal(samples: int, world: int) -> Ints:
    return np.asarray(-((np.arange(world) - samples) // world), np.int64)
