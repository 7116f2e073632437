"""Threads on a virtual clock: the ranks' own code, one thread at a time, in an order that repeats.

A thread runs until it waits for something: a time, a key in the store, a collective, a condition.
Then the scheduler resumes the thread that can go on first. Where nobody can go on, ranks hang: that
is an error. Real threads are used, but never two at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from paceline.train.sync import rounds as rank_rounds
from paceline.train.sync.base import Ranks

# Of what happens at the same moment: a rank's own steps first, then ends of reductions, then calls.
STEP, REDUCED, CALLED = range(3)


class HangError(Exception):
    """No thread can go on."""


class _Ended(BaseException):
    """The scheduler is through with a thread that waits."""


class _Thread:
    def __init__(self, scheduler: Scheduler, name: str, body: Callable[[], None]) -> None:
        self.name, self.done, self.ended = name, False, False
        self.wake: Callable[[], float] = lambda: scheduler.now
        self.order = STEP
        self.turn = threading.Semaphore(0)
        self.parent = scheduler.running
        self._scheduler, self._body = scheduler, body
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.turn.acquire()
        try:
            if not self.ended:
                self._body()
        except _Ended:
            pass
        finally:
            self.done = True
            self._scheduler.back.release()


class Scheduler:
    """Virtual time, and the threads on it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.back = threading.Semaphore(0)
        self._threads: list[_Thread] = []
        self.running: _Thread | None = None

    def start(self, name: str, body: Callable[[], None]) -> _Thread:
        thread = _Thread(self, name, body)
        self._threads.append(thread)
        return thread

    def wait(self, wake: Callable[[], float], order: int = STEP) -> None:
        """The running thread waits.

        Args:
            wake: when it can go on, as things are; infinite: not before they change.
            order: of threads that can go on at the same time, the least goes first.
        """
        thread = self.running
        assert thread is not None
        thread.wake, thread.order = wake, order
        self.back.release()
        thread.turn.acquire()
        if thread.ended:
            raise _Ended

    def run(self) -> None:
        """Until all threads are through.

        Raises:
            HangError: they wait for each other.
        """
        try:
            while waiting := [thread for thread in self._threads if not thread.done]:
                times = [max(thread.wake(), self.now) for thread in waiting]
                first = min(range(len(waiting)), key=lambda at: (times[at], waiting[at].order))
                if times[first] == math.inf:
                    raise HangError(f"at {self.now}: {[thread.name for thread in waiting]}")
                self.now = times[first]
                self._resume(waiting[first])
        finally:
            for thread in self._threads:
                if not thread.done:
                    thread.ended = True
                    self._resume(thread)

    def end_children(self) -> None:
        """Ends the threads that the running one started, as its process ends."""
        running = self.running
        for thread in self._threads:
            if thread.parent is running and not thread.done:
                thread.wake, thread.ended = (lambda: self.now), True

    def _resume(self, thread: _Thread) -> None:
        self.running = thread
        thread.turn.release()
        self.back.acquire()
        self.running = None


class Store:
    """The ranks' store: a word is there for those that wait for it some time after it was set."""

    def __init__(self, scheduler: Scheduler, call_s: float, timeout_s: float) -> None:
        self._scheduler, self._call_s, self._timeout_s = scheduler, call_s, timeout_s
        self.words: dict[str, bytes] = {}
        self._set_at: dict[str, float] = {}

    def set(self, key: str, word: str | bytes) -> None:
        self.words[key] = word.encode() if isinstance(word, str) else word
        running = self._scheduler.running is not None  # else it was there before all threads
        self._set_at[key] = self._scheduler.now if running else -math.inf

    def compare_set(self, key: str, expected: str, word: str) -> bytes:
        if key not in self.words and not expected:
            self.set(key, word)
        return self.words[key]

    def add(self, key: str, count: int) -> int:
        total = int(self.words.get(key, b"0")) + count
        self.set(key, str(total))
        return total

    def get(self, key: str) -> bytes:
        if self._set_at.get(key) == -math.inf:
            return self.words[key]
        deadline = self._scheduler.now + self._timeout_s

        def there_at() -> float:
            return self._set_at[key] + self._call_s if key in self.words else deadline

        self._scheduler.wait(there_at, CALLED)
        if key not in self.words:
            raise RuntimeError(f"{key}: nobody set it")
        return self.words[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self.words for key in keys)

    def delete_key(self, key: str) -> bool:
        self._set_at.pop(key, None)
        return self.words.pop(key, None) is not None


class Group:
    """A process group: what all have given is reduced some time after the last one came."""

    def __init__(self, scheduler: Scheduler, world: int, round_s: float, timeout_s: float) -> None:
        self._scheduler, self._world = scheduler, world
        self._round_s, self._timeout_s = round_s, timeout_s
        self._given: list[torch.Tensor] = []
        self._over_at = math.inf

    def all_reduce(self, vector: torch.Tensor) -> None:
        self.begin(vector).wait()

    def begin(self, vector: torch.Tensor) -> Reduction:
        """A reduction in the background."""
        given, deadline = self._given, self._scheduler.now + self._timeout_s
        given.append(vector)
        if len(given) == self._world:
            self._given = []
            total = torch.stack(given).sum(0)
            for each in given:
                each.copy_(total)
            self._over_at = self._scheduler.now + self._round_s
            given.append(torch.tensor(0.0))  # all are there

        def wait() -> None:
            scheduled = self._scheduler
            scheduled.wait(lambda: self._over_at if len(given) > self._world else deadline, REDUCED)
            if len(given) <= self._world:
                raise RuntimeError("gloo: timed out")

        return Reduction(wait)


@dataclass
class Reduction:
    """A reduction under way, as `dist.Work`."""

    over: Callable[[], None]  # waits until it is over

    def wait(self, timeout: object = None) -> None:
        self.over()


class _Condition:
    """For threads that run one at a time: what is under the lock needs none."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._notified = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def notify_all(self) -> None:
        self._notified += 1

    def wait_for(self, predicate: Callable[[], bool], timeout: float) -> bool:
        scheduler = self._scheduler
        deadline = scheduler.now + timeout
        while not predicate() and scheduler.now < deadline:
            self._await(self._notified, deadline)
        return predicate()

    def _await(self, seen: int, deadline: float) -> None:
        scheduler = self._scheduler
        scheduler.wait(lambda: scheduler.now if self._notified > seen else deadline)


class Started:
    """`threading.Thread`, as far as ranks need it."""

    def __init__(self, scheduler: Scheduler, target: Callable[[], None], name: str) -> None:
        self._scheduler, self._target, self._name = scheduler, target, name

    def start(self) -> None:
        self._made = self._scheduler.start(self._name, self._target)

    def join(self, timeout: float = math.inf) -> None:
        scheduler = self._scheduler
        deadline = scheduler.now + timeout
        scheduler.wait(lambda: scheduler.now if self._made.done else deadline)

    def is_alive(self) -> bool:
        return not self._made.done


@contextmanager
def ranks(
    world: int, round_s: float, call_s: float, timeout_s: float = 1e7
) -> Iterator[tuple[Scheduler, list[Ranks]]]:
    """Ranks whose `Rounds` have a virtual clock, store and process group.

    Args:
        call_s: from when a key is set until those that wait for it know.
        timeout_s: after which a rank that waits gives up.
    """
    scheduler = Scheduler()
    store = Store(scheduler, call_s, 4 * timeout_s)
    group = Group(scheduler, world, round_s, timeout_s)
    patience = timedelta(seconds=timeout_s)
    made: list[Any] = [Ranks({"": group}, store, store, k, world, patience) for k in range(world)]
    threads = SimpleNamespace(
        Condition=lambda: _Condition(scheduler),
        Thread=lambda target, name, daemon: Started(scheduler, target, name),
    )
    clock = SimpleNamespace(monotonic=lambda: scheduler.now, perf_counter=lambda: scheduler.now)
    dist = SimpleNamespace(all_reduce=lambda vector, group: group.all_reduce(vector))
    with (
        mock.patch.object(rank_rounds, "threading", threads),
        mock.patch.object(rank_rounds, "time", clock),
        mock.patch.object(rank_rounds, "dist", dist),
    ):
        yield scheduler, made
