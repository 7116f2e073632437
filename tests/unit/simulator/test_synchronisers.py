"""Models of relaxed synchronisers: timelines worked out by hand, and what holds for any work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.wire import ALLREDUCE
from paceline.wire.synchronisation import Synchronisation, convert
from paceline_backend.policies.base import Floats
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


def test_a_probed_rank_is_not_ready_for_what_came_too_late() -> None:
    """Rank 1 ends its first step while the first round is reduced, and its second at 3.2 s."""
    work_s = [[1.0, 1.2], [3.0, 2.0], [1.0, 1.0]]
    rounds = run(partial(**SOLO), work_s, Costs(round_s=0.5)).rounds
    ended = [round(record.ended_at, 1) for record in rounds]
    assert ended[:3] == [1.5, 3.7, 4.5]
    # So its first two go together.
    assert [record.contributors for record in rounds[:3]] == [1, 1, 1]
    assert [sum(record.staleness) for record in rounds[:3]] == [1, 2, 1]
    # A quorum counts them.
    eager = run(partial(quorum=1, staleness=4, mean=False), work_s, Costs(round_s=0.5)).rounds
    assert [round(record.ended_at, 1) for record in eager[:3]] == [1.5, 2.0, 3.7]


def test_eager_sgd_has_one_round_to_a_step_which_ranks_wait_for() -> None:
    """The first rank ready calls; who is late goes on without waiting until it has caught up."""
    work_s = [[1.0, 2.5], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    timeline = run(partial(**SOLO, waits=True, paced=True), work_s)
    # Rank 1 is through with as many steps at 2.5, 3.5, …: the round of its k-th step is over.
    # A rank that is through with all calls once more, to tell it.
    assert [record.ended_at for record in timeline.rounds] == [1, 2, 3, 4, 5, 6, 6, 7.5]
    assert [record.contributors for record in timeline.rounds] == [1, 1, 2, 2, 2, 2, 0, 1]
    assert timeline.wait_s[:-1].tolist() == [[0, 0]] * 5
    # Where the second one is drawn (for the first round: by this seed), the first waits.
    slow = run(partial(**{**SOLO, "probes": 1}, waits=True, paced=True), work_s, seed=0)
    assert slow.rounds[0].ended_at == 2.5
    assert slow.wait_s[0].tolist() == [1.5, 0]


def test_all_that_is_ready_at_one_moment_goes_into_a_round() -> None:
    timeline = run(partial(**SOLO), np.ones((3, 4)), Costs(round_s=0.25))
    assert [record.contributors for record in timeline.rounds] == [4, 4, 4]
    assert timeline.wait_s[-1].tolist() == [0.25] * 4


def test_a_call_takes_time_in_which_others_get_ready() -> None:
    work_s = [[1.0, 1.1, 1.5]]
    timeline = run(partial(**SOLO), work_s, Costs(round_s=0.5, call_s=0.2))
    first, second = timeline.rounds
    assert (first.contributors, first.waited_s, first.ended_at) == (2, 1.2, 1.7)
    # Rank 2 gets ready while the first is reduced, which says that it is not through.
    assert (second.contributors, second.waited_s) == (1, pytest.approx(0.2))
    assert second.ended_at == pytest.approx(2.4)


def test_the_newest_gradient_of_a_rank_counts_however_old_it_is() -> None:
    """A rank that computes while four rounds pass: its gradient is four rounds old."""
    work_s = np.array([[1.0, 4.2], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    samples = np.array([[3, 5]] * 5)
    for staleness in (4, 3, 1):
        timeline = run(partial(**{**SOLO, "staleness": staleness}), work_s, samples=samples)
        assert sum(record.dropped for record in timeline.rounds) == 0
        assert sum(sum(record.staleness) for record in timeline.rounds) == 10
        (late,) = [record for record in timeline.rounds if record.ended_at == 4.2]
        assert late.staleness == [*[0] * staleness, 1], "its age, or that of the last bin"
    # With a bound of no rounds it is dropped.
    timeline = run(partial(**{**SOLO, "staleness": 0}), work_s, samples=samples)
    assert sum(record.dropped for record in timeline.rounds) >= 5
    # A rank that has nothing but such a gradient calls no round: at 4.2 s there is none.
    assert 4.2 not in [record.ended_at for record in timeline.rounds]


def test_a_quorum_is_of_ranks_that_are_not_through() -> None:
    """Those that are through are ready; and once a round has told it, they do not count."""
    what = partial(quorum=2, staleness=4, mean=False)
    timeline = run(what, [[1, 2, 5], [1, 2, 5]])
    # At 2 ranks 0 and 1, of which 0 is through. At 5 rank 2, with rank 1 that is through since 4.
    # Then rank 2 alone is left.
    assert [record.ended_at for record in timeline.rounds] == [2, 5, 10]
    assert [record.contributors for record in timeline.rounds] == [2, 2, 1]


def test_backup_workers_wait_for_as_many_rounds_as_steps() -> None:
    """Three of four must be ready; the slow one's gradients are dropped, and it never waits."""
    work_s = np.array([[1, 1, 1.5, 4.0]] * 3)
    what = partial(spare=1, staleness=0, waits=True, mean=False)
    timeline = run(what, work_s, Costs(round_s=0.5), samples=np.full((3, 4), 2))
    # Rounds end at 2, 4 and 6: the third fastest takes 1.5 s. Another one tells rank 3 that the
    # others are through. Its first two gradients are too old when they are there; its last is not.
    assert ended_at(timeline, work_s)[:2, :3].tolist() == [[2] * 3, [4] * 3]
    assert timeline.wait_s[:2, 3].tolist() == [0, 0]
    assert ended_at(timeline, work_s)[-1].tolist() == [12.5] * 4
    assert [record.dropped for record in timeline.rounds] == [0, 0, 2, 0, 2]
    assert [record.contributors for record in timeline.rounds] == [3, 3, 3, 0, 1]


def test_a_lead_is_bounded_by_what_the_last_round_told() -> None:
    """Rank 0 is twice as fast, and may be one step ahead."""
    work_s = np.array([[1.0, 2.0]] * 4)
    timeline = run(partial(quorum=1, staleness=None, lead=1, mean=False), work_s)
    # Two steps ahead at 2: until rank 1 is through its first, at the same moment; then at 4.
    ends = ended_at(timeline, work_s)
    assert ends[:, 0].tolist() == [1, 2, 4, 8]
    assert ends[:, 1].tolist() == [2, 4, 6, 8]


def test_a_rank_whose_gradients_pile_up_calls_the_round_itself() -> None:
    """Only rank 1 is probed, and slow: rank 0 waits after its fifth gradient, no longer."""
    work_s = np.array([[1.0, 100.0]] * 8)
    seed = next(s for s in range(99) if probes_rank(1, s))
    timeline = run(partial(**{**RNA, "probes": 1}), work_s, Costs(round_s=0.5), seed=seed)
    assert (timeline.rounds[0].waited_s, timeline.rounds[0].staleness[0]) == (5.0, 5)
    assert timeline.wait_s[:5, 0].tolist() == [0, 0, 0, 0, 0.5]


def probes_rank(rank: int, seed: int) -> bool:
    """Whether the first round of two ranks is called by this one if it can be."""
    timeline = run(partial(**{**RNA, "probes": 1}), [[3.0 - 2 * rank, 1.0 + 2 * rank]], seed=seed)
    return bool(timeline.rounds[0].waited_s == 1.0 + 2 * rank)


def test_ranks_without_samples_hold_nobody_up() -> None:
    """Ready with nothing: the round is called at once."""
    timeline = run(
        partial(quorum=2, staleness=4, mean=False), [[1, 0], [1, 0]], samples=[[3, 0]] * 2
    )
    assert [record.contributors for record in timeline.rounds] == [1, 1]
    assert timeline.wait_s[:, 0].tolist() == [0, 0]


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


def test_an_all_reduce_waits_for_the_slowest_in_each_step() -> None:
    timeline = run(ALLREDUCE, [[1, 3], [4, 2]], Costs(round_s=0.5))
    assert timeline.wait_s.tolist() == [[2, 0], [0, 2]]
    assert timeline.communication_s.tolist() == [[0.5, 0.5]] * 2
    assert timeline.rounds == []


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


def test_a_thousand_workers() -> None:
    """Seconds for as many steps. Ranks that share batches take no longer than the mean rank."""
    work_s = np.random.default_rng(0).uniform(0.01, 0.05, (50, 1000))
    slowest_s = work_s.sum(axis=0).max() / 50
    for name in ("rna", "ssp", "n-soft"):
        step_s = step_time_s(partial(**PARTIAL[name]), work_s, Costs(0.001), 50)
        if name == "ssp":
            assert slowest_s <= step_s <= 1.1 * slowest_s
        else:
            assert work_s.mean() <= step_s < min(slowest_s, 1.08 * work_s.mean()), name
