"""How the ranks' gradients meet in the segment at hand: all-reduce in DDP, or a relaxed way.

A relaxed synchroniser takes effect where the optimiser steps: a hook takes the rank's own gradient
out of ``.grad`` and applies what shall be applied, if anything. So a script trains as before.
"""

from __future__ import annotations

import gc
import inspect
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.core.errors import PacelineError
from paceline.train.ddp import Now, WeightedDDP
from paceline.train.meeting import TIMEOUT
from paceline.train.parts import Step
from paceline.train.sync import make
from paceline.train.sync.agreement import Leaving, raises
from paceline.train.sync.base import Ranks, Round, Synchroniser, no_gradient
from paceline.train.sync.partial import Partial
from paceline.train.sync.stealing import Stealing
from paceline.wire import ALLREDUCE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

_UNWRAPPED = (
    "session.loader() was used, but no model was given to session.wrap(): this step would train "
    "with gradients that are not weighted for the ranks' different batches. Before the loop write "
    "model = session.wrap(model) in place of DistributedDataParallel, also where a framework such "
    "as Accelerate would wrap the model"
)

_T = TypeVar("_T")
Reported = Callable[[Step, Round], None]


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
        self._now, self._models = now, models
        self._store: Store | None = store
        self._rank, self._seed = rank, seed
        self.reported: Reported | None = None  # takes rounds, of ranks that tell of them
        self.stealing: Stealing | None = None  # once training has begun
        self._plan: Step | None = None  # the step in hand, or the last one of the epoch
        self._able = False  # the synchroniser in force, being a relaxed one, suits the script
        self._relaxed: Synchroniser | None = None  # of the segment in hand, if it is
        self._optimiser: weakref.ref[torch.optim.Optimizer] | None = None  # scripts may drop it
        self._others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # of other models
        self._closures = False  # the script steps the model's optimiser with a closure
        self._apart = False  # gradient scalers may differ between ranks
        self._made: Ranks | None = None
        self._leaving: Leaving | None = None  # once a relaxed synchroniser was in force
        self._left = False  # this rank's loop, after the same step as all
        self._why: str | None = None  # this rank cannot go on
        self._inside = False  # a step of the optimiser that is ours
        self._hook = register_optimizer_step_pre_hook(self._stepping)

    def begin(self, plan: Step) -> None:
        """A step begins; where the synchroniser changes all ranks meet first.

        Raises:
            PacelineError: a rank left its loop; the message says which, and where.
        """
        before, self._plan = self._plan, plan
        if self._leaving is not None and (
            plan.synchroniser != ALLREDUCE
            or (before is not None and before.synchroniser != ALLREDUCE)
        ):
            with self._ours():
                self._leaving.begin(plan.step)
        if before is not None and before.segment == plan.segment:
            return
        same = before is not None and before.synchroniser == plan.synchroniser
        if same and self._relaxed is not None:
            return
        self._meet()
        self._reduce(True)  # also where the script cannot have what comes
        if self._now.world == 1:
            return
        reduces = plan.synchroniser == ALLREDUCE
        if not (reduces or same):
            self._able = self._agreed(plan.synchroniser.name)
        if reduces or not self._able:
            self._scale_alike()
            return
        self._apart = True
        optimiser = self._only()
        self._relaxed = make(
            plan.synchroniser,
            self._ranks(),
            f"rounds/{plan.segment}",
            self._parameters(),
            optimiser,
            self._seed + plan.segment,
            self._told,
        )
        self._reduce(False)
        self._now.weighs = self._relaxed.weighs

    def dealt(self, plan: Step) -> Step:
        """A step that is about to be loaded, possibly with more or fewer samples than planned."""
        if not plan.synchroniser.steals:
            return plan
        here = self._plan is not None and self._plan.segment == plan.segment
        clocks = self._relaxed.clocks if here and isinstance(self._relaxed, Partial) else None
        assert self.stealing is not None
        return self.stealing.batch(plan, clocks)

    def body_done(self, closing: bool) -> None:
        """The loop's body is through with a step: with a segment's last one, all ranks meet.

        Args:
            closing: the loop was left.

        Raises:
            PacelineError: it was left by an exception, and others went on or are silent.
        """
        if self._relaxed is None:
            return
        assert self._plan is not None and self._now.step is not None
        # First of all: others may be in a collective of the script's own.
        raised = closing and self._why is None and raises()
        if self._plan.epoch_end:
            assert self._leaving is not None
            with self._ours():
                self._leaving.through(self._plan.step, raised)
        elif raised:
            self._leave(raised)
        began = time.perf_counter()
        with self._ours():
            self._relaxed.body_done(self._plan, self._only())
        self._now.step.waited(time.perf_counter() - began)
        if self._plan.last and not self._relaxed.goes_on:
            self._meet()

    def end(self, ran_out: bool) -> None:
        """The epoch is over, or its loop was left: all ranks meet.

        Raises:
            PacelineError: others went on where this one left; the message says which.
        """
        if self._why is not None:  # whoever waits for this rank learns it when it closes
            return
        if not (ran_out or self._left):
            self._leave(raised=raises())
        self._meet()
        self._reduce(True)
        self._plan, self._left = None, False

    def close(self) -> None:
        """No more steps come of this rank: in the middle of a segment, the others learn it."""
        self._hook.remove()
        if self._plan is not None and self._leaving is not None:
            why = self._why or "its session was closed"
            self._leaving.tell(self._plan.step, why)
            if self._relaxed is not None:
                # The leader, whose store it is, may have gone first; the script may end all groups.
                with suppress(RuntimeError, ValueError):
                    self._relaxed.abort(f"left its loop in step {self._plan.step}: {why}")
        if self._made is not None:
            self._made.close()
        self._relaxed = self._made = self._leaving = None
        self._store = self.stealing = None  # the store may go

    def _leave(self, raised: bool) -> None:
        plan = self._plan
        if plan is None or plan.epoch_end or plan.synchroniser == ALLREDUCE:
            return
        if self._leaving is not None:
            with self._ours():
                self._leaving.leave(plan.step, raised)
        self._left = True

    def _meet(self) -> None:
        if self._relaxed is None:
            return
        relaxed, self._relaxed = self._relaxed, None
        began = time.perf_counter()
        with self._ours():
            relaxed.meet(self._only())
        if self._now.step is not None:
            self._now.step.waited(time.perf_counter() - began)

    def _reduce(self, reduces: bool) -> None:
        self._now.weighs = True
        for model in self._models:
            model.reduce(reduces)

    def _scale_alike(self) -> None:
        """Gradients are summed as they are again: so all ranks scale them alike, by the least."""
        if not self._apart:
            return
        self._apart = False
        scalers = _alive(torch.amp.GradScaler, torch.amp.GradScaler.is_enabled)
        states = [scaler.state_dict() for scaler in scalers]
        least = [[state["scale"], state["_growth_tracker"]] for state in states]
        vector = torch.tensor([*least, [torch.inf, torch.inf]], dtype=torch.float64).amin(0)
        with self._ours():
            dist.all_reduce(vector, dist.ReduceOp.MIN, self._ranks().group)
        scale, grown = vector.tolist()
        for scaler, state in zip(scalers, states, strict=True):
            scaler.load_state_dict(state | {"scale": scale, "_growth_tracker": int(grown)})
            for parameter in self._parameters():
                if parameter.grad is not None:  # of steps that the script accumulates
                    parameter.grad.mul_(scale / state["scale"])

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """What an exchange does, and may fail in."""
        self._inside = True
        try:
            yield
        except (PacelineError, RuntimeError) as error:
            cause = error.__cause__ if isinstance(error, PacelineError) else error
            if not _of_connections(cause):
                self._why = str(error)
                raise
            assert self._leaving is not None
            # Gloo tells an address and a port.
            self._why = f"{error}; {self._leaving.where()}"
            raise PacelineError(self._why) from error
        finally:
            self._inside = False

    def _told(self, one: Round) -> None:
        if self.reported is not None and self._plan is not None:
            self.reported(self._plan, one)

    def _agreed(self, name: str) -> bool:
        """Whether this script can do without the all-reduce; a switch must not end its training."""
        ranks = self._ranks()
        refusals: list[str | None] = [None] * ranks.world
        dist.all_gather_object(refusals, self._refusal(), group=ranks.group)
        why = next((one for one in refusals if one is not None), None)
        if why is not None and self._rank == 0:
            logger.warning("%s: gradients go on being all-reduced, as %s", name, why)
        return why is None

    def _refusal(self) -> str | None:
        if not self._models:
            return "no model is wrapped"
        if any(model.static_graph for model in self._models):
            return "the model is wrapped with static_graph=True"
        mine = {id(p) for p in self._parameters()}
        # Also those that have not stepped yet: the first segment may be a relaxed one.
        found = _alive(torch.optim.Optimizer, lambda one: _has_any(one, mine))
        if len(found) != 1:
            return f"{len(found)} optimisers have the model's parameters, it takes one"
        if self._closures or _needs_closure(found[0]):
            return "the script steps its optimiser with a closure"
        if _has_more(found[0], mine):  # which each round would step again
            return "its optimiser has parameters of no wrapped model"
        scalers = _alive(torch.amp.GradScaler, torch.amp.GradScaler.is_enabled)
        if len(scalers) > 1:  # which of two ranks' would be the same one?
            return f"{len(scalers)} gradient scalers are enabled, it takes one"
        self._optimiser = weakref.ref(found[0])
        return None

    def _only(self) -> torch.optim.Optimizer:
        optimiser = self._optimiser() if self._optimiser is not None else None
        if optimiser is None:
            raise PacelineError(
                "the optimiser is gone in the middle of training under a relaxed synchroniser: "
                "keep it, or switch to a policy that reduces all gradients in each step"
            )
        return optimiser

    def _ranks(self) -> Ranks:
        if self._made is None:
            assert self._store is not None
            # Its own group: two threads on one give wrong sums. On the CPU, where the vectors are.
            group = dist.new_group(backend="gloo", timeout=TIMEOUT)
            # Made once: on a busy host, one new connection in some dozens took 5 s.
            asking, waiting = (self._store.clone() for _ in range(2))  # type: ignore[attr-defined]
            world = dist.get_world_size()
            self._made = Ranks({"": group}, asking, waiting, self._rank, world, TIMEOUT)
            self._leaving = Leaving(self._made)
        return self._made

    def _parameters(self) -> list[nn.Parameter]:
        return [p for model in self._models for p in model.module.parameters() if p.requires_grad]

    def _stepping(self, optimiser: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside or self._now.step is None:
            return
        if not self._now.wrapped:
            raise PacelineError(_UNWRAPPED)
        closure = len(args) > 1 or kwargs.get("closure") is not None  # args[0]: itself
        if (self._relaxed is None and not closure) or optimiser in self._others:
            return
        known = self._optimiser is not None and optimiser is self._optimiser()
        if not (known or _has_any(optimiser, {id(p) for p in self._parameters()})):
            self._others.add(optimiser)
            return
        self._closures |= closure
        if self._relaxed is None:
            return
        if not known:
            raise PacelineError(
                "a relaxed synchroniser takes one optimiser, and this script has another: "
                "switch to a policy that reduces all gradients in each step"
            )
        if closure:
            raise PacelineError(
                "a relaxed synchroniser cannot step with a closure: begin with a policy that "
                "reduces all gradients in each step, such as bsp; switches will then keep that up"
            )
        step = self._now.step
        step.gradients_offered()
        with self._ours(), _unscaled(optimiser, self._parameters()):
            self._relaxed.stepping(step.plan, optimiser)
        step.reduced()


def _of_connections(error: BaseException | None) -> bool:
    """Whether a rank's end would explain it: errors of gloo and of the store."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _alive(kind: type[_T], fits: Callable[[_T], bool]) -> list[_T]:
    """Objects of a kind that the script has; of several, not those that it dropped."""
    found = [one for one in gc.get_objects() if issubclass(type(one), kind) and fits(one)]
    if len(found) > 1:
        del found
        gc.collect()
        found = [one for one in gc.get_objects() if issubclass(type(one), kind) and fits(one)]
    return found


def _needs_closure(optimiser: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(type(optimiser).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _has_more(optimiser: torch.optim.Optimizer, parameters: set[int]) -> bool:
    given = (p for group in optimiser.param_groups for p in group["params"])
    return any(p.requires_grad and id(p) not in parameters for p in given)


def _has_any(optimiser: torch.optim.Optimizer, parameters: set[int]) -> bool:
    return any(id(p) in parameters for group in optimiser.param_groups for p in group["params"])


@contextmanager
def _unscaled(optimiser: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> Iterator[None]:
    """From then on gradients are unscaled: `GradScaler` leaves it to optimisers that can do it."""
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
