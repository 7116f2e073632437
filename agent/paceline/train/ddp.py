"""DistributedDataParallel with weighted gradients, right for uneven and for empty local batches.

The update is Σ_j w_j g_j with w_j = n_j/Σn or Λ_j/ΣΛ (CHRONICA Alg. 4, Eq. 7): the mean gradient
over the global batch, as one process would compute it. Here as the mean over ranks of M w_j g_j:
what was reduced before, alike on all ranks, stays as it is when more is added and reduced.
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

from paceline.train.timing import RunningStep

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
        self.wrapped = False  # the session has a model, whose gradients it weighs
        self.weighs = True  # False: ranks step by themselves, with their own batches' means

    def weighed(self, gradient: torch.Tensor) -> torch.Tensor:
        """A local gradient times this rank's weight, relative to an equal part's."""
        if self.step is None:
            return gradient
        if self.step.plan.samples == 0:  # 0 · NaN is NaN, and a filler's gradient may be anything
            return torch.zeros_like(gradient)
        return gradient * (self.step.plan.weight * self.world) if self.weighs else gradient


def _mean(
    now: Now,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[torch.Tensor]:
    """The communication hook: the mean over ranks of what has been weighed, as DDP's own."""
    step, last = now.step, bucket.is_last()
    if last and step is not None:
        step.gradients_ready()
    work = dist.all_reduce(bucket.buffer().div_(now.world), async_op=True)
    assert work is not None

    def reduced(future: Future[list[torch.Tensor]]) -> torch.Tensor:
        if last and step is not None:
            step.reduced()
        return future.value()[0]

    result: Future[torch.Tensor] = work.get_future().then(reduced)
    return result


class WeightedDDP(DistributedDataParallel):
    """DistributedDataParallel that weighs each rank's gradient. Made by `Session.wrap`.

    Each parameter's gradient is weighed before it is added to ``.grad``, so what accumulates there,
    in `no_sync` or over several steps, needs no more weighing.
    """

    def __init__(self, module: nn.Module, now: Now, **options: Any) -> None:
        size = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        if size <= _SMALL_BYTES and "bucket_cap_mb_list" not in options:
            options.setdefault("bucket_cap_mb", _SMALL_BYTES >> 20)
        super().__init__(module, **options)
        if not options.keys() & {"broadcast_buffers", "forward_sync_buffers"}:
            # They are equal at the start. Sent before every step they would blur compute times.
            self.broadcast_buffers = False
        now.wrapped = True
        self._now = now
        self._local = False  # gradients of the newest forward pass stay on this rank
        super().register_comm_hook(now, _mean)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._arrives)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        if torch.is_grad_enabled():
            self._local = not self.require_backward_grad_sync
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def reduce(self, reduces: bool) -> None:
        """Whether backward passes reduce gradients; else they stay on this rank. Between steps."""
        self.require_backward_grad_sync = reduces

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward passes accumulate on this rank; the next one outside reduces all.

        Raises:
            ValueError: with ``static_graph=True``, where PyTorch's reducer fails.
        """
        if self.static_graph:
            raise ValueError("no_sync() needs static_graph=False: PyTorch's reducer takes not both")
        with super().no_sync():
            yield

    def _arrives(self, gradient: torch.Tensor) -> torch.Tensor:
        """A backward pass has computed a parameter's gradient; what is added to ``.grad``."""
        if self._local and self._now.step is not None:
            self._now.step.gradients_kept()
        return self._now.weighed(gradient)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Refused: the hook that reduces gradients is the only one.

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
        raise ValueError("Paceline's loader ends on all ranks at the same step: leave join() out")


class Alone(nn.Module):
    """What `Session.wrap` returns in a single process: DDP's face without its work."""

    def __init__(self, module: nn.Module, now: Now) -> None:
        super().__init__()
        now.wrapped = True
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
