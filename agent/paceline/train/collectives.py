"""Listeners that are called before each collective of this process.

PyTorch has no hook for collectives, so this module wraps methods of `dist.ProcessGroup` while a
listener is registered. Reductions in DDP's C++ code and functional collectives are not reported.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

# Function that gets a method's name, its group and its arguments, in the thread that calls the
# method.
Listener = Callable[[str, dist.ProcessGroup, tuple[Any, ...]], None]

# Methods of `dist.ProcessGroup` in torch 2.8 to 2.13. Each release has only some of them.
_METHODS = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "scatter",
    "send",
    "_allgather_base",
    "_reduce_scatter_base",
)
# The listeners of each wrapped method, and the original method, by the method's name.
_listeners: dict[str, list[Listener]] = {}
_originals: dict[str, Any] = {}
# Protects the two dictionaries above.
_lock = threading.Lock()
# If the attribute `depth` is above 0, the collectives of this thread are Paceline's own.
_mine = threading.local()


@contextmanager
def own() -> Iterator[None]:
    """Hide the collectives in this context from all listeners, because they are Paceline's own."""
    _mine.depth = getattr(_mine, "depth", 0) + 1
    try:
        yield
    finally:
        _mine.depth -= 1


def listen(listener: Listener, methods: Collection[str] = _METHODS) -> Callable[[], None]:
    """Call `listener` before each collective of this process whose name is in `methods`.

    Each call of such a collective takes a few µs longer. Return a function that unregisters the
    listener; further calls of that function do nothing.
    """
    present = [name for name in methods if name in vars(dist.ProcessGroup)]
    with _lock:
        for name in present:
            if name not in _listeners:
                _wrap(name)
            _listeners[name].append(listener)

    def end() -> None:
        with _lock:
            for name in present:
                _listeners[name].remove(listener)
                if not _listeners[name]:
                    del _listeners[name]
                    setattr(dist.ProcessGroup, name, _originals.pop(name))
            present.clear()

    return end


def _wrap(name: str) -> None:
    _originals[name] = vars(dist.ProcessGroup)[name]
    listeners = _listeners[name] = []
    method = _observed(name, getattr(dist.ProcessGroup, name), listeners)
    setattr(dist.ProcessGroup, name, method)


def _observed(name: str, method: Any, listeners: Collection[Listener]) -> Any:
    @functools.wraps(method)
    def observed(*args: Any, **kwargs: Any) -> Any:
        if not getattr(_mine, "depth", 0):
            for listener in tuple(listeners):
                listener(name, args[0], args[1:])
        return method(*args, **kwargs)

    return observed
