"""DistributedDataParallel with weighted gradients, right for uneven and for empty local batches.

The update is Σ_j w_j g_j with w_j = n_j/Σn or Λ_j/ΣΛ (CHRONICA Alg. 4, Eq. 7): the mean gradient
over the global batch, as one process would compute it. It is computed as the mean over ranks of
M w_j g_j. A gradient that was reduced before is equal on all ranks, and the mean leaves it as it is
when more is added to it and reduced.
"""

# No `from __future__ import annotations`: DDP checks the hook's annotations and takes no strings.

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.core.errors import PacelineError
from paceline.train.fillers import uncounted
from paceline.train.timing import RunningStep

_GRADIENT_AFTER = (
    "Session(micro_batches=True): in step {step} a parameter gets a gradient after its optimiser "
    "has stepped in the same turn of the loop: compute all gradients of an optimiser's parameters "
    "before its step, and freeze a model (requires_grad_(False)) while another is trained through "
    "it"
)

_NO_OUTPUT = (
    "a loss does not depend on the outputs of the model that session.wrap gave, and parameters had "
    "gradients before its backward pass: call zero_grad() before the forward pass, or return from "
    "the model what the loss is made of"
)

_FROZEN = (
    "{name} was frozen when session.wrap() got its model, and now has a gradient, which no rank "
    "would reduce: let it be trainable (requires_grad_(True)) when you wrap the model with "
    "session.wrap(model, find_unused_parameters=True), and freeze it afterwards as you like"
)

_SMALL_BYTES = 25 << 20  # up to here one bucket: three took 13.9 ms where one took 7.7


class Rehearsal(Protocol):
    """A trial of `paceline.train.proof`, as wrapped models and the gate know it."""

    def forward(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Around a forward pass of a wrapped model."""

    def stepping(self, optimiser: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> None:
        """An optimiser is about to step, perhaps with a closure."""


class CurrentStep:
    """The step that this rank is in, and how its gradients are weighed.

    Args:
        world: W.
        accumulates: gradients of micro-batches are added up; see `Session`.
        group: of the ranks that have batches of their own; None: the default one.
    """

    def __init__(
        self,
        world: int,
        *,
        accumulates: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.world, self.group = world, group
        self.accumulates = accumulates
        self._running: RunningStep | None = None
        self.filler = False  # this rank's batch is one; compiled models read it
        self.weighs = True  # False: gradients stay the means of each rank's own batch
        self.reduces = False  # in the call of a collective that is not the script's
        self.reduced = set[int]()  # `id`s of parameters that a wrapped model reduces
        # Weighed gradients of the step's micro-batches so far, by the parameter's id. They are not
        # in ``.grad``, which scripts set to zero before or after each step of their optimiser.
        self.kept: dict[int, torch.Tensor] = {}
        # Called with the step and the number of a wrapped model before its reduction begins in a
        # backward pass, and with the error of one that failed.
        self.reducing: Callable[[RunningStep, int], None] = lambda running, model: None
        self.explained: Callable[[Exception], Exception] = lambda error: error
        # Called before a forward pass in a step that will have a backward pass.
        self.forward: Callable[[], None] = lambda: None
        self.models = 0  # that were wrapped
        self.rehearsal: Rehearsal | None = None  # a trial of `paceline.train.proof` is made
        self.through: set[int] = set()  # parameters whose optimiser has stepped in this turn
        self.parameters: Callable[[], Iterable[nn.Parameter]] = list  # of the wrapped models

    @property
    def running(self) -> RunningStep | None:
        """The step that this rank is in; None outside the loop over the loader."""
        return self._running

    @running.setter
    def running(self, running: RunningStep | None) -> None:
        self._running = running
        self.filler = running is not None and running.step.samples == 0

    @contextlib.contextmanager
    def own_collective(self) -> Iterator[None]:
        """Around a collective of Paceline's own in the loop's body."""
        before, self.reduces = self.reduces, True
        try:
            yield
        finally:
            self.reduces = before

    @property
    def weight(self) -> float:
        """This rank's weight in the current step, relative to the weight of an equal part."""
        if self._running is None:
            return 1.0
        step = self._running.step
        if not step.samples:
            return 0.0
        return step.weight * self.world if self.weighs else step.share

    def weighed(self, gradient: torch.Tensor) -> torch.Tensor:
        """A local gradient times this rank's weight."""
        if self.rehearsal is not None:
            return gradient
        weight = self.weight
        if weight == 0:  # 0 · NaN is NaN, and a filler's gradient may be anything
            return torch.zeros_like(gradient)
        return gradient if weight == 1 else gradient * weight

    def summed(self, parameter: int, gradient: torch.Tensor) -> torch.Tensor:
        """What is added to a parameter's ``.grad``: only at a step's last micro-batch more than 0.

        Args:
            parameter: its id.
            gradient: of the current batch.

        Raises:
            PacelineError: the parameter's optimiser has stepped in this turn. Whether a later
                `zero_grad` drops such a gradient cannot be known.
        """
        weighed = self.weighed(gradient)
        if self.running is None or self.rehearsal is not None:
            return weighed
        step = self.running.step
        if step.more and parameter in self.through:
            raise PacelineError(_GRADIENT_AFTER.format(step=step.step))
        kept = self.kept.pop(parameter, None)
        if kept is not None:
            weighed = weighed + kept
        if step.more:
            self.kept[parameter] = weighed
            return torch.zeros_like(weighed)
        if self.kept:  # perhaps of parameters that this micro-batch does not use
            torch.autograd.Variable._execution_engine.queue_callback(self.add_kept)
        return weighed

    def add_kept(self) -> None:
        """Adds gradients of parameters that the step's last micro-batch did not use."""
        if not self.kept:
            return
        for parameter in self.parameters():
            kept = self.kept.pop(id(parameter), None)
            if kept is not None:
                parameter.grad = kept if parameter.grad is None else parameter.grad.add_(kept)


def _hook_frozen(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> None:
    """Has a hook called with the gradients of a parameter that may be trained later."""
    if parameter.is_floating_point() or parameter.is_complex():  # others have no gradients
        parameter.requires_grad_(True)
        parameter.register_hook(hook)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(False)


def _refuse_gradient(current: CurrentStep, name: str, parameter: int, _: torch.Tensor) -> None:
    """A parameter that was frozen has a gradient. Outside the loop it is the script's own."""
    if current.running is not None and parameter not in current.reduced:
        raise PacelineError(_FROZEN.format(name=name))


class _Weighing:
    """Where one model's gradients are weighed in a backward pass.

    A gradient that is added to one from an earlier pass is weighed before, in a hook of its
    parameter. Otherwise a bucket is weighed as a whole, by one operation and not by one for each
    parameter. Which of the two it is can be told only when a backward pass begins, as scripts set
    gradients to None before or after the forward pass. A hook of each parameter takes 2 to 4 µs of
    the script's thread, as long as a small layer. Therefore parameters get theirs in the first pass
    that needs them. If parameters have gradients when a forward pass begins, or two forward passes
    follow each other, a hook of the outputs tells when the backward pass begins.

    Args:
        current: the current step.
        parameters: of the model, those that are trained.
        group: all ranks.
        model: number of the model in its session.
    """

    def __init__(
        self,
        current: CurrentStep,
        parameters: list[nn.Parameter],
        group: dist.ProcessGroup,
        model: int,
    ) -> None:
        self.current, self._model = current, model
        self._reducing = False  # some buckets of the pass are reduced already
        self._group = group
        self._parameters = parameters
        self._reduces = False  # the next backward pass
        self._local = False  # gradients of the newest forward pass stay on this rank
        self._fresh = True  # no parameter had a gradient when the newest forward pass began
        self._waits = False  # a backward pass that reduces has yet to follow a forward pass
        self._open = False  # how the next backward pass weighs is known only when it begins
        self._by_bucket: bool | None = None  # None: it is not known that the pass has begun
        self._hooked = False  # parameters have hooks
        if current.accumulates:
            self._hook()

    def begin(self, reduces: bool) -> None:
        """A forward pass begins, whose backward pass reduces the gradients or keeps them here."""
        self._reduces, self._local, self._by_bucket = reduces, not reduces, None
        if self._hooked:
            return
        if not reduces:
            self._hook()
            return
        self._fresh = self._without_gradients()
        self._open, self._waits = self._waits or not self._fresh, True

    def watch(self, outputs: Any) -> None:
        """Takes what the forward pass gave: the backward pass begins there."""
        if self._hooked or not self._open:
            return
        nodes = [output.grad_fn for output in _tensors(outputs) if output.grad_fn is not None]
        for node in nodes:
            node.register_prehook(self._begins)
        if not nodes:
            self._hook()

    def begin_reduction(self) -> None:
        """A bucket is complete; before the pass's first one, the ranks must be in step."""
        if not self._reducing:
            self._reducing = True
            if (running := self.current.running) is not None:
                self.current.reducing(running, self._model)

    def all_reduce(self, share: torch.Tensor) -> dist.Work:
        """Begins to add up a tensor over all ranks.

        `torch.distributed.all_reduce` takes 20 to 40 µs longer, for checks of its arguments.
        """
        current = self.current
        before, current.reduces = current.reduces, True  # a context would take 3 µs
        try:
            if share.is_complex():  # not every backend adds up complex numbers
                work: dist.Work | None = dist.all_reduce(share, group=self._group, async_op=True)
                assert work is not None
                return work
            options = dist.AllreduceOptions()
            options.asyncOp = True
            return self._group.allreduce([share], options)
        finally:
            current.reduces = before

    def divided(self, bucket: torch.Tensor) -> torch.Tensor:
        """A bucket's share in the mean over ranks, in its own memory.

        Raises:
            PacelineError: there were gradients before, and the pass did not begin at an output.
        """
        if self._by_bucket is None and not self._hooked:
            self._by_bucket = self._reduces and self._fresh
            if not self._by_bucket:
                raise PacelineError(_NO_OUTPUT)
        weight = self.current.weight if self._by_bucket else 1.0
        if weight == 0:
            return bucket.zero_()
        if weight == 1:  # bit by bit as DDP divides
            return bucket.div_(self.current.world)
        return bucket.mul_(weight / self.current.world)

    def end(self) -> None:
        """The pass's last bucket was divided."""
        self._reduces, self._by_bucket, self._waits = False, None, False
        self._reducing = False

    def _begins(self, _: Any) -> None:
        """A backward pass has come to an output."""
        if not self._in_buckets():
            self._hook()

    def _hook(self) -> None:
        if self._hooked:
            return
        self._hooked = True
        for parameter in self._parameters:
            # Not the parameter itself: a cycle would stay.
            hook = partial(self._arrives, id(parameter))
            trains = parameter.requires_grad  # a frozen one takes no hook, and may be trained again
            parameter.requires_grad_(True)
            parameter.register_hook(hook)  # type: ignore[no-untyped-call]
            parameter.requires_grad_(trains)

    def _arrives(self, parameter: int, gradient: torch.Tensor) -> torch.Tensor:
        """Called with a parameter's new gradient; returns what is added to ``.grad``."""
        if self.current.rehearsal is not None or self._in_buckets():
            return gradient
        running = self.current.running
        if self._local and running is not None:
            running.gradients_kept()
        return self.current.summed(parameter, gradient)

    def _in_buckets(self) -> bool:
        """Whether this pass's gradients are weighed in their buckets; asked before any of them."""
        if self._by_bucket is None:
            self._by_bucket = (
                self._reduces and not self.current.accumulates and self._without_gradients()
            )
        return self._by_bucket

    def _without_gradients(self) -> bool:
        return all(parameter.grad is None for parameter in self._parameters)


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """The tensors among what a model gives, as DistributedDataParallel finds them."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, (list, tuple)):
        for each in outputs:
            yield from _tensors(each)
    elif isinstance(outputs, Mapping):
        yield from _tensors(list(outputs.values()))
    elif is_dataclass(outputs) and not isinstance(outputs, type):
        yield from _tensors([getattr(outputs, field.name, None) for field in fields(outputs)])


def _mean(
    weighing: _Weighing,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[torch.Tensor]:
    """The communication hook: the mean over ranks of the weighed gradients, as DDP's own hook."""
    current = weighing.current
    running, last = current.running, bucket.is_last()
    weighing.begin_reduction()
    if last and running is not None:
        running.gradients_ready()
    share = weighing.divided(bucket.buffer())
    if last:
        weighing.end()
    work = weighing.all_reduce(share)

    def reduced(future: Future[list[torch.Tensor]]) -> torch.Tensor:
        if last and running is not None:
            running.reduced()
        try:
            return future.value()[0]
        except RuntimeError as error:
            raise current.explained(error) from error

    result: Future[torch.Tensor] = work.get_future().then(reduced)
    return result


class WeightedDDP(DistributedDataParallel):
    """DistributedDataParallel that weighs each rank's gradient. `Session.wrap` makes it.

    Where gradients accumulate in ``.grad``, in `no_sync` or over several steps, each is weighed
    before it is added there. Otherwise they are weighed with their bucket.
    """

    def __init__(self, module: nn.Module, current: CurrentStep, **options: Any) -> None:
        size = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        if size <= _SMALL_BYTES and "bucket_cap_mb_list" not in options:
            options.setdefault("bucket_cap_mb", _SMALL_BYTES >> 20)
        super().__init__(module, **options)
        if not options.keys() & {"broadcast_buffers", "forward_sync_buffers"}:
            # Buffers are equal at the start. Sending them in every step would blur compute times.
            self.broadcast_buffers = False
        self._current = current
        parameters = [p for p in module.parameters() if p.requires_grad]
        current.reduced |= {id(p) for p in parameters}
        self._weighing = _Weighing(current, parameters, self.process_group, current.models)
        current.models += 1
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad and current.world > 1:
                refuse = partial(_refuse_gradient, current, name, id(parameter))
                _hook_frozen(parameter, refuse)
        super().register_comm_hook(self._weighing, _mean)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Refused: DistributedDataParallel asks its module for it when it is made.

        Raises:
            PacelineError: always. The outer reducer would put the plain mean over ranks in place of
                the weighted one.
        """
        raise PacelineError(
            "session.wrap has wrapped this model, and DistributedDataParallel around it would "
            "reduce its gradients once more, without their weights: leave DistributedDataParallel "
            "out, and what makes it, such as prepare_model of Ray Train"
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        if (rehearsal := self._current.rehearsal) is not None:
            filler = self._current.filler
            uncount = uncounted(self.module, self._current) if filler else contextlib.nullcontext()
            with rehearsal.forward(self), uncount:
                return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        if not torch.is_grad_enabled():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        self._current.forward()
        self._weighing.begin(self.require_backward_grad_sync)
        # A compiled model takes fillers in: the buffers' copies would break its graph.
        if self._current.filler and not torch.compiler.is_compiling():
            with uncounted(self.module, self._current):
                outputs = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        else:
            outputs = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        self._weighing.watch(outputs)
        return outputs

    def reduce(self, reduces: bool) -> None:
        """Sets whether backward passes reduce gradients or keep them here. Between steps."""
        self.require_backward_grad_sync = reduces

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients on this rank; the next backward pass outside reduces all of them.

        Raises:
            ValueError: with ``static_graph=True``, where PyTorch's reducer fails, or with
                ``Session(micro_batches=True)``, which accumulates by itself.
        """
        if self._current.accumulates:
            raise ValueError(
                "no_sync() and Session(micro_batches=True) do not go together: give Session a "
                "larger global_batch instead, and let it accumulate"
            )
        with self.unreduced():
            yield

    @contextlib.contextmanager
    def unreduced(self) -> Iterator[None]:
        """Keeps gradients on this rank.

        Raises:
            ValueError: with ``static_graph=True``.
        """
        if self.static_graph:
            raise ValueError("no_sync() needs static_graph=False: PyTorch's reducer cannot do both")
        with super().no_sync():
            yield

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Refused: DDP takes one hook, and Paceline reduces gradients in it.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "Paceline reduces weighted gradients in DDP's communication hook, and DDP takes only "
            "one: register none"
        )

    def join(self, *_: Any, **__: Any) -> Any:
        """Refused: no rank runs out of batches before the others.

        Raises:
            ValueError: always.
        """
        raise ValueError("Paceline's loader ends on all ranks together: leave join() out")


class SingleProcess(nn.Module):
    """What `Session.wrap` returns in a single process: `WeightedDDP` without its work."""

    static_graph = False

    def __init__(self, module: nn.Module, current: CurrentStep) -> None:
        super().__init__()
        self.module = module

        def computed(_: torch.Tensor) -> None:
            """Marks the end of computing: the last gradient of the step overwrites the mark."""
            if current.running is not None:
                current.running.gradients_kept()

        def arrives(parameter: int, gradient: torch.Tensor) -> torch.Tensor:
            running = current.running
            if running is None or running.step.share == 1.0:
                return gradient
            return current.summed(parameter, gradient)

        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(arrives, id(parameter)))  # type: ignore[no-untyped-call]
                parameter.register_post_accumulate_grad_hook(computed)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        return self.module(*inputs, **kwargs)

    def reduce(self, reduces: bool) -> None:
        """Does nothing: there is no other rank."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Does nothing: there is no other rank."""
        return contextlib.nullcontext()

    unreduced = no_sync


def wrap(
    model: nn.Module, current: CurrentStep, options: dict[str, Any]
) -> WeightedDDP | SingleProcess:
    """The wrapper that a model needs here.

    Args:
        model: the script's.
        current: the current step of the session.
        options: of DistributedDataParallel.
    """
    if current.world == 1 and not dist.is_initialized():
        return SingleProcess(model, current)
    return WeightedDDP(model, current, **options)


def trained(models: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters of wrapped models that are trained, in the same order on all ranks."""
    return [p for model in models for p in model.parameters() if p.requires_grad]
