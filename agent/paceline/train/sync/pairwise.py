"""AD-PSGD: each rank steps alone, and after each step two ranks average their replicas.

Lian et al., "Asynchronous decentralized parallel stochastic gradient descent" (2018), Algorithm 1.
Ranks continue to compute during the exchange. Averaging is atomic: steps that a rank makes
meanwhile are not lost.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
from torch import nn

from paceline.core import replicas
from paceline.train.plan_shard import LocalStep
from paceline.train.sync.averaging import AveragingSync
from paceline.train.sync.base import Channel, Round
from paceline.train.sync.gradients import joined, spread
from paceline.train.sync.outer import Outer
from paceline.train.sync.peers import Peers, TaskThread
from paceline.wire.synchronisation import AveragingRules


class PairwiseSync(AveragingSync):
    """Synchronisation that averages two replicas at a time.

    Even ranks send requests and odd ranks answer them, so waits cannot form a cycle (the bipartite
    graph in Sec. 3 of the paper). Each rank has a copy of its replica, the shadow, to which it adds
    its own steps. At each exchange it also adds half of the difference between the other rank's
    shadow and its own. So the mean of all shadows changes only by the ranks' steps. Only the
    script's thread changes parameters: it copies the shadow to them at the end of each step.

    A rank steps with the mean gradient of its batch times its weight times M, the number of ranks.
    So with plain SGD the mean of all replicas changes by Σw_j·g_j, whatever the sizes of the
    batches. When all ranks synchronise, each replica becomes the mean of all replicas. All have the
    same weight in the mean, because each replica includes steps of all ranks.

    `on_round` is called with each mean of two replicas, on the rank that sent the request, in
    another thread.
    """

    weighs = True

    def __init__(self, channel: Channel, parameters: list[nn.Parameter], seed: int) -> None:
        unreported = replace(channel, on_round=None)
        super().__init__(unreported, parameters, AveragingRules(every=None), Outer())
        ranks, self._on_mean = channel.ranks, channel.on_round
        self._partners = replicas.Partners(ranks.rank, ranks.world, seed)
        self._asks = ranks.rank in replicas.asking(ranks.world)
        self._swaps = self._steps = 0
        self._lock = threading.Lock()
        # The parameters' values just after the shadow was last copied to them.
        self._loaded = joined(parameters)
        # The shadow, and as the last element the number of this rank's steps that the shadow
        # includes. `_lock` protects this vector.
        self._shadow = torch.cat([self._loaded, torch.zeros(1)])
        answering = replicas.answering(ranks.world)
        self._tasks = TaskThread(ranks.timeout.total_seconds())
        self._peers = Peers(ranks, channel.prefix, answering, len(self._shadow), self._answer)

    def stepping(self, step: LocalStep, optimiser: torch.optim.Optimizer) -> None:
        """See `GradientSync.stepping`. First, wait for the exchange of the previous step."""
        self._tasks.wait()
        self._peers.check()
        super().stepping(step, optimiser)

    def body_done(self, step: LocalStep, optimiser: torch.optim.Optimizer) -> None:
        """See `GradientSync.body_done`."""
        super().body_done(step, optimiser)
        self._steps += 1
        self._take_over()
        if self._asks and self._stepped is step:
            self._tasks.begin(self._swap)

    def synchronise(self, optimiser: torch.optim.Optimizer) -> None:
        """See `GradientSync.synchronise`."""
        self._tasks.close()
        self._tasks.wait()
        self._peers.finish()
        self._take_over()
        self._work = [1.0]
        super().synchronise(optimiser)

    def abort(self, reason: str) -> None:
        """See `GradientSync.abort`."""
        self._peers.abort(reason)
        self._tasks.close(timeout_s=1.0)
        super().abort(reason)

    def _take_over(self) -> None:
        """Add the script's changes to the shadow, and copy the shadow to the parameters."""
        with self._lock:
            now = joined(self._parameters)
            self._shadow[:-1] += now - self._loaded
            self._shadow[-1] = self._steps
            spread(self._shadow[:-1], self._parameters)
        # The values are read back, because parameters may have a lower precision than the shadow.
        self._loaded = joined(self._parameters)

    def _swap(self) -> None:
        with self._lock:
            mine = self._shadow.clone()
        answer = self._peers.ask(self._partners.next(), mine)
        with self._lock:
            self._approach(mine, answer.vector)
        number, self._swaps = self._swaps, self._swaps + 1
        if self._on_mean is not None:
            ages = replicas.staleness(round(float(mine[-1])), round(float(answer.vector[-1])))
            waited_s, reduced_s = answer.waited_s, answer.answered_s
            self._on_mean(Round(number, 2, 2, ages, 0, waited_s, reduced_s, mine.nbytes))

    def _answer(self, rank: int, theirs: torch.Tensor) -> torch.Tensor:
        with self._lock:
            mine = self._shadow.clone()
            self._approach(mine, theirs)
        return mine

    def _approach(self, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        self._shadow[:-1].add_(theirs[:-1] - mine[:-1], alpha=0.5)
