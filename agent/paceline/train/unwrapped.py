"""Detection of models that a script trains in the loop with gradients that no session reduces.

If a session wraps no model at all, it refuses the first step of an optimiser, because no gradient
of that training would be weighted. If the session wraps a model, the script may train another model
separately on purpose, such as a rank's own copy in meta-learning, or may reduce the other model's
gradients itself. So the ranks compare their gradients of the other model, and rank 0 warns if the
gradients differ.

Gradients of a wrapped model can also bypass the all-reduce, as with DistributedDataParallel, if the
script uses the inner module or `torch.autograd.grad`. So ranks compare the gradients of wrapped
models in the same way.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from paceline.core.errors import PacelineError
from paceline.train.ddp import CurrentStep
from paceline.train.fsdp.kinds import is_dtensor
from paceline.train.fsdp.model import Wrapped

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)

_REFUSAL = (
    "session.loader() was used, but no model was given to session.wrap(): this step would train "
    "with gradients that are not weighted for the ranks' different batches. Before the loop write "
    "model = session.wrap(model) in place of DistributedDataParallel. For Accelerate, Hugging "
    "Face's Trainer and Lightning, which wrap models themselves, use paceline.accelerate, "
    "paceline.transformers and paceline.lightning"
)
_WARNING = (
    "%s steps a model that was not passed to session.wrap(), and its gradients differ between "
    "ranks: each rank trains a different model. Wrap each model that is trained, as in "
    "discriminator = session.wrap(discriminator). If the ranks' models should differ, ignore this"
)
_NOT_REDUCED = (
    "%s steps a model of session.wrap(), but its gradients differ between ranks: they were not "
    "reduced, or the script changed them afterwards. Paceline reduces what backward() computes "
    "after a forward pass of the model that session.wrap() returned. It does not reduce gradients "
    "of model.module, of torch.autograd.grad, of another backward() without a forward pass before "
    "it, and of optimisers that step within backward(). If the ranks' gradients should differ, "
    "ignore this"
)
_MIXED = (
    "in step {step} the loop also has a batch of {other}, which wraps no model: the model that "
    "{name} has wrapped would weight both batches with {weight:.4g} on rank {rank}, but the other "
    "session's batch needs {beside:.4g} there. Train a model with the batches of one session: put "
    "both data sets into one, whose samples are pairs, or let the second session wrap its own model"
)
# Gradients count as reduced if their norms differ between ranks by at most this fraction.
_NORM_TOLERANCE = 1e-5
# Maximum number of steps in which rank 0 checks for the norms of other ranks. A check takes about
# 50 µs.
_NORM_CHECKS = 1000
# Maximum number of compared optimisers with the same description, because some scripts make a new
# optimiser in each step.
_MOST_COMPARED = 8

# The `UnwrappedModels` of all open sessions, in the order in which they were made.
_watches: dict[UnwrappedModels, None] = {}


class _Apart(NamedTuple):
    """Parameters of an optimiser whose gradients have not been compared between ranks yet."""

    warning: str
    # The description of the optimiser.
    words: str
    # An ID of the set of parameters, to compare between ranks; see `UnwrappedModels._which`.
    which: str
    # Number of the optimiser among those with the same `words` and `which`, from 0.
    number: int
    parameters: Sequence[nn.Parameter]


class UnwrappedModels:
    """Checks of gradients that a session does not reduce. Not thread-safe; no method blocks.

    Several sessions may train in one loop, each with a model of its own. So a model counts as
    wrapped if any session that is in a step wraps it. Of the sessions that are in a step and wrap a
    model, only the first one compares gradients.
    """

    def __init__(
        self,
        current: CurrentStep,
        models: Sequence[Wrapped],
        store: Store,
        rank: int,
    ) -> None:
        self._current, self._models = current, models
        self._store: Store | None = store
        self._rank = rank
        # The session's name in messages.
        self.name = "this session"
        # For each optimiser that has stepped, the parameters that are not yet compared.
        self._apart: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[_Apart]]
        self._apart = weakref.WeakKeyDictionary()
        # Number of optimisers that were selected for comparison so far, by description.
        self._comparisons: Counter[str] = Counter()
        # For each comparison that still lacks norms of other ranks, on rank 0: the number of checks
        # that are left.
        self.uncompared: dict[_Apart, int] = {}
        self._warned: set[str] = set()
        _watches[self] = None

    def stepping(self, optimiser: torch.optim.Optimizer, *, reduces: bool = True) -> None:
        """Check an optimiser that is about to step in the loop's body.

        Only the parameters at the optimiser's first step are checked, not those that are added
        later. With `reduces`, gradients of wrapped models are all-reduced; otherwise each rank has
        its own gradients.

        Raises:
            PacelineError: the optimiser trains a model, and no session in a step wraps any model.
        """
        if self._current.world == 1:
            return
        waiting = self._apart.get(optimiser)
        if waiting is None:
            waiting = self._apart[optimiser] = self._to_compare(optimiser)
        for apart in waiting.copy() if waiting else ():
            if apart.warning is _NOT_REDUCED and not reduces:
                continue
            norms = _norms(apart.parameters)
            # Norms that are zero or not finite prove nothing, so a later step is compared.
            if all(norm > 0 and math.isfinite(norm) for norm in norms):
                waiting.remove(apart)
                self._publish(apart, norms)

    def refuse_mixed(self) -> None:
        """Raise a PacelineError if a forward pass would train on batches with different weights.

        Two sessions may have a batch in the loop at the same time. If the other session wraps no
        model, this session's model is assumed to train on both batches. The gradients of both
        would be multiplied by this session's weight, which is wrong if the other session's weight
        differs.
        """
        if len(_watches) < 2:
            return
        running = self._current.running
        if running is None or not self._current.weighs:
            return
        weight = running.step.weight
        for other in _watches:
            beside = other._current.running
            if other is self or other._models or beside is None or not beside.in_body:
                continue
            if not math.isclose(weight, beside.step.weight, rel_tol=1e-9):
                raise PacelineError(
                    _MIXED.format(
                        step=running.step.step,
                        name=self.name,
                        other=other.name,
                        weight=weight,
                        beside=beside.step.weight,
                        rank=self._rank,
                    )
                )

    def look(self) -> None:
        """On rank 0, compare gradients once all ranks have put their norms into the store.

        A model that only some ranks train is never compared.
        """
        for apart in list(self.uncompared):
            assert self._store is not None
            keys = [_key(apart, rank) for rank in range(self._current.world)]
            self.uncompared[apart] -= 1
            if not self._store.check(keys):
                if not self.uncompared[apart]:
                    del self.uncompared[apart]
                continue
            del self.uncompared[apart]
            norms = zip(*(json.loads(self._store.get(key)) for key in keys), strict=True)
            differ = any(
                max(of_ranks) - min(of_ranks) > _NORM_TOLERANCE * max(of_ranks)
                for of_ranks in norms
            )
            warning = apart.warning % apart.words
            if differ and warning not in self._warned:
                self._warned.add(warning)
                logger.warning("%s", warning)

    def close(self) -> None:
        """End this session's checks, and release the store."""
        _watches.pop(self, None)
        self._store = None
        self.uncompared.clear()

    @property
    def in_step(self) -> bool:
        """Return True if the session is in a step."""
        return self._current.running is not None

    @property
    def wrapped(self) -> set[int]:
        """Return the `id`s of the parameters of the models that the session wraps."""
        return {id(p) for model in self._models for p in model.parameters()}

    def _which(self, parameters: list[nn.Parameter]) -> str:
        """Return an ID of parameters, which is equal on ranks that step the same parameters.

        Each rank may step a different part of a model, as with ZeroRedundancyOptimizer. Then the
        IDs differ between ranks, and gradients are not compared.
        """
        places = {id(p): n for n, p in enumerate(p for m in self._models for p in m.parameters())}
        mine = sorted(places.get(id(parameter), -1) for parameter in parameters)
        return hashlib.blake2b(repr(mine).encode(), digest_size=8).hexdigest()

    def _to_compare(self, optimiser: torch.optim.Optimizer) -> list[_Apart]:
        unwrapped, wrapped = _parted(optimiser)
        wrapping = [watch for watch in _watches if watch.in_step and watch._models]
        if unwrapped and not wrapping:
            raise PacelineError(_REFUSAL)
        if not wrapping or wrapping[0] is not self:
            return []
        apart = []
        for warning, parameters in ((_WARNING, unwrapped), (_NOT_REDUCED, wrapped)):
            if not parameters:
                continue
            words, which = _described(optimiser, parameters), self._which(parameters)
            number = self._comparisons[words + which]
            if number < _MOST_COMPARED:
                self._comparisons[words + which] += 1
                apart.append(_Apart(warning, words, which, number, parameters))
        return apart

    def _publish(self, apart: _Apart, norms: tuple[float, float]) -> None:
        assert self._store is not None
        # Rank 0, which hosts the store, may have ended first.
        with contextlib.suppress(RuntimeError):
            self._store.set(_key(apart, self._rank), json.dumps(norms))
        if self._rank == 0:
            self.uncompared[apart._replace(parameters=())] = _NORM_CHECKS


def _parted(optimiser: torch.optim.Optimizer) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return an optimiser's parameters in two lists: outside wrapped models, and inside.

    Sharded parameters of wrapped models are left out, because each rank has a different shard.
    Plain tensors that are no parameters, such as generated inputs, are left out, too.
    """
    ours = set[int]().union(*(watch.wrapped for watch in _watches if watch.in_step))
    given = [tensor for group in optimiser.param_groups for tensor in group["params"]]
    parameters = [p for p in given if isinstance(p, nn.Parameter)]
    unwrapped = [p for p in parameters if id(p) not in ours]
    return unwrapped, [p for p in parameters if id(p) in ours and not is_dtensor(p)]


def _norms(parameters: Sequence[nn.Parameter]) -> tuple[float, float]:
    """Return the L1 norm and the L2 norm of the gradients.

    Gradient clipping can make one of the norms equal on all ranks, so both norms are compared.
    Gradients of sharded parameters are left out, because they differ between ranks although they
    are reduced.
    """
    given = [p.grad.detach() for p in parameters if p.grad is not None and not is_dtensor(p)]
    absolute = sum(_norm(gradient, 1) for gradient in given)
    return absolute, math.hypot(*(_norm(gradient, 2) for gradient in given))


def _norm(gradient: torch.Tensor, order: int) -> float:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    dtype = torch.promote_types(values.dtype, torch.float32)
    return float(torch.linalg.vector_norm(values.to(dtype), order))


def _described(optimiser: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> str:
    shape = list(parameters[0].shape)
    count = f"{len(parameters)} parameter{'s' if len(parameters) > 1 else ''}"
    return f"{type(optimiser).__name__} with {count}, the first of shape {shape},"


def _key(apart: _Apart, rank: int) -> str:
    return f"unwrapped/{apart.words}/{apart.which}/{apart.number}/{rank}"
