"""Holds the script's optimiser and gradient scaler.

The script declares them with `session.optimizer`; otherwise `discovery` searches for them.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.errors import PacelineError
from paceline.train.sync import discovery
from paceline.train.sync.base import no_gradient


class ScriptOptimiser:
    """The optimiser that trains the wrapped models, if it is known. Not thread-safe.

    `choose` selects the optimiser that `chosen` returns until the next call of `choose`.
    """

    def __init__(self) -> None:
        self._declared: torch.optim.Optimizer | None = None
        self._scaler: torch.amp.GradScaler | None = None
        # A weak reference, because the script may drop its optimiser.
        self._chosen: weakref.ref[torch.optim.Optimizer] | None = None
        # Optimisers that have stepped: those with parameters of wrapped models, and all others.
        self._training: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        # True if the script steps an optimiser of wrapped models with a closure.
        self.closures = False

    def declare(
        self,
        optimiser: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        """Declare the optimiser and its scaler; see `Session.optimizer`, also for the errors."""
        if not isinstance(optimiser, torch.optim.Optimizer):
            raise TypeError(
                f"session.optimizer({type(optimiser).__name__}): give it a torch.optim.Optimizer, "
                "before a framework wraps it"
            )
        if not isinstance(scaler, torch.amp.GradScaler | None):
            raise TypeError(
                f"session.optimizer(…, scaler={type(scaler).__name__}): give it a "
                "torch.amp.GradScaler, or leave it out"
            )
        if self._declared is not None:
            raise PacelineError(
                "this session has an optimiser already: give all parameters to one optimiser, as "
                "parameter groups, or leave session.optimizer out"
            )
        if not discovery.has_any(optimiser, {id(p) for p in parameters}):
            raise ValueError(
                "the optimiser has no parameter of a wrapped model: first write model = "
                "session.wrap(model), then create the optimiser from model.parameters()"
            )
        self._declared, self._scaler = optimiser, scaler

    def choose(self, parameters: Sequence[nn.Parameter]) -> str | None:
        """Select the optimiser whose `step` relaxed synchronisation calls.

        Return None if an optimiser was selected, else the reason why no optimiser is suitable.
        """
        mine = {id(p) for p in parameters}
        candidates = [self._declared] if self._declared is not None else discovery.optimisers(mine)
        if len(candidates) != 1:
            return (
                f"{len(candidates)} optimisers have the wrapped models' parameters, but relaxed "
                "synchronisation supports one: give all parameters to one optimiser, and give that "
                "optimiser to session.optimizer"
            )
        (optimiser,) = candidates
        if self._declared is not None and any(other is not optimiser for other in self._training):
            return "the script also steps an optimiser that was not given to session.optimizer"
        if self.closures or _needs_closure(optimiser):
            return "the script steps its optimiser with a closure"
        # Each round steps the optimiser, so parameters outside of the wrapped models would step
        # once per round, too.
        if has_more(optimiser, mine):
            return (
                "the script's optimiser has parameters of no wrapped model: give their module to "
                "session.wrap, too"
            )
        scalers = self.scalers()
        # With several scalers, it would be unknown which scalers of two ranks belong together.
        if len(scalers) > 1:
            return (
                f"{len(scalers)} gradient scalers are enabled, but relaxed synchronisation "
                "supports one: give it to session.optimizer(optimizer, scaler)"
            )
        self._chosen = weakref.ref(optimiser)
        return None

    def chosen(self) -> torch.optim.Optimizer:
        """Return the selected optimiser; raise a PacelineError if the script dropped it."""
        optimiser = self._chosen() if self._chosen is not None else None
        if optimiser is None:
            raise PacelineError(
                "the optimiser was deleted during training with relaxed synchronisation: keep it, "
                "or switch to a policy that reduces all gradients in each step"
            )
        return optimiser

    @property
    def has_stepped(self) -> bool:
        """Return whether an optimiser of the wrapped models has stepped."""
        return bool(self._training)

    def is_chosen(self, optimiser: torch.optim.Optimizer) -> bool:
        """Return whether `choose` selected this optimiser."""
        return self._chosen is not None and optimiser is self._chosen()

    def trains(
        self,
        optimiser: torch.optim.Optimizer,
        parameters: Callable[[], Sequence[nn.Parameter]],
    ) -> bool:
        """Return whether an optimiser that is about to step has parameters of the wrapped models.

        `parameters` is only called for a new optimiser.
        """
        if optimiser in self._training:
            return True
        if optimiser in self._others:
            return False
        has_any = discovery.has_any(optimiser, {id(p) for p in parameters()})
        (self._training if has_any else self._others).add(optimiser)
        return has_any

    def equal_scales(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        """Set the ranks' gradient scalers to the smallest of their scales. Collective.

        Gradients that the script accumulates in ``.grad`` are rescaled.
        """
        scalers = self.scalers()
        states = [scaler.state_dict() for scaler in scalers]
        scales = [[state["scale"], state["_growth_tracker"]] for state in states]
        # Ranks without a scaler contribute infinity to the minimum.
        vector = torch.tensor([*scales, [torch.inf, torch.inf]], dtype=torch.float64).amin(0)
        dist.all_reduce(vector, dist.ReduceOp.MIN, group)
        scale, grown = vector.tolist()
        for scaler, state in zip(scalers, states, strict=True):
            scaler.load_state_dict(state | {"scale": scale, "_growth_tracker": int(grown)})
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale / state["scale"])

    def scalers(self) -> list[torch.amp.GradScaler]:
        """Return the script's enabled gradient scalers."""
        if self._scaler is None:
            return discovery.scalers()
        return [self._scaler] if self._scaler.is_enabled() else []


class Scales:
    """Undoes those updates of gradient scalers that come before a step's last micro-batch.

    A scaler's scale depends on its number of updates. Ranks have different numbers of micro-batches
    in a step, so each step must count as one update. Not thread-safe.
    """

    def __init__(self, script: ScriptOptimiser) -> None:
        self._script = script
        # The scalers; searched only once, because that takes long.
        self._scalers: list[torch.amp.GradScaler] | None = None
        self._states: list[dict[str, Any]] = []

    def keep(self) -> None:
        """Store the scalers' current states."""
        if self._scalers is None:
            self._scalers = self._script.scalers()
        self._states = [scaler.state_dict() for scaler in self._scalers]

    def restore(self) -> None:
        """Undo the script's updates since `keep`."""
        for scaler, state in zip(self._scalers or (), self._states, strict=True):
            scaler.load_state_dict(state)


@contextmanager
def unscaled(optimiser: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Unscale the gradients if `GradScaler` leaves this to the optimiser, such as a fused one."""
    given: Any = optimiser
    scale, found_inf = getattr(given, "grad_scale", None), getattr(given, "found_inf", None)
    if scale is None and found_inf is None:
        yield
        return
    given.grad_scale = given.found_inf = None
    for parameter in parameters:
        if parameter.grad is not None and scale is not None:
            parameter.grad.div_(scale.to(parameter.device))
    if found_inf is not None and float(found_inf):
        no_gradient(parameters)
    try:
        yield
    finally:
        given.found_inf = found_inf


def _needs_closure(optimiser: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(type(optimiser).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def has_more(optimiser: torch.optim.Optimizer, parameters: set[int]) -> bool:
    """Return True if an optimiser trains parameters other than these, given by their `id`s."""
    given = (p for group in optimiser.param_groups for p in group["params"])
    return any(p.requires_grad and id(p) not in parameters for p in given)
