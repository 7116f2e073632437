"""Short trainings with real accuracies on real ranks, by Paceline or by PyTorch's own means.

`support.ranks` runs `train` on all ranks at once.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from tasks import Epoch, Task, task_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import paceline
from paceline.core.cost import Features
from paceline.core.emulation import Emulation
from paceline.train.plan.leader import Leader
from paceline.train.sync.averaging import AveragingSync
from paceline.train.sync.base import GradientSync
from paceline.train.sync.hierarchical import HierarchicalSync
from paceline.train.sync.pairwise import PairwiseSync
from paceline.train.sync.partial import PartialSync
from paceline.wire import ALLREDUCE, Plan
from paceline.wire.synchronisation import Synchronisation

# Hide the warning that devices are emulated.
logging.getLogger("paceline.train.device").setLevel(logging.ERROR)

# Number of first steps, which do not count. Half of them are all-reduced.
WARM = 8
# Learning rate, low enough that stale gradients do no harm. The momentum is 0.5.
RATE = 0.1
# Number of steps between two averages of PyTorch's local SGD.
EVERY = 8
# Maximum time in seconds that ranks wait for each other at the start of the counted part.
MEET_S = 20.0
# Maximum number of moments of a training at which the loss is evaluated.
MOMENTS = 8_192
# Key in the ranks' store of the number of ranks that are at the start of the counted part.
_HERE = "benchmark/here"


@dataclass(frozen=True)
class Work:
    """Specification of a training.

    Args:
        task: a name that `tasks.task_of` knows.
        how: "paceline", or one of PyTorch's own means: "ddp", "join", "post-local".
        seed: seed of the model, and of the order of the data.
        steps: number of steps that count.
        warm: steps before the first step that counts, with a learning rate of 0.
        synchroniser: without a control plane, Paceline's synchroniser from the second segment on.
        segment: without a control plane, steps of a segment with that synchroniser.
        rate: learning rate.
        uneven_steps: with Paceline, fast ranks may take over batches of slow ranks.
    """

    task: str
    how: str
    seed: int
    steps: int
    warm: int = WARM
    synchroniser: Synchronisation = ALLREDUCE
    segment: int = 64
    rate: float = RATE
    uneven_steps: bool = True


@dataclass
class Trained:
    """Observations of a rank in the counted part of a training, and the final quality.

    Args:
        began: start of the counted part on this rank, in seconds of a clock that all ranks share.
            Infinite if the rank had too few steps.
        began_at: the same moment in Unix time.
        ended: moment at which all ranks were synchronised after training, in seconds of the shared
            clock.
        steps: counted steps of this rank.
        updates: number of changes of this rank's parameters.
        target_at: moment at which the model reached the target loss, in seconds of the shared clock
            (see `Watch`), or None if it never did.
        loss: held-out loss of the mean of the final replicas.
        accuracy: held-out accuracy of the mean of the final replicas.
    """

    began: float = math.inf
    began_at: float = 0.0
    ended: float = 0.0
    steps: int = 0
    updates: int = 0
    target_at: float | None = None
    loss: float = math.inf
    accuracy: float = 0.0


@dataclass(frozen=True)
class _Seen:
    """Replica of a rank at a step's start, after its group has synchronised, or after training.

    `replica` is the rank's contribution to the common model (see `Watch`). With `waits`, it is part
    of the model also while the rank waits for other ranks. `ended` is infinite if no step started
    at this moment. Times are in seconds of the clock that all ranks share.
    """

    began: float
    replica: Tensor
    weight: float = 1.0
    waits: bool = False
    ended: float = math.inf


class Watch:
    """Observer of a training: start and end of its counted part, and the model in between.

    The watch copies the parameters during training and evaluates them afterwards, so that
    evaluation does not count as training time. It evaluates the model that all ranks would have if
    they synchronised at that moment:

    - if replicas are averaged: their weighted mean;
    - under RNA's hierarchy: the mean of all replicas without what came from other groups;
    - otherwise: the mean over the ranks that are in a step. The other ranks wait, and will receive
      what these ranks have.

    A replica is copied when its rank starts a step, so it lacks later changes. Relaxed
    synchronisers therefore seem to reach the target later than they do, by up to a slow rank's
    step.

    Args:
        network: the network that is trained.
        warm: steps that do not count.
        rate: learning rate of the counted part.
        meets: all ranks start the counted part at once.
        averages: PyTorch averages replicas instead of reducing gradients.
    """

    def __init__(
        self, network: nn.Module, warm: int, rate: float, *, meets: bool, averages: bool
    ) -> None:
        self._network, self._warm, self._rate = network, warm, rate
        self._meets, self._averages = meets, averages
        # Function that returns the current synchroniser.
        self.relaxed: Callable[[], GradientSync | None] = lambda: None
        # Makes a context in which the session counts the rank as waiting in the loop's body.
        self.waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        # Store in which ranks count themselves at the start of the counted part.
        self.store: dist.Store | None = None
        self._trained = Trained()
        self._steps: list[_Seen] = []
        self._optimiser = torch.optim.SGD(network.parameters(), 0.0, momentum=0.5)
        self._optimiser.register_step_pre_hook(self._stepping)

    @property
    def optimiser(self) -> torch.optim.Optimizer:
        """Optimiser of the training. Its learning rate is 0 until the counted part starts."""
        return self._optimiser

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Observe an iteration of the training loop, whose step is `number`.

        If ranks share a segment's batches, `number` is the segment's first step.
        """
        if number < self._warm:
            yield
            return
        first = self._trained.began == math.inf
        relaxed = self.relaxed()
        # Between two averages a slow rank may leave all its batches to other ranks, and never come
        # here.
        leaves = isinstance(relaxed, AveragingSync) and not isinstance(relaxed, PairwiseSync)
        if first and self._meets and not leaves:
            # The wait must not count as work on the rank's batch: otherwise ranks that come early
            # would leave their batches to the others.
            with self.waiting():
                self._meet()
        now = time.perf_counter()
        if first:
            self._trained.began, self._trained.began_at = now, time.time()
            for group in self._optimiser.param_groups:
                group["lr"] = self._rate
        seen = self._seen(now, relaxed)
        yield
        self._steps.append(replace(seen, ended=time.perf_counter()))
        self._trained.steps += 1

    def _meet(self) -> None:
        """Wait until all ranks are at the start of the counted part, for at most `MEET_S`.

        A barrier would deadlock: a rank that was delayed for longer than the others need for a
        segment leaves all its batches of that segment to them. It gets its next batch in the next
        segment, which rank 0 plans only once it is done with this one.
        """
        assert self.store is not None
        until = time.monotonic() + MEET_S
        here = self.store.add(_HERE, 1)
        while here < dist.get_world_size() and time.monotonic() < until:
            time.sleep(0.001)
            here = self.store.add(_HERE, 0)

    def group_met(self, relaxed: HierarchicalSync) -> None:
        """Record that this rank's group has synchronised, and now waits for other groups."""
        if self._trained.began < math.inf:
            self._steps.append(self._seen(time.perf_counter(), relaxed))

    def over(self) -> None:
        """Record that the training has ended and all ranks are synchronised."""
        self._trained.ended = time.perf_counter()
        self._steps.append(self._seen(self._trained.ended, None))

    def done(self, task: Task) -> Trained:
        """Return this rank's observations and the final quality. All ranks must call this."""
        mean = self._steps[-1].replica / dist.get_world_size()
        dist.all_reduce(mean)
        self._trained.loss, self._trained.accuracy = self._evaluated(mean, task)
        self._trained.target_at = self._target_at(task)
        return self._trained

    def _target_at(self, task: Task) -> float | None:
        """Return the first moment with the target loss, among those of all ranks' `_Seen`."""
        rank, world = dist.get_rank(), dist.get_world_size()
        steps_of: list[list[_Seen]] = [[]] * world
        nothing = torch.empty(0)
        dist.all_gather_object(steps_of, [replace(step, replica=nothing) for step in self._steps])
        stepped = [k for k in range(world) if len(steps_of[k]) > 1]
        newest = dict.fromkeys(stepped, -1)
        # Moment, number of this rank's replica, and weight of the replica.
        due: list[tuple[float, int, float]] = []
        begun = [(step.began, k, n) for k in stepped for n, step in enumerate(steps_of[k])]
        for at, who, number in sorted(begun):
            newest[who] = number
            if min(newest.values()) >= 0:
                seen = {k: steps_of[k][n] for k, n in newest.items()}
                within = {k: s.weight for k, s in seen.items() if s.waits or s.ended > at}
                # All ranks have just synchronised.
                if not any(within.values()):
                    within = dict.fromkeys(within, 1.0)
                share = within.get(rank, 0.0) / sum(within.values())
                due.append((at, newest.get(rank, 0), share))
        due = due[:: -max(1, math.ceil(len(due) / MOMENTS))][::-1]
        # A block has as many moments as there are ranks, so that each rank evaluates one.
        for block in (due[first : first + world] for first in range(0, len(due), world)):
            means = torch.zeros(world, self._steps[-1].replica.numel())
            for mean, (_, number, share) in zip(means, block, strict=False):
                mean.copy_(self._steps[number].replica * share)
            dist.all_reduce(means)
            losses = torch.full((world,), math.inf)
            if rank < len(block):
                losses[rank], _ = self._evaluated(means[rank], task)
            dist.all_reduce(losses, dist.ReduceOp.MIN)
            for (at, _, _), loss in zip(block, losses.tolist(), strict=False):
                if loss <= task.target:
                    return at
        return None

    def _evaluated(self, parameters: Tensor, task: Task) -> tuple[float, float]:
        """Return held-out loss and accuracy. The network keeps these parameters."""
        nn.utils.vector_to_parameters(parameters, self._network.parameters())
        *inputs, classes = task.held_out
        with torch.no_grad():
            logits = self._network(*inputs)
            accuracy = (logits.argmax(1) == classes).float().mean()
            return float(cross_entropy(logits, classes)), float(accuracy)

    def _stepping(self, *_: Any) -> None:
        # A relaxed synchroniser may call this several times, or without gradients (no round ended).
        if self._trained.began < math.inf and any(
            p.grad is not None for p in self._network.parameters()
        ):
            self._trained.updates += 1

    def _seen(self, now: float, relaxed: GradientSync | None) -> _Seen:
        if isinstance(relaxed, HierarchicalSync):
            return _Seen(now, relaxed.own, waits=True)
        replica = nn.utils.parameters_to_vector(p.detach() for p in self._network.parameters())
        if isinstance(relaxed, AveragingSync):
            weight = 1.0 if isinstance(relaxed, PairwiseSync) else relaxed._work[0]
            return _Seen(now, replica, weight, waits=True)
        return _Seen(now, replica, waits=self._averages)


def train(work: Work) -> Trained:
    """Train on this rank, whose device `PACELINE_EMULATE` specifies."""
    task, world = task_of(work.task), dist.get_world_size()
    data = Epoch(task, world * task.batch * (work.warm + work.steps))
    torch.manual_seed(work.seed)
    network = task.network()
    # Paceline's ranks may be at different steps when counting starts, so they wait for each other.
    # Under `Join` a slow rank may end before the counted part, so ranks must not wait for it.
    meets = work.how == "paceline"
    averages = work.how == "post-local"
    watch = Watch(network, work.warm, work.rate, meets=meets, averages=averages)
    dist.barrier()
    if work.how == "paceline":
        _by_paceline(work, task, data, network, watch)
    else:
        _by_torch(work, task, data, network, watch)
    return watch.done(task)


@contextlib.contextmanager
def _coasted(what: Synchronisation, steps: int) -> Iterator[None]:
    """Patch the leader so that segments that it plans without a controller have a synchroniser.

    The first two segments are short, and the first is all-reduced. Later ones have `steps` steps.
    """
    coasted = Leader._coasted

    def next_one(leader: Leader) -> Plan:
        leader._coast_steps = WARM // 2 if leader.seq < 2 else steps
        made = coasted(leader)
        return msgspec.structs.replace(made, synchroniser=what if leader.seq else ALLREDUCE)

    with (
        mock.patch("paceline.train.plan.leader.MOST_COASTED", steps),
        # Otherwise the first two segments would be longer.
        mock.patch("paceline.train.plan.leader.ALONE_S", 0.0),
        mock.patch.object(Leader, "_coasted", next_one),
    ):
        yield


@contextlib.contextmanager
def _groups_seen(watch: Watch) -> Iterator[None]:
    """Notify the watch when this rank's group has synchronised."""
    met = PartialSync.synchronise

    def synchronise(synchroniser: PartialSync, optimiser: torch.optim.Optimizer) -> None:
        met(synchroniser, optimiser)
        if isinstance(synchroniser, HierarchicalSync):
            watch.group_met(synchroniser)

    with mock.patch.object(PartialSync, "synchronise", synchronise):
        yield


def _by_paceline(work: Work, task: Task, data: Epoch, network: nn.Module, watch: Watch) -> None:
    batch = task.batch * dist.get_world_size()
    own: Any = contextlib.nullcontext()
    if "PACELINE_BUS" not in os.environ:
        own = _coasted(work.synchroniser, work.segment)
    with _groups_seen(watch), own:
        session = paceline.Session(
            data,
            global_batch=batch,
            seed=work.seed,
            uneven_steps=work.uneven_steps,
            # Without a control plane, `_coasted` plans, so rank 0 must not.
            policy="bsp",
        )
        watch.relaxed = lambda: session._loop.gate.relaxed
        watch.waiting = lambda: session._loop.running().waiting()
        watch.store = session._loop.startup.store
        model = session.wrap(network)
        optimiser = watch.optimiser
        for *inputs, classes in session.loader(collate_fn=task.collate):
            # If ranks share a segment's batches, a fast rank may have trained later ones already,
            # so count from the segment's first step.
            with watch.step(session._loop.running().step.segment_first):
                optimiser.zero_grad()
                cross_entropy(model(*inputs), classes).backward()
                optimiser.step()
        watch.over()
        session.close()


class Held:
    """Emulated device under plain DDP, which delays gradients until its computing time is over."""

    def __init__(self) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._emulation = Emulation.parse(os.environ["PACELINE_EMULATE"], self._world)
        self._until = 0.0

    def begin(self, step: int, sizes: list[int]) -> None:
        """Start a step with samples of the given sizes."""
        spent_s = self._emulation.rank_s(self._rank, step, _features(sizes))
        self._until = time.perf_counter() + spent_s

    def before(self, hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return a communication hook that waits until the emulated device has computed."""

        # DDP checks the annotations of hooks, so leave them out.
        def held(state, bucket):  # type: ignore[no-untyped-def]
            time.sleep(max(0.0, self._until - time.perf_counter()))
            return hook(state, bucket)

        return held

    def speeds(self, sizes: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return each rank's steps per second with samples of these sizes, [W]."""
        all_ranks = Features(*(np.full(self._world, value) for value in _features(sizes)))
        steps = [self._emulation.compute_s(step, all_ranks) for step in range(256)]
        return np.asarray(1 / np.mean(steps, axis=0))


def _features(sizes: list[int]) -> Features:
    own = np.array(sizes, float)
    batch: Any = (len(own), own.sum(), (own**2).sum(), own.max())
    return Features(*batch)


def _by_torch(work: Work, task: Task, data: Epoch, network: nn.Module, watch: Watch) -> None:
    held = Held()
    model = DistributedDataParallel(network)
    optimiser = watch.optimiser
    joined: Any = contextlib.nullcontext()
    if work.how == "post-local":
        with warnings.catch_warnings():
            # The import warns about TorchScript.
            warnings.simplefilter("ignore")
            from torch.distributed.optim import PostLocalSGDOptimizer
        alone, _ = dist.new_subgroups(1)
        first = WARM - 1
        state = PostLocalSGDState(None, alone, first, post_local_gradient_allreduce=False)
        optimiser = PostLocalSGDOptimizer(optimiser, PeriodicModelAverager(EVERY, first))
        model.register_comm_hook(state, held.before(post_localSGD_hook))
    else:
        model.register_comm_hook(None, held.before(allreduce_hook))
    if work.how == "join":
        joined = Join([model])
        batches = _by_speed(work, task, data, held)
    else:
        sampler = DistributedSampler(data, seed=work.seed)
        own = list(sampler)
        batches = [own[at : at + task.batch] for at in range(0, len(own), task.batch)]
    loader = DataLoader(data, batch_sampler=batches, collate_fn=task.collate)
    with joined:
        for step, (*inputs, classes) in enumerate(loader):
            held.begin(step, [data.sizes[k] for k in batches[step]])
            with watch.step(step):
                optimiser.zero_grad()
                cross_entropy(model(*inputs), classes).backward()
                optimiser.step()
    dist.barrier()
    watch.over()
    if work.how == "post-local":
        dist.destroy_process_group(alone)


def _by_speed(work: Work, task: Task, data: Epoch, held: Held) -> list[list[int]]:
    """Return this rank's batches; their number is in proportion to the rank's emulated speed.

    `Join` allows ranks to have different numbers of batches.
    """
    generator = torch.Generator().manual_seed(work.seed)
    order = torch.randperm(len(data), generator=generator).tolist()
    batches = [order[at : at + task.batch] for at in range(0, len(order), task.batch)]
    speeds = held.speeds(data.sizes[: task.batch])
    ends = np.round(np.cumsum(speeds) / speeds.sum() * len(batches)).astype(int)
    rank = dist.get_rank()
    return batches[ends[rank - 1] if rank else 0 : ends[rank]]
