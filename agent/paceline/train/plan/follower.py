"""A rank's view of the plan: reads the rank's parts of the leader's segments."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from paceline.core.errors import PacelineError
from paceline.data.keeper import NodePart
from paceline.train.parts import Part, Step
from paceline.train.plan.fetcher import Fetcher

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from paceline.train.plan.leader import Leader


class Follower:
    """Reader of one rank's steps from the ranks' store, segment by segment. For one thread.

    Every rank has a follower and must `close` it. On rank 0 the follower also drives the leader,
    which adopts the next segment when the follower needs it. The follower calls `on_node`, in any
    thread, with each segment's part for this rank's node.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        leader: Leader | None,
        on_node: Callable[[NodePart], None] = lambda part: None,
    ) -> None:
        self._rank = rank
        self._leader = leader
        self._on_node = on_node
        self._fetcher = Fetcher(store, rank, on_node) if leader is None else None
        self.stopped = False
        # The plan ended because nodes join or leave.
        self.reforms = False
        # The follower is waiting for a segment. Any thread may read this.
        self.waits = False

    def steps(self, epoch: int, ahead: int = 0) -> Iterator[Step]:
        """Yield the steps of an epoch, waiting for each segment until the leader has stored it.

        A step is only yielded when `ahead` later steps are planned, too. Rank 0 needs that if its
        loader fetches fewer steps ahead than those of other ranks.

        Raises:
            PacelineError: the ranks are not in the same epoch, or the plan cannot continue.
            torch.distributed.DistError: rank 0 has ended, or stored nothing for too long.
        """
        planned: deque[Step] = deque()
        for step in self._steps(epoch):
            planned.append(step)
            if len(planned) > ahead:
                yield planned.popleft()
        yield from planned

    def fail(self, error: Exception) -> None:
        """Make `steps` raise this error where it would wait. Any thread may call it."""
        if self._fetcher is not None:
            self._fetcher.fail(error)

    def close(self) -> None:
        """End the thread that fetches the plan."""
        if self._fetcher is not None:
            self._fetcher.close()

    def _steps(self, epoch: int) -> Iterator[Step]:
        if self._fetcher is not None and not self.stopped:
            self._fetcher.enter(epoch)
        while not self.stopped:
            self.waits = True
            part = self._next(epoch)
            self.waits = False
            if part.failed:
                raise PacelineError(part.failed)
            if part.stop:
                self.stopped, self.reforms = True, part.reform
            elif part.epoch == epoch:
                yield from part.steps()
                if part.epoch_end:
                    return
            elif part.epoch > epoch:
                raise PacelineError(
                    f"rank {self._rank} is in epoch {epoch} but the leader is in epoch "
                    f"{part.epoch}: every rank must iterate over the loader the same number of "
                    "times"
                )
            # A part of an earlier epoch is skipped: all ranks left that epoch early.

    def _next(self, epoch: int) -> Part:
        if self._leader is None:
            assert self._fetcher is not None
            return self._fetcher.next()
        part = self._leader.advance(epoch)
        if part.node is not None:
            self._on_node(part.node)
        return part
