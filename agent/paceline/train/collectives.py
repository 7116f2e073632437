"""Who is told of each collective that this process calls.

PyTorch has no hook for collectives, so methods of its process groups are wrapped while somebody
listens to them. Reductions in DDP's C++ code are not seen, nor are functional collectives.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

# Called with the method's name, its group and its arguments, in the thread that calls it.
Listener = Callable[[str, dist.ProcessGroup, tuple[Any, ...]], None]

_METHODS = (  # those of torch 2.8 to 2.13; a release lacks some
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
_listeners: dict[str, list[Listener]] = {}  # of each method that is wrapped
_originals: dict[str, Any] = {}  # of the same methods
_lock = threading.Lock()  # of the above
_mine = threading.local()  # `depth` above 0: this thread's collectives are Paceline's own


@contextmanager
def own() -> Iterator[None]:
    """Around Paceline's own collectives: no listener is told of them."""
    _mine.depth = getattr(_mine, "depth", 0) + 1
    try:
        yield
    finally:
        _mine.depth -= 1


def listen(listener: Listener, methods: Collection[str] = _METHODS) -> Callable[[], None]:
    """Call a listener before each collective of this process.

    Args:
        listener: the function to call.
        methods: names of the methods of process groups to wrap. Each call of a wrapped method
            takes a few µs longer.

    Returns:
        a function that ends this; calling it again does nothing.
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
    method = _telling(name, getattr(dist.ProcessGroup, name), listeners)
    setattr(dist.ProcessGroup, name, method)


def _telling(name: str, method: Any, listeners: Collection[Listener]) -> Any:
    @functools.wraps(method)
    def telling(*args: Any, **kwargs: Any) -> Any:
        if not getattr(_mine, "depth", 0):
            for listener in tuple(listeners):
                listener(name, args[0], args[1:])
        return method(*args, **kwargs)

    return telling
