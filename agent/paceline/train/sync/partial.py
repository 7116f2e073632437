"""Synchronisers of the partial all-reduce: RNA, eager-SGD, n-soft, SSP, backup workers."""

from __future__ import annotations

import statistics

import torch
from torch import nn

from paceline.train.parts import Step
from paceline.train.sync.base import Ranks, Told, kept, no_gradient
from paceline.train.sync.gradients import Flat, Gradient
from paceline.train.sync.rounds import Call, Limits, Rounds, Sum


class Partial:
    """Each step of the optimiser applies the rounds that have come meanwhile; see `rounds`.

    A round's step is as large as the share of the work that its contributors did; see
    `Flat.applying`.

    Args:
        ranks: that take part.
        prefix: of keys in the store, new for each segment.
        parameters: that are trained, in the same order on all ranks.
        optimiser: of them.
        call: who calls a round.
        limits: how far ranks may drift apart.
        told: called with each round, in another thread.
        extra: see `Rounds`.
        share: of all ranks that these are.
    """

    goes_on, weighs = False, True

    def __init__(
        self,
        ranks: Ranks,
        prefix: str,
        parameters: list[nn.Parameter],
        optimiser: torch.optim.Optimizer,
        call: Call,
        limits: Limits,
        told: Told | None = None,
        extra: int = 0,
        share: float = 1.0,
    ) -> None:
        self._world, self._share = ranks.world, share
        self._flat = Flat(parameters, optimiser)
        self._rounds = Rounds(ranks, prefix, self._flat.length, call, limits, told, extra)
        self._samples = 0  # whose gradients are in .grad,
        self._weights: list[float] = []  # and of each of their steps
        self._counted = self._offered = -1  # the latest steps of which samples, or gradients, were

    def stepping(self, plan: Step, optimiser: torch.optim.Optimizer) -> None:
        """See `Synchroniser.stepping`. All is applied here: the step itself finds no gradients."""
        own = self._own(plan, optimiser)
        self._rounds.offer(own, ends_step=self._offered != plan.step)
        self._offered = plan.step
        self._apply(self._rounds.take(), optimiser)
        no_gradient(self._flat.parameters)

    def body_done(self, plan: Step, optimiser: torch.optim.Optimizer) -> None:
        """See `Synchroniser.body_done`. If nothing was offered, the script accumulates."""
        self._count(plan)
        if self._offered != plan.step:
            self._rounds.offer(None)
            with kept(self._flat.parameters):
                self._apply(self._rounds.take(), optimiser)

    def meet(self, optimiser: torch.optim.Optimizer) -> None:
        """See `Synchroniser.meet`."""
        with kept(self._flat.parameters):
            self._apply(self._rounds.finish(), optimiser)

    def abort(self, reason: str) -> None:
        """See `Synchroniser.abort`."""
        self._rounds.abort(reason)

    @property
    def clocks(self) -> list[int]:
        """Steps of the segment that ranks are through with, as the last round told."""
        return self._rounds.clocks

    def _count(self, plan: Step) -> None:
        if self._counted != plan.step:
            self._counted = plan.step
            self._samples += plan.samples
            self._weights.append(plan.weight)

    def _own(self, plan: Step, optimiser: torch.optim.Optimizer) -> Gradient | None:
        self._count(plan)
        again = self._offered == plan.step and plan.samples > 0
        samples, weights = self._samples, self._weights or [plan.weight]
        self._samples, self._weights = 0, []
        if not (samples or again) or all(p.grad is None for p in self._flat.parameters):
            return None
        weight = statistics.fmean(weights) / self._share
        return self._flat.read(optimiser, 1 / self._world, weight, samples)

    def _apply(self, sums: list[Sum], optimiser: torch.optim.Optimizer) -> None:
        for one in sums:
            if one.contributors:
                with self._flat.applying(optimiser, one.total):
                    optimiser.step()
