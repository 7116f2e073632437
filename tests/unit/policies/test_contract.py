"""What every registered policy keeps (docs/invariants.md, items 1, 3, 4 and 6)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import policies
from paceline.core.ledger import BatchRules, Ledger
from paceline.policies import Policy, Problem, Shuffle, plan
from paceline.policies.solve.order import epoch_order
from paceline.wire import ALLREDUCE, Plan
from paceline.wire.synchronisation import Synchronisation
from support.cluster import Cluster

NAMES = policies.names()
# Each preset is drawn for itself, and beside that in the segments of others. All 500 of `long`.
EXAMPLES = settings.default.max_examples
EXAMPLES = EXAMPLES if EXAMPLES >= 500 else max(10, EXAMPLES // 2)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    world = draw(st.integers(1, 6))
    sizes = draw(
        st.lists(st.sampled_from([0.0, 1.0, 1.0, 2.5, 40.0, 900.0]), min_size=1, max_size=60)
    )
    speed = st.floats(1e-6, 1e-2)
    return Cluster(
        sizes=np.array(sizes),
        a=np.array(draw(st.lists(speed, min_size=world, max_size=world))),
        b=np.array(draw(st.lists(st.sampled_from([0.0, 0.01]), min_size=world, max_size=world))),
        global_batch=draw(st.integers(1, 20)),
        seed=draw(st.integers(0, 2**33)),
        noise=draw(st.sampled_from([0.0, 0.1])),
        drop_last=draw(st.booleans()),
    )


def policies_of(name: str) -> st.SearchStrategy[Policy]:
    """A preset with any of its parameters' legal values."""
    values: dict[str, Any] = {}
    for key, schema in policies.properties(policies.get(name).parameters).items():
        if "enum" in schema:
            values[key] = st.sampled_from(schema["enum"])
        elif schema["type"] == "boolean":
            values[key] = st.booleans()
        elif schema["type"] == "integer":
            values[key] = st.integers(schema["minimum"], schema["maximum"])
        else:
            values[key] = st.just(schema["default"])
    return st.fixed_dictionaries(values).map(lambda given: policies.make(name, given))


@st.composite
def happenings(draw: st.DrawFn, name: str) -> list[Any]:
    """Segments of this policy, with others, coasting and restarts in between."""
    segment = st.tuples(policies_of(name), st.integers(1, 4))
    other = st.tuples(st.sampled_from(NAMES).flatmap(policies_of), st.integers(1, 4))
    coast = st.tuples(st.just("coast"), st.booleans(), st.integers(1, 4))
    restart = st.just(("restart",))
    return draw(st.lists(st.one_of(segment, segment, other, coast, restart), max_size=12))


def coast(training: Cluster, shares: list[float], steps: int) -> None:
    """What the leader does without a controller."""
    used = np.flatnonzero(~training.remaining)
    order = epoch_order(len(training.sizes), training.seed, training.epoch)
    ledger = Ledger(
        training.epoch, order, BatchRules(training.global_batch, training.drop_last), used
    )
    assignments = ledger.coast(steps, training.world, training.sizes, shares)
    ledger.use(np.concatenate([part for step in assignments for part in step]))
    training.train(assignments, epoch_end=ledger.finished)


def restart(training: Cluster) -> None:
    """Another attempt: feedback and placement are gone, the used samples are not."""
    training.forget_feedback()
    training.holder = np.arange(len(training.sizes)) % training.world
    training.forget_placement()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_each_epoch_uses_every_sample_exactly_once(name: str, data: st.DataObject) -> None:
    """Items 1 and 3, across switches, coasted segments and restarts."""
    training = data.draw(clusters())
    shares: list[float] = []
    if training.drop_last and training.global_batch > len(training.sizes):
        return  # an epoch without a step
    for what in data.draw(happenings(name)):
        if what[0] == "restart":
            restart(training)
        elif what[0] == "coast":
            coast(training, shares if what[1] else [], what[2])
        else:
            policy, steps = what
            if data.draw(st.booleans()):
                training.forget_placement()
            shares = training.run(policy, steps).shares
    policy = policies.make(name)
    while training.remaining.any() and not (training.remaining.all() and training.step):
        training.run(policy)

    n, batch = len(training.sizes), training.global_batch
    used = training.used
    assert len(set(used)) == len(used)
    for epoch in range(training.epoch):
        samples = sum(e == epoch for e, _ in used)
        assert samples == (n - n % batch if training.drop_last else n)
        counts = [count for e, count in training.step_sizes if e == epoch]
        full, rest = divmod(n, batch)
        assert counts == [batch] * full + ([rest] if rest and not training.drop_last else [])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_plans_are_repeatable_values(name: str, data: st.DataObject) -> None:
    """Items 4 and 6: the same arguments give the same plan, and are left as they were.

    What the ranks get is valid, and they know the synchroniser, which the segment brings them.
    """
    training = data.draw(clusters())
    policy = data.draw(policies_of(name))
    for _ in range(data.draw(st.integers(0, 3))):
        if training.problem(1, shuffle=False).batch_sizes():
            training.run(policies.make("bsp"))
    for shuffle in (True, False):
        problem, feedback = training.problem(3, shuffle=shuffle), training.feedback()
        arguments = [getattr(o, f.name) for o in (problem, feedback) for f in fields(o)]
        before = [a.copy() for a in arguments if isinstance(a, np.ndarray)]
        first, shuffled = plan(policy, problem, feedback, shuffle=shuffle)
        again, shuffled_again = plan(policy, problem, feedback, shuffle=shuffle)
        assert_same(first, again)
        assert_same_shuffle(shuffled, shuffled_again)
        assert_valid(policy, problem, first)
        after = [a for a in arguments if isinstance(a, np.ndarray)]
        for old, new in zip(before, after, strict=True):
            np.testing.assert_array_equal(old, new)
        outside = np.setdiff1d(np.arange(len(problem.sizes)), problem.remaining)
        np.testing.assert_array_equal(shuffled.placement[outside], problem.placement[outside])
        assert ((shuffled.placement >= 0) & (shuffled.placement < problem.world)).all()


def assert_same_shuffle(expected: Shuffle, made: Shuffle) -> None:
    np.testing.assert_array_equal(expected.placement, made.placement)


def assert_same(expected: Plan, made: Plan) -> None:
    assert [[p.tolist() for p in s] for s in expected.assignment.parts] == [
        [p.tolist() for p in s] for s in made.assignment.parts
    ]
    for name in ("ett_s", "shares", "moved", "epoch_end", "memory", "synchroniser", "why"):
        assert getattr(expected, name) == getattr(made, name), name


def assert_valid(policy: Policy, problem: Problem, made: Plan) -> None:
    """Batch sizes, ETT and shares have the right shapes and signs."""
    sizes, world = problem.batch_sizes(), problem.world
    assert [sum(map(len, step)) for step in made.assignment.parts] == sizes
    assert all(len(step) == world for step in made.assignment.parts)
    how = made.synchroniser
    assert how.defect(world) is None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(how), type=Synchronisation) == how
    assert policy.relaxed or (how, made.why) == (ALLREDUCE, "")
    if made.ett_s:
        assert np.shape(made.ett_s) == (len(sizes), world)
        assert np.isfinite(made.ett_s).all()
    if made.shares:
        assert len(made.shares) == world
        assert min(made.shares) >= 0
        assert sum(made.shares) == pytest.approx(1)
