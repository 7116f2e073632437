"""Decides whether all ranks' scripts can train under relaxed synchronisation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from enum import Enum, auto

import torch.distributed as dist

from paceline.train.batchnorm import shares_statistics
from paceline.train.ddp import trained
from paceline.train.fsdp.model import WeightedFSDP, Wrapped
from paceline.train.plan_shard import LocalStep
from paceline.train.sync.base import Ranks
from paceline.train.sync.optimiser import ScriptOptimiser

logger = logging.getLogger(__name__)

_NAMED = 8
# Number of steps under the all-reduce after which rank 0 warns that no optimiser has stepped.
_PATIENCE = 100
_WARNING = (
    "%s: gradients are still all-reduced after %d steps, because %s. Keep one "
    "torch.optim.Optimizer for the whole training, and call session.optimizer(optimizer) before "
    "the loop"
)
_NO_STEP = "no torch optimiser of the wrapped models has stepped on ranks {ranks}"

# Called with a step of the segment, and the reason why the segment's gradients are all-reduced.
OnFallback = Callable[[LocalStep, str], None]
Models = Sequence[Wrapped]


class Suits(Enum):
    """Result of the check whether all ranks' scripts suit relaxed synchronisation.

    `NOT_YET`: unknown until each rank's optimiser has stepped once.
    """

    NO = auto()
    YES = auto()
    NOT_YET = auto()


class Suitability:
    """Check of all ranks' scripts; `answer` is its newest result. Not thread-safe.

    If a script does not suit relaxed synchronisation, training continues under the all-reduce: no
    policy may end a training, neither the run's first one nor one that an operator switches to. How
    a script steps its optimiser is known only after its first step, so gradients are all-reduced
    until then.
    """

    def __init__(self, script: ScriptOptimiser, models: Models) -> None:
        self._script, self._models = script, models
        # Number of all-reduced steps in which some rank's optimiser had not stepped yet.
        self._waited = 0
        self.answer = Suits.NO
        # The reason to report; empty if there is no reason, or if the optimiser has not stepped yet
        # but only few steps have passed.
        self._fallback = ""
        # None: this rank does not report fallbacks.
        self.on_fallback: OnFallback | None = None
        self._reported: int | None = None

    def ask(self, name: str, ranks: Ranks) -> None:
        """Update the answer. Collective.

        If the answer is `NOT_YET`, scripts are examined again only once all ranks' optimisers have
        stepped, because the examination takes long.
        """
        if self.answer is not Suits.NOT_YET or self._all_stepped(name, ranks):
            self.answer = self._all_suit(name, ranks)

    def tell(self, step: LocalStep) -> None:
        """Report, once per segment, that the all-reduce replaces the planned synchronisation."""
        if self.on_fallback is None or not self._fallback or self._reported == step.segment:
            return
        self._reported = step.segment
        self.on_fallback(step, self._fallback)

    def _all_suit(self, name: str, ranks: Ranks) -> Suits:
        answers: list[tuple[str | None, bool]] = [(None, True)] * ranks.world
        # `refusal` is called first, because its search may make Python collect unused optimisers,
        # which `has_stepped` must not count.
        mine = self.refusal(), self._script.has_stepped
        dist.all_gather_object(answers, mine, group=ranks.group)
        why = next((refusal for refusal, _ in answers if refusal is not None), None)
        if why is not None:
            if ranks.rank == 0:
                logger.warning("%s: gradients are still all-reduced, because %s", name, why)
            self._fallback = why
            return Suits.NO
        self._fallback = self._late([stepped for _, stepped in answers])
        if all(stepped for _, stepped in answers):
            return Suits.YES
        if self._waited == 0 and ranks.rank == 0:
            logger.info(
                "%s starts after the optimiser's first step; until then gradients are all-reduced",
                name,
            )
        return Suits.NOT_YET

    def _all_stepped(self, name: str, ranks: Ranks) -> bool:
        stepped = [False] * ranks.world
        dist.all_gather_object(stepped, self._script.has_stepped, group=ranks.group)
        self._waited += 1
        self._fallback = self._late(stepped)
        if self._waited == _PATIENCE and ranks.rank == 0:
            logger.warning(_WARNING, name, _PATIENCE, self._fallback)
        return all(stepped)

    def _late(self, stepped: list[bool]) -> str:
        """Name the ranks whose optimiser has not stepped after many steps; empty if none."""
        if self._waited < _PATIENCE or all(stepped):
            return ""
        missing = [str(rank) for rank, has_stepped in enumerate(stepped) if not has_stepped]
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        return _NO_STEP.format(ranks=", ".join(missing[:_NAMED]) + more)

    def refusal(self) -> str | None:
        """Return why this rank's script does not suit relaxed synchronisation; None if it does."""
        if not self._models:
            return "no model is wrapped"
        if any(model.static_graph for model in self._models):
            return "the model is wrapped with static_graph=True"
        if any(isinstance(model, WeightedFSDP) for model in self._models):
            return (
                "the model is sharded by fully_shard, so ranks gather parameters from each other "
                "in each pass: choose a policy that reduces all gradients in each step, or wrap "
                "the model without fully_shard"
            )
        if any(shares_statistics(model) for model in self._models):
            return (
                "ranks wait for each other in each synchronised BatchNorm layer: wrap the model "
                "with batchnorm='local' to use relaxed policies"
            )
        return self._script.choose(trained(self._models))
