"""Models that a script trains in the loop, and that no session wraps.

A session that wraps no model at all refuses the first step of an optimiser: nothing of that
training would be weighted. Beside a wrapped model, another one may be meant to train apart, as a
rank's own copy in meta-learning does, or its gradients may be reduced by the script itself. So the
ranks compare their gradients of it, and rank 0 warns where they differ.
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from paceline.core.errors import PacelineError
from paceline.train.ddp import CurrentStep, SingleProcess, WeightedDDP
from paceline.train.refusals import is_dtensor

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)

_REFUSAL = (
    "session.loader() was used, but no model was given to session.wrap(): this step would train "
    "with gradients that are not weighted for the ranks' different batches. Before the loop write "
    "model = session.wrap(model) in place of DistributedDataParallel, also where a framework such "
    "as Accelerate would wrap the model"
)
_WARNING = (
    "%s steps a model that session.wrap() was not given, and its gradients differ between ranks: "
    "each rank trains a model of its own. Wrap each model that is trained, as in "
    "discriminator = session.wrap(discriminator). If the ranks' models shall differ, ignore this"
)
_ALIKE = 1e-5  # relative difference of norms up to which gradients count as reduced

_watches: weakref.WeakSet[UnwrappedModels] = weakref.WeakSet()


class UnwrappedModels:
    """What a session knows of models that it does not wrap. For one thread; it waits for nothing.

    Several sessions may train in one loop, each with a model of its own. So a model counts as
    wrapped when any session that is in a step wraps it.

    Args:
        current: the session's current step.
        models: that the session wraps; `Session.wrap` adds to them.
        store: the ranks'.
        rank: this rank.
    """

    def __init__(
        self,
        current: CurrentStep,
        models: Sequence[WeightedDDP | SingleProcess],
        store: Store,
        rank: int,
    ) -> None:
        self._current, self._models = current, models
        self._store: Store | None = store
        self._rank = rank
        # Of each optimiser that has stepped, what is yet to be compared.
        self._apart: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[nn.Parameter]]
        self._apart = weakref.WeakKeyDictionary()
        self._published: set[str] = set()  # optimisers whose norms this rank has put into the store
        self._uncompared: list[str] = []  # of these, on rank 0: it waits for other ranks' norms
        _watches.add(self)

    def stepping(self, optimiser: torch.optim.Optimizer) -> None:
        """An optimiser is about to step in the loop's body.

        Raises:
            PacelineError: it trains a model, and the session wraps none.
        """
        if self._current.world == 1:
            return
        apart = self._apart.get(optimiser)
        if apart is None:
            apart = _unwrapped(optimiser)
            if apart and not self._models:
                raise PacelineError(_REFUSAL)
            self._apart[optimiser] = apart
        norm = _norm(apart)
        if norm > 0 and math.isfinite(norm):  # otherwise a later step shows more
            self._apart[optimiser] = []
            self._publish(_described(optimiser, apart), norm)

    def look(self) -> None:
        """On rank 0, compares gradients as soon as all ranks have put their norms into the store.

        A model that only some ranks train is never compared.
        """
        for name in self._uncompared.copy():
            assert self._store is not None
            keys = [_key(name, rank) for rank in range(self._current.world)]
            if not self._store.check(keys):
                continue
            self._uncompared.remove(name)
            norms = [float(self._store.get(key)) for key in keys]
            if max(norms) - min(norms) > _ALIKE * max(norms):
                logger.warning(_WARNING, name)

    def close(self) -> None:
        """The session is over; the store may go."""
        _watches.discard(self)
        self._store = None
        self._uncompared.clear()

    def weighed(self) -> set[int]:
        """The `id`s of the parameters whose gradients the session weighs now."""
        if self._current.running is None:
            return set()
        return {id(p) for model in self._models for p in model.module.parameters()}

    def _publish(self, name: str, norm: float) -> None:
        if name in self._published:
            return
        self._published.add(name)
        assert self._store is not None
        with contextlib.suppress(RuntimeError):  # rank 0, whose store it is, has ended first
            self._store.set(_key(name, self._rank), repr(norm))
        if self._rank == 0:
            self._uncompared.append(name)


def _unwrapped(optimiser: torch.optim.Optimizer) -> list[nn.Parameter]:
    """An optimiser's parameters that are of no wrapped model.

    Other optimisers step plain tensors, such as made-up inputs.
    """
    weighed = set[int]().union(*(watch.weighed() for watch in _watches))
    given = [tensor for group in optimiser.param_groups for tensor in group["params"]]
    return [p for p in given if isinstance(p, nn.Parameter) and id(p) not in weighed]


def _norm(parameters: Sequence[nn.Parameter]) -> float:
    """Of the gradients. Those of sharded parameters are left out: they differ, and are reduced."""
    given = [p.grad for p in parameters if p.grad is not None and not is_dtensor(p)]
    return math.hypot(*(_norm_of(gradient.detach()) for gradient in given))


def _norm_of(gradient: torch.Tensor) -> float:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    dtype = torch.promote_types(values.dtype, torch.float32)
    return float(torch.linalg.vector_norm(values.to(dtype)))


def _described(optimiser: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> str:
    """An optimiser in words that are the same on all ranks."""
    shape = list(parameters[0].shape)
    count = f"{len(parameters)} parameter{'s' if len(parameters) > 1 else ''}"
    return f"{type(optimiser).__name__} with {count}, the first of shape {shape},"


def _key(name: str, rank: int) -> str:
    return f"unwrapped/{name}/{rank}"
