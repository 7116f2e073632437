"""The loader: a DataLoader whose batches follow the plan."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Sampler

from paceline.train.parts import Step

if TYPE_CHECKING:
    from paceline.train.session import Session

_PLANNED = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}


class _Batches(Sampler[list[int]]):
    """Sample indices of each step of the session's epoch, in the order in which they are loaded."""

    def __init__(self, session: Session, steps: deque[Step]) -> None:
        self._session = session
        self._steps = steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._session.steps():
            self._steps.append(step)
            yield step.indices or [self._session.filler]


class Loader:
    """A DataLoader whose batches follow the plan, one epoch an iteration. Made by `Session`.

    Leaving the loop early drops the rest of the epoch; all ranks must leave it at the same step. A
    rank that the plan gives no samples gets the smallest sample of the data set as a filler, whose
    gradient does not count (`Session.batch` tells).
    """

    def __init__(self, session: Session, dataset: Any, options: dict[str, Any]) -> None:
        if clash := sorted(_PLANNED & options.keys()):
            raise TypeError(
                f"loader({clash[0]}=…): the plan decides it; batch and order are given to Session "
                "(global_batch, seed, drop_last)"
            )
        if not options.get("in_order", True):
            raise TypeError("loader(in_order=False): steps follow the plan in order; leave it out")
        self._session = session
        self._steps: deque[Step] = deque()  # handed to the DataLoader, not yet to the user
        batches = _Batches(session, self._steps)
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=batches, **options)

    @property
    def lookahead(self) -> int:
        """Steps whose plan is needed before training reaches them."""
        return self._loader.num_workers * (self._loader.prefetch_factor or 0)

    def __len__(self) -> int:
        """Steps in a whole epoch."""
        return self._session.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        session = self._session
        if not session.begin_epoch(self.lookahead):
            return
        self._steps.clear()
        ran_out = False
        longer_s = session.emulated_loading_s
        try:
            batches = iter(self._loader)
            while True:
                asked = time.perf_counter()
                try:
                    batch = next(batches)
                except StopIteration:
                    ran_out = True
                    break
                if longer_s:
                    time.sleep(longer_s)
                session.begin_step(self._steps.popleft(), time.perf_counter() - asked)
                closing = True  # by a break, a return or an exception in the body
                try:
                    yield batch
                    closing = False
                finally:
                    session.end_body(closing)
        finally:
            session.end_epoch(ran_out)
