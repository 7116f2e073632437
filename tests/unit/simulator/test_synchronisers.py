"""Models of relaxed synchronisers: timelines worked out by hand, and what holds for any work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policies.base import Floats
from paceline.wire import ALLREDUCE
from paceline.wire.synchronisation import Synchronisation, convert
from paceline_backend.simulator.sync import (
    Costs,
    SimulatedTimeline,
    Work,
    make,
    step_time_s,
)

RNA = {"probes": 2, "staleness": 4, "mean": True}
SOLO = {"probes": None, "staleness": 4, "mean": False}
PARTIAL: dict[str, dict[str, Any]] = {
    "rna": RNA,
    "majority": {**SOLO, "probes": 1},
    "solo": SOLO,
    "n-soft": {"parts": 2, "staleness": 4, "mean": False},
    "ssp": {"quorum": 1, "staleness": None, "lead": 2, "mean": False},
    "backup": {"spare": 1, "staleness": 0, "waits": True, "mean": False},
    "none too old": {"probes": 2, "staleness": 0, "mean": True},
}


FREE = Costs()


def partial(**given: Any) -> Synchronisation:
    return convert("partial", {"mean": False} | given)


def run(
    what: Synchronisation,
    work_s: Any,
    costs: Costs = FREE,
    *,
    samples: Any = None,
    seed: int = 0,
) -> SimulatedTimeline:
    work_s = np.array(work_s, float)
    samples = np.ones(work_s.shape, int) if samples is None else np.array(samples)
    work = Work(0, work_s, samples, np.full(work_s.shape, costs.round_s), costs)
    return make(what, work_s.shape[1], seed).run(np.zeros(work_s.shape[1]), work)


def ended_at(timeline: SimulatedTimeline, work_s: Any) -> Floats:
    return np.cumsum(np.array(work_s) + timeline.wait_s + timeline.communication_s, axis=0)


def test_rounds_take_what_is_ready_while_ranks_compute_on() -> None:
    """Two ranks, the second three times slower; the first ready calls, a round takes 0.5 s."""
    work_s = [[1, 3], [1, 3]]
    timeline = run(partial(**SOLO), work_s, Costs(round_s=0.5, bytes=7))
    # Called at 1, 2 (rank 0 is through then), 3 and 6, as rank 1 ends its second step.
    assert [record.ended_at for record in timeline.rounds] == [1.5, 2.5, 3.5, 6.5]
    assert [record.waited_s for record in timeline.rounds] == [1.0, 0.5, 0.5, 2.5]
    assert {
        (record.contributors, record.reduced_s, record.bytes) for record in timeline.rounds
    } == {(1, 0.5, 7)}
    # Rank 0 began its second step before the first round was over; rank 1 its own with three.
    oldest = [record.staleness.index(1) for record in timeline.rounds]
    assert oldest == [0, 1, 2, 1]
    assert [record.step for record in timeline.rounds] == [1, 1, 1, 1]
    # Nobody waits but at the end, until all have met.
    assert timeline.wait_s.tolist() == [[0, 0], [4.5, 0.5]]
    assert ended_at(timeline, work_s)[-1].tolist() == [6.5, 6.5]


def test_means_of_replicas_every_so_many_steps() -> None:
    """By the run's count of steps, over segments that are no multiple of it."""
    model = make(convert("averaging", {"every": 3}), 2, 0)
    work_s = np.array([[1.0, 2.0]] * 4)
    costs = Costs(round_s=0.5)
    samples = np.array([[1, 0]] * 4)
    now = np.zeros(2)
    ran = []
    for first_step, epoch_end in ((0, False), (4, True)):
        work = Work(first_step, work_s, samples, np.zeros_like(work_s), costs, epoch_end)
        timeline = model.run(now, work)
        now = now + (work_s + timeline.wait_s + timeline.communication_s).sum(axis=0)
        ran.append((timeline, now))
    (first, after_first), (second, after_second) = ran
    assert first.wait_s.tolist() == [[0, 0], [0, 0], [3, 0], [0, 0]]
    assert first.communication_s[2].tolist() == [0.5, 0.5]
    assert after_first.tolist() == [7.5, 8.5]
    assert [r.number for r in (*first.rounds, *second.rounds)] == [0, 1, 2]
    assert [r.contributors for r in first.rounds] == [1]
    # Met at step 5; then for good, with the optimisers' state: two reductions.
    assert second.wait_s.tolist() == [[0, 0], [3, 0], [0, 0], [2, 0]]
    assert second.communication_s[3].tolist() == [1.0, 1.0]
    assert after_second.tolist() == [18.0, 18.0]


def test_means_of_parts_take_turns() -> None:
    """Two parts, each with a mean every four steps: half a reduction every two steps."""
    work_s = np.array([[1.0, 2.0]] * 6)
    zeros = np.zeros_like(work_s)
    work = Work(0, work_s, np.ones((6, 2), int), zeros, Costs(round_s=0.5, bytes=8), True)
    timeline = make(convert("averaging", {"every": 4, "parts": 2}), 2, 0).run(np.zeros(2), work)
    assert timeline.wait_s[:, 0].tolist() == [0, 2, 0, 2, 0, 2]
    assert timeline.communication_s[:, 1].tolist() == [0, 0.25, 0, 0.25, 0, 1.25]
    assert [each.bytes for each in timeline.rounds] == [4, 4, 8]
    assert [each.contributors for each in timeline.rounds] == [2, 2, 2]


work = st.tuples(st.integers(1, 5), st.integers(1, 12), st.integers(0, 2**31))


@pytest.mark.parametrize("name", PARTIAL)
@given(shape=work, round_s=st.sampled_from([0.0, 0.3, 7.0]), call_s=st.sampled_from([0.0, 0.2]))
def test_every_gradient_counts_once_or_as_dropped(
    name: str, shape: tuple[int, int, int], round_s: float, call_s: float
) -> None:
    world, steps, seed = shape
    rng = np.random.default_rng(seed)
    work_s = rng.choice([0.0, 0.5, 1.0, 2.5, 9.0], (steps, world))
    samples = rng.choice([0, 1, 1, 4], (steps, world))
    what = partial(**PARTIAL[name])
    timeline = run(what, work_s, Costs(round_s, call_s), samples=samples, seed=seed)
    again = run(what, work_s, Costs(round_s, call_s), samples=samples, seed=seed)
    assert timeline.rounds == again.rounds
    went_in = sum(sum(record.staleness) for record in timeline.rounds)
    dropped = sum(record.dropped for record in timeline.rounds)
    assert 0 <= int((samples > 0).sum()) - went_in <= dropped
    if PARTIAL[name]["staleness"] is None:
        assert (dropped, went_in) == (0, (samples > 0).sum())
    assert all(
        record.contributors <= min(world, sum(record.staleness)) for record in timeline.rounds
    )
    # One round at a time; all meet as the last is over.
    ends = [record.ended_at for record in timeline.rounds]
    begun = [end - record.reduced_s for end, record in zip(ends, timeline.rounds, strict=True)]
    assert all(b >= a - 1e-9 for a, b in zip(ends[:-1], begun[1:], strict=True))
    all_met = ended_at(timeline, work_s)[-1]
    assert np.allclose(all_met, ends[-1])
    assert (timeline.wait_s >= 0).all()
    assert all_met[0] >= work_s.sum(axis=0).max() - 1e-9


def test_the_mean_time_of_a_step() -> None:
    """Segments are put one after the other; what is left over is shorter."""
    work_s = np.array([[1.0, 2.0], [2.0, 1.0], [1.0, 1.0]])
    costs = Costs(round_s=0.25)
    assert step_time_s(ALLREDUCE, work_s, costs, 2) == pytest.approx((2 + 2 + 1 + 0.75) / 3)
    # Rounds hide behind computing; the last of each segment does not.
    apart = partial(**SOLO, lead=9)  # with a lead, ranks train their own batches only
    assert step_time_s(apart, work_s, costs, 2) == pytest.approx((3.25 + 1.25) / 3)
    # What exchanges take a rank itself is in each of its steps.
    own = Costs(round_s=0.25, own_s=np.array([0.125, 0.5]))
    assert step_time_s(apart, work_s, own, 2) == pytest.approx((4.25 + 1.75) / 3)


@pytest.mark.parametrize("name", ["partial", "pairwise", "averaging", "hierarchical"])
def test_the_mean_time_of_a_step_of_ranks_that_share_batches(name: str) -> None:
    """Three ranks take 1 s for a batch, a fourth takes 5 s: 4 batches take 4 / 3.2 = 1.25 s."""
    what = {
        "partial": partial(**RNA),
        "pairwise": convert("pairwise"),
        "averaging": convert("averaging", {"every": 32}),
        "hierarchical": convert("hierarchical", RNA | {"every": 4, "groups": [[0, 1, 2], [3]]}),
    }[name]
    work_s = np.tile([1.0, 1.0, 1.0, 5.0], (64, 1))
    assert step_time_s(what, work_s, FREE, 32) == pytest.approx(1.25, rel=0.03)
    assert step_time_s(ALLREDUCE, work_s, FREE, 32) == 5
    # Batches of the slow rank with a fifth of the samples: nobody has anything to take over.
    samples = np.tile([5, 5, 5, 1], (64, 1))
    assert step_time_s(what, np.ones((64, 4)), FREE, 32, samples=samples) == pytest.approx(1.0)


def test_hundreds_of_workers() -> None:
    """Ranks that share batches take no longer than the mean rank."""
    work_s = np.random.default_rng(0).uniform(0.01, 0.05, (50, 400))
    slowest_s = work_s.sum(axis=0).max() / 50
    for name in ("rna", "ssp", "n-soft"):
        step_s = step_time_s(partial(**PARTIAL[name]), work_s, Costs(0.001), 50)
        if name == "ssp":
            assert slowest_s <= step_s <= 1.1 * slowest_s
        else:
            assert work_s.mean() <= step_s < min(slowest_s, 1.08 * work_s.mean()), name
