"""Synchronisation with a partial all-reduce: RNA, eager-SGD, n-soft, SSP, backup workers."""

from __future__ import annotations

import statistics

import torch

from paceline.core.rounds import Call, Drift
from paceline.train.plan_shard import LocalStep
from paceline.train.sync.base import Channel, Replica, kept, no_gradient
from paceline.train.sync.gradients import Flat, Gradient
from paceline.train.sync.rounds import Rounds, Sum


class PartialSync:
    """Synchronisation with a partial all-reduce.

    In each step of the script's optimiser, the rounds that ended since the previous step are
    applied. The optimiser step for a round is scaled by the contributors' weight; see
    `Flat.applying`. `share` is the fraction of the run's ranks that participate. The channel's
    `on_round` is called in another thread.
    """

    goes_on, weighs = False, True

    def __init__(
        self,
        channel: Channel,
        replica: Replica,
        call: Call,
        drift: Drift,
        extra: int = 0,
        share: float = 1.0,
    ) -> None:
        self._world, self._share = channel.ranks.world, share
        self._flat = Flat(replica.parameters, replica.optimiser)
        self._rounds = Rounds(channel, self._flat.length, call, drift, extra)
        # Number of samples whose gradients are in .grad, and the weights of the steps that computed
        # these gradients.
        self._samples = 0
        self._weights: list[float] = []
        # The newest iteration whose samples are in `_samples`.
        self._counted: LocalStep | None = None
        self._offered: LocalStep | None = None

    def stepping(self, step: LocalStep, optimiser: torch.optim.Optimizer) -> None:
        """See `GradientSync.stepping`. The script's own step then has no gradients to apply."""
        own = self._own(step, optimiser)
        self._rounds.offer(own, ends_step=self._offered is not step)
        self._offered = step
        self._apply(self._rounds.take(), optimiser)
        no_gradient(self._flat.parameters)

    def body_done(self, step: LocalStep, optimiser: torch.optim.Optimizer) -> None:
        """See `GradientSync.body_done`. If the optimiser did not step, gradients accumulate."""
        self._count(step)
        if self._offered is not step:
            self._rounds.offer(None)
            with kept(self._flat.parameters):
                self._apply(self._rounds.take(), optimiser)

    def end_step(self, step: LocalStep) -> None:
        """See `GradientSync.end_step`. Do nothing, because rounds do not end with a plan's step."""

    def synchronise(self, optimiser: torch.optim.Optimizer) -> None:
        """See `GradientSync.synchronise`."""
        with kept(self._flat.parameters):
            self._apply(self._rounds.finish(), optimiser)

    def abort(self, reason: str) -> None:
        """See `GradientSync.abort`."""
        self._rounds.abort(reason)

    def _count(self, step: LocalStep) -> None:
        if self._counted is not step:
            self._counted = step
            self._samples += step.samples
            self._weights.append(step.weight)

    def _own(self, step: LocalStep, optimiser: torch.optim.Optimizer) -> Gradient | None:
        self._count(step)
        again = self._offered is step and step.samples > 0
        samples, weights = self._samples, self._weights or [step.weight]
        self._samples, self._weights = 0, []
        if not (samples or again) or all(p.grad is None for p in self._flat.parameters):
            return None
        weight = statistics.fmean(weights) / self._share
        return self._flat.read(optimiser, 1 / self._world, weight, samples)

    def _apply(self, sums: list[Sum], optimiser: torch.optim.Optimizer) -> None:
        for result in sums:
            if result.contributors:
                with self._flat.applying(optimiser, result.total):
                    optimiser.step()
