"""`ep4ddl`: equal batches; workers predicted to be slow compute with more CPU threads.

EP4DDL (Z. Ji, X. Zhang, J. Li, J. Wei, Z. Wei, The Journal of Supercomputing, 2022), as described
in CHRONICA (§II, §VI-A): a GRU predicts each worker's performance, and branch and bound picks the
degrees of parallelism that minimise the variance between workers. docs/policies.md explains how
this preset completes the parts that the description leaves open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from paceline.policies.base import (
    Allocation,
    Feedback,
    Floats,
    Ints,
    KeepPlacement,
    Models,
    Policy,
    Preset,
    Problem,
)
from paceline.policies.parameters import Parameters
from paceline.policies.predict.gru import PAST, GruPredictor
from paceline.policies.presets.bsp import EqualCounts
from paceline.policies.solve import counts

# Maximum number of nodes that branch and bound visits, in about 30 ms.
_MOST_VISITED = 20_000
# Maximum number of workers for branch and bound; for more, `_MOST_VISITED` nodes are too few.
_WORKERS = 64
# Approximate maximum number of levels (common times of all workers) that `try_levels` tries.
_LEVELS = 256
# Threads change only if the standard deviation of the workers' times falls by more than this
# fraction of their mean.
_WORTH = 0.05


def shortened(threads: Ints, serial: float) -> Floats:
    """Return the time of a step with k threads ÷ its time with one thread, for each k in `threads`.

    By Amdahl's law, the ratio is serial + (1 - serial) / k; `serial` is the fraction of the time
    that threads do not shorten.
    """
    return np.asarray(serial + (1 - serial) / threads)


def least_variance(times: Floats, most: int, cores: int, serial: float) -> Ints:
    """Return each worker's number of threads such that the variance of their times is least, [W].

    A worker has 1 to `most` threads. The search is branch and bound, depth first. Its bound is the
    sum of squared deviations of the decided workers from their mean, which can only grow with more
    workers. The search begins with the best of the choices in which each worker's time is as near
    as possible to a common level; with more than 64 workers, the search also ends with this
    choice. Of equally good choices, the choice with fewer threads is the result.

    `times` are the workers' times with one thread, [W] s. `cores` is the maximum number of threads
    of all workers together (each worker has at least one thread); 0: no maximum. `serial` is the
    fraction of the time that threads do not shorten.
    """
    search = _Search(times[:, None] * shortened(np.arange(1, most + 1), serial), cores)
    search.try_levels()
    if len(times) <= _WORKERS:
        search.descend()
    return search.best


class _Search:
    """Branch and bound over the workers' choices; the slowest worker is decided first.

    `choices[j, t - 1]` is the time of worker j with t threads; shape [W, maximum number of
    threads].
    """

    def __init__(self, choices: Floats, cores: int) -> None:
        world, most = choices.shape
        self._workers = np.argsort(-choices[:, 0], kind="stable")
        self._choices = choices[self._workers]
        # Number of threads that all workers together may have beyond one per worker. `_best` has
        # each worker's number of threads beyond one.
        self._spare = max(cores - world, 0) if cores else world * most
        self._best: Ints = np.zeros(world, np.int64)
        self._least = _squares(self._choices[:, 0])
        self._nodes = 0

    @property
    def best(self) -> Ints:
        threads = np.empty_like(self._best)
        threads[self._workers] = self._best + 1
        return threads

    def try_levels(self) -> None:
        levels = np.unique(self._choices)
        for level in levels[:: max(1, len(levels) // _LEVELS)]:
            wanted = np.cumsum(np.abs(self._choices - level).argmin(axis=1))
            self._keep(np.diff(np.minimum(wanted, self._spare), prepend=0))

    def descend(self) -> None:
        level = self._times(self._best).mean()
        order = np.argsort(np.abs(self._choices - level), axis=1, kind="stable")
        self._visit(order.tolist(), [], 0.0, 0.0, self._spare)

    def _visit(
        self, order: list[list[int]], picks: list[int], mean: float, squares: float, spare: int
    ) -> None:
        depth = len(picks)
        if depth == len(order):
            self._keep(np.array(picks))
            return
        for extra in order[depth]:
            if extra > spare or self._nodes >= _MOST_VISITED:
                continue
            self._nodes += 1
            off = float(self._choices[depth, extra]) - mean
            step = off / (depth + 1)
            if (grown := squares + off * (off - step)) <= self._least:
                self._visit(order, [*picks, extra], mean + step, grown, spare - extra)

    def _keep(self, extra: Ints) -> None:
        squares = _squares(self._times(extra))
        slack = 1e-9 * self._least
        fewer = extra.sum() < self._best.sum()
        if squares < self._least - slack or (squares <= self._least + slack and fewer):
            self._best, self._least = extra, squares

    def _times(self, extra: Ints) -> Floats:
        return np.asarray(self._choices[np.arange(len(extra)), extra])


def _squares(times: Floats) -> float:
    return float(np.square(times - times.mean()).sum())


class _Ep4ddlMemory(counts.Counted):
    threads: list[int]  # [W]
    # First step with these threads.
    since: int
    # Fraction of a step's time that more threads do not shorten.
    serial: float
    # Time in seconds that each worker would have taken with one thread when `threads` were chosen,
    # [W]; empty: unknown.
    single_s: list[float] = msgspec.field(name="one")


@dataclass(frozen=True)
class ThreadAllocator:
    """EP4DDL's choice of parallelism.

    All workers get the same number of samples, and begin with one thread. The numbers of threads
    change if this lowers the standard deviation of the predicted times by more than 5 % of their
    mean, and not again in the next eight steps. From the times of these steps, the allocator
    computes the fraction of the time that threads do not shorten; before the first change, this
    fraction is `serial`. For `most` and `cores` see `least_variance`.
    """

    most: int
    cores: int
    serial: float

    def allocate(self, problem: Problem, models: Models, feedback: Feedback) -> Allocation:
        """See `Allocator.allocate`."""
        memory = counts.recall(problem, _Ep4ddlMemory) or self._first(problem)
        settled = len(feedback) and int(feedback.step[-1]) >= memory.since + PAST - 1
        if not models.known or not settled:
            return self._allocation(memory, self._expected(models, memory))
        threads = np.array(memory.threads)
        serial = memory.serial
        if memory.single_s and (threads > 1).any():
            serial = serial_share(models.b / memory.single_s, threads)
        single_s = models.b / shortened(threads, serial)
        wanted = least_variance(single_s, self.most, self.cores, serial)
        gain = models.b.std() - (single_s * shortened(wanted, serial)).std()
        fewer = wanted.sum() < threads.sum()
        if gain > _WORTH * models.b.mean() or (fewer and gain >= 0):
            memory = _Ep4ddlMemory(
                counts=memory.counts,
                threads=wanted.tolist(),
                since=problem.first_step,
                serial=serial,
                single_s=single_s.tolist(),
            )
        else:
            memory = msgspec.structs.replace(memory, serial=serial, single_s=[])
        return self._allocation(memory, self._expected(models, memory))

    def _first(self, problem: Problem) -> _Ep4ddlMemory:
        world, batch = problem.world, problem.global_batch
        return _Ep4ddlMemory(
            counts=[len(range(rank, batch, world)) for rank in range(world)],
            threads=[1] * world,
            since=problem.first_step,
            serial=self.serial,
            single_s=[],
        )

    @staticmethod
    def _expected(models: Models, memory: _Ep4ddlMemory) -> Models:
        """Return models for the current numbers of threads, because the feedback may be older."""
        if not models.known or not memory.single_s:
            return models
        return replace(
            models, b=np.array(memory.single_s) * shortened(np.array(memory.threads), memory.serial)
        )

    @staticmethod
    def _allocation(memory: _Ep4ddlMemory, models: Models) -> Allocation:
        # Send the numbers of threads even if all are 1, because ranks would otherwise keep the
        # script's number.
        samples, threads = np.array(memory.counts), tuple(memory.threads)
        return Allocation(samples, msgspec.to_builtins(memory), threads, models)


def serial_share(ratio: Floats, threads: Ints) -> float:
    """Return the fraction of a step's time that more threads do not shorten.

    `ratio` is each worker's measured time with its `threads` ÷ its time with one thread, [W]. Some
    worker must have several threads.
    """
    many = threads > 1
    share = (ratio[many] - 1 / threads[many]) / (1 - 1 / threads[many])
    return float(np.clip(np.median(share), 0.0, 1.0))


class Ep4ddlParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of `ep4ddl`."""

    most_threads: Annotated[
        int, Meta(ge=1, le=64, description="Maximum number of CPU threads of a rank.")
    ] = 4
    cores: Annotated[
        int,
        Meta(
            ge=0,
            le=65_536,
            description="Maximum number of CPU threads of all ranks together; 0: no limit. With "
            "more threads than cores, ranks on the same node slow each other down.",
        ),
    ] = 0
    serial: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Assumed fraction of the compute time that more threads do not shorten. "
            "After the first change of a rank's threads, the measured fraction is used.",
        ),
    ] = 0.1


def make(parameters: Ep4ddlParameters) -> Policy:
    """Make the policy."""
    return Policy(
        name="ep4ddl",
        predictor=GruPredictor(),
        scheduler=EqualCounts(),
        shuffler=KeepPlacement(),
        plain_batches=True,
        allocator=ThreadAllocator(parameters.most_threads, parameters.cores, parameters.serial),
        balances=False,
        threads=True,
    )


preset = Preset(
    name="ep4ddl",
    summary="Equal batches; ranks predicted to be slow compute with more CPU threads.",
    source="EP4DDL: addressing straggler problem in heterogeneous distributed deep learning",
    make=make,
    parameters=Ep4ddlParameters,
)
