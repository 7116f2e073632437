"""Synchronisation that averages replicas every few steps of the ranks: local SGD, OSA, DiLoCo."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.replicas import part_due, parted
from paceline.train.plan_shard import LocalStep
from paceline.train.sync.base import Channel, Ranks, Round, no_gradient
from paceline.train.sync.gradients import Mean, averaged, joined, spread
from paceline.train.sync.outer import Outer
from paceline.train.sync.peers import TaskThread
from paceline.train.sync.rounds import RoundCalls
from paceline.wire.synchronisation import AveragingRules, OuterRules


class AveragingSync:
    """Synchronisation that averages all ranks' parameters every few steps.

    A rank's weight in a mean is its work: the sum of its steps' weights since the previous mean.
    With an outer optimiser, the mean is the input of an outer step, and parameters become the
    result of that step. If all ranks synchronise between two outer steps, parameters become the
    mean itself, and the next outer step covers the whole change since the previous outer step.

    With an overlap (`rules.overlap` > 0), a mean is reduced while ranks continue to step. The mean
    takes effect `rules.overlap` steps later: θ ← α·θ + (1 − α)·merged, where θ are a rank's
    parameters, α is `rules.keep`, and merged is the mean or the result of the outer step (Douillard
    et al., Streaming DiLoCo with overlapping communication, 2025). A rank's weight in the next mean
    then includes α times its work in this mean. When all ranks synchronise, a mean that is still
    being reduced (in flight) takes effect first, so that a checkpoint includes it.
    """

    goes_on, weighs = True, False

    def __init__(
        self,
        channel: Channel,
        parameters: list[nn.Parameter],
        rules: AveragingRules,
        outer: Outer,
    ) -> None:
        self._ranks, self._parameters, self._rules = channel.ranks, parameters, rules
        self._on_round = channel.on_round
        numbers = parted([p.numel() for p in parameters], rules.parts)
        self._parts = [[parameters[k] for k in part] for part in numbers]
        self._outer = outer
        if rules.outer is not None:
            outer.begin(self._parts)
        # Σ of the steps' weights since each part's previous mean.
        self._work = [0.0] * rules.parts
        # Number of samples of earlier steps whose gradients are still in .grad.
        self._samples = 0
        # The newest iteration of the script's loop in which the optimiser stepped.
        self._stepped: LocalStep | None = None
        self._means = 0
        # The mean in flight, if there is one, and the number of means that have been in flight.
        self._flight: _Flight | None = None
        self._flights = 0
        # A reduction that has begun cannot be cancelled, and would wait for a rank that has left.
        # So a reduction begins only when all ranks have announced that they are ready.
        self._calls = RoundCalls(channel.ranks, f"{channel.prefix}/means")
        self._task_thread = (
            TaskThread(channel.ranks.timeout.total_seconds()) if rules.overlap else None
        )

    def stepping(self, step: LocalStep, optimiser: torch.optim.Optimizer) -> None:
        """See `GradientSync.stepping`."""
        self._stepped = step
        if not (self._samples or step.samples):
            no_gradient(self._parameters)

    def body_done(self, step: LocalStep, optimiser: torch.optim.Optimizer) -> None:
        """See `GradientSync.body_done`."""
        self._samples = 0 if self._stepped is step else self._samples + step.samples
        self._work = [work + step.weight for work in self._work]

    def end_step(self, step: LocalStep) -> None:
        """See `GradientSync.end_step`."""
        if self._flight is not None and step.step >= self._flight.due:
            self._land(self._flight)
        part = part_due(step.step, self._rules.every, self._rules.parts)
        if part is None:
            return
        if self._rules.overlap:
            self._take_off(part, step.step)
        else:
            self._mean([part], self._rules.outer)

    def synchronise(self, optimiser: torch.optim.Optimizer) -> None:
        """See `GradientSync.synchronise`. Afterwards the optimisers' states are equal, too."""
        if self._flight is not None:
            self._land(self._flight)
        if self._task_thread is not None:
            self._task_thread.close()
        self._mean(range(len(self._parts)), None)
        if self._flights and self._ranks.rank == 0:
            self._calls.forget(self._flights - 1)
        alike(optimiser, self._parameters, self._ranks)

    def abort(self, reason: str) -> None:
        """See `GradientSync.abort`."""
        if self._task_thread is not None:
            self._calls.abort(self._flights - (self._flight is not None), reason)
            self._task_thread.close(timeout_s=1.0)
        # Without the group, the collectives of other ranks fail.
        dist.destroy_process_group(self._ranks.group)

    def _take_off(self, part: int, step: int) -> None:
        """Start to average a part of the parameters after a step, in the background."""
        tensors, work = [p.data for p in self._parts[part]], self._work[part]
        if not tensors or self._task_thread is None:
            return
        mean = Mean(tensors, work, [float(work > 0)])
        self._flight = _Flight(part, mean, work, step + self._rules.overlap)
        self._task_thread.begin(partial(self._carry, mean, self._flights))
        self._flights += 1
        self._work[part] = 0.0

    def _carry(self, mean: Mean, number: int) -> None:
        """Reduce a mean in the task thread, once all ranks are ready for it."""
        if self._calls.count_ready(number) == self._ranks.world:
            self._calls.call(number)
        self._calls.wait(number)
        mean.reduce(self._ranks.group)
        if number and self._ranks.rank == 0:
            # All ranks ended the previous mean before they began this one, so its keys are no
            # longer needed.
            self._calls.forget(number - 1)

    def _land(self, flight: _Flight) -> None:
        """Wait for the mean in flight, and apply its result."""
        assert self._task_thread is not None
        began = time.perf_counter()
        self._task_thread.wait()
        self._flight = None
        mean, (gave,) = flight.mean.value, flight.mean.sums
        waited_s = time.perf_counter() - began
        tensors, keep = [p.data for p in self._parts[flight.part]], self._rules.keep
        if mean is not None:
            outer, part = self._rules.outer, flight.part
            merged = mean if outer is None else self._outer.step(outer, part, mean)
            if keep:
                merged = torch.lerp(merged, joined(tensors), keep)
            spread(merged, tensors)
        self._work[flight.part] += keep * flight.work
        # Only the wait above counts as reduction time: before it, the reduction overlapped the
        # ranks' steps.
        self._report(round(gave), waited_s, sum(t.numel() * t.element_size() for t in tensors))

    def _mean(self, parts: Sequence[int], rules: OuterRules | None) -> None:
        """Average parts of the parameters; if `rules` are given, also step the outer optimiser."""
        began = time.perf_counter()
        givers, size = 0, 0
        for part in parts:
            tensors, work = [p.data for p in self._parts[part]], self._work[part]
            if not tensors:
                continue
            then = None if rules is None else partial(self._outer.step, rules, part)
            (gave,) = averaged(tensors, work, self._ranks.group, [float(work > 0)], then)
            self._work[part] = 0.0
            givers = max(givers, round(gave))
            size += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._report(givers, time.perf_counter() - began, size)

    def _report(self, givers: int, took_s: float, size: int) -> None:
        number, self._means = self._means, self._means + 1
        if self._on_round is not None:
            self._on_round(Round(number, self._ranks.world, givers, [givers], 0, 0.0, took_s, size))


@dataclass(frozen=True)
class _Flight:
    """Mean of one part of the parameters that is being reduced in the background.

    `work` is this rank's weight in the mean. The mean takes effect after the step `due`.
    """

    part: int
    mean: Mean
    work: float
    due: int


def alike(optimiser: torch.optim.Optimizer, parameters: list[nn.Parameter], ranks: Ranks) -> None:
    """Make the optimiser's state equal on all ranks, so that equal replicas stay equal.

    A tensor becomes its mean over ranks. A single number, such as a count of steps, becomes its
    maximum over ranks. If the states of ranks have different shapes, all ranks get the state of the
    rank with the most entries.
    """
    states = [optimiser.state.get(p, {}) for p in parameters]
    shapes = [{k: tuple(v.shape) for k, v in s.items() if torch.is_tensor(v)} for s in states]
    numbers = [
        {k: float(v) for k, v in s.items() if _is_number(v, p)}
        for p, s in zip(parameters, states, strict=True)
    ]
    gathered: list[tuple[list[dict[str, tuple[int, ...]]], list[dict[str, float]]]]
    gathered = [([], []) for _ in range(ranks.world)]
    dist.all_gather_object(gathered, (shapes, numbers), group=ranks.group)
    fullest = max(range(ranks.world), key=lambda rank: sum(map(len, gathered[rank][0])))
    # The shapes differ if some rank has not stepped yet.
    if any(of_rank != gathered[0][0] for of_rank, _ in gathered):
        box = [optimiser.state_dict() if ranks.rank == fullest else None]
        dist.broadcast_object_list(box, src=fullest, group=ranks.group)
        assert box[0] is not None
        optimiser.load_state_dict(box[0])
        return
    for k, state in enumerate(states):
        for name in numbers[k]:
            largest = max(of_rank[k][name] for _, of_rank in gathered)
            if torch.is_tensor(state[name]):
                state[name].fill_(largest)
            else:
                state[name] = type(state[name])(largest)
    vectors = [
        value
        for k, state in enumerate(states)
        for name, value in state.items()
        if name not in numbers[k] and torch.is_tensor(value) and value.is_floating_point()
    ]
    if vectors:
        averaged(vectors, 1.0, ranks.group)


def _is_number(value: object, parameter: nn.Parameter) -> bool:
    if torch.is_tensor(value):
        return value.dim() == 0 and value.shape != parameter.shape
    return isinstance(value, int | float)
