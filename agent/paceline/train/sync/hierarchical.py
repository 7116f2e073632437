"""RNA's hierarchy: rounds within groups of equal speed, and a parameter server between groups."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.groups import Pushes
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
        if ranks.rank == 0:  # beside the thread of its group's rounds
            ranks = replace(ranks, blocking_store=ranks.another_blocking_store)
        self._peers = Peers(ranks, prefix, [0], len(self._values), self._add)

    def push(self, change: torch.Tensor) -> torch.Tensor:
        """Adds a share of what changed in this rank's group; the parameters are then these.

        Raises:
            PacelineError: rank 0 left, or was silent for too long.
        """
        return self._peers.ask(0, change * self._share).vector

    def check(self) -> None:
        """Raises what keeps the server from answering, if anything does."""
        self._peers.check()

    def finish(self) -> torch.Tensor:
        """This rank pushes no more: waits until no rank does; what the parameters are then.

        Raises:
            PacelineError: a rank left, or was silent for too long; the message names it.
        """
        self._peers.finish()
        dist.broadcast(self._values, group=self.ranks.group, group_src=0)
        return self._values

    def abort(self, reason: str) -> None:
        """This rank leaves in the middle."""
        self._peers.abort(reason)
        dist.destroy_process_group(self.ranks.group)  # others fail in the broadcast

    def _add(self, rank: int, change: torch.Tensor) -> torch.Tensor:
        with self._lock:
            self._values += change
            return self._values.clone()


class Hierarchical(Partial):
    """RNA's hierarchical synchronisation (RNA, Sec. 4).

    A group steps as if there was no other: a round's sum is Σw_j·g_j of its ranks times M/(ranks of
    the group). Of the change the server takes (ranks of the group)/M: so each gradient moves its
    parameters by as much as under the all-reduce, w_j·g_j, whatever the groups' sizes.

    Every so many rounds the group's first rank pushes what the group changed, and pulls, while the
    group goes on; what it pulled comes to all of the group with the same later round, as a
    correction that leaves what they did meanwhile. So within a group replicas are the same. Where
    all meet, what has not been pushed is, and the server's parameters are everyone's.

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
        self._corrections = torch.zeros_like(first)  # all that came
        self._pushes = group.rank == 0
        self._pushed = first if self._pushes else torch.empty(0)  # what `own` was then
        extra, share = len(first), group.world / server.ranks.world
        super().__init__(group, prefix, parameters, optimiser, call, drift, on_round, extra, share)
        self._server, self._due = server, Pushes(every)
        self._courier = Courier(group.timeout.total_seconds())

    @property
    def own(self) -> torch.Tensor:
        """The replica less what came from other groups.

        The mean over all ranks is what they had if they met now, with nothing more to apply.
        """
        return joined(self._flat.parameters) - self._corrections

    def stepping(self, step: Step, optimiser: torch.optim.Optimizer) -> None:
        """See `Synchroniser.stepping`."""
        if self._courier.idle:
            self._courier.wait()  # which tells if it failed
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
            # What a push pulled may be here before its thread is through with giving it.
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
