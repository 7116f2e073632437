"""Synchronisers of the partial all-reduce: RNA, eager-SGD, n-soft, SSP, backup workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.plan import Step
from paceline.synchronisers._base import Ranks, no_gradient
from paceline.synchronisers.gradients import Flat
from paceline.synchronisers.rounds import Call, Gradient, Limits, Round, Rounds


class Partial:
    """Each step of the optimiser applies the rounds that have come meanwhile; see `rounds`.

    A round's sum is applied as it is: with few contributors a small step (RNA's linear scaling,
    Sec. 3.1: its mean over contributors times Σw).

    Args:
        ranks: that take part.
        prefix: of keys in the store, new for each segment.
        parameters: that are trained, in the same order on all ranks.
        groups: parameter groups of the optimiser.
        call: who calls a round.
        limits: how far ranks may drift apart.
        told: called with each round, in another thread.
    """

    goes_on, weighs = False, True

    def __init__(
        self,
        ranks: Ranks,
        prefix: str,
        parameters: list[nn.Parameter],
        groups: int,
        call: Call,
        limits: Limits,
        told: Callable[[Round], None] | None = None,
    ) -> None:
        self._flat = Flat(parameters, groups)
        self._rounds = Rounds(ranks, prefix, self._flat.length, call, limits, told)
        self._left: list[Round] = []  # taken, not applied yet
        self._rates: list[Any] = []  # the script's learning rates, while others are in force

    def stepping(self, plan: Step, optimiser: torch.optim.Optimizer) -> None:
        """See `Synchroniser.stepping`."""
        own = Gradient(self._flat.read(optimiser), plan.samples) if plan.samples else None
        self._rounds.offer(own)
        self._left = _filled(self._rounds.take())
        if self._left:
            self._put(optimiser)
        else:
            no_gradient(self._flat.parameters)

    def stepped(self, plan: Step, optimiser: torch.optim.Optimizer) -> None:
        """See `Synchroniser.stepped`."""
        self._restore(optimiser)
        self._apply(optimiser)

    def through(self) -> None:
        """See `Synchroniser.through`."""
        self._rounds.through()

    def meet(self, optimiser: torch.optim.Optimizer) -> None:
        """See `Synchroniser.meet`."""
        self._left = _filled(self._rounds.finish())
        self._apply(optimiser)
        no_gradient(self._flat.parameters)

    def abort(self, reason: str) -> None:
        """See `Synchroniser.abort`."""
        self._rounds.abort(reason)

    def _apply(self, optimiser: torch.optim.Optimizer) -> None:
        while self._left:
            self._put(optimiser)
            optimiser.step()
            self._restore(optimiser)

    def _put(self, optimiser: torch.optim.Optimizer) -> None:
        """The next round's gradients, and the learning rates of those who gave to it."""
        rates = self._flat.write(self._left.pop(0).total)
        self._rates = [group["lr"] for group in optimiser.param_groups]
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            if not isinstance(group["lr"], torch.Tensor):
                group["lr"] = rate

    def _restore(self, optimiser: torch.optim.Optimizer) -> None:
        for group, rate in zip(optimiser.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates = []


def _filled(rounds: list[Round]) -> list[Round]:
    """Those that anyone gave something to."""
    return [one for one in rounds if one.contributors]
