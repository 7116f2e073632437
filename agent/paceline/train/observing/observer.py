"""Takes what patched functions see in a process, and ends observing where anything goes wrong."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline import observation
from paceline.train.observing.batches import size_of
from paceline.train.observing.recorder import Recorder
from paceline.train.telling.metrics import Value

logger = logging.getLogger(__name__)

_HOOKED = 16  # parameters of a model that tell that a backward pass has begun
# Far above what a step has: under FSDP2 about 6 of each group of parameters and micro-batch.
_MOST_SPANS = 20_000


def _guarded(method: Any) -> Any:
    """A method that does nothing once observing has ended, and ends it instead of raising."""

    @wraps(method)
    def call(self: Observer, *args: Any, **kwargs: Any) -> None:
        if self.over or os.getpid() != self.pid:
            return
        if _captures():
            self.end("the script captures a CUDA graph, which runs without what is observed")
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.end(error)

    return call


class Observer:
    """What one process tells of its training. Without a wrapped model it tells nothing."""

    def __init__(self) -> None:
        self.pid = os.getpid()  # a forked child is not observed
        self.over = False
        self._recorder: Recorder | None = None
        self._thread = 0  # that trains
        self._parameters: set[int] = set()  # of observed models, by id
        self._leading: weakref.ref[torch.optim.Optimizer] | None = None  # whose steps are counted
        self._others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._in_backward = False
        self._loss = ""  # the name of the loss that is reported

    def end(self, why: Exception | str) -> None:
        """Ends observing in this process; training goes on."""
        self.over = True
        trace = why if isinstance(why, Exception) else None
        logger.warning("this process is not observed any more: %s", why, exc_info=trace)

    @_guarded
    def wrapped(self, model: nn.Module) -> None:
        """DistributedDataParallel wraps a model."""
        trained = [each for each in model.parameters() if each.requires_grad]
        if not trained:
            return
        self._begin(trained, trained[0].device)
        step = max(1, len(trained) // _HOOKED)
        for parameter in trained[::step]:
            if parameter.is_leaf:
                watched: Any = parameter
                watched.register_post_accumulate_grad_hook(self.backward_began)

    @_guarded
    def sharded(self, group: Any) -> None:
        """FSDP2 shards a group of parameters, its `FSDPParamGroup`."""
        parameters = [each.sharded_param for each in group.fsdp_params]
        trained = [each for each in parameters if each.requires_grad]
        if trained:
            self._begin(trained, group.device)  # parameters may be elsewhere, or have no data yet

    def _begin(self, trained: list[nn.Parameter], device: torch.device) -> None:
        self._parameters.update(map(id, trained))
        if self._recorder is not None:
            return
        rank, world = dist.get_rank(), dist.get_world_size()
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if os.environ.get(observation.NODE) and here < world:
            self.end(
                "its ranks are on several nodes, which `paceline run --observe --nodes` observes"
            )
            return
        self._thread = threading.get_ident()
        self._recorder = Recorder(os.environ, rank, world, device)
        atexit.register(self.close)

    @_guarded
    def close(self) -> None:
        """Delivers what is left."""
        if self._recorder is not None:
            self._recorder.close()
        self.over = True

    def loading(self) -> AbstractContextManager[None]:
        """Around the wait for a loader's next batch."""
        if self.over or not self._trains_here():
            return nullcontext()
        assert self._recorder is not None
        return self._recorder.timeline.loading()

    @_guarded
    def loaded(self, iterator: Any, batch: Any, took_s: float) -> None:
        """A DataLoader's iterator gave a batch."""
        if not self._trains_here():
            return
        assert self._recorder is not None
        data = iterator._dataset
        if first := iterator._num_yielded == 1:
            with suppress(Exception):  # a length is the script's own code, and may be refused
                self._recorder.reads(id(data), len(data))
        sampled = getattr(iterator._index_sampler, "batch_size", None)
        size = size_of(batch, sampled)
        self._recorder.timeline.loaded(took_s, id(data), size, first=first)

    @_guarded
    def entered(self, model: nn.Module, inputs: Any) -> None:
        """A wrapped model is called."""
        if self._recorder is not None and model.training and torch.is_grad_enabled():
            self._recorder.timeline.entered(size_of(inputs))

    @_guarded
    def backward_began(self, _parameter: torch.Tensor) -> None:
        """The gradient of a parameter is there; more follow in the same backward pass.

        Callbacks at the end of a pass run in order: this one, then DistributedDataParallel's, which
        waits for the reduction, then the one that `_computed` adds.
        """
        if self._recorder is not None and not self._in_backward:
            self._in_backward = True
            _at_the_end(self._computed)

    @_guarded
    def _computed(self) -> None:
        assert self._recorder is not None
        self._recorder.timeline.waits()
        _at_the_end(self._reduced)

    @_guarded
    def _reduced(self) -> None:
        assert self._recorder is not None
        self._in_backward = False
        self._recorder.timeline.reduced()
        self._bound()

    @_guarded
    def sharded_backward_began(self) -> None:
        """FSDP2 reduces the gradients of some parameters; `_reduced` follows its last reduction."""
        if self._recorder is not None and not self._in_backward:
            self._in_backward = True
            _at_the_end(self._reduced)

    @_guarded
    def waits(self) -> None:
        """FSDP2 begins to gather or to reduce."""
        if self._recorder is not None:
            self._recorder.timeline.waits()

    @_guarded
    def waited(self) -> None:
        """What FSDP2 waited for is there."""
        if self._recorder is not None:
            self._recorder.timeline.waited()
            self._bound()

    @_guarded
    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimiser has stepped."""
        if self._recorder is not None and self._leads(optimizer):
            self._in_backward = False
            self._recorder.stepped()

    @_guarded
    def logged(self, name: str, value: Value) -> None:
        """The script logs a loss under a name; the first name that comes is the one that counts."""
        if self._recorder is not None and self._loss in ("", name):
            self._loss = name
            self._recorder.logged(value)

    def _bound(self) -> None:
        """Ends observing where no step ever ends, whose parts would fill the memory."""
        assert self._recorder is not None
        if self._recorder.timeline.spans > _MOST_SPANS:
            self.end("no optimiser of the model steps")

    def _trains_here(self) -> bool:
        return self._recorder is not None and threading.get_ident() == self._thread

    def _leads(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimiser's steps are counted: the first one that has an observed parameter.

        Of two optimisers of a model each steps once a step.
        """
        leading = None if self._leading is None else self._leading()
        if leading is not None or optimizer in self._others:
            return optimizer is leading
        groups = optimizer.param_groups
        if any(id(each) in self._parameters for group in groups for each in group["params"]):
            self._leading = weakref.ref(optimizer)
            return True
        self._others.add(optimizer)
        return False


def _captures() -> bool:
    """Whether the current stream's work becomes part of a CUDA graph."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def _at_the_end(callback: Any) -> None:
    """Calls a function at the end of the backward pass that runs now."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)
