"""Samples that get other holders keep to the room that nodes have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policies.base import Models, Problem, Storage
from paceline.policies.presets.chronica import ChronicaShuffler
from paceline.policies.solve.nodes import dealt, held


@st.composite
def stored(draw: st.DrawFn) -> tuple[Problem, Models]:
    """A placement that fits into the nodes' room, and speeds that it does not suit."""
    world = draw(st.integers(2, 6))
    nodes = np.array([rank % draw(st.integers(2, 3)) for rank in range(world)])
    nodes = np.unique(nodes, return_inverse=True)[1]
    samples = draw(st.integers(4, 60))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    sizes, lengths = rng.lognormal(3, 1, samples), rng.integers(1, 100, samples)
    placement = rng.integers(0, world, samples)
    spare = draw(st.integers(0, 300))
    room = np.bincount(nodes[placement], lengths, nodes.max() + 1).astype(np.int64) + spare
    loose = rng.random(samples) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    storage = Storage(room, lengths, loose, ahead=draw(st.booleans()))
    rest = np.arange(samples)
    problem = Problem(
        sizes, rest, rest, placement, 0, 0, 1, 4, world, seed=1, nodes=nodes, storage=storage
    )
    models = Models(rng.uniform(1, 5, world), np.zeros(world), np.zeros(world))
    return problem, models


@pytest.mark.parametrize("paper", [False, True])
@given(stored())
def test_no_node_gets_more_than_it_has_room_for(paper: bool, drawn: tuple[Problem, Models]) -> None:
    problem, models = drawn
    storage, nodes = problem.storage, problem.nodes
    assert storage is not None and nodes is not None
    placement = ChronicaShuffler(paper).shuffle(problem, models)
    assert (held(placement, nodes, storage) <= storage.room).all()
    if not storage.ahead:
        fixed = ~storage.loose
        assert (nodes[placement] == nodes[problem.placement])[fixed].all()


def test_a_node_that_has_too_much_gives_it_up() -> None:
    lengths = np.full(6, 10)
    storage = Storage(np.array([30, 60]), lengths, np.zeros(6, bool), ahead=True)
    every = np.arange(6)
    problem = Problem(
        np.ones(6),
        every,
        every,
        np.array([0, 0, 0, 0, 0, 1]),
        0,
        0,
        1,
        2,
        2,
        seed=1,
        nodes=np.array([0, 1]),
        storage=storage,
    )
    fast = Models(np.array([1.0, 50.0]), np.zeros(2), np.zeros(2))
    placement = ChronicaShuffler().shuffle(problem, fast)
    assert held(placement, np.array([0, 1]), storage).tolist() == [30, 30]
    nowhere = replace(problem, storage=replace(storage, room=np.array([30, 10])))
    kept = ChronicaShuffler().shuffle(nowhere, fast)
    assert kept.tolist() == problem.placement.tolist(), "the other node has no room, either"


def test_samples_of_no_node_are_dealt_in_turn_where_there_is_room() -> None:
    nodes, lengths = np.array([0, 0, 1]), np.full(9, 10)
    storage = Storage(np.array([60, 60]), lengths, np.ones(9, bool))
    nobody = np.full(9, -1)
    assert dealt(nobody, nodes, storage).tolist() == [0, 1, 2] * 3
    little = replace(storage, room=np.array([30, 60]))
    assert held(dealt(nobody, nodes, little), nodes, little).tolist() == [30, 60]
    some = nobody.copy()
    some[[0, 3]] = 1
    assert dealt(some, nodes, storage)[[0, 3]].tolist() == [2, 2]
