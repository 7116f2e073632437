"""Short trainings with a real accuracy on real ranks: by Paceline, or by PyTorch's own.

`train` is a case for the ranks of `support.ranks`: it runs on all of them at once.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
import torch.distributed as dist
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
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import paceline
from paceline.cost import Features
from paceline.emulation import Emulation
from paceline.leader import Leader
from paceline.wire import ALLREDUCE, Segment, Synchronisation

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "plaid"))
logging.getLogger("paceline.device").setLevel(logging.ERROR)  # that devices are emulated

WARM = 8  # first steps, not counted: half of them all-reduced
RATE = 0.1  # so low that gradients some rounds old do no harm; with momentum 0.5
SEGMENT = 64  # steps after which all ranks of a relaxed synchroniser meet: the controller's most
EVERY = 8  # local SGD's steps between two means
FRAME = 20  # points of a recording that the LSTM takes at once

Item = tuple[Tensor, int]
Batch = tuple[Tensor, ...]  # what the network takes, then classes [n]


@dataclass(frozen=True)
class Work:
    """One training.

    Args:
        task: of `task_of`.
        how: "paceline", or PyTorch's own: "ddp", "join", "post-local".
        seed: of the model, and of the order of the data.
        steps: counted ones,
        warm: after so many in which nothing is learnt.
        synchroniser: Paceline's, where no control plane says it, in all segments but the first.
        rate: learning rate.
    """

    task: str
    how: str
    seed: int
    steps: int
    warm: int = WARM
    synchroniser: Synchronisation = ALLREDUCE
    rate: float = RATE


@dataclass
class Trained:
    """What one rank saw of the counted part of a training.

    Args:
        began: s of a clock that all ranks share; inf: it had too few steps for that,
        began_at: and Unix time.
        ended: s of that clock, when all had met.
        steps: of this rank.
        updates: how often its parameters changed.
        curve: (s, held-out loss of its replica) at each step, and in the end.
        accuracy: held-out, in the end.
    """

    began: float = math.inf
    began_at: float = 0.0
    ended: float = 0.0
    steps: int = 0
    updates: int = 0
    curve: list[tuple[float, float]] = field(default_factory=list)
    accuracy: float = 0.0


@dataclass(frozen=True)
class Task:
    """What to learn: real data, small enough to be learnt in seconds.

    Args:
        samples: (what the network takes, class).
        sizes: λ of each.
        held_out: to evaluate with.
        collate: makes a batch of samples.
        network: makes one.
        batch: samples of a step and rank.
        target: held-out loss.
    """

    samples: list[Item]
    sizes: list[int]
    held_out: Batch
    collate: Callable[[list[Any]], Batch]
    network: Callable[[], nn.Module]
    batch: int
    target: float


class Epoch(Dataset[Item]):
    """A task's samples, over and over: as many as a training needs, without an epoch's end."""

    def __init__(self, task: Task, count: int) -> None:
        self._samples = task.samples
        self.sizes = [task.sizes[k % len(task.sizes)] for k in range(count)]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Item:
        return self._samples[index % len(self._samples)]


def _stacked(items: list[Item]) -> Batch:
    return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])


def _digits() -> Task:
    """scikit-learn's handwritten digits, two thirds of them to learn."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).flatten(1)
    images = (images - images.mean()) / images.std()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, classes = images[order], torch.tensor(found.target)[order]
    cut = len(images) * 2 // 3
    samples = list(zip(images[:cut], classes[:cut].tolist(), strict=True))
    return Task(
        samples,
        [1] * len(samples),
        (images[cut:], classes[cut:]),
        _stacked,
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        batch=8,
        target=0.4,
    )


def _wide_digits() -> Task:
    """The same, for a network of 1.1 million parameters."""

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )

    return replace(_digits(), network=network)


class SeriesLSTM(nn.Module):
    """An LSTM over a series' frames, then the mean and the maximum of its states."""

    def __init__(self, classes: int, width: int = 32) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2 * FRAME, width, batch_first=True)
        self.norm = nn.LayerNorm(2 * width + 2)
        self.head = nn.Linear(2 * width + 2, classes)

    def forward(self, series: Tensor, lengths: Tensor) -> Tensor:
        """Logits [n, classes] of padded series [n, points] with lengths [n]."""
        series = nn.functional.pad(series, (0, -series.shape[1] % FRAME))
        peak = series.abs().amax(1, keepdim=True).clamp_min(1e-4)
        mean = series.sum(1, keepdim=True) / lengths[:, None]
        # Both the current's shape and its strength tell an appliance.
        kinds = [x.unflatten(1, (-1, FRAME)) for x in (series / peak, torch.asinh(series))]
        states, _ = self.lstm(torch.cat(kinds, 2))
        inside = (torch.arange(states.shape[1]) * FRAME < lengths[:, None])[:, :, None]
        pooled = [
            (states * inside).sum(1) / inside.sum(1),
            states.masked_fill(~inside, -1).amax(1),
            peak.log() / 3,
            torch.asinh(mean),
        ]
        logits: Tensor = self.head(self.norm(torch.cat(pooled, 1)))
        return logits


def _plaid() -> Task:
    """PLAID's recordings, of 100 to 1,344 points, for an LSTM."""
    from data import CLASSES, Plaid, collate

    data, held_out = Plaid(train=True), Plaid(train=False)
    return Task(
        data.items,
        data.sizes,
        collate(held_out.items),
        collate,
        lambda: SeriesLSTM(CLASSES),
        batch=4,
        target=1.6,
    )


@cache
def task_of(name: str) -> Task:
    """A task, read once in each process.

    Raises:
        KeyError: no such task.
    """
    return {"digits": _digits, "wide digits": _wide_digits, "plaid": _plaid}[name]()


class Watch:
    """Sees a training: when its counted part began and ended, and what the model was in between.

    It keeps copies of the parameters, to be evaluated when the clock does not run any more.
    """

    def __init__(self, network: nn.Module, warm: int, rate: float, *, meets: bool) -> None:
        self._network, self._warm, self._rate, self._meets = network, warm, rate, meets
        self._begun = 0  # steps
        self._seen = Trained()
        self._kept: list[tuple[float, list[Tensor]]] = []
        self._optimiser = torch.optim.SGD(network.parameters(), 0.0, momentum=0.5)
        self._optimiser.register_step_pre_hook(self._stepping)

    @property
    def optimiser(self) -> torch.optim.Optimizer:
        """The training's. Its learning rate is 0 until the counted part begins."""
        return self._optimiser

    def step(self) -> None:
        """A step begins."""
        self._begun += 1
        if self._begun <= self._warm:
            return
        if self._begun == self._warm + 1 and self._meets:
            dist.barrier()
        now = time.perf_counter()
        if self._begun == self._warm + 1:
            self._seen.began, self._seen.began_at = now, time.time()
            for group in self._optimiser.param_groups:
                group["lr"] = self._rate
        self._keep(now)

    def over(self) -> None:
        """The training has ended, all have met."""
        self._seen.ended = time.perf_counter()
        self._seen.steps = max(0, self._begun - self._warm)
        self._keep(self._seen.ended)

    def done(self, held_out: Batch) -> Trained:
        """What was seen, and how well this rank's replica did."""
        *inputs, classes = held_out
        with torch.no_grad():
            for at, parameters in self._kept:
                for parameter, kept in zip(self._network.parameters(), parameters, strict=True):
                    parameter.copy_(kept)
                logits = self._network(*inputs)
                self._seen.curve.append((at, float(cross_entropy(logits, classes))))
                self._seen.accuracy = float((logits.argmax(1) == classes).float().mean())
        return self._seen

    def _stepping(self, *_: Any) -> None:
        # Relaxed synchronisers step with no gradients where nothing has come, or several times.
        if self._seen.began < math.inf and any(
            p.grad is not None for p in self._network.parameters()
        ):
            self._seen.updates += 1

    def _keep(self, now: float) -> None:
        self._kept.append((now, [p.detach().clone() for p in self._network.parameters()]))


def train(work: Work) -> Trained:
    """Trains on this rank, whose speed `PACELINE_EMULATE` says."""
    task, world = task_of(work.task), dist.get_world_size()
    data = Epoch(task, world * task.batch * (work.warm + work.steps))
    torch.manual_seed(work.seed)
    network = task.network()
    # Paceline's may be apart where counting begins. Under `Join` a slow rank may never come there.
    meets = work.how == "paceline"
    watch = Watch(network, work.warm, work.rate, meets=meets)
    dist.barrier()
    if work.how == "paceline":
        _by_paceline(work, task, data, network, watch)
    else:
        _by_torch(work, task, data, network, watch)
    return watch.done(task.held_out)


@contextlib.contextmanager
def _coasted(what: Synchronisation) -> Iterator[None]:
    """The leader's own segments carry a synchroniser: two short ones first, then the longest."""
    coasted = Leader._coasted

    def next_one(leader: Leader) -> Segment:
        leader._coast_steps = WARM // 2 if leader.seq < 2 else SEGMENT
        made = coasted(leader)
        return msgspec.structs.replace(made, synchroniser=what if leader.seq else ALLREDUCE)

    with (
        mock.patch("paceline.leader.MOST_COASTED", SEGMENT),
        mock.patch.object(Leader, "_coasted", next_one),
    ):
        yield


def _by_paceline(work: Work, task: Task, data: Epoch, network: nn.Module, watch: Watch) -> None:
    batch = task.batch * dist.get_world_size()
    planned = "PACELINE_BUS" in os.environ
    with contextlib.nullcontext() if planned else _coasted(work.synchroniser):
        session = paceline.Session(data, global_batch=batch, seed=work.seed)
        model = session.wrap(network)
        optimiser = watch.optimiser
        for *inputs, classes in session.loader(collate_fn=task.collate):
            watch.step()
            optimiser.zero_grad()
            cross_entropy(model(*inputs), classes).backward()
            optimiser.step()
        watch.over()
        session.close()


class _Held:
    """An emulated device under plain DDP: gradients are not reduced before their time."""

    def __init__(self) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._emulation = Emulation.parse(os.environ["PACELINE_EMULATE"], self._world)
        self._until = 0.0

    def begin(self, step: int, sizes: list[int]) -> None:
        """A step begins, with samples of these sizes."""
        spent_s = self._emulation.rank_s(self._rank, step, _features(sizes))
        self._until = time.perf_counter() + spent_s

    def before(self, hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """A communication hook that begins when the device has computed."""

        def held(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations
            time.sleep(max(0.0, self._until - time.perf_counter()))
            return hook(state, bucket)

        return held

    def speeds(self, sizes: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Steps with samples of these sizes that each rank does in a second, [W]."""
        all_ranks = Features(*(np.full(self._world, value) for value in _features(sizes)))
        steps = [self._emulation.compute_s(step, all_ranks) for step in range(256)]
        return np.asarray(1 / np.mean(steps, axis=0))


def _features(sizes: list[int]) -> Features:
    own = np.array(sizes, float)
    batch: Any = (len(own), own.sum(), (own**2).sum(), own.max())
    return Features(*batch)


def _by_torch(work: Work, task: Task, data: Epoch, network: nn.Module, watch: Watch) -> None:
    held = _Held()
    model = DistributedDataParallel(network)
    optimiser = watch.optimiser
    joined: Any = contextlib.nullcontext()
    if work.how == "post-local":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript's, with which it comes
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
            watch.step()
            optimiser.zero_grad()
            cross_entropy(model(*inputs), classes).backward()
            optimiser.step()
    dist.barrier()
    watch.over()
    if work.how == "post-local":
        dist.destroy_process_group(alone)


def _by_speed(work: Work, task: Task, data: Epoch, held: _Held) -> list[list[int]]:
    """More batches for faster ranks, as `Join` lets them have; a user must know the speeds."""
    generator = torch.Generator().manual_seed(work.seed)
    order = torch.randperm(len(data), generator=generator).tolist()
    batches = [order[at : at + task.batch] for at in range(0, len(order), task.batch)]
    speeds = held.speeds(data.sizes[: task.batch])
    ends = np.round(np.cumsum(speeds) / speeds.sum() * len(batches)).astype(int)
    rank = dist.get_rank()
    return batches[ends[rank - 1] if rank else 0 : ends[rank]]
