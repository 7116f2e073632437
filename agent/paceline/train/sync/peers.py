"""Vectors between two ranks, beside the threads that train: one asks, the other answers at once.

A rank that answers does so in a thread of its own, whatever it computes meanwhile. Keys in the
ranks' store say who asks, so that anyone can end the waiting; vectors go through the process group,
each way under a tag of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch
import torch.distributed as dist

from paceline.core.errors import PacelineError
from paceline.train.sync.base import Ranks

_QUESTION, _ANSWER = 1, 2  # tags
_END, _THROUGH = "end", "through"
_CLOSED = 1 << 40  # added to the count of questions: later ones are refused


@dataclass(frozen=True)
class Answer:
    """What another rank gave back."""

    vector: torch.Tensor
    waited_s: float  # until it took the question,
    answered_s: float  # and from then until the answer was here


class Peers:
    """One rank's part in questions and answers; each rank makes it when the segment begins.

    Questions may come from any thread, but from one at a time.

    Args:
        ranks: that take part. What their group does meanwhile has other tags, and nothing else
            waits in their store.
        prefix: of keys in the store, new for each segment.
        answering: ranks that answer.
        answer: gives the answer to a rank's vector, as long as that one: on ranks that answer,
            called in the thread that does so.
    """

    def __init__(
        self,
        ranks: Ranks,
        prefix: str,
        answering: Sequence[int],
        length: int,
        answer: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> None:
        self._ranks, self._prefix, self._answering = ranks, prefix, list(answering)
        self._length, self._answer = length, answer
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if ranks.rank in self._answering:
            self._thread = threading.Thread(target=self._run, name="paceline-peers", daemon=True)
            self._thread.start()

    def ask(self, rank: int, vector: torch.Tensor) -> Answer:
        """Gives a vector to a rank, and waits for its answer.

        Args:
            rank: one that answers, or this one itself.
            vector: on the CPU, 32 bits.

        Raises:
            PacelineError: a rank left, or was silent for too long; the message names it.
        """
        if rank == self._ranks.rank:
            return Answer(self._answer(rank, vector), 0.0, 0.0)
        store = self._ranks.store
        number = store.add(self._key(rank, "asked"), 1) - 1
        if number >= _CLOSED:
            raise PacelineError(store.get(self._key("closed")).decode())
        store.set(self._key(rank, number), str(self._ranks.rank))
        began = time.perf_counter()
        try:
            self._send(vector, rank, _QUESTION)
            taken = time.perf_counter()
            answer = self._receive(rank, _ANSWER)
        except RuntimeError as error:
            raise PacelineError(f"rank {rank} does not answer: {error}") from error
        return Answer(answer, taken - began, time.perf_counter() - taken)

    def check(self) -> None:
        """Raises what kept this rank from answering, if anything did."""
        _raise(self._error)

    def finish(self) -> None:
        """This rank asks no more: waits until no rank does. All questions are answered then.

        Raises:
            PacelineError: a rank left, or was silent for too long; the message names it.
        """
        store, ranks = self._ranks.store, self._ranks
        store.set(self._key("through", ranks.rank), "")
        if store.add(self._key("through"), 1) == ranks.world:
            self._close(_THROUGH)
        if not self._ended():
            slow = [
                rank for rank in range(ranks.world) if not store.check([self._key("through", rank)])
            ]
            raise PacelineError(
                f"rank {ranks.rank} waited {ranks.timeout.total_seconds():g} s for ranks {slow}, "
                "of which some are stuck or gone"
            )
        self.check()
        word = store.get(self._key("closed")).decode()
        if word != _THROUGH:
            raise PacelineError(word)
        if store.add(self._key("read"), 1) == ranks.world:
            self._forget()

    def abort(self, reason: str) -> None:
        """This rank leaves in the middle: questions that have come are answered, others refused."""
        with contextlib.suppress(RuntimeError):  # the leader, whose store it is, has gone first
            self._close(f"rank {self._ranks.rank} {reason}")
            if self._thread is not None:
                self._thread.join(timeout=1.0)

    def _close(self, word: str) -> None:
        """Ends it for all ranks. Whoever is first says why."""
        store = self._ranks.store
        if store.compare_set(self._key("closed"), "", word).decode() != word:
            return
        for rank in self._answering:
            asked = store.add(self._key(rank, "asked"), _CLOSED) - _CLOSED
            store.set(self._key(rank, asked), _END)

    def _ended(self) -> bool:
        """Waits until it has; False: for too long."""
        if self._thread is not None:
            self._thread.join(self._ranks.timeout.total_seconds())
            return not self._thread.is_alive()
        try:
            self._ranks.blocking_store.wait([self._key("closed")], self._ranks.timeout)
        except RuntimeError:  # or the store is gone, which the next question to it will tell
            return False
        return True

    def _forget(self) -> None:
        """Deletes what is left in the store; all have read it."""
        names: list[tuple[str | int, ...]] = [("closed",), ("through",), ("read",)]
        names += [("through", rank) for rank in range(self._ranks.world)]
        names += [(rank, "asked") for rank in self._answering]
        for name in names:
            self._ranks.store.delete_key(self._key(*name))

    def _run(self) -> None:
        number = 0
        try:
            while (word := self._next(number)) != _END:
                self._serve(int(word))
                number += 1
        except BaseException as error:
            self._error = self._error or error

    def _next(self, number: int) -> str:
        key, waiting = self._key(self._ranks.rank, number), self._ranks.blocking_store
        while True:
            try:
                word: str = waiting.get(key).decode()
            except dist.DistStoreError:  # nobody asked for as long as the store waits
                continue
            waiting.delete_key(key)
            return word

    def _serve(self, rank: int) -> None:
        try:
            self._send(self._answer(rank, self._receive(rank, _QUESTION)), rank, _ANSWER)
        except RuntimeError as error:  # others may have asked before they learn it
            why = f"rank {rank} has gone in the middle of a question to rank {self._ranks.rank}"
            self._error = self._error or PacelineError(f"{why}: {error}")
            self._close(why)

    def _send(self, vector: torch.Tensor, rank: int, tag: int) -> None:
        work = dist.isend(vector, group=self._ranks.group, tag=tag, group_dst=rank)
        assert work is not None
        work.wait(self._ranks.timeout)

    def _receive(self, rank: int, tag: int) -> torch.Tensor:
        vector = torch.empty(self._length)
        work = dist.irecv(vector, group=self._ranks.group, tag=tag, group_src=rank)
        assert work is not None
        work.wait(self._ranks.timeout)
        return vector

    def _key(self, *parts: str | int) -> str:
        return "/".join([self._prefix, *map(str, parts)])


def _raise(error: BaseException | None) -> None:
    """Raises what another thread failed with, if it did: as a new one.

    The old one would hold all that its traceback comes through, such as the store's server.
    """
    if error is not None:
        kind = PacelineError if isinstance(error, PacelineError) else RuntimeError
        raise kind(str(error)) from error


class Courier:
    """A thread that does one thing at a time, while the one that trains goes on.

    Args:
        timeout_s: how long to wait for it at most.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._error: BaseException | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="paceline-courier", daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return self._idle.is_set()

    def begin(self, task: Callable[[], None]) -> None:
        """Does it now. It must be idle."""
        assert self.idle
        self._idle.clear()
        self._tasks.put(task)

    def wait(self) -> None:
        """Waits until it is idle.

        Raises:
            PacelineError: it takes too long.
            whatever the thing raised that it did.
        """
        if not self._idle.wait(self._timeout_s):
            raise PacelineError(f"waited {self._timeout_s:g} s for an answer of another rank")
        _raise(self._error)

    def close(self, timeout_s: float | None = None) -> None:
        """Ends the thread once it is idle; waits for that as long as `wait` at most, or less."""
        self._tasks.put(None)
        self._idle.wait(self._timeout_s if timeout_s is None else timeout_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException as error:
                self._error = error
            self._idle.set()
