"""Large Hellos are put together in a thread of their own, so that ingest continues meanwhile.

One Hello at a time: each may have hundreds of megabytes. What takes long here (to read, to hash, to
check numbers) lets other threads run.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from paceline.wire import Hello, WireError
from paceline.wire.parts import joined
from paceline_backend.control.checks import problem
from paceline_backend.store import Store, hellos


class Assembly:
    """Puts Hellos together whose parts are all stored. For one thread.

    Args:
        store: that has the parts.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(1, "hellos")
        self._job: tuple[hellos.HelloKey, Future[Hello]] | None = None

    def hello(self, named: hellos.HelloKey, ranks: int, *, wait: bool = False) -> Hello | None:
        """Return a Hello that `problem` says nothing against; None: ask again.

        Args:
            named: the Hello. Another one that was asked for before is dropped.
            ranks: the most that its run may have.
            wait: until it is there.

        Raises:
            WireError: the parts make no Hello.
            StoreError: or one of its kinds.
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
        raise WireError(f"parts of attempt {named.attempt} make a Hello of {hello.attempt}")
    if reason := problem(hello):
        raise WireError(reason)
    return hello
