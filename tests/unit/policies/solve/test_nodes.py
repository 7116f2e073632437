"""Samples stay on their nodes where that makes no worker's work longer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline import policies
from paceline.policies import Feedback, Models, Problem
from paceline.policies.presets.chronica import ChronicaShuffler
from paceline.policies.solve.nodes import kept_on_nodes


@st.composite
def shuffled(draw: st.DrawFn) -> tuple[Problem, Models, policies.base.Ints]:
    """A problem, the workers' models, and a placement that some shuffler wants."""
    world = draw(st.integers(2, 6))
    samples = draw(st.integers(1, 40))
    ranks = st.lists(st.integers(0, world - 1), min_size=samples, max_size=samples)
    size = st.sampled_from([1.0, 1.0, 1.5, 2.0, 7.25])
    sizes = np.array(draw(st.lists(size, min_size=samples, max_size=samples)))
    before, after = np.array(draw(ranks)), np.array(draw(ranks))
    rest = np.flatnonzero(draw(st.lists(st.booleans(), min_size=samples, max_size=samples)))
    after = np.where(np.isin(np.arange(samples), rest), after, before)
    nodes = np.array(draw(st.lists(st.integers(0, 2), min_size=world, max_size=world)))
    cost = st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=world, max_size=world)
    models = Models(np.array(draw(cost)), np.array(draw(cost)), np.zeros(world))
    problem = Problem(sizes, rest, rest, before, 0, 0, 1, 4, world, seed=1, nodes=nodes)
    return problem, models, after


def work(problem: Problem, models: Models, placement: policies.base.Ints) -> policies.base.Floats:
    """Of each worker, for the samples that remain, s."""
    mine = placement[problem.remaining]
    load = np.bincount(mine, problem.sizes[problem.remaining], problem.world)
    return models.a * load + models.c * np.bincount(mine, minlength=problem.world)


@given(shuffled())
def test_fewer_samples_change_their_node_at_no_cost(
    case: tuple[Problem, Models, policies.base.Ints],
) -> None:
    problem, models, wanted = case
    kept = kept_on_nodes(wanted, problem, models)
    before = problem.placement
    assert problem.across(before, kept) <= problem.across(before, wanted)
    longest = work(problem, models, wanted).max()
    assert work(problem, models, kept).max() <= longest * (1 + 1e-12)
    held = [
        np.bincount(each[problem.remaining], minlength=problem.world) for each in (wanted, kept)
    ]
    assert held[0].tolist() == held[1].tolist()
    used = np.setdiff1d(np.arange(len(before)), problem.remaining)
    assert kept[used].tolist() == before[used].tolist()


def test_two_samples_that_would_cross_stay() -> None:
    """Ranks 0 and 1 are on a node, ranks 2 and 3 on another; 0 and 2 give up a sample each."""
    sizes = np.ones(8)
    before = np.array([0, 0, 0, 1, 2, 2, 2, 3])
    wanted = np.array([3, 0, 0, 1, 1, 2, 2, 3])
    rest, nodes = np.arange(8), np.array([0, 0, 1, 1])
    problem = Problem(sizes, rest, rest, before, 0, 0, 1, 4, 4, seed=1, nodes=nodes)
    assert problem.across(before, wanted) == 2
    kept = kept_on_nodes(wanted, problem, Models.unknown(4))
    assert problem.across(before, kept) == 0
    assert np.bincount(kept).tolist() == np.bincount(wanted).tolist()


@given(shuffled())
def test_chronica_is_as_balanced_on_nodes(
    case: tuple[Problem, Models, policies.base.Ints],
) -> None:
    problem, models, _ = case
    if not len(problem.remaining):
        return
    plain = ChronicaShuffler().shuffle(replace(problem, nodes=None), models)
    placed = ChronicaShuffler().shuffle(problem, models)
    longest = [work(problem, models, each).max() for each in (plain, placed)]
    assert longest[1] <= longest[0] * (1 + 1e-12)
    assert problem.across(problem.placement, placed) <= problem.across(problem.placement, plain)


def test_a_plan_counts_samples_that_go_to_another_node() -> None:
    """Rank 1 is on the other node, and has no samples of its own."""
    rest, before = np.arange(8), np.zeros(8, np.int64)
    problem = Problem(np.ones(8), rest, rest, before, 0, 0, 2, 4, 2, seed=1, nodes=np.array([0, 1]))
    plan, _ = policies.plan(policies.make("bsp"), problem, Feedback.empty(), shuffle=True)
    assert plan.moved == plan.across == 4
    same = replace(problem, nodes=None)
    plan, _ = policies.plan(policies.make("bsp"), same, Feedback.empty(), shuffle=True)
    assert plan.across == 0
