"""Assembly of large Hellos in a separate thread, so that ingest continues meanwhile.

A Hello can have hundreds of megabytes, so the thread assembles one at a time. Its slow operations
(reading, hashing, checking numbers) release the interpreter lock.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from paceline.wire import Hello, WireError
from paceline.wire.parts import joined
from paceline_backend.control.checks import problem
from paceline_backend.store import Store, hellos


class Assembly:
    """Assembler of Hellos whose parts are all stored. Not thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(1, "hellos")
        self._job: tuple[hellos.HelloKey, Future[Hello]] | None = None

    def hello(self, named: hellos.HelloKey, ranks: int, *, wait: bool = False) -> Hello | None:
        """Return a Hello that passed `problem`, or None while the thread is still assembling it.

        Args:
            named: the Hello to assemble. A call with another key drops the earlier request.
            ranks: maximum number of ranks of the run.
            wait: block until the Hello is assembled.

        Raises:
            WireError: the parts do not form a valid Hello.
        """
        if self._job is None or self._job[0] != named:
            self._job = named, self._pool.submit(_assembled, self._store, named, ranks)
        job = self._job[1]
        if not (wait or job.done()):
            return None
        self._job = None
        return job.result()


def _assembled(store: Store, named: hellos.HelloKey, ranks: int) -> Hello:
    with store.read() as connection:
        data = hellos.read(connection, named)
    hello = joined(data, named.digest, ranks)
    if hello.attempt != named.attempt:
        raise WireError(f"parts of attempt {named.attempt} form a Hello of attempt {hello.attempt}")
    if reason := problem(hello):
        raise WireError(reason)
    return hello
