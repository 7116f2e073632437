"""RNA's hierarchy: rounds within groups of equal speed, and a parameter server between groups."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.partners.groups import Pushes
from paceline.core.rounds import Call, Drift
from paceline.train.parts import Step
from paceline.train.sync.averaging import alike
from paceline.train.sync.base import OnRound, Ranks
from paceline.train.sync.gradients import joined, spread
from paceline.train.sync.partial import Partial
from paceline.train.sync.peers import Courier, Peers
from paceline.train.sync.rounds import Sum


class Server:
    """The parameters as the groups' changes make them, on rank 0, in a thread of its own.

    Args:
        ranks: all of them.
        prefix: of keys in the store, new for each segment.
        parameters: that are trained: the same values on all ranks now.
        share: of the ranks that this rank's group has.
    """

    def __init__(
        self, ranks: Ranks, prefix: str, parameters: list[nn.Parameter], share: float
    ) -> None:
        self.ranks = ranks
        self._share = share
        self._values = joined(parameters)
        self._lock = threading.Lock()
        if ranks.rank == 0:  # the thread of its group's rounds uses the other connection
            ranks = replace(ranks, blocking_store=ranks.another_blocking_store)
        self._peers = Peers(ranks, prefix, [0], len(self._values), self._add)

    def push(self, change: torch.Tensor) -> torch.Tensor:
        """Adds a share of what changed in this rank's group; returns the parameters after it.

        Raises:
            PacelineError: rank 0 left, or was silent for too long.
        """
        return self._peers.ask(0, change * self._share).vector

    def check(self) -> None:
        """Raises the error that keeps the server from answering, if there is one."""
        self._peers.check()

    def finish(self) -> torch.Tensor:
        """This rank pushes no more. Waits until no rank does; returns the parameters after that.

        Raises:
            PacelineError: a rank left, or was silent for too long; the message names it.
        """
        self._peers.finish()
        dist.broadcast(self._values, group=self.ranks.group, group_src=0)
        return self._values

    def abort(self, reason: str) -> None:
        """This rank leaves in the middle."""
        self._peers.abort(reason)
        dist.destroy_process_group(self.ranks.group)  # so the others' broadcast fails

    def _add(self, rank: int, change: torch.Tensor) -> torch.Tensor:
        with self._lock:
            self._values += change
            return self._values.clone()


class Hierarchical(Partial):
    """RNA's hierarchical synchronisation (RNA, Sec. 4).

    A group steps as if there were no other groups: a round's sum is Σw_j·g_j of the group's ranks
    times M/(ranks of the group). The server takes the fraction (ranks of the group)/M of the
    change. So each gradient moves the server's parameters by w_j·g_j, as under the all-reduce.

    Every few rounds the group's first rank pushes what the group changed, and pulls the server's
    parameters, while the group goes on. What it pulled reaches all ranks of the group with the same
    later round, as a correction. The correction keeps what the group did meanwhile, so replicas
    within a group stay equal. Where all ranks meet, each group pushes what it has not pushed yet,
    and the server's parameters become everyone's.

    Args:
        group: of this rank.
        prefix: of keys in the store, new for each segment and group.
        parameters: that are trained, in the same order on all ranks.
        optimiser: of them.
        call: who calls a round.
        drift: how far ranks of a group may drift apart.
        server: between the groups.
        every: rounds between two pushes; None: only when all meet.
        on_round: called with each round of the group, in another thread.
    """

    def __init__(
        self,
        group: Ranks,
        prefix: str,
        parameters: list[nn.Parameter],
        optimiser: torch.optim.Optimizer,
        call: Call,
        drift: Drift,
        server: Server,
        every: int | None,
        on_round: OnRound | None = None,
    ) -> None:
        first = joined(parameters)
        self._corrections = torch.zeros_like(first)  # the sum of those that have been applied
        self._pushes = group.rank == 0
        self._pushed = first if self._pushes else torch.empty(0)  # `own` at the latest push
        extra, share = len(first), group.world / server.ranks.world
        super().__init__(group, prefix, parameters, optimiser, call, drift, on_round, extra, share)
        self._server, self._due = server, Pushes(every)
        self._courier = Courier(group.timeout.total_seconds())

    @property
    def own(self) -> torch.Tensor:
        """The replica less what came from other groups."""
        return joined(self._flat.parameters) - self._corrections

    def stepping(self, step: Step, optimiser: torch.optim.Optimizer) -> None:
        """See `Synchroniser.stepping`."""
        if self._courier.idle:
            self._courier.wait()  # raises the error of the latest push, if there is one
        self._server.check()
        super().stepping(step, optimiser)

    def meet(self, optimiser: torch.optim.Optimizer) -> None:
        """See `Synchroniser.meet`."""
        super().meet(optimiser)
        parameters = self._flat.parameters
        self._courier.close()
        self._courier.wait()
        if self._pushes:
            self._server.push(self.own - self._pushed)
        spread(self._server.finish(), parameters)
        alike(optimiser, parameters, self._server.ranks)

    def abort(self, reason: str) -> None:
        """See `Synchroniser.abort`."""
        super().abort(reason)
        self._server.abort(reason)
        self._courier.close(timeout_s=1.0)

    def _apply(self, sums: list[Sum], optimiser: torch.optim.Optimizer) -> None:
        for result in sums:
            super()._apply([result], optimiser)
            if result.extra is not None:
                spread(joined(self._flat.parameters) + result.extra, self._flat.parameters)
                self._corrections += result.extra
            # A correction may be applied while the thread that gave it is still busy with that.
            idle, corrected = self._courier.idle, result.extra is not None
            if self._pushes and self._due.applied(correction=corrected, idle=idle):
                self._push()

    def _push(self) -> None:
        now = joined(self._flat.parameters)
        own = now - self._corrections
        change, self._pushed = own - self._pushed, own

        def push() -> None:
            self._rounds.give(self._server.push(change) - now)

        self._courier.begin(push)
