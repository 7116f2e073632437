"""Loader of `Session.loader`: a DataLoader whose batches follow the plan.

The loader calls `loop.Loop` around each iteration of the script's loop, in the order that `Loop`
documents.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Generator, Iterator
from functools import partial
from types import FrameType
from typing import Any, NoReturn, SupportsIndex

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data._utils.pin_memory import pin_memory

from paceline.core.errors import PacelineError
from paceline.core.terms import whole
from paceline.train import replay
from paceline.train.loop import Loop
from paceline.train.plan_shard import LocalStep
from paceline.train.profile import spread
from paceline.train.proof import ProofResult
from paceline.train.seeding import Epoch, WorkerInit, seeded

_PLANNED = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}


class _NoSamplerError(PacelineError, AttributeError):
    """Error on access to `sampler`; an AttributeError, too, so that `hasattr` returns False."""


class _Batches(Sampler[list[int]]):
    def __init__(
        self, loop: Loop, turns: deque[tuple[LocalStep, LocalStep]], *, ahead: bool
    ) -> None:
        self._loop = loop
        self._turns = turns
        # True if batches are loaded before the script reaches them.
        self._ahead = ahead

    def __iter__(self) -> Iterator[list[int]]:
        sharing = None if self._ahead else self._loop.sharing
        for step in self._loop.steps():
            for turn in step.micro or (step,):
                self._turns.append((step, turn))
                taken_over = sharing is not None and sharing.is_taken_over(step)
                yield self._loop.fillers if taken_over or not turn.indices else turn.indices


class _Seeded(Dataset[Any]):
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> Any:
        with seeded(index):
            if hasattr(self._dataset, "__getitems__"):
                return self._dataset.__getitems__([index])[0]
            return self._dataset[index]


class Loader:
    """DataLoader whose batches follow the plan; each iteration over it is an epoch.

    `Session.loader` makes it. If the script leaves the loop early, the rest of the epoch is
    dropped; all ranks must leave the loop at the same step.

    A rank that has no samples in a step gets a filler, the smallest sample of the data set, whose
    gradient does not count. Then `Session.batch.empty` is True. With ``Session(shapes=…)`` the
    filler batch has n copies of this sample, where n is the smallest number of samples that the
    shapes allow, or the rank's limit if that is smaller.

    With ``Session(uneven_steps=True)`` and most relaxed policies, fast ranks take over batches of
    slow ranks. Then a fast rank's loop has more iterations than a slow rank's, and there are no
    fillers. `Session.batch` has the step that a batch belongs to.

    With ``Session(micro_batches=True)`` a step may take several iterations of the loop on this
    rank. The optimiser steps in the last of them, where `Session.batch.last` is True.

    ``len(loader)`` is the number of steps in a whole epoch. It is the same on every rank and under
    every policy, so a schedule of the learning rate can use it; see `Session.steps_per_epoch`.
    """

    def __init__(self, loop: Loop, dataset: Any, options: dict[str, Any]) -> None:
        if clash := sorted(_PLANNED & options.keys()):
            raise TypeError(
                f"loader({clash[0]}=…): the plan decides it; leave it out here and give Session "
                "global_batch, seed or drop_last"
            )
        if not options.get("in_order", True):
            raise TypeError("loader(in_order=False): steps follow the plan in order; leave it out")
        self._loop = loop
        # Iterations of the loop that the DataLoader has read but the script has not reached. Each
        # pair has the whole step, and the micro-batch of it that the iteration trains.
        self._turns: deque[tuple[LocalStep, LocalStep]] = deque()
        # True if the loss must be checked before the first step (`paceline.train.proof`).
        self.proves = loop.context.prove
        # Result of the check of the loss; None until the check is done.
        self.answer: ProofResult | None = None
        # The newest result of `typical`: its number of samples, and the batch.
        self._typical: tuple[int, Any] | None = None
        for feature in loop.features:
            dataset, options = feature.reads(dataset, options)
        ahead = options.get("num_workers", 0) > 0
        batches = _Batches(loop, self._turns, ahead=ahead)
        self._epoch = Epoch(loop.context.terms.seed, shared=ahead)
        if ahead:
            begin = WorkerInit(self._epoch, options.get("worker_init_fn"))
            options = options | {"worker_init_fn": begin}
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=batches, **options)

    def typical(self, samples: int) -> Any:
        """Return a batch for `Session.profile`, whose samples' sizes are quantiles of all sizes.

        A repeated call with the same number returns the same batch, so that timing it again does
        not measure reading. Samples repeat if the data set has fewer than `samples` samples.

        Raises:
            ValueError: `samples` is not a whole number ≥ 1.
            PacelineError: the call is not within `Session.profile`.
        """
        whole("typical", samples, 1)
        typical = self._loop.findings.typical
        if not typical or self._loop.begun:
            raise PacelineError(
                "typical: call it only inside the function that session.profile runs"
            )
        if self._typical is None or self._typical[0] != samples:
            # Release the old batch first: two batches may not fit into memory.
            self._typical = None
            batch = self._load(spread(typical, samples))
            self._typical = samples, self._loaded(batch, 0.0)
        return self._typical[1]

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Set the epoch of the next pass, like DistributedSampler's method. Call it on every rank.

        The order of samples is that of ``DistributedSampler(seed=seed)`` after the same call, so a
        script whose epochs begin with 1 gets the same orders as with DistributedSampler. Without
        this call epochs begin with 0, and each pass is the next epoch.

        Raises:
            TypeError, ValueError: `epoch` is not a whole number ≥ 0.
            PacelineError: the script is in the loop, or has reached a later epoch.
        """
        self._loop.set_epoch(whole("set_epoch", epoch, 0))

    def samples(self, indices: list[int]) -> list[Any]:
        """Read samples with the same random numbers on each rank, and return them.

        If the loader has worker processes, a worker process reads the samples: a file that a data
        set opens at its first read must not be open in the process that forks the workers.
        """
        loader, seeded = self._loader, _Seeded(self._loader.dataset)
        if not loader.num_workers:
            with self._epoch:
                return [seeded[index] for index in indices]
        reading = DataLoader(
            seeded,
            batch_sampler=[indices],
            num_workers=1,
            collate_fn=list,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            timeout=loader.timeout,
        )
        read: list[Any]
        (read,) = reading
        return read

    def collated(self, samples: list[Any]) -> Any:
        """Return a batch of samples, as the loader would make it."""
        batch = self._loader.collate_fn(samples)
        if self._loader.pin_memory and torch.cuda.is_available():
            return pin_memory(batch)  # type: ignore[no-untyped-call]
        return batch

    @property
    def lookahead(self) -> int:
        """Return the number of steps that the DataLoader fetches before training reaches them."""
        return self._loader.num_workers * (self._loader.prefetch_factor or 0)

    @property
    def sampler(self) -> NoReturn:
        """Refuse access: frameworks read a DataLoader's sampler to replace it."""
        raise _NoSamplerError(
            "session.loader has no sampler that a framework could replace: the plan decides which "
            "samples a batch has. Remove the call that prepares a DataLoader, such as Ray Train's "
            "prepare_data_loader, and move batches to the device in the loop"
        )

    def __len__(self) -> int:
        return self._loop.progress.steps_per_epoch

    def __iter__(self) -> Generator[Any]:
        loop = self._loop
        if not loop.begin_epoch(self.lookahead, partial(self._profile, sys._getframe(1))):
            return
        self._typical = None
        self._turns.clear()
        self._epoch.number = loop.progress.epoch
        if self.proves:
            self.proves = False
            replay.prove_first(loop, self, sys._getframe(1))
        ran_out = False
        longer_s, on, sharing = loop.context.device.loading_s, loop.on, loop.sharing
        try:
            self._begin_loading()
            # Making the iterator draws a random number, so the random generators' states of a
            # checkpoint are restored only afterwards.
            batches = iter(self._loader)
            loop.restore_random()
            while True:
                for loading in on.loading:
                    loading()
                asked = time.perf_counter()
                try:
                    with self._epoch:
                        batch = next(batches)
                except StopIteration:
                    ran_out = True
                    break
                step, turn = self._turns.popleft()
                if on.loaded:
                    batch = self._loaded(batch, time.perf_counter() - asked)
                if longer_s and not (sharing is not None and sharing.is_taken_over(step)):
                    time.sleep(longer_s)
                yield from self._body(step, turn, batch, time.perf_counter() - asked)
                if turn.more:
                    continue
                while sharing is not None and (taken := sharing.take_over(step)) is not None:
                    asked = time.perf_counter()
                    batch = self._load(taken.indices)
                    batch = self._loaded(batch, time.perf_counter() - asked)
                    if longer_s:
                        time.sleep(longer_s)
                    yield from self._body(taken, taken, batch, time.perf_counter() - asked)
                loop.end_step(step)
        finally:
            loop.end_epoch(ran_out)

    def _profile(self, frame: FrameType) -> None:
        # `paceline doctor` checks the loss itself, after which it ends the script.
        if self.proves or not self._loop.context.prove:
            replay.profile_first(self._loop, self, frame)

    def _body(self, step: LocalStep, turn: LocalStep, batch: Any, data_s: float) -> Iterator[Any]:
        """Yield the batch to one iteration of the script's loop, if this rank trains the batch."""
        loop = self._loop
        if turn.micro_index:
            loop.begin_turn(turn, data_s)
        elif not loop.begin_step(step, data_s):
            return
        # `closing` stays True if a break, a return or an exception ends the body.
        closing = True
        try:
            yield batch
            closing = False
        finally:
            loop.end_turn(closing)

    def _begin_loading(self) -> None:
        for loading in self._loop.on.loading:
            loading()

    def _loaded(self, batch: Any, data_s: float) -> Any:
        for loaded in self._loop.on.loaded:
            batch = loaded(batch, data_s)
        return batch

    def _load(self, indices: list[int]) -> Any:
        dataset = self._loader.dataset
        self._begin_loading()
        with self._epoch:
            if hasattr(dataset, "__getitems__"):
                samples = dataset.__getitems__(indices)
            else:
                samples = [dataset[index] for index in indices]
            return self.collated(samples)
