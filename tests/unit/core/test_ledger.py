"""Memory limits where the leader plans: what it coasts, and what it refuses."""

from __future__ import annotations

import math
import re
import time
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from paceline.core.dealing import dealt, equal_counts
from paceline.core.ledger import BatchRules, Ledger
from paceline.core.terms import Terms
from paceline.train.checkpoint.position import Position
from paceline.train.epochs import epoch_order
from paceline.train.plan.leader import Leader, weights_of
from paceline.train.profile import Limits
from paceline.wire import Adopted, Plan
from paceline.wire.synchronisation import Averaging, AveragingRules, convert
from support.contexts import met, run_context
from support.records import pack_indices


@given(data=st.data())
def test_coasting_keeps_limits(data: st.DataObject) -> None:
    """With shares and without, in a smaller last step, also where limits leave no choice."""
    world, batch = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 20))
    samples = data.draw(st.integers(batch, 60))
    some = st.lists(st.integers(0, batch), min_size=world, max_size=world)
    limits = np.array(data.draw(some))
    limits[data.draw(st.integers(0, world - 1))] += max(0, batch - limits.sum())
    share = st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=world, max_size=world)
    shares = data.draw(share.filter(any) | st.just([]))
    sizes = np.random.default_rng(1).lognormal(size=samples)
    ledger = Ledger(1, epoch_order(samples, 5, 1), BatchRules(batch, limits=limits))
    seen = []
    while not ledger.finished:
        counts, indices = pack_indices(ledger.coast(2, world, sizes, shares))
        assert (np.array(counts) <= limits).all()
        flat = np.frombuffer(indices, "<u4").astype(np.int64)
        over = len(flat) == ledger.left
        made = Plan(0, 1, 0, counts, indices, "bsp", 0, "coast", over, shares=shares)
        assert ledger.refusal(made, world) is None
        ledger.use(flat)
        seen += flat.tolist()
    assert sorted(seen) == list(range(samples))


def test_each_rank_has_its_own_limit_where_some_get_nothing() -> None:
    ledger = Ledger(0, np.arange(12), BatchRules(12, limits=np.array([0, 2, 10])))
    [step] = ledger.coast(1, 3, np.ones(12), [0.2, 0.4, 0.4])
    assert [len(part) for part in step] == [0, 2, 10]


@given(data=st.data())
def test_limits_that_do_not_bind_change_nothing(data: st.DataObject) -> None:
    world, batch = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 20))
    shares = data.draw(st.sampled_from([[], [1.0 + j for j in range(world)]]))
    sizes = np.random.default_rng(1).lognormal(size=50)
    ample = np.full(world, batch)
    parts = [
        Ledger(1, epoch_order(50, 5, 1), BatchRules(batch, limits=limits)).coast(
            4, world, sizes, shares
        )
        for limits in (None, ample)
    ]
    for free, limited in zip(chain(*parts[0]), chain(*parts[1]), strict=True):
        np.testing.assert_array_equal(free, limited)


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_smaller_last_step_follows_all_whole_ones(drop_last: bool) -> None:
    """32 samples in steps of 10: a plan of the three whole steps does not include it."""
    ledger = Ledger(0, np.arange(32), BatchRules(10, drop_last))
    epoch = [10, 10, 10] if drop_last else [10, 10, 10, 2]
    for steps in range(1, 6):
        assert ledger.batch_sizes(steps) == epoch[:steps]
        assert len(ledger.coast(steps, 2, np.ones(32), [])) == len(epoch[:steps])


def test_dealing_goes_on_past_ranks_at_their_limit() -> None:
    assert equal_counts(7, np.array([9, 9, 9])).tolist() == [3, 2, 2]
    counts = equal_counts(8, np.array([5, 0, 1, 9]))
    assert counts.tolist() == [4, 0, 1, 3]
    assert dealt(counts).tolist() == [0, 3, 5, 7, 1, 2, 4, 6]
    assert equal_counts(6, np.array([2, 4])).tolist() == [2, 4]


def test_a_loss_that_is_scaled_for_the_mean_over_ranks_is_left_as_it_is() -> None:
    counts, loads = np.array([[2, 6], [0, 8]]), np.array([[1.0, 3.0], [0.0, 9.0]])
    assert weights_of("samples", counts, loads).tolist() == [[0.25, 0.75], [0.0, 1.0]]
    assert weights_of("size", counts, loads).tolist() == [[0.25, 0.75], [0.0, 1.0]]
    assert weights_of("ranks", counts, loads).tolist() == [[0.5, 0.5], [0.0, 0.5]]


def test_the_leader_keeps_limits_from_the_first_step_on() -> None:
    adopted: list[Adopted] = []
    terms = Terms(200, 60, 0, False, "samples", 2)
    context, startup = run_context(terms, limits=Limits([8, 60])), met(2, np.ones(200), HashStore())
    leader = Leader(context, startup, Position(), announce=adopted.append)
    leader.advance(0)
    leader.advance(0)
    leader.advance(1)
    counts = [row for a in adopted for row in a.plan.counts]
    assert counts[:4] == [[8, 52], [8, 52], [8, 52], [8, 12]]
    assert all(row in ([8, 52], [8, 12]) for row in counts[4:])


@pytest.mark.parametrize(("step_s", "steps"), [(0.001, 64), (0.01, 25), (0.1, 2)])
def test_a_leader_without_a_controller_plans_a_quarter_of_a_second_at_once(
    monkeypatch: pytest.MonkeyPatch, step_s: float, steps: int
) -> None:
    adopted: list[Adopted] = []
    terms = Terms(10_000, 10, 0, False, "samples", 2)
    startup = met(2, np.ones(10_000), HashStore())
    leader = Leader(run_context(terms), startup, Position(), announce=adopted.append)
    trained = [0]
    monkeypatch.setattr(time, "monotonic", lambda: step_s * trained[0])
    for _ in range(12):
        leader.advance(0)
        trained[0] += adopted[-1].plan.steps
    assert adopted[0].plan.steps == 2
    assert adopted[-1].plan.steps == steps


ROUNDS: dict[str, Any] = {"probes": 2, "staleness": 4, "mean": True, "every": 4}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"counts": [[5, 7]]}, r"up to \[5, 7\] samples a step; \[4, 12\] fit"),
        ({"threads": [2]}, r"threads \[2\] are not valid for 2 ranks"),
        ({"threads": [1, 2, 3]}, "threads"),
        ({"threads": [2, 0]}, "give each 1 to"),
        ({"synchroniser": convert("hierarchical", {"groups": [[1], [0]]} | ROUNDS)}, None),
        (
            {"synchroniser": convert("hierarchical", {"groups": [[0]]} | ROUNDS)},
            r"groups: \[\[0\]\] do not match 2 ranks",
        ),
        ({"synchroniser": Averaging(AveragingRules(every=0))}, "every: expected `int` >= 1"),
        ({"shares": [math.inf, 1.0]}, "shares"),
        ({"memory": {"a": {1: 2}}}, "memory"),
        ({"memory": {"a": msgspec.msgpack.Ext(5, b"")}}, "memory"),
        ({"memory": {"a": nested(900)}}, "memory"),
        ({"memory": {"a": nested(20), "b": 1.5}}, None),
        ({"threads": [2, 6], "counts": [[4, 8]]}, None),
    ],
)
def test_what_ranks_cannot_do_is_refused(changes: dict[str, Any], why: str | None) -> None:
    indices = np.arange(12).astype("<u4").tobytes()
    made = Plan(0, 0, 0, [[0, 12]], indices, "lbb", 0, "controller", False)
    made = msgspec.structs.replace(made, **changes)
    said = Ledger(0, np.arange(40), BatchRules(12, limits=np.array([4, 12]))).refusal(made, 2)
    if why is None:
        assert said is None
    else:
        assert said is not None
        assert re.search(why, said)
