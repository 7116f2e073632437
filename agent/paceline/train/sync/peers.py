"""Exchange of vectors between two ranks while both train: one sends a question, the other answers.

A question and its answer are one vector each. A rank answers at once, in a separate thread, even
while its training thread computes. The answering thread waits for a key in the ranks' store, whose
value is the rank that sends the next question. So any rank can end the wait by setting the key. The
vectors are sent in the process group; questions and answers have different tags.
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
_END, _FINISHED = "end", "finished"
# This number is added to the count of questions to refuse all later questions.
_CLOSED = 1 << 40


@dataclass(frozen=True)
class PeerAnswer:
    """A rank's answer to a question.

    `waited_s` is the time from sending the question until the other rank received it. `answered_s`
    is the time from then until the answer arrived.
    """

    vector: torch.Tensor
    waited_s: float
    answered_s: float


class Peers:
    """One rank's sender of questions, and its answering thread, in one segment.

    Each rank makes a `Peers` when the segment begins. Any thread may send questions, but only one
    thread at a time. Ranks in `answering` call `answer` in their answering thread. Other messages
    in the ranks' process group must have other tags, and no other thread may use
    `ranks.blocking_store`. If a rank leaves or is silent for too long, methods raise a
    PacelineError that names this rank.
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

    def ask(self, rank: int, vector: torch.Tensor) -> PeerAnswer:
        """Send a vector (on the CPU, 32 bits) to a rank that answers, and wait for its answer."""
        if rank == self._ranks.rank:
            return PeerAnswer(self._answer(rank, vector), 0.0, 0.0)
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
        return PeerAnswer(answer, taken - began, time.perf_counter() - taken)

    def check(self) -> None:
        """Raise the error that kept this rank from answering, if there was one."""
        _raise(self._error)

    def finish(self) -> None:
        """End this rank's questions, and wait until the questions of all ranks are answered."""
        store, ranks = self._ranks.store, self._ranks
        store.set(self._key("finished", ranks.rank), "")
        if store.add(self._key("finished"), 1) == ranks.world:
            self._close(_FINISHED)
        if not self._ended():
            slow = [
                rank
                for rank in range(ranks.world)
                if not store.check([self._key("finished", rank)])
            ]
            raise PacelineError(
                f"rank {ranks.rank} waited {ranks.timeout.total_seconds():g} s for ranks {slow}, "
                "some of which are stuck or gone"
            )
        self.check()
        word = store.get(self._key("closed")).decode()
        if word != _FINISHED:
            raise PacelineError(word)
        if store.add(self._key("read"), 1) == ranks.world:
            self._forget()

    def abort(self, reason: str) -> None:
        """Leave in the middle of the segment, after answering the questions that have arrived."""
        # The store may have ended with rank 0.
        with contextlib.suppress(RuntimeError):
            self._close(f"rank {self._ranks.rank} {reason}")
            if self._thread is not None:
                self._thread.join(timeout=1.0)

    def _close(self, word: str) -> None:
        """End all ranks' questions and answers.

        The first call by any rank stores `word`, a reason or `_FINISHED`; later calls do nothing.
        """
        store = self._ranks.store
        if store.compare_set(self._key("closed"), "", word).decode() != word:
            return
        for rank in self._answering:
            asked = store.add(self._key(rank, "asked"), _CLOSED) - _CLOSED
            store.set(self._key(rank, asked), _END)

    def _ended(self) -> bool:
        """Wait until questions and answers have ended; return False on a timeout."""
        if self._thread is not None:
            self._thread.join(self._ranks.timeout.total_seconds())
            return not self._thread.is_alive()
        try:
            self._ranks.blocking_store.wait([self._key("closed")], self._ranks.timeout)
        # The wait took too long, or the store has ended. In the second case, the caller's next call
        # to the store raises.
        except RuntimeError:
            return False
        return True

    def _forget(self) -> None:
        names: list[tuple[str | int, ...]] = [("closed",), ("finished",), ("read",)]
        names += [("finished", rank) for rank in range(self._ranks.world)]
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
        """Wait, without a limit, for the number of the rank with the next question, or `_END`."""
        key, store = self._key(self._ranks.rank, number), self._ranks.blocking_store
        while True:
            try:
                word: str = store.get(key).decode()
            # No rank sent a question within the store's own timeout.
            except dist.DistStoreError:
                continue
            store.delete_key(key)
            return word

    def _serve(self, rank: int) -> None:
        try:
            self._send(self._answer(rank, self._receive(rank, _QUESTION)), rank, _ANSWER)
        # `_close` makes all ranks fail: a rank that waits for the segment's end receives the
        # reason, and a rank that still asks gets a connection error.
        except RuntimeError as error:
            why = f"rank {rank} was lost during its exchange with rank {self._ranks.rank}"
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
    """Raise the error of another thread, if there is one, as a new exception.

    Raising the original exception again would extend its traceback by the caller's frames, and so
    keep the objects in these frames alive, such as the server of the ranks' store.
    """
    if error is not None:
        kind = PacelineError if isinstance(error, PacelineError) else RuntimeError
        raise kind(str(error)) from error


class TaskThread:
    """A thread that does one task at a time, while the training thread continues."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._error: BaseException | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="paceline-tasks", daemon=True).start()

    @property
    def idle(self) -> bool:
        """Return whether the thread has no task."""
        return self._idle.is_set()

    def begin(self, task: Callable[[], None]) -> None:
        """Start a task. The thread must be idle."""
        assert self.idle
        self._idle.clear()
        self._tasks.put(task)

    def wait(self) -> None:
        """Wait until the thread is idle.

        Raises:
            PacelineError: the task takes too long, or raised a PacelineError.
            RuntimeError: the task raised another error.
        """
        if not self._idle.wait(self._timeout_s):
            raise PacelineError(f"waited {self._timeout_s:g} s for an answer from another rank")
        _raise(self._error)

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread once it is idle.

        Wait for it at most `timeout_s` seconds; None: at most as long as `wait`.
        """
        self._tasks.put(None)
        self._idle.wait(self._timeout_s if timeout_s is None else timeout_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException as error:
                self._error = error
            self._idle.set()
