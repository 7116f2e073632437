"""How the ranks' gradients meet in the segment at hand: all-reduce in DDP, or a relaxed way.

A relaxed synchroniser takes effect where the optimiser steps: a hook takes the rank's own gradient
out of ``.grad`` and puts into it what shall be applied, if anything. So a script trains as before.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paceline.ddp import Now, WeightedDDP
from paceline.errors import PacelineError
from paceline.meeting import TIMEOUT
from paceline.plan import Step
from paceline.synchronisers import make
from paceline.synchronisers._base import Ranks, Synchroniser
from paceline.synchronisers.rounds import spoil
from paceline.wire import ALLREDUCE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)


class Exchange:
    """A session's synchroniser, whichever is in force. For one thread.

    Args:
        now: the step in hand.
        models: wrapped ones; more may be added.
        store: the ranks'.
        rank: which of them.
        seed: of the run.
    """

    def __init__(
        self, now: Now, models: Sequence[WeightedDDP], store: Store, rank: int, seed: int
    ) -> None:
        self._now, self._models, self._store = now, models, store
        self._rank, self._seed = rank, seed
        self._plan: Step | None = None  # the step in hand, or the last one of the epoch
        self._segment = -1  # the newest one
        self._relaxed: Synchroniser | None = None  # of the segment in hand, if it is
        # That have stepped the models. Weak: a script may make a new one, and drop the old.
        self._optimisers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._refused: set[str] = set()  # synchronisers that this script cannot have
        self._made: Ranks | None = None
        self._inside = False  # a step of the optimiser that is ours
        self._hooks = [
            register_optimizer_step_pre_hook(self._stepping),
            register_optimizer_step_post_hook(self._stepped),
        ]

    def begin(self, plan: Step) -> None:
        """A step begins; between segments all ranks meet, and may go on in another way."""
        before, self._plan, self._segment = self._plan, plan, plan.segment
        if before is not None and before.segment == plan.segment:
            return
        same = before is not None and before.synchroniser == plan.synchroniser
        if same and self._relaxed is not None and self._relaxed.goes_on:
            return
        self._meet()
        relaxed = plan.synchroniser != ALLREDUCE and self._able(plan.synchroniser.name)
        for model in self._models:
            model.reduce(not relaxed)
        self._now.weighs = True
        if not relaxed:
            return
        assert self._optimiser is not None
        ranks = self._ranks()
        self._relaxed = make(
            plan.synchroniser,
            ranks,
            f"rounds/{plan.segment}",
            self._parameters(),
            len(self._optimiser.param_groups),
            self._seed + plan.segment,
        )
        self._now.weighs = self._relaxed.weighs

    def body_done(self) -> None:
        """The step is through; of a segment's last one the others learn it before all meet."""
        if self._relaxed is not None and self._plan is not None and self._plan.last:
            self._relaxed.through()

    def end(self) -> None:
        """The epoch is over, or its loop was left: all ranks meet."""
        self._meet()
        self._plan = None

    def close(self) -> None:
        """No more steps come of this rank: in the middle of a segment, the others learn it."""
        for hook in self._hooks:
            hook.remove()
        if self._relaxed is not None:
            self._relaxed.abort("has left its loop")
            self._relaxed = None
        elif self._made is not None:
            # Others that go on, as it was an error that ended this loop, are not to wait for it.
            with contextlib.suppress(RuntimeError):  # the leader, whose store it is, has gone first
                spoil(self._made, f"rounds/{self._segment + 1}", 0, "has left its loop")

    def _meet(self) -> None:
        if self._relaxed is None:
            return
        assert self._optimiser is not None
        relaxed, self._relaxed = self._relaxed, None
        self._inside = True
        try:
            relaxed.meet(self._optimiser)
        finally:
            self._inside = False

    def _able(self, name: str) -> bool:
        """Whether this script can do without the all-reduce; a switch must not end its training."""
        if not self._models:
            return False
        why = None
        if len(self._optimisers) != 1:
            why = f"{len(self._optimisers)} optimisers have stepped the model, it takes one"
        elif any(model.static_graph for model in self._models):
            why = "the model is wrapped with static_graph=True"
        if why is not None and name not in self._refused:
            self._refused.add(name)
            logger.warning("%s: gradients go on being all-reduced, as %s", name, why)
        return why is None

    @property
    def _optimiser(self) -> torch.optim.Optimizer | None:
        return next(iter(self._optimisers), None)

    def _ranks(self) -> Ranks:
        if self._made is None:
            # Its own group: two threads on one give wrong sums. On the CPU, where the vectors are.
            group = dist.new_group(backend="gloo")
            # Made once: on a busy host, one new connection in some dozens took 5 s.
            asking, waiting = (self._store.clone() for _ in range(2))  # type: ignore[attr-defined]
            self._made = Ranks(group, asking, waiting, self._rank, dist.get_world_size(), TIMEOUT)
        return self._made

    def _parameters(self) -> list[nn.Parameter]:
        return [p for model in self._models for p in model.module.parameters() if p.requires_grad]

    def _mine(self, optimiser: torch.optim.Optimizer) -> bool:
        mine = {id(p) for p in self._parameters()}
        return any(id(p) in mine for group in optimiser.param_groups for p in group["params"])

    def _stepping(self, optimiser: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside:
            return
        if optimiser not in self._optimisers:
            if not self._mine(optimiser):
                return
            self._optimisers.add(optimiser)
        if self._relaxed is not None and len(self._optimisers) > 1:
            raise PacelineError(
                "a relaxed synchroniser takes one optimiser, and this script has another: "
                "switch to a policy that reduces all gradients in each step"
            )
        step = self._now.step
        if self._relaxed is None or step is None:
            return
        for model in self._models:
            model.settle()
        step.gradients_ready()
        self._relaxed.stepping(step.plan, optimiser)
        step.reduced()

    def _stepped(self, optimiser: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside or self._relaxed is None or optimiser is not self._optimiser:
            return
        if self._now.step is None:
            return
        self._inside = True
        try:
            self._relaxed.stepped(self._now.step.plan, optimiser)
        finally:
            self._inside = False
        for model in self._models:
            model.applied()
