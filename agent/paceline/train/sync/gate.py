"""The gate between training and a segment's synchroniser: all-reduce in DDP, or a relaxed one.

A relaxed synchroniser takes effect where the optimiser steps: a hook takes the rank's own gradient
out of ``.grad`` and applies the gradients that have arrived, if any. So scripts stay as they are.
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
from paceline.train.meeting import TIMEOUT, Lanes
from paceline.train.parts import Step
from paceline.train.sync import make
from paceline.train.sync.agreement import LoopAgreement
from paceline.train.sync.base import Ranks, Round, Synchroniser, no_gradient
from paceline.train.sync.discovery import exception_ends_loop
from paceline.train.sync.optimiser import Scales, ScriptOptimiser, has_more, unscaled
from paceline.train.sync.outer import Outer
from paceline.train.sync.suitability import Suitability, Suits
from paceline.train.unwrapped import UnwrappedModels
from paceline.wire import ALLREDUCE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_ANOTHER_OPTIMISER = (
    "a relaxed synchroniser takes one optimiser of the wrapped models, and this script steps "
    "another: give all parameters to one optimiser, and that to session.optimizer before a "
    "framework wraps it; or switch to a policy that reduces all gradients in each step"
)
_CLOSURE = (
    "a relaxed synchroniser cannot step with a closure, and this script gives one to its optimiser "
    "for the first time: step without it, or use a policy that reduces all gradients in each step, "
    "such as bsp"
)

_CLOSURE_OF_MICRO = (
    "Session(micro_batches=True): in step {step} the optimiser steps with a closure, before the "
    "last micro-batch: step it without"
)
_MORE_PARAMETERS = (
    "Session(micro_batches=True): the optimiser has parameters of no wrapped model, and would step "
    "them for each micro-batch: give session.wrap the module that has them, too"
)
_STEPPED_BEFORE = (
    "Session(micro_batches=True): in step {step} and those before it the optimiser stepped after "
    "an earlier micro-batch and not after the last: step it in each turn of the loop, or where "
    "session.batch.last is true"
)
_MISSED = 3  # steps in a row: a script may skip one whose gradients are not finite
_LEFT_IN_A_STEP = (
    "left its loop in step {step}, before the last micro-batch of it: with "
    "Session(micro_batches=True) leave the loop where session.batch.last is true"
)

_LEFT = (
    ", while ranks shared batches: with Session(uneven_steps=True) the loop over "
    "session.loader() may only end by itself"
)

OnRound = Callable[[Step, Round], None]


class SyncGate:
    """Puts each segment's synchroniser into force on this rank. For one thread.

    The loop calls `begin` for each batch, `body_done` once the script is through with it,
    `end_step` for each step of the plan, and `end` after an epoch. Between `begin` and `body_done`
    the script steps its optimiser; torch's hook calls the gate before each of these steps.

    Args:
        current: the current step.
        store: the ranks'.
        rank: this rank.
        seed: of the run.
        lanes: where several ranks share each batch.
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
        self.models: list[sharded.Wrapped] = []  # `Session.wrap` adds to it
        self.on_round: OnRound | None = None  # called with rounds, on a rank that reports them
        self.outer = Outer()
        self._unwrapped = UnwrappedModels(current, self.models, store, rank)
        self._script = ScriptOptimiser()
        self.suitability = Suitability(self._script, self.models)  # it reports fallbacks
        self._step: Step | None = None  # the current step, or the last one of the epoch
        self._relaxed: Synchroniser | None = None  # the one in force, if it is relaxed
        self._scales_differ = False  # ranks may have different scales of gradients
        self._scales = Scales(self._script)
        self._held_back = False  # the optimiser stepped, without effect, as micro-batches follow
        self._missed = 0  # steps in a row in which it stepped like that, and not in the last turn
        self._ranks_made: Ranks | None = None
        self._agreement: LoopAgreement | None = None  # None until a relaxed one is asked for
        self._stepped: Step | None = None  # the newest body in which the models' optimiser stepped
        self._body: Step | None = None  # the newest body that has ended
        self._left = False  # all ranks left the loop after the same step
        self._failure: str | None = None  # why this rank cannot go on
        self._in_gate = False  # an optimiser step made now is the gate's own
        current.parameters = self._parameters
        current.forward = self._unwrapped.refuse_mixed
        self._hook = register_optimizer_step_pre_hook(self._before_optimiser_step)

    def name(self, session: str) -> None:
        """Give the session a name for messages."""
        self._unwrapped.name = session

    @property
    def relaxed(self) -> Synchroniser | None:
        """The relaxed synchroniser in force; None: gradients are all-reduced."""
        return self._relaxed

    def chosen(self) -> torch.optim.Optimizer:
        """The script's optimiser, while a relaxed synchroniser is in force."""
        return self._script.chosen()

    @property
    def stepped(self) -> bool:
        """Whether the models' optimiser stepped in the newest body: no gradients accumulate."""
        return self._stepped is self._body

    def declare(
        self, optimiser: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
    ) -> None:
        """See `Session.optimizer`."""
        self._script.declare(optimiser, scaler, self._parameters())

    def begin(self, step: Step) -> None:
        """Begins a step. If the synchroniser changes, all ranks meet first.

        Raises:
            PacelineError: a rank left its loop; the message says which rank, and where.
        """
        self._unwrapped.look()
        sharded.begin(self.models)
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
        if unchanged and self._relaxed is not None:
            return
        self._meet()
        self._reduce(True)  # also where the script does not suit the new synchroniser
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

    def begin_turn(self, step: Step) -> None:
        """Begins a turn of the script's loop: the step's that has begun, or a micro-batch's."""
        self._current.through.clear()
        if step.place == 0:
            self._current.kept.clear()
            self._held_back = False
        if step.more and step.place == 0:
            self._scales.keep()
        if self._relaxed is None and step.share != 1.0:
            for model in self.models:
                model.reduce(not step.more)

    def turn_done(self, closing: bool) -> None:
        """Ends the loop's body after a micro-batch that is not the step's last.

        Raises:
            PacelineError: the script left the loop here, and no exception did.
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
        """Ends the loop's body.

        Args:
            closing: the script left the loop.

        Raises:
            PacelineError: an exception ended the loop here, and other ranks went on or are silent.
        """
        self._body = self._step
        if self._held_back and not closing:
            self._missed = 0 if self.stepped else self._missed + 1
            # A gradient scaler skips steps whose gradients are not finite: as many as it takes.
            if self._missed >= _MISSED and not self._script.scalers():
                assert self._step is not None
                raise PacelineError(_STEPPED_BEFORE.format(step=self._step.step))
        if self._relaxed is None:
            return
        assert self._step is not None and self._current.running is not None
        # First: if this rank raised, others may wait for it in a collective of the script's own.
        raised = closing and self._failure is None and exception_ends_loop()
        if self._step.epoch_end and not self.pools(self._step):
            self._through(self._step, raised)
        elif raised:
            self._leave(raised)
        with self._current.running.waiting(), self._entered():
            self._relaxed.body_done(self._step, self._script.chosen())

    def pools(self, step: Step) -> bool:
        """Whether ranks may take over batches of each other in this step, which has begun."""
        return self._relaxed is not None and step.pooled

    def end_step(self, step: Step) -> None:
        """Ends a step of the plan on this rank. After a segment's last step, all ranks meet.

        Args:
            step: as planned; this rank may have had no batch in it, or several.

        Raises:
            PacelineError: a rank left; the message says which.
        """
        if self._relaxed is None:
            return
        if step.epoch_end and self.pools(step):
            self._through(step, raised=False)
        running = self._current.running
        with nullcontext() if running is None else running.waiting(), self._entered():
            self._relaxed.end_step(step)
        if step.last and not self._relaxed.goes_on:
            self._meet()

    def end(self, ran_out: bool) -> None:
        """Ends the epoch: all ranks meet.

        Args:
            ran_out: the loop ended because there were no more steps; else the script left it.

        Raises:
            PacelineError: other ranks went on where this one left; the message says which.
        """
        if self._failure is not None:  # `close` tells ranks that wait for this one
            return
        if not (ran_out or self._left):
            self._leave(raised=exception_ends_loop())
        self._meet()
        self._reduce(True)
        self._unwrapped.look()
        self._step, self._left = None, False

    def close(self) -> None:
        """Ends this rank's part. If that is in the middle of a segment, the others are told."""
        self._hook.remove()
        self._unwrapped.close()
        sharded.close(self.models)
        self._current.parameters = list
        if self._step is not None and self._agreement is not None:
            why = self._failure or "its session was closed"
            self._agreement.tell(self._step.step, why)
            if self._relaxed is not None:
                # The store may have ended with rank 0, and the script may have ended all groups.
                with suppress(RuntimeError, ValueError):
                    self._relaxed.abort(f"left its loop in step {self._step.step}: {why}")
        if self._ranks_made is not None:
            self._ranks_made.close()
        self._relaxed = self._ranks_made = self._agreement = None
        # Let go of the optimiser and the store.
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

    def _refuse_to_leave(self, step: Step) -> None:
        """Ranks that share batches have no step in common after which all could leave."""
        assert self._relaxed is not None
        self._failure = f"left its loop in step {step.step}{_LEFT}"
        with suppress(RuntimeError, ValueError):  # the store may have ended with rank 0
            self._relaxed.abort(self._failure)
        raise PacelineError(f"rank {self._rank} {self._failure}")

    def _through(self, step: Step, raised: bool) -> None:
        assert self._agreement is not None
        with self._entered():
            self._agreement.through(step.step, raised)

    def _meet(self) -> None:
        if self._relaxed is None:
            return
        relaxed, self._relaxed = self._relaxed, None
        running = self._current.running
        with nullcontext() if running is None else running.waiting(), self._entered():
            relaxed.meet(self._script.chosen())

    def _reduce(self, reduces: bool) -> None:
        self._current.weighs = True
        for model in self.models:
            model.reduce(reduces)

    def _relax(self, step: Step) -> None:
        self._scales_differ = True
        self._relaxed = make(
            step.synchroniser,
            self._ranks(),
            f"rounds/{step.segment}",
            self._parameters(),
            self._script.chosen(),
            self._seed + step.segment,
            self.outer,
            self._report,
        )
        self._reduce(False)
        self._current.weighs = self._relaxed.weighs

    def _equal_scales(self) -> None:
        """Back under all-reduce, every rank must use one loss scale: take the smallest."""
        if not self._scales_differ:
            return
        self._scales_differ = False
        with self._entered():
            self._script.equal_scales(self._parameters(), self._ranks().group)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Around exchanges with other ranks. Names the ranks that left if an exchange fails."""
        self._in_gate = True
        try:
            yield
        except (PacelineError, RuntimeError) as error:
            cause = error.__cause__ if isinstance(error, PacelineError) else error
            if not _is_of_connections(cause):
                self._failure = str(error)
                raise
            assert self._agreement is not None
            # Gloo's message names only an address and a port.
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
            # A new process group, because two threads that use one group get wrong sums. It is
            # gloo's, because the vectors are on the CPU.
            if self._lanes is None:
                group = dist.new_group(backend="gloo", timeout=TIMEOUT)
            else:
                group = self._lanes.of_lane()
            # Made once: on a busy host, one new connection in a few dozen took 5 s.
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
        """Torch calls it before each step of any optimiser in the process."""
        running = self._current.running
        if self._in_gate or running is None:
            return
        if self._current.rehearsal is not None:
            self._current.rehearsal.stepping(optimiser, _closure(args, kwargs))
            return
        self._unwrapped.stepping(optimiser, reduces=self._relaxed is None)
        if running.step.more:
            self._hold_back(optimiser, args, kwargs)
            return
        if not self._script.trains(optimiser, self._parameters):
            return
        self._stepped = self._step
        closure = _closure(args, kwargs) is not None
        self._script.closures |= closure
        self._current.add_kept()
        if self._relaxed is None:
            return
        if not self._script.is_chosen(optimiser):
            raise PacelineError(_ANOTHER_OPTIMISER)
        if closure:
            raise PacelineError(_CLOSURE)
        running.gradients_offered()
        with running.exchanging(), self._entered(), unscaled(optimiser, self._parameters()):
            assert self._step is not None
            self._relaxed.stepping(self._step, optimiser)
        running.reduced()

    def _hold_back(self, optimiser: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Lets an optimiser step without gradients, so without effect, as micro-batches follow."""
        trains = self._script.trains(optimiser, self._parameters)
        if trains and _closure(args, kwargs) is not None:
            assert self._step is not None
            raise PacelineError(_CLOSURE_OF_MICRO.format(step=self._step.step))
        parameters = self._parameters()
        if not trains or has_more(optimiser, {id(p) for p in parameters}):
            raise PacelineError(_MORE_PARAMETERS)
        no_gradient(parameters)
        self._current.through |= {
            id(p) for group in optimiser.param_groups for p in group["params"]
        }
        self._held_back = True


def _closure(args: Any, kwargs: Any) -> Any:
    """Return the closure that an optimiser steps with. Accelerate steps with None in its place."""
    return args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimiser


def _is_of_connections(error: BaseException | None) -> bool:
    """Whether another rank's end may have caused an error: gloo or the store raised it."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)
