"""Receives events from patched functions, and stops observing the process at the first error."""

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
from paceline.train.metrics import Value
from paceline.train.observing.recorder import Recorder
from paceline.train.observing.timeline import size_of

logger = logging.getLogger(__name__)

# About this many of a model's parameters get a hook that detects the start of a backward pass.
_HOOKED = 16
# Maximum length of a step's `ObservedStep.spans`. Real steps have far fewer items: under FSDP2
# about 6 for each group of parameters and micro-batch.
_MOST_SPANS = 20_000


def _guarded(method: Any) -> Any:
    """Make a method do nothing after observing has ended; end observing if the method raises."""

    @wraps(method)
    def call(self: Observer, *args: Any, **kwargs: Any) -> None:
        if self.ended or os.getpid() != self.pid:
            return
        if _captures():
            self.end("the script captures a CUDA graph, whose replays cannot be observed")
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.end(error)

    return call


class Observer:
    """Receiver of one process's training events. Nothing is reported until a model is wrapped."""

    def __init__(self) -> None:
        # A forked child is not observed.
        self.pid = os.getpid()
        self.ended = False
        self._recorder: Recorder | None = None
        # The identifier of the thread that trains.
        self._thread = 0
        # The observed models' parameters, by `id`.
        self._parameters: set[int] = set()
        # The optimiser whose steps are counted (`_leading`), and optimisers that have no observed
        # parameters.
        self._leading: weakref.ref[torch.optim.Optimizer] | None = None
        self._others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._in_backward = False
        self._loss = ""

    def end(self, why: Exception | str) -> None:
        """End observing in this process; training continues."""
        self.ended = True
        trace = why if isinstance(why, Exception) else None
        logger.warning("this process is no longer observed: %s", why, exc_info=trace)

    @_guarded
    def wrapped(self, model: nn.Module) -> None:
        """Observe a model that DistributedDataParallel has wrapped."""
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
        """Observe a group of parameters that FSDP2 has sharded (`FSDPParamGroup`)."""
        parameters = [each.sharded_param for each in group.fsdp_params]
        trained = [each for each in parameters if each.requires_grad]
        if trained:
            # Use the group's device, because parameters may be elsewhere, or have no data yet.
            self._begin(trained, group.device)

    def _begin(self, trained: list[nn.Parameter], device: torch.device) -> None:
        self._parameters.update(map(id, trained))
        if self._recorder is not None:
            return
        rank, world = dist.get_rank(), dist.get_world_size()
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if os.environ.get(observation.NODE) and here < world:
            self.end("the ranks are on several nodes: use `paceline run --observe --nodes`")
            return
        self._thread = threading.get_ident()
        self._recorder = Recorder(os.environ, rank, world, device)
        atexit.register(self.close)

    @_guarded
    def close(self) -> None:
        """Deliver the remaining records."""
        if self._recorder is not None:
            self._recorder.close()
        self.ended = True

    def loading(self) -> AbstractContextManager[None]:
        """Return a context for the wait for a loader's next batch."""
        if self.ended or not self._trains_here():
            return nullcontext()
        assert self._recorder is not None
        return self._recorder.timeline.loading()

    @_guarded
    def loaded(self, iterator: Any, batch: Any, took_s: float) -> None:
        """Record a batch from a DataLoader's iterator."""
        if not self._trains_here():
            return
        assert self._recorder is not None
        data = iterator._dataset
        if first := iterator._num_yielded == 1:
            # `len` calls the script's own code, which may raise any error.
            with suppress(Exception):
                self._recorder.reads(id(data), len(data))
        sampled = getattr(iterator._index_sampler, "batch_size", None)
        size = size_of(batch, sampled)
        self._recorder.timeline.loaded(took_s, id(data), size, first=first)

    @_guarded
    def entered(self, model: nn.Module, inputs: Any) -> None:
        """Record a call of a wrapped model."""
        if self._recorder is not None and model.training and torch.is_grad_enabled():
            self._recorder.timeline.entered(size_of(inputs))

    @_guarded
    def backward_began(self, _parameter: torch.Tensor) -> None:
        """Record the first gradient of a backward pass.

        At the end of the pass, three callbacks run. The first is `_computed`, which queues
        `_reduced`. The second is the callback of DistributedDataParallel, which waits for the
        reduction. The third is `_reduced`.
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
        """Record that FSDP2 starts to reduce gradients; `_reduced` runs after all reductions."""
        if self._recorder is not None and not self._in_backward:
            self._in_backward = True
            _at_the_end(self._reduced)

    @_guarded
    def waits(self) -> None:
        """Record that FSDP2 starts to gather parameters or to reduce gradients."""
        if self._recorder is not None:
            self._recorder.timeline.waits()

    @_guarded
    def waited(self) -> None:
        """Record the end of a wait that `waits` began."""
        if self._recorder is not None:
            self._recorder.timeline.waited()
            self._bound()

    @_guarded
    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record a step of an optimiser."""
        if self._recorder is not None and self._leads(optimizer):
            self._in_backward = False
            self._recorder.stepped()

    @_guarded
    def logged(self, name: str, value: Value) -> None:
        """Record a loss that the script logs; ignore losses with another name than the first."""
        if self._recorder is not None and self._loss in ("", name):
            self._loss = name
            self._recorder.logged(value)

    def _bound(self) -> None:
        """End observing if a step's `ObservedStep.spans` would fill the memory."""
        assert self._recorder is not None
        if self._recorder.timeline.spans > _MOST_SPANS:
            self.end("no optimiser steps the model")

    def _trains_here(self) -> bool:
        return self._recorder is not None and threading.get_ident() == self._thread

    def _leads(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True for the first optimiser with observed parameters, whose steps are counted.

        If a model has several optimisers, it is enough to count the steps of one, because each
        optimiser steps once in a training step.
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
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def _at_the_end(callback: Any) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)
