"""DistributedDataParallel with weighted gradients, right for uneven and for empty local batches.

The update is Σ_j w_j g_j with w_j = n_j/Σn or Λ_j/ΣΛ (CHRONICA Alg. 4, Eq. 7): the mean gradient
over the global batch, as one process would compute it.
"""

# No `from __future__ import annotations`: DDP checks the hook's annotations and takes no strings.

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from paceline.timing import RunningStep

_SMALL_BYTES = 25 << 20  # up to here one bucket: three took 13.9 ms where one took 7.7

_REFUSED = {
    "process_group": "gradients are weighted over all ranks: leave it out",
    "device_mesh": "gradients are weighted over all ranks: leave it out",
    "delay_all_reduce_named_params": "these gradients would not be weighted: leave it out",
    "param_to_hook_all_reduce": "these gradients would not be weighted: leave it out",
    "mixed_precision": "it needs a communication hook of its own: use torch.autocast",
}


class Now:
    """The step that this rank is in; None outside the loader's loop."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.step: RunningStep | None = None
        self.weighs = True  # False: ranks step by themselves, with their own batches' means

    def weigh(self, gradient: torch.Tensor) -> None:
        """Scales a local gradient in place by this rank's weight."""
        if self.step is None:
            gradient.div_(self.world)
        elif self.step.plan.samples == 0:
            gradient.zero_()  # 0 · NaN is NaN, and a filler's gradient may be anything
        elif self.weighs:
            gradient.mul_(self.step.plan.weight)


class _Reduction:
    """What the communication hook needs."""

    def __init__(self, now: Now) -> None:
        self.now = now
        self.aside: dict[
            nn.Parameter, torch.Tensor
        ] = {}  # weighted sums of earlier backward passes


def _reduce_weighted(
    state: _Reduction,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[torch.Tensor]:
    """The communication hook: weighs, adds what was accumulated, sums over ranks."""
    step = state.now.step
    state.now.weigh(bucket.buffer())
    if state.aside:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter in state.aside:
                gradient.add_(state.aside[parameter])
    last = bucket.is_last()
    if last:
        state.aside.clear()
        if step is not None:
            step.gradients_ready()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None

    def reduced(future: Future[list[torch.Tensor]]) -> torch.Tensor:
        if last and step is not None:
            step.reduced()
        return future.value()[0]

    result: Future[torch.Tensor] = work.get_future().then(reduced)
    return result


class WeightedDDP(DistributedDataParallel):
    """DistributedDataParallel that weighs each rank's gradient. Made by `Session.wrap`.

    After `no_sync`, ``.grad`` holds this rank's *weighted* sum so far. The next backward pass must
    not weigh it again, so it is set aside while one runs, and not sooner: until the backward pass
    ``zero_grad`` discards it as in DDP.
    """

    def __init__(self, module: nn.Module, now: Now, **options: Any) -> None:
        size = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        if size <= _SMALL_BYTES and "bucket_cap_mb_list" not in options:
            options.setdefault("bucket_cap_mb", _SMALL_BYTES >> 20)
        super().__init__(module, **options)
        if not options.keys() & {"broadcast_buffers", "forward_sync_buffers"}:
            # They are equal at the start. Sent before every step they would blur compute times.
            self.broadcast_buffers = False
        self._now = now
        self._reduces = True
        self._local = False  # gradients of the newest forward pass stay on this rank
        self._raw = False  # .grad holds unweighted gradients of the current step
        self._partial = False  # .grad holds this rank's weighted sum, not reduced yet
        self._reduction = _Reduction(now)
        super().register_comm_hook(self._reduction, _reduce_weighted)
        for parameter in self._parameters_with_gradient():  # hooks run before .grad changes
            parameter.register_hook(self._arrives)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        if torch.is_grad_enabled():
            self.settle()
            self._local = not self.require_backward_grad_sync
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def reduce(self, reduces: bool) -> None:
        """Whether backward passes reduce gradients; else they stay on this rank, weighted.

        Between steps only; what was accumulated is lost when it changes.
        """
        if reduces != self._reduces:
            self._reduces = self.require_backward_grad_sync = reduces
            self.applied()

    def applied(self) -> None:
        """What ``.grad`` holds has been used up: the next backward pass begins anew."""
        self._raw = self._partial = False
        self._reduction.aside.clear()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward passes accumulate on this rank; the next one outside reduces all.

        Raises:
            ValueError: with ``static_graph=True``, where PyTorch's reducer fails.
        """
        if self.static_graph:
            raise ValueError("no_sync() needs static_graph=False: PyTorch's reducer takes not both")
        with super().no_sync():
            try:
                yield
            finally:
                if self._raw and self._now.step is not None:
                    self._now.step.gradients_kept()
                self.settle()

    def settle(self) -> None:
        """Weighs what was accumulated in the current step; called before it changes, too."""
        aside = self._reduction.aside
        if not self._raw and not aside:
            return
        for parameter in self._parameters_with_gradient():
            total = aside.pop(parameter, None)
            if self._raw and parameter.grad is not None:
                # A new tensor: the old one may be a view of DDP's bucket, which is written again.
                gradient = parameter.grad.clone()
                self._now.weigh(gradient)
                total = gradient if total is None else total.add_(gradient)
            parameter.grad = total
        self._raw, self._partial = False, True

    def _arrives(self, _: torch.Tensor) -> None:
        """A backward pass has computed a gradient."""
        if self._partial:
            self._set_aside()
        if self._local:  # also where the backward pass runs after `no_sync`: so does DDP
            self._raw = True

    def _set_aside(self) -> None:
        for parameter in self._parameters_with_gradient():
            if parameter.grad is not None:
                self._reduction.aside[parameter] = parameter.grad
                # Looking for unused parameters, DDP wants a gradient wherever it saw a use before.
                keep = self.find_unused_parameters
                parameter.grad = torch.zeros_like(parameter.grad) if keep else None
        self._partial = False

    def _parameters_with_gradient(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Refused: the hook that weighs gradients is the only one.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "Paceline weighs gradients in DDP's communication hook, and DDP takes only one: "
            "register none"
        )

    def join(self, *_: Any, **__: Any) -> Any:
        """Refused: no rank runs out of batches before the others.

        Raises:
            ValueError: always.
        """
        raise ValueError("Paceline's loader ends on all ranks at the same step: leave join() out")


class Alone(nn.Module):
    """What `Session.wrap` returns in a single process: DDP's face without its work."""

    def __init__(self, module: nn.Module, now: Now) -> None:
        super().__init__()
        self.module = module

        def computed(_: torch.Tensor) -> None:
            """The step's last gradient ends its computing, as a reduction would."""
            if now.step is not None:
                now.step.gradients_kept()

        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(computed)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        return self.module(*inputs, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Does nothing: there is nobody to synchronise with."""
        return contextlib.nullcontext()


def check(module: nn.Module, batchnorm: str | None, options: dict[str, Any]) -> None:
    """Refuses what would give wrong gradients.

    Raises:
        ValueError: the message names the layer or option and what to do instead.
    """
    if batchnorm not in (None, "local"):
        raise ValueError(f"batchnorm={batchnorm!r}: give 'local', or leave it out")
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise ValueError(
                f"{name or 'the model'} is a SyncBatchNorm: its backward pass mixes the ranks' "
                "gradients before they are weighted, so uneven batches would train wrongly; "
                "use GroupNorm or LayerNorm, or BatchNorm with wrap(model, batchnorm='local')"
            )
        if isinstance(layer, _BatchNorm) and batchnorm is None:
            raise ValueError(
                f"{name or 'the model'} is a {type(layer).__name__}: its statistics are of the "
                "local batch, whose size Paceline changes, so training differs from one process; "
                "use GroupNorm or LayerNorm, or accept that with wrap(model, batchnorm='local')"
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise ValueError(
                f"{name or 'the model'} has sparse gradients, which Paceline does not weigh: "
                "use sparse=False"
            )
    for option, reason in _REFUSED.items():
        if options.get(option) is not None:
            raise ValueError(f"wrap(..., {option}=…) is refused: {reason}")
