"""Who is told of each collective that this process calls.

PyTorch has no hook for collectives, so the methods of its process groups are wrapped while somebody
listens. Reductions in DDP's C++ code are not seen, nor are functional collectives.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
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
_listeners: list[Listener] = []
_originals: dict[str, Any] = {}  # of the methods that are wrapped
_lock = threading.Lock()  # of the list above
_mine = threading.local()  # `depth` above 0: this thread's collectives are Paceline's own


@contextmanager
def own() -> Iterator[None]:
    """Around Paceline's own collectives: no listener is told of them."""
    _mine.depth = getattr(_mine, "depth", 0) + 1
    try:
        yield
    finally:
        _mine.depth -= 1


def listen(listener: Listener) -> Callable[[], None]:
    """Calls a listener before each collective of this process; returns what ends that."""
    with _lock:
        if not _listeners:
            _wrap()
        _listeners.append(listener)

    def end() -> None:
        with _lock:
            if listener in _listeners:
                _listeners.remove(listener)
                if not _listeners:
                    _unwrap()

    return end


def _wrap() -> None:
    for name in _METHODS:
        if name in vars(dist.ProcessGroup):
            _originals[name] = vars(dist.ProcessGroup)[name]
            setattr(dist.ProcessGroup, name, _telling(name, getattr(dist.ProcessGroup, name)))


def _unwrap() -> None:
    while _originals:
        name, method = _originals.popitem()
        setattr(dist.ProcessGroup, name, method)


def _telling(name: str, method: Any) -> Any:
    @functools.wraps(method)
    def telling(*args: Any, **kwargs: Any) -> Any:
        if not getattr(_mine, "depth", 0):
            for listener in tuple(_listeners):
                listener(name, args[0], args[1:])
        return method(*args, **kwargs)

    return telling
