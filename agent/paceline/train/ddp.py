"""DistributedDataParallel with weighted gradients, correct for uneven and for empty local batches.

Rank j has n_j samples of total size Λ_j, and g_j is the gradient of its mean loss. The update is
Σ_j w_j g_j with w_j = n_j/Σn or Λ_j/ΣΛ (CHRONICA Alg. 4, Eq. 7): the mean gradient over the global
batch, as a single process would compute it. With `loss_mean="ranks"`, w_j = 1/M. Ranks compute this
sum as the mean of M w_j g_j over the M ranks. A reduced gradient is equal on all ranks. So if a
script adds new gradients to it, and the sum is reduced again, the mean over ranks does not change
the part that was reduced before.
"""

# No `from __future__ import annotations`: DDP checks the hook's annotations, but rejects strings.

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
    "has stepped in the same iteration of the loop: compute all gradients of an optimiser's "
    "parameters before its step, and freeze a model (requires_grad_(False)) while its outputs "
    "train another model"
)

_NO_OUTPUT = (
    "a loss does not depend on the outputs of the model that session.wrap() returned, and "
    "parameters had gradients before the backward pass: call zero_grad() before the forward pass, "
    "or compute the loss from the model's outputs"
)

_FROZEN = (
    "{name} was frozen when session.wrap() wrapped its model, and now has a gradient, which would "
    "not be reduced: make it trainable (requires_grad_(True)) before session.wrap(model, "
    "find_unused_parameters=True), and freeze it afterwards"
)

# A model whose trainable parameters take at most this many bytes gets a single gradient bucket. One
# bucket took 7.7 ms in a measurement, three buckets 13.9 ms.
_SMALL_BYTES = 25 << 20


class TrialHooks(Protocol):
    """A trial (`paceline.train.proof`), as wrapped models and the gate call it."""

    def forward(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context for a forward pass of a wrapped model."""

    def stepping(self, optimiser: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> None:
        """Note that an optimiser is about to step, perhaps with a closure."""


class CurrentStep:
    """Current step of this rank, and the weight of its gradients.

    With `accumulates`, gradients of micro-batches are added up; see `Session`. `world` is the
    number of ranks that have batches of their own, and `group` is their process group; None: the
    default group.
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
        # The step that this rank is in; None outside the loop over the loader. `enter` sets it.
        self.running: RunningStep | None = None
        # True if this rank's batch is a filler. Compiled models read this attribute.
        self.filler = False
        # If False, gradients are not weighted: they stay means over each rank's own batch.
        self.weighs = True
        # True during a collective that Paceline itself calls, not the script.
        self.reduces = False
        # The `id`s of parameters whose gradients a wrapped model reduces.
        self.reduced = set[int]()
        # Weighted gradients of the step's micro-batches so far, by the parameter's id. These
        # gradients are not in ``.grad``, which scripts set to zero before or after each step of
        # their optimiser.
        self.kept: dict[int, torch.Tensor] = {}
        # `reducing` is called with the step and the index of a wrapped model, before the first
        # reduction of a backward pass. `explained` is called with the error of a failed reduction,
        # and returns the error to raise.
        self.reducing: Callable[[RunningStep, int], None] = lambda running, model: None
        self.explained: Callable[[Exception], Exception] = lambda error: error
        # Function that is called before each forward pass with gradients enabled.
        self.forward: Callable[[], None] = lambda: None
        self.models = 0
        # The running trial of `paceline.train.proof`; None if there is none.
        self.rehearsal: TrialHooks | None = None
        # The `id`s of parameters that an optimiser has stepped in this iteration of the loop.
        self.stepped_parameters: set[int] = set()
        self.parameters: Callable[[], Iterable[nn.Parameter]] = list

    def enter(self, running: RunningStep | None) -> None:
        """Set the step that this rank is in; None: it has left the loop over the loader."""
        self.running = running
        self.filler = running is not None and not running.step.indices

    @contextlib.contextmanager
    def own_collective(self) -> Iterator[None]:
        """Mark the collectives in this context as called by Paceline, not by the script."""
        before, self.reduces = self.reduces, True
        try:
            yield
        finally:
            self.reduces = before

    @property
    def weight(self) -> float:
        """Return the factor by which this rank's gradients enter the mean over ranks.

        The factor is 1 for a local batch of the ranks' mean size, and 0 for a filler. If `weighs`
        is False, the factor is only the micro-batch's weight in the mean over this rank's batch.
        """
        if self.running is None:
            return 1.0
        step = self.running.step
        if not step.indices:
            return 0.0
        return step.weight * self.world if self.weighs else step.share

    def weighed(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a local gradient times the factor `weight`."""
        if self.rehearsal is not None:
            return gradient
        weight = self.weight
        # Do not multiply by 0: a filler's gradient may be NaN, and 0 · NaN is NaN.
        if weight == 0:
            return torch.zeros_like(gradient)
        return gradient if weight == 1 else gradient * weight

    def summed(self, parameter: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient to add to ``.grad``; it is zero before a step's last micro-batch.

        Raises:
            PacelineError: the parameter's optimiser has already stepped in this iteration of the
                loop. It is unknown whether the script then calls `zero_grad`, which would erase
                the gradient.
        """
        weighed = self.weighed(gradient)
        if self.running is None or self.rehearsal is not None:
            return weighed
        step = self.running.step
        if step.more and parameter in self.stepped_parameters:
            raise PacelineError(_GRADIENT_AFTER.format(step=step.step))
        kept = self.kept.pop(parameter, None)
        if kept is not None:
            weighed = weighed + kept
        if step.more:
            self.kept[parameter] = weighed
            return torch.zeros_like(weighed)
        # Earlier micro-batches may have used parameters that this micro-batch does not use. The
        # kept gradients of such parameters are added at the end of this backward pass.
        if self.kept:
            torch.autograd.Variable._execution_engine.queue_callback(self.add_kept)
        return weighed

    def add_kept(self) -> None:
        """Add the gradients in `kept` to parameters that the last micro-batch did not use."""
        if not self.kept:
            return
        for parameter in self.parameters():
            kept = self.kept.pop(id(parameter), None)
            if kept is not None:
                parameter.grad = kept if parameter.grad is None else parameter.grad.add_(kept)


def _hook_frozen(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> None:
    # Parameters of other types, such as integers, have no gradients.
    if parameter.is_floating_point() or parameter.is_complex():
        parameter.requires_grad_(True)
        parameter.register_hook(hook)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(False)


def _refuse_gradient(current: CurrentStep, name: str, parameter: int, _: torch.Tensor) -> None:
    if current.running is not None and parameter not in current.reduced:
        raise PacelineError(_FROZEN.format(name=name))


class _Weighing:
    """Weighting of one model's gradients in a backward pass.

    Gradients are weighted in one of two places. If a parameter has a gradient from an earlier
    pass, a hook of the parameter weights the new gradient before autograd adds it. Otherwise the
    communication hook weights a whole bucket, with one operation instead of one per parameter.

    The choice can be made only when a backward pass begins, because scripts set gradients to None
    before or after the forward pass. A parameter's hook takes 2 to 4 µs in the script's thread, as
    much as a small layer, so parameters get their hooks only in the first pass that needs them. If
    parameters have gradients when a forward pass begins, or two forward passes follow each other, a
    hook on the outputs detects the start of the backward pass.
    """

    def __init__(
        self,
        current: CurrentStep,
        parameters: list[nn.Parameter],
        group: dist.ProcessGroup,
        model: int,
        *,
        reduces_more: bool,
    ) -> None:
        self.current, self.model = current, model
        # True if DDP starts another reduction after that of the last bucket, in the same pass.
        self.reduces_more = reduces_more
        # The newest bucket whose reduction the script's thread waited for, and a completed future
        # whose value is that bucket.
        self._waited: tuple[torch.Tensor, Future[torch.Tensor]] | None = None
        self.reducing = False
        self._group = group
        # Options of a reduction that does not block. Each reduction copies the options, so this
        # object can be reused.
        self._options = dist.AllreduceOptions()
        self._options.asyncOp = True
        self._parameters = parameters
        self._reduces = False
        # True if gradients of the newest forward pass stay on this rank.
        self._local = False
        # True if no parameter had a gradient when the newest forward pass began.
        self._fresh = True
        # True from the start of a forward pass until its backward pass has reduced all gradients.
        self._in_pass = False
        # True if only the start of the next backward pass shows whether gradients must be weighted
        # by parameter or by bucket.
        self.open = False
        # True if this backward pass's gradients are weighted by bucket; None: not decided yet.
        self._by_bucket: bool | None = None
        self._hooked = False
        if current.accumulates:
            self._hook()

    def begin(self, reduces: bool) -> None:
        self._reduces, self._local, self._by_bucket = reduces, not reduces, None
        if self._hooked:
            return
        if not reduces:
            self._hook()
            return
        self._fresh = self._without_gradients()
        self.open, self._in_pass = self._in_pass or not self._fresh, True

    def watch(self, outputs: Any) -> None:
        """Add hooks to the outputs of the forward pass, because the backward pass begins there."""
        if self._hooked:
            return
        nodes = [output.grad_fn for output in _tensors(outputs) if output.grad_fn is not None]
        for node in nodes:
            node.register_prehook(self._begins)
        if not nodes:
            self._hook()

    def all_reduce(self, bucket: torch.Tensor) -> dist.Work:
        """Start a sum over ranks without `dist.all_reduce`, whose checks take 20 to 40 µs."""
        current = self.current
        # These lines replace `own_collective`, whose context manager would take 3 µs.
        before, current.reduces = current.reduces, True
        try:
            # `dist.all_reduce` views complex numbers as pairs of real ones, because not every
            # backend can add complex numbers.
            if bucket.is_complex():
                work: dist.Work | None = dist.all_reduce(bucket, group=self._group, async_op=True)
                assert work is not None
                return work
            return self._group.allreduce([bucket], self._options)
        finally:
            current.reduces = before

    def divided(self, bucket: torch.Tensor) -> torch.Tensor:
        """Scale a bucket in place, so that its sum over ranks is the weighted mean."""
        if self._by_bucket is None and not self._hooked:
            self._by_bucket = self._reduces and self._fresh
            if not self._by_bucket:
                raise PacelineError(_NO_OUTPUT)
        weight = self.current.weight if self._by_bucket else 1.0
        # Divide exactly as DDP does, so that results are bitwise equal to DDP's.
        if weight == 1:
            return bucket.div_(self.current.world)
        if weight == 0:
            return bucket.zero_()
        return bucket.mul_(weight / self.current.world)

    def end(self) -> None:
        self._reduces, self._by_bucket, self._in_pass = False, None, False
        self.reducing = False

    def completed(self, bucket: torch.Tensor) -> Future[torch.Tensor]:
        # DDP reuses a bucket's tensor in each step, so most steps need no new future.
        if self._waited is None or self._waited[0] is not bucket:
            self._waited = bucket, Future()
            self._waited[1].set_result(bucket)
        return self._waited[1]

    def _begins(self, _: Any) -> None:
        if not self._in_buckets():
            self._hook()

    def _hook(self) -> None:
        if self._hooked:
            return
        self._hooked = True
        for parameter in self._parameters:
            # Give the hook only the parameter's `id`, because a reference to the parameter would
            # form a cycle.
            hook = partial(self._arrives, id(parameter))
            # PyTorch accepts no hook on a frozen parameter, but the script may unfreeze the
            # parameter later. So unfreeze it while the hook is registered.
            trains = parameter.requires_grad
            parameter.requires_grad_(True)
            parameter.register_hook(hook)  # type: ignore[no-untyped-call]
            parameter.requires_grad_(trains)

    def _arrives(self, parameter: int, gradient: torch.Tensor) -> torch.Tensor:
        if self.current.rehearsal is not None or self._in_buckets():
            return gradient
        running = self.current.running
        if self._local and running is not None:
            running.gradients_kept()
        return self.current.summed(parameter, gradient)

    def _in_buckets(self) -> bool:
        """Return whether gradients are weighted by bucket; the pass's first gradient decides."""
        if self._by_bucket is None:
            self._by_bucket = (
                self._reduces and not self.current.accumulates and self._without_gradients()
            )
        return self._by_bucket

    def _without_gradients(self) -> bool:
        # Use a loop, because each step runs this code, and a generator expression would take twice
        # as long.
        for parameter in self._parameters:  # noqa: SIM110
            if parameter.grad is not None:
                return False
        return True


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a model's output, as DistributedDataParallel finds them."""
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
    """Start the mean over ranks of a bucket's weighted gradients, as DDP's communication hook."""
    current = weighing.current
    running, last = current.running, bucket.is_last()
    if not weighing.reducing:
        weighing.reducing = True
        if running is not None:
            current.reducing(running, weighing.model)
    if last and running is not None:
        running.gradients_ready()
    buffer = weighing.divided(bucket.buffer())
    if last:
        weighing.end()
    work = weighing.all_reduce(buffer)
    # DDP waits for the reductions right after the last bucket, so this thread can wait here. A
    # callback would take longer: gloo's thread would need the GIL to run it, and would then wake
    # this thread. Do not wait for a GPU, because the host can continue while the GPU works. With
    # several models, do not wait either, because the backward pass may continue in another model.
    waits = last and current.models == 1 and not weighing.reduces_more and buffer.is_cpu
    if waits and running is not None:
        try:
            work.wait()
        except RuntimeError as error:
            running.reduced()
            raise current.explained(error) from error
        running.reduced()
        return weighing.completed(buffer)

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
    """DistributedDataParallel that weights each rank's gradient. `Session.wrap` makes it."""

    def __init__(self, module: nn.Module, current: CurrentStep, **options: Any) -> None:
        size = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        if size <= _SMALL_BYTES and "bucket_cap_mb_list" not in options:
            options.setdefault("bucket_cap_mb", _SMALL_BYTES >> 20)
        super().__init__(module, **options)
        if not options.keys() & {"broadcast_buffers", "forward_sync_buffers"}:
            # Do not broadcast buffers: they are equal at the start, and a broadcast in each step
            # would distort compute times.
            self.broadcast_buffers = False
        self._current = current
        parameters = [p for p in module.parameters() if p.requires_grad]
        current.reduced |= {id(p) for p in parameters}
        self._weighing = _Weighing(
            current,
            parameters,
            self.process_group,
            current.models,
            reduces_more=self.find_unused_parameters,
        )
        current.models += 1
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad and current.world > 1:
                refuse = partial(_refuse_gradient, current, name, id(parameter))
                _hook_frozen(parameter, refuse)
        super().register_comm_hook(self._weighing, _mean)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Refuse DistributedDataParallel, which reads this attribute of the module it wraps."""
        raise PacelineError(
            "session.wrap has already wrapped this model, and DistributedDataParallel around it "
            "would reduce its gradients again, unweighted: remove DistributedDataParallel, and any "
            "call that adds it, such as Ray Train's prepare_model"
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        if (rehearsal := self._current.rehearsal) is not None:
            filler = self._current.filler
            uncount = uncounted(self.module, self._current) if filler else contextlib.nullcontext()
            with rehearsal.forward(self), uncount:
                return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        if not torch.is_grad_enabled():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        self._current.forward()
        self._weighing.begin(self.require_backward_grad_sync)
        # Fillers do change a compiled model's buffers, because copying the buffers would cause a
        # graph break.
        if self._current.filler and not torch.compiler.is_compiling():
            with uncounted(self.module, self._current):
                outputs = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        else:
            outputs = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        if self._weighing.open:
            self._weighing.watch(outputs)
        return outputs

    def reduce(self, reduces: bool) -> None:
        """Set whether backward passes reduce gradients or leave them local. Call between steps."""
        self.require_backward_grad_sync = reduces

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank; the first backward pass after that reduces them.

        Raises:
            ValueError: with ``static_graph=True``, where PyTorch's reducer fails, or with
                ``Session(micro_batches=True)``, which accumulates automatically.
        """
        if self._current.accumulates:
            raise ValueError(
                "no_sync() and Session(micro_batches=True) cannot be combined: give Session a "
                "larger global_batch instead, and let it accumulate"
            )
        with self.unreduced():
            yield

    @contextlib.contextmanager
    def unreduced(self) -> Iterator[None]:
        """Keep gradients on this rank; raise a ValueError with ``static_graph=True``."""
        if self.static_graph:
            raise ValueError(
                "PyTorch's reducer cannot combine no_sync() with static_graph=True: leave "
                "no_sync() out, or call session.wrap(model, static_graph=False)"
            )
        with super().no_sync():
            yield

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Raise a ValueError: DDP accepts only one hook, and Paceline reduces gradients in it."""
        raise ValueError(
            "Paceline reduces weighted gradients in DDP's communication hook, and DDP allows only "
            "one: do not register another"
        )

    def join(self, *_: Any, **__: Any) -> Any:
        """Raise a ValueError: no rank runs out of batches before the others."""
        raise ValueError("Paceline's loader ends on all ranks together: leave join() out")


class SingleProcess(nn.Module):
    """Wrapper that `Session.wrap` returns in a single process, where there is nothing to reduce."""

    static_graph = False

    def __init__(self, module: nn.Module, current: CurrentStep) -> None:
        super().__init__()
        self.module = module

        def computed(_: torch.Tensor) -> None:
            """Record the time of a gradient, because computing ends with the last gradient."""
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
        """Run the module's forward pass."""
        return self.module(*inputs, **kwargs)

    def reduce(self, reduces: bool) -> None:
        """Do nothing: there is no other rank."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: there is no other rank."""
        return contextlib.nullcontext()

    unreduced = no_sync


def wrap(
    model: nn.Module, current: CurrentStep, options: dict[str, Any]
) -> WeightedDDP | SingleProcess:
    """Wrap a model, for one or several processes; DistributedDataParallel gets the `options`."""
    if current.world == 1 and not dist.is_initialized():
        return SingleProcess(model, current)
    return WeightedDDP(model, current, **options)


def trained(models: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the trainable parameters of wrapped models, in the same order on all ranks."""
    return [p for model in models for p in model.parameters() if p.requires_grad]
