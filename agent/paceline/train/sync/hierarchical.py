"""Hierarchical synchronisation: rounds within groups of ranks, and a parameter server.

A group has ranks of about equal speed. Groups exchange their changes through the server. The method
is from the RNA paper, "Mitigating stragglers in the decentralized training on heterogeneous
clusters".
"""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.replicas import Pushes
from paceline.core.rounds import Call, Drift
from paceline.train.plan_shard import LocalStep
from paceline.train.sync.averaging import alike
from paceline.train.sync.base import Channel, Ranks, Replica
from paceline.train.sync.gradients import joined, spread
from paceline.train.sync.partial import PartialSync
from paceline.train.sync.peers import Peers, TaskThread
from paceline.train.sync.rounds import Sum


class ParameterServer:
    """Parameter server, in a thread on rank 0, to which groups push their changes.

    All ranks start with equal parameters. `share` is the fraction of all ranks that are in this
    rank's group. If a rank leaves or is silent for too long, methods raise a PacelineError that
    names it.
    """

    def __init__(
        self, ranks: Ranks, prefix: str, parameters: list[nn.Parameter], share: float
    ) -> None:
        self.ranks = ranks
        self._share = share
        self._values = joined(parameters)
        self._lock = threading.Lock()
        # On rank 0, the thread of its group's rounds uses `blocking_store`, so the server needs
        # another connection.
        if ranks.rank == 0:
            ranks = replace(ranks, blocking_store=ranks.another_blocking_store)
        self._peers = Peers(ranks, prefix, [0], len(self._values), self._add)

    def push(self, change: torch.Tensor) -> torch.Tensor:
        """Add the group's weighted change to the server's parameters; return the new ones."""
        return self._peers.ask(0, change * self._share).vector

    def check(self) -> None:
        """Raise the error that keeps the server from answering, if there is one."""
        self._peers.check()

    def finish(self) -> torch.Tensor:
        """End this rank's pushes, wait until all ranks have ended theirs; return the parameters."""
        self._peers.finish()
        dist.broadcast(self._values, group=self.ranks.group, group_src=0)
        return self._values

    def abort(self, reason: str) -> None:
        """Leave in the middle of the segment."""
        self._peers.abort(reason)
        # Without the group, the broadcast of other ranks fails.
        dist.destroy_process_group(self.ranks.group)

    def _add(self, rank: int, change: torch.Tensor) -> torch.Tensor:
        with self._lock:
            self._values += change
            return self._values.clone()


class HierarchicalSync(PartialSync):
    """Synchronisation with a hierarchy of groups (Sec. 4 of the RNA paper).

    A group steps as if there were no other groups. With M ranks, weights w_j and gradients g_j, a
    round's sum is Σw_j·g_j over the group's ranks, times M/(number of the group's ranks). The
    server applies the group's change times (number of the group's ranks)/M. So each gradient
    contributes w_j·g_j to the server's parameters, as under the all-reduce.

    After every `every` rounds the group's first rank pushes the group's change and pulls the
    server's parameters, while the group continues to train. A later round sends a correction to all
    ranks of the group: the pulled parameters minus the group's parameters at the push. Each rank
    adds the correction to its parameters, which does not undo the steps that the group made
    meanwhile. All ranks of the group do so with the same round, so their replicas stay equal. When
    all ranks synchronise, each group pushes the rest of its change, and all ranks load the server's
    parameters. If `every` is None, groups push only when all ranks synchronise.
    """

    def __init__(
        self,
        channel: Channel,
        replica: Replica,
        call: Call,
        drift: Drift,
        server: ParameterServer,
        every: int | None,
    ) -> None:
        group, first = channel.ranks, joined(replica.parameters)
        self._corrections = torch.zeros_like(first)
        self._pushes = group.rank == 0
        # The value of `own` at the latest push.
        self._pushed = first if self._pushes else torch.empty(0)
        extra, share = len(first), group.world / server.ranks.world
        super().__init__(channel, replica, call, drift, extra, share)
        self._server, self._due = server, Pushes(every)
        self._tasks = TaskThread(group.timeout.total_seconds())

    @property
    def own(self) -> torch.Tensor:
        """Return the replica's parameters without the changes of other groups."""
        return joined(self._flat.parameters) - self._corrections

    def stepping(self, step: LocalStep, optimiser: torch.optim.Optimizer) -> None:
        """See `GradientSync.stepping`."""
        if self._tasks.idle:
            # `wait` raises the error of the latest push, if there is one.
            self._tasks.wait()
        self._server.check()
        super().stepping(step, optimiser)

    def synchronise(self, optimiser: torch.optim.Optimizer) -> None:
        """See `GradientSync.synchronise`."""
        super().synchronise(optimiser)
        parameters = self._flat.parameters
        self._tasks.close()
        self._tasks.wait()
        if self._pushes:
            self._server.push(self.own - self._pushed)
        spread(self._server.finish(), parameters)
        alike(optimiser, parameters, self._server.ranks)

    def abort(self, reason: str) -> None:
        """See `GradientSync.abort`."""
        super().abort(reason)
        self._server.abort(reason)
        self._tasks.close(timeout_s=1.0)

    def _apply(self, sums: list[Sum], optimiser: torch.optim.Optimizer) -> None:
        for result in sums:
            super()._apply([result], optimiser)
            if result.extra is not None:
                spread(joined(self._flat.parameters) + result.extra, self._flat.parameters)
                self._corrections += result.extra
            # A correction may be applied while the pushing thread is still in the task that
            # provided it.
            idle, corrected = self._tasks.idle, result.extra is not None
            if self._pushes and self._due.applied(correction=corrected, idle=idle):
                self._push()

    def _push(self) -> None:
        now = joined(self._flat.parameters)
        own = now - self._corrections
        change, self._pushed = own - self._pushed, own

        def push() -> None:
            self._rounds.give(self._server.push(change) - now)

        self._tasks.begin(push)
