"""Plan of the next segment: `plan` calls the parts of a policy one after the other.

Controller and simulator call `plan` through `planning.offer`. `plan` is pure:
`insight.replay` calls it with the same arguments and gets the same segment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from paceline.core.batch_limits.shapes import raised
from paceline.core.cost import Cost, features
from paceline.policies import pauses
from paceline.policies.parts import (
    CHOOSER,
    PAUSES,
    Allocation,
    Allocator,
    Choice,
    Policy,
)
from paceline.policies.solve.constraints import gridded, within_limits
from paceline.policies.values import Feedback, Ints, Models, Problem
from paceline.wire import Assignment, Moves, Plan, pack_samples

# Minimum number of samples per worker; see `_in_fine_counts`.
_FINE_SAMPLES = 8


@dataclass(frozen=True)
class Shuffle:
    """Placement and order of samples from which the epoch's next plans start.

    The caller of `plan` stores both; they are not part of the `Plan`. If `plan` did not call the
    shuffler, both are the values in its argument `problem`.
    """

    placement: Ints  # [N]
    # The samples that the epoch had not used before the planned segment, in the order of their use.
    order: Ints  # [R]
    # The cost of a batch under the models of this plan.
    cost: Cost


def unsuited(policy: Policy, token_budget: float | None) -> str | None:
    """Return the reason why a policy cannot plan a run with this token budget, or None.

    A token budget is the maximum total size of a step's samples. In a run with a budget, each step
    uses the next samples of the epoch's order that fit, and a policy may only choose which rank
    computes which of these samples.
    """
    if token_budget is None or policy.changes == "nothing":
        return None
    does = "relaxes synchronisation" if policy.relaxed else "composes batches itself"
    return (
        f"{policy.name} {does}, so it cannot keep a token budget: choose a policy that trains as "
        "plain DDP does, such as paceline with mode=exact"
    )


def plan(
    policy: Policy,
    problem: Problem,
    feedback: Feedback,
    *,
    shuffle: bool,
    choice: Choice | None = None,
    ahead: Problem | None = None,
) -> tuple[Plan, Shuffle]:
    """Plan the next segment.

    `planning.offer` fills in the fields of the plan that a policy does not know, such as the steps
    of the feedback.

    Args:
        policy: the policy whose parts are called.
        problem: all inputs of the plan except feedback.
        feedback: measurements for predictor, allocator and chooser.
        shuffle: call `Shuffler.shuffle` and `Scheduler.compose` first. True at an epoch's start, at
            a switch and at a controller's takeover.
        choice: result of `Policy.choose` for this feedback and ``problem.memory``; None: call
            `Policy.choose`.
        ahead: inputs for planning the whole next epoch; `ahead.placement` has the rank that last
            trained each sample. If the ranks' speeds are known, the next epoch's placement is
            planned as well. None: only this epoch is planned.

    Raises:
        ValueError: the policy does not suit the run: see `unsuited`.
    """
    if reason := unsuited(policy, problem.token_budget):
        raise ValueError(reason)
    if problem.length_grid:
        feedback = replace(feedback, longest=raised(feedback.longest, problem.length_grid))
    models, memory = _fitted(policy, problem, feedback)
    moves, moved, across = None, 0, 0
    if shuffle:
        before = problem.placement
        problem = _shuffled(policy, problem, models)
        moved = int(np.count_nonzero(problem.placement != before))
        across = problem.across(before, problem.placement)
    # With unknown speeds, samples would move as if speeds were equal, and later have to move back.
    if ahead is not None and models.known:
        away, ranks, of_moves = _away(policy, problem, ahead, models)
        moves = Moves.of(away, ranks)
        moved, across = moved + len(away), across + of_moves
        # The moves are only correct if this epoch's remaining samples stay on their planned nodes.
        storage = None if problem.storage is None else problem.storage.settled
        problem = replace(problem, storage=storage)
    if choice is None:
        choice = policy.choose(
            feedback,
            problem.world,
            problem.memory,
            problem.nodes,
            first_step=problem.first_step,
            uneven_steps=problem.uneven_steps,
        )
    threads: list[int] = []
    if policy.allocator is not None:
        problem, allocation = _allocated(policy.allocator, problem, models, feedback)
        models = allocation.models or models
        memory.update(allocation.memory)
        threads = list(allocation.threads)
    if choice.memory:
        memory[CHOOSER] = choice.memory
    assignment = gridded(policy.scheduler.schedule(problem, models), policy, problem, models)
    assignment = within_limits(assignment, policy, problem, models)
    holders, ranks = problem.placement[assignment.samples], assignment.ranks()
    moved += int(np.count_nonzero(holders != ranks))
    across += problem.across(holders, ranks)
    made = Plan(
        seq=problem.seq,
        epoch=problem.epoch,
        first_step=problem.first_step,
        counts=assignment.counts.tolist(),
        indices=pack_samples(assignment.samples),
        policy=policy.name,
        version=problem.version,
        source="controller",
        epoch_end=problem.reaches_epoch_end,
        ett_s=_ett_s(problem, models, assignment),
        shares=shares_of(policy, models, feedback, problem.counts),
        shuffled=shuffle,
        moved=moved,
        # Convert the state to plain values, as the bus returns them.
        memory=msgspec.to_builtins(memory),
        threads=threads,
        synchroniser=choice.synchroniser,
        why=choice.why,
        across=across,
        moves=moves,
    ).keeping(assignment)
    return made, Shuffle(problem.placement, problem.order, models.cautious.cost)


def _fitted(policy: Policy, problem: Problem, feedback: Feedback) -> tuple[Models, dict[str, Any]]:
    models = policy.predictor.fit(feedback, problem.world).padded_to(problem.length_grid)
    if not policy.foretells:
        return models, {}
    noticed = pauses.noticed(problem.memory.get(PAUSES, {}), feedback, models)
    steps = len(problem.batch_sizes())
    slower = pauses.factors(noticed, problem.first_step, steps, problem.world)
    return replace(models, factors=slower), {PAUSES: noticed}


def _shuffled(policy: Policy, problem: Problem, models: Models) -> Problem:
    problem = replace(problem, placement=policy.shuffler.shuffle(problem, models))
    return replace(problem, order=policy.scheduler.compose(problem, models))


def _away(
    policy: Policy, problem: Problem, ahead: Problem, models: Models
) -> tuple[Ints, Ints, int]:
    """Return the samples whose rank changes with the next epoch, and their new ranks.

    The third result is the number of these samples that move to another node.
    """
    held = ahead.placement.copy()
    # A sample that this epoch has not used yet will be trained by the rank that holds it now.
    held[problem.remaining] = problem.placement[problem.remaining]
    ahead = replace(ahead, placement=held)
    placement = policy.shuffler.shuffle(ahead, models)
    away = np.flatnonzero(placement != held)
    return away, placement[away], ahead.across(held, placement)


def _allocated(
    allocator: Allocator, problem: Problem, models: Models, feedback: Feedback
) -> tuple[Problem, Allocation]:
    problem = _in_fine_counts(problem)
    own = {name: value for name, value in problem.memory.items() if name not in (CHOOSER, PAUSES)}
    allocation = allocator.allocate(replace(problem, memory=own), models, feedback)
    return replace(problem, counts=allocation.counts), allocation


def _in_fine_counts(problem: Problem) -> Problem:
    """Return the problem with a global batch that is large enough for precise counts.

    In a run with a token budget, an allocator's counts are only used as proportions. If the global
    batch is small, the count of a slow worker would be rounded to 0.
    """
    if problem.token_budget is None:
        return problem
    return replace(problem, global_batch=max(problem.global_batch, _FINE_SAMPLES * problem.world))


def _ett_s(problem: Problem, models: Models, assignment: Assignment) -> list[list[float]]:
    if not models.known:
        return []
    ett_s = models.ett(features(problem.sizes[assignment.samples], assignment.counts))
    return list((ett_s if models.factors is None else ett_s * models.factors).tolist())


def shares_of(
    policy: Policy, models: Models, feedback: Feedback, counts: Ints | None = None
) -> list[float]:
    """Return each rank's share of the load, [W], for the leader's own plans; empty: equal counts.

    `models` are fitted to `feedback`. `counts` are the allocator's counts; None: the policy has no
    allocator, and the shares are in proportion to the ranks' speeds.
    """
    if not policy.balances:
        return []
    if counts is not None:
        return list((counts / counts.sum()).tolist())
    if models.known:
        samples = max(int(feedback.samples.sum()), 1)
        size = float(models.cost.load(feedback.features).sum()) / samples
        by_size = models.a * (size or 1.0)
        each_s = by_size + models.c
        # If a fit has a negative cost per sample, the sum may be negative for small samples.
        # Then leave this cost out.
        each_s = np.where(each_s > 0, each_s, by_size)
        # Speed of each rank, in samples of mean size per second.
        speed = 1.0 / each_s
        return list((speed / speed.sum()).tolist())
    return []
