"""The gate between training and a segment's synchronisation: all-reduce in DDP, or a relaxed one.

Relaxed synchronisation takes effect when the optimiser steps: a hook takes the rank's own gradient
out of ``.grad`` and applies the gradients that have arrived, if any. So scripts need no change.
Under the all-reduce, the gate never steps an optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.core.errors import PacelineError
from paceline.train.ddp import CurrentStep, trained
from paceline.train.fsdp import model as sharded
from paceline.train.plan_shard import LocalStep
from paceline.train.startup import TIMEOUT, Lanes
from paceline.train.sync import make
from paceline.train.sync.agreement import LoopAgreement
from paceline.train.sync.base import Channel, GradientSync, Ranks, Replica, Round, no_gradient
from paceline.train.sync.discovery import exception_ends_loop
from paceline.train.sync.optimiser import Scales, ScriptOptimiser, has_more, unscaled
from paceline.train.sync.outer import Outer
from paceline.train.sync.suitability import Suitability, Suits
from paceline.train.unwrapped import UnwrappedModels
from paceline.wire import ALLREDUCE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_ANOTHER_OPTIMISER = (
    "relaxed synchronisation supports one optimiser of the wrapped models, but this script steps "
    "another: give all parameters to one optimiser, and give that optimiser to session.optimizer "
    "before a framework wraps it; or switch to a policy that reduces all gradients in each step"
)
_CLOSURE = (
    "relaxed synchronisation supports no closure, but this script passes a closure to its "
    "optimiser for the first time: call step() without it, or use a policy that reduces all "
    "gradients in each step, such as bsp"
)

_CLOSURE_OF_MICRO = (
    "Session(micro_batches=True): in step {step} the optimiser steps with a closure, before the "
    "last micro-batch: call step() without it"
)
_MORE_PARAMETERS = (
    "Session(micro_batches=True): the optimiser has parameters of no wrapped model, and would step "
    "them for each micro-batch: give their module to session.wrap, too"
)
_STEPPED_BEFORE = (
    "Session(micro_batches=True): in step {step} and the steps before it, the optimiser stepped "
    "after an earlier micro-batch but not after the last: step it in each iteration of the loop, "
    "or where session.batch.last is true"
)
# An error is raised after this many successive steps in which the optimiser stepped, but not after
# the last micro-batch. Fewer such steps are no error, because a script may skip the optimiser step
# if gradients are not finite.
_MISSED_STEPS = 3
_LEFT_IN_A_STEP = (
    "left its loop in step {step}, before its last micro-batch: with Session(micro_batches=True) "
    "leave the loop where session.batch.last is true"
)

_LEFT = (
    ", while ranks shared batches: with Session(uneven_steps=True) do not leave the loop over "
    "session.loader() early"
)

OnRound = Callable[[LocalStep, Round], None]


class SyncGate:
    """Gate between this rank's training loop and each segment's synchronisation. Not thread-safe.

    The loop calls `begin` for each batch, `body_done` once the script has used it, `end_step`
    for each step of the plan, and `end` after an epoch. Between `begin` and `body_done` the script
    steps its optimiser; torch's hook calls the gate before each of these steps. The gate's methods
    raise a PacelineError if another rank left its loop at another step; the message names the rank.
    """

    def __init__(
        self,
        current: CurrentStep,
        store: Store,
        rank: int,
        seed: int,
        lanes: Lanes | None = None,
    ) -> None:
        self._current, self._lanes = current, lanes
        self._store: Store | None = store
        self._rank, self._seed = rank, seed
        # The session's wrapped models; `Session.wrap` appends to the list.
        self.models: list[sharded.Wrapped] = []
        self.on_round: OnRound | None = None
        self.outer = Outer()
        self._unwrapped = UnwrappedModels(current, self.models, store, rank)
        self._script = ScriptOptimiser()
        self.suitability = Suitability(self._script, self.models)
        # The newest step of this epoch that has begun; None before the first one.
        self._step: LocalStep | None = None
        # The current synchronisation if it is relaxed; None under the all-reduce.
        self.relaxed: GradientSync | None = None
        self._scales_differ = False
        self._scales = Scales(self._script)
        # True if the script stepped the optimiser before the step's last micro-batch. Such an
        # optimiser step has no effect.
        self._held_back = False
        # Number of successive steps in which the optimiser stepped after an earlier micro-batch,
        # but not after the last one.
        self._missed = 0
        self._ranks_made: Ranks | None = None
        # None until the first segment whose planned synchronisation is relaxed.
        self._agreement: LoopAgreement | None = None
        # The newest iteration in which the models' optimiser stepped (`_stepped`), and the newest
        # iteration that has ended (`_body`).
        self._stepped: LocalStep | None = None
        self._body: LocalStep | None = None
        # True if all ranks left the loop after the same step.
        self._left = False
        # The reason why this rank cannot continue.
        self._failure: str | None = None
        # True during an exchange with other ranks, in which the gate itself may step the optimiser.
        self._in_gate = False
        current.parameters = self._parameters
        current.forward = self._unwrapped.refuse_mixed
        self._hook = register_optimizer_step_pre_hook(self._before_optimiser_step)

    def name(self, session: str) -> None:
        """Set the session's name for messages."""
        self._unwrapped.name = session

    def chosen(self) -> torch.optim.Optimizer:
        """Return the script's optimiser, while relaxed synchronisation is in force."""
        return self._script.chosen()

    @property
    def stepped(self) -> bool:
        """Return True if the optimiser stepped in the newest iteration; else gradients add up."""
        return self._stepped is self._body

    def declare(
        self, optimiser: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
    ) -> None:
        """See `Session.optimizer`."""
        self._script.declare(optimiser, scaler, self._parameters())

    def begin(self, step: LocalStep) -> None:
        """Begin a step. If the synchronisation changes, all ranks synchronise first."""
        if self._unwrapped.uncompared:
            self._unwrapped.look()
        for model in self.models:
            if isinstance(model, sharded.WeightedFSDP):
                model.begin()
        before, self._step = self._step, step
        same_segment = before is not None and before.segment == step.segment
        if self._agreement is not None and (
            step.synchroniser != ALLREDUCE
            or (before is not None and before.synchroniser != ALLREDUCE)
        ):
            with self._entered():
                self._agreement.begin(step.step)
        reduces = step.synchroniser == ALLREDUCE
        waits = not reduces and self.suitability.answer is Suits.NOT_YET
        if same_segment and not waits:
            return
        unchanged = before is not None and before.synchroniser == step.synchroniser
        if unchanged and self.relaxed is not None:
            return
        self._meet()
        # Restore the all-reduce. `_relax` ends it again, if the new synchronisation is relaxed and
        # the script suits it.
        self._reduce(True)
        self.outer.keep_for(step.synchroniser)
        if self._current.world == 1:
            return
        if waits or not (reduces or unchanged):
            self.suitability.ask(step.synchroniser.name, self._ranks())
        if reduces or self.suitability.answer is not Suits.YES:
            self._equal_scales()
            if not reduces:
                self.suitability.tell(step)
        else:
            self._relax(step)

    def begin_turn(self, step: LocalStep) -> None:
        """Begin an iteration of the script's loop, for a step's batch or a further micro-batch."""
        self._current.stepped_parameters.clear()
        if step.micro_index == 0:
            self._current.kept.clear()
            self._held_back = False
        if step.more and step.micro_index == 0:
            self._scales.keep()
        if self.relaxed is None and step.share != 1.0:
            for model in self.models:
                model.reduce(not step.more)

    def turn_done(self, closing: bool) -> None:
        """Handle the end of an iteration whose micro-batch is not the step's last.

        Raise a PacelineError if the script left the loop here without an exception.
        """
        assert self._step is not None
        if not closing:
            self._scales.restore()
        elif exception_ends_loop():
            self.body_done(closing)
        else:
            self._failure = _LEFT_IN_A_STEP.format(step=self._step.step)
            raise PacelineError(f"rank {self._rank} {self._failure}")

    def body_done(self, closing: bool) -> None:
        """Handle the end of an iteration with the step's last or only batch.

        `closing`: the script left the loop. Raise a PacelineError if an exception ended the loop
        and other ranks continued or are silent.
        """
        self._body = self._step
        if self._held_back and not closing:
            self._missed = 0 if self.stepped else self._missed + 1
            # With a gradient scaler, missed steps are no error: it skips any number of steps whose
            # gradients are not finite.
            if self._missed >= _MISSED_STEPS and not self._script.scalers():
                assert self._step is not None
                raise PacelineError(_STEPPED_BEFORE.format(step=self._step.step))
        if self.relaxed is None:
            return
        assert self._step is not None and self._current.running is not None
        # Check for an exception first: if this rank's script raised, other ranks may wait for this
        # rank in the script's collectives, and cannot exchange gradients.
        raised = closing and self._failure is None and exception_ends_loop()
        if self._step.epoch_end and not self.pools(self._step):
            self._leave_step(self._step, raised)
        elif raised:
            self._leave(raised)
        with self._current.running.waiting(), self._entered():
            self.relaxed.body_done(self._step, self._script.chosen())

    def pools(self, step: LocalStep) -> bool:
        """Return whether ranks may take over each other's batches in this step, which has begun."""
        return self.relaxed is not None and step.pooled

    def end_step(self, step: LocalStep) -> None:
        """End a step of the plan, in which this rank had any number of batches."""
        if self.relaxed is None:
            return
        if step.epoch_end and self.pools(step):
            self._leave_step(step, raised=False)
        running = self._current.running
        with nullcontext() if running is None else running.waiting(), self._entered():
            self.relaxed.end_step(step)
        if step.last and not self.relaxed.goes_on:
            self._meet()

    def end(self, ran_out: bool) -> None:
        """End the epoch, and synchronise all ranks. `ran_out`: the script did not leave early."""
        # `close` reports the failure to ranks that wait for this one.
        if self._failure is not None:
            return
        if not (ran_out or self._left):
            self._leave(raised=exception_ends_loop())
        self._meet()
        self._reduce(True)
        self._unwrapped.look()
        self._step, self._left = None, False

    def close(self) -> None:
        """End this rank's participation; in the middle of a segment, inform the other ranks."""
        self._hook.remove()
        self._unwrapped.close()
        sharded.close(self.models)
        self._current.parameters = list
        if self._step is not None and self._agreement is not None:
            why = self._failure or "its session was closed"
            self._agreement.tell(self._step.step, why)
            if self.relaxed is not None:
                # The store may have ended with rank 0, and the script may have ended all groups.
                with suppress(RuntimeError, ValueError):
                    self.relaxed.abort(f"left its loop in step {self._step.step}: {why}")
        if self._ranks_made is not None:
            self._ranks_made.close()
        self.relaxed = self._ranks_made = self._agreement = None
        self._script = ScriptOptimiser()
        self._scales = Scales(self._script)
        self.suitability = Suitability(self._script, self.models)
        self._store = None

    def _leave(self, raised: bool) -> None:
        step = self._step
        if step is not None and self.pools(step):
            self._refuse_to_leave(step)
        if step is None or step.epoch_end or step.synchroniser == ALLREDUCE:
            return
        if self._agreement is not None:
            with self._entered():
                self._agreement.leave(step.step, raised)
        self._left = True

    def _refuse_to_leave(self, step: LocalStep) -> None:
        """Leave with an error: ranks that share batches cannot all leave after the same step."""
        assert self.relaxed is not None
        self._failure = f"left its loop in step {step.step}{_LEFT}"
        # The store may have ended with rank 0.
        with suppress(RuntimeError, ValueError):
            self.relaxed.abort(self._failure)
        raise PacelineError(f"rank {self._rank} {self._failure}")

    def _leave_step(self, step: LocalStep, raised: bool) -> None:
        assert self._agreement is not None
        with self._entered():
            self._agreement.end_epoch(step.step, raised)

    def _meet(self) -> None:
        if self.relaxed is None:
            return
        relaxed, self.relaxed = self.relaxed, None
        running = self._current.running
        with nullcontext() if running is None else running.waiting(), self._entered():
            relaxed.synchronise(self._script.chosen())

    def _reduce(self, reduces: bool) -> None:
        self._current.weighs = True
        for model in self.models:
            model.reduce(reduces)

    def _relax(self, step: LocalStep) -> None:
        self._scales_differ = True
        self.relaxed = make(
            step.synchroniser,
            Channel(self._ranks(), f"rounds/{step.segment}", self._report),
            Replica(self._parameters(), self._script.chosen()),
            self._seed + step.segment,
            self.outer,
        )
        self._reduce(False)
        self._current.weighs = self.relaxed.weighs

    def _equal_scales(self) -> None:
        """Set all ranks to the smallest loss scale, because the all-reduce needs equal ones."""
        if not self._scales_differ:
            return
        self._scales_differ = False
        with self._entered():
            self._script.equal_scales(self._parameters(), self._ranks().group)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Guard an exchange with other ranks; if it fails, name the ranks that left."""
        self._in_gate = True
        try:
            yield
        except (PacelineError, RuntimeError) as error:
            cause = error.__cause__ if isinstance(error, PacelineError) else error
            if not _is_of_connections(cause):
                self._failure = str(error)
                raise
            assert self._agreement is not None
            # Gloo's message has only an address and a port, so add the ranks' steps.
            self._failure = f"{self._current.explained(error)}; {self._agreement.where()}"
            raise PacelineError(self._failure) from error
        finally:
            self._in_gate = False

    def _report(self, finished: Round) -> None:
        if self.on_round is not None and self._step is not None:
            self.on_round(self._step, finished)

    def _ranks(self) -> Ranks:
        if self._ranks_made is None:
            assert self._store is not None
            # A new process group, because two threads that use one group get wrong sums. The
            # group's backend is gloo, because the vectors are on the CPU.
            if self._lanes is None:
                group = dist.new_group(backend="gloo", timeout=TIMEOUT)
            else:
                group = self._lanes.of_lane()
            # The connections are made only once: on a busy host, one new connection in a few dozen
            # took 5 s.
            store, blocking_store = (self._store.clone() for _ in range(2))  # type: ignore[attr-defined]
            world = self._current.world
            self._ranks_made = Ranks({"": group}, store, blocking_store, self._rank, world, TIMEOUT)
            self._agreement = LoopAgreement(self._ranks_made)
        return self._ranks_made

    def _parameters(self) -> list[nn.Parameter]:
        return trained(self.models)

    def _before_optimiser_step(
        self, optimiser: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> None:
        """Run before each step of any optimiser in the process; torch calls it."""
        running = self._current.running
        if self._in_gate or running is None:
            return
        if self._current.rehearsal is not None:
            self._current.rehearsal.stepping(optimiser, _closure(args, kwargs))
            return
        self._unwrapped.stepping(optimiser, reduces=self.relaxed is None)
        if running.step.more:
            self._hold_back(optimiser, args, kwargs)
            return
        if not self._script.trains(optimiser, self._parameters):
            return
        self._stepped = self._step
        closure = _closure(args, kwargs) is not None
        self._script.closures |= closure
        if self._current.kept:
            self._current.add_kept()
        if self.relaxed is None:
            return
        if not self._script.is_chosen(optimiser):
            raise PacelineError(_ANOTHER_OPTIMISER)
        if closure:
            raise PacelineError(_CLOSURE)
        running.gradients_offered()
        with running.exchanging(), self._entered(), unscaled(optimiser, self._parameters()):
            assert self._step is not None
            self.relaxed.stepping(self._step, optimiser)
        running.reduced()

    def _hold_back(self, optimiser: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Remove the gradients, so that a step before the last micro-batch has no effect."""
        trains = self._script.trains(optimiser, self._parameters)
        if trains and _closure(args, kwargs) is not None:
            assert self._step is not None
            raise PacelineError(_CLOSURE_OF_MICRO.format(step=self._step.step))
        parameters = self._parameters()
        if not trains or has_more(optimiser, {id(p) for p in parameters}):
            raise PacelineError(_MORE_PARAMETERS)
        no_gradient(parameters)
        self._current.stepped_parameters |= {
            id(p) for group in optimiser.param_groups for p in group["params"]
        }
        self._held_back = True


def _closure(args: Any, kwargs: Any) -> Any:
    # args[0] is the optimiser. Accelerate passes None as the closure.
    return args[1] if len(args) > 1 else kwargs.get("closure")


def _is_of_connections(error: BaseException | None) -> bool:
    """Return whether an error is from gloo or the store: perhaps another rank has ended."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)
