"""Shared batches on the virtual clock: decisions are those of the core, rows those of ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import pool
from paceline.core.cost import Features
from paceline.core.emulation import Emulation
from paceline.core.pool import RankQueue, Stance
from paceline.wire.synchronisation import convert
from paceline_backend.simulator import Scenario, Simulation, TrainedSegment
from paceline_backend.simulator.simulation import DealtBatches
from paceline_backend.simulator.sync import (
    Bodies,
    Costs,
    SimulatedPool,
    SimulatedTimeline,
    Work,
    make,
)
from paceline_backend.simulator.sync.pool import Board
from support.records import adopted
from support.simulated import train

RNA = convert("partial", {"probes": 2, "staleness": 4, "mean": True})


def trained(
    what: Any, factors: list[float], counts: Any, starts: Any = None, **given: Any
) -> tuple[SimulatedTimeline, DealtBatches, Work]:
    """A segment of batches of samples that take a rank of factor 1 a second each."""
    counts = np.array(counts)
    world = len(factors)
    devices = given.pop("devices", Emulation(a_s=factors, b_s=[0.0] * world))
    nothing = np.zeros(counts.shape)
    limits = given.pop("limits", [])
    batches = DealtBatches(
        devices, adopted(0, 0).plan, np.ones(counts.sum()), counts, np.zeros(world), limits
    )
    costs = given.pop("costs", Costs())
    work = Work(0, batches.compute_s.copy(), counts, nothing, costs, dealing=batches, **given)
    starts = np.zeros(world) if starts is None else np.array(starts)
    return SimulatedPool(world).run(what, make(what, world, 0), starts, work), batches, work


def test_rows_of_ranks_that_take_over_and_of_one_that_leaves() -> None:
    """Rank 1 takes 4 s for a batch: it trains two of six, and rank 0 ten in the same 10 s."""
    timeline, batches, _ = trained(RNA, [1.0, 4.0], np.ones((6, 2), int))
    # Rank 1 has trained two batches at 8 s, with rank 0 in its last but one.
    assert batches.features.samples.T.tolist() == [[1, 1, 1, 1, 1, 5], [1, 1, 0, 0, 0, 0]]
    assert timeline.work_s.T.tolist() == [[1, 1, 1, 1, 1, 5], [4, 4, 0, 0, 0, 0]]
    assert batches.compute_s.tolist() == timeline.work_s.tolist()
    # Who waits at the end does so in the last step, though it had no batch in that.
    assert timeline.wait_s.T.tolist() == [[0] * 6, [0] * 5 + [2]]
    longest = batches.features.longest.T
    assert longest.tolist() == [[1] * 6, [1, 1, 0, 0, 0, 0]]


def test_batches_that_are_taken_over_have_delays_of_their_own() -> None:
    """Though their record is of one step."""
    devices = Emulation(a_s=[0.0] * 2, b_s=[1.0] * 2, delay_s=(0.0, 1.0))
    timeline, batches, _ = trained(RNA, [0.0] * 2, [[1, 0]] * 20, devices=devices)
    taken = int(batches.features.samples[:, 1].sum())
    alone = Features(1, 1.0, 1.0, 1.0)
    expected = [devices.rank_s(1, step, alone) for step in range(20 - taken, 20)]
    assert taken > 5 and len(set(expected)) == taken
    assert timeline.work_s[:, 1].tolist() == [0.0] * 19 + [pytest.approx(sum(expected))]


def test_nobody_takes_over_what_does_not_fit_into_its_memory() -> None:
    """Rank 0 has room for two samples; the batches of rank 1 have three. So rank 1 stays."""
    timeline, batches, _ = trained(RNA, [1.0, 9.0], [[2, 3]] * 4, limits=[2, 3])
    assert batches.features.samples.tolist() == [[2, 3]] * 4
    assert timeline.wait_s[-1].tolist() == [4 * 27 - 8, 0]


shapes = st.tuples(st.integers(1, 6), st.integers(1, 12), st.integers(0, 2**31))


@pytest.mark.parametrize(
    "what",
    [
        RNA,
        convert("pairwise"),
        convert("averaging", {"every": 3}),
        convert("averaging", {"every": None}),
        convert("partial", {"spare": 1, "staleness": 0, "mean": False, "waits": True}),
        convert(
            "hierarchical",
            {"probes": 2, "staleness": 4, "mean": True, "every": 4, "groups": [[0, 2], [1]]},
        ),
    ],
    ids=["rna", "pairwise", "averaging", "osa", "backup", "hierarchical"],
)
@given(shape=shapes, epoch_end=st.booleans(), limited=st.booleans())
def test_each_batch_is_trained_once_and_rows_sum_up(
    what: Any, shape: tuple[int, int, int], epoch_end: bool, limited: bool
) -> None:
    world, steps, seed = shape
    world = 3 if what.name == "hierarchical" else world
    rng = np.random.default_rng(seed)
    counts = rng.choice([0, 1, 2, 5], (steps, world))
    factors = rng.choice([0.5, 1.0, 5.0], world).tolist()
    starts = rng.uniform(0, 3, world) if what.name in ("pairwise", "averaging") else None
    costs = Costs(round_s=0.25, call_s=0.125)
    limits = counts.max(axis=0).tolist() if limited else []
    pooled: list[Bodies] = []
    batches, kept = DealtBatches.pool, pooled.append

    def pool_(self: DealtBatches, bodies: Bodies) -> None:
        kept(bodies)
        batches(self, bodies)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DealtBatches, "pool", pool_)
        timeline, dealt, work = trained(
            what, factors, counts, starts, epoch_end=epoch_end, limits=limits, costs=costs
        )
    spans = [bodies.batch[bodies.made] for bodies in pooled]
    trained_ones = np.concatenate([*spans, []])
    assert len(set(trained_ones.tolist())) == len(trained_ones)
    assert dealt.features.samples.sum() == counts.sum()
    assert (timeline.wait_s >= -1e-9).all()
    if world > 1:
        assert timeline.work_s == pytest.approx(dealt.compute_s)
        assert (timeline.work_s.sum(axis=0) <= work.work_s.sum() * 10).all()
    if limited:
        for bodies in pooled:
            assert (bodies.samples <= limits).all()
    ends = (timeline.work_s + timeline.wait_s + timeline.communication_s).sum(axis=0)
    ends += 0 if starts is None else starts
    meets = not make(what, world, 0).goes_on or epoch_end
    if meets:
        assert ends == pytest.approx(np.full(world, ends.max()))
    assert all(0 <= each.step < steps for each in timeline.rounds)


rank_queues = st.lists(
    st.builds(
        lambda begun, left, batch_s, stance: RankQueue(begun, begun + left, batch_s, stance),
        st.integers(0, 5),
        st.integers(0, 5),
        st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0]),
        st.sampled_from(list(Stance)),
    ),
    min_size=1,
    max_size=6,
)


@given(
    rank_queues,
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.sampled_from([0.5, 1.0, 4.0]))),
)
def test_the_board_decides_as_the_core(
    given_queues: list[RankQueue], changes: list[tuple[int, int, float]]
) -> None:
    board, world = Board(list(given_queues)), len(given_queues)
    for rank, kind, batch_s in [(0, -1, 1.0), *changes]:
        rank %= world
        queue = board.rank_queues[rank]
        if kind == 0 and queue.left:
            board.put(rank, queue.begin(batch_s))
        elif kind == 1 and queue.left:
            board.put(rank, queue.give())
        elif kind > 1:
            board.put(rank, (queue.leave, queue.stop, queue.resume)[kind - 2]())
        now = board.rank_queues
        for asks in range(world):
            for mine_s in (0.0, 0.5, 1.0, 3.0, 20.0):
                worth = pool.is_worth_it(now, asks, mine_s)
                assert board.is_worth_it(asks, mine_s) == worth
            assert board.slowest(asks, 9, lambda rank: 1) == pool.slowest(now, asks)
            even = board.slowest(asks, 9, lambda rank: 1 if rank % 2 == 0 else 99)
            assert even == pool.slowest(now, asks, lambda rank: rank % 2 == 0)
            assert board.has_working_peer(asks) == pool.has_working_peer(now, asks)


@cache
def plain_s(slow: float) -> float:
    """The time that plain data parallelism takes."""
    return run("bsp", slow)[0].now


def run(policy: str, slow: float, **given: Any) -> tuple[Simulation, list[TrainedSegment]]:
    """One rank of eight is slower by this factor."""
    plain = {
        "name": "one slow rank",
        "workers": 8,
        "global_batch": 128,
        "epochs": 2,
        "sizes": {"distribution": "constant", "mean": 10, "samples": 128 * 300},
        "devices": {"unit_s": 1e-4, "factors": [1, 1, 1, slow, 1, 1, 1, 1]},
        "policy": policy,
    }
    simulation = Simulation.of(Scenario.of({**plain, **given}))
    return simulation, train(simulation)


@pytest.mark.parametrize(
    ("policy", "slow", "least"),
    [
        ("rna", 5.0, 3.5),
        ("ad-psgd", 5.0, 3.5),
        ("local-sgd", 10.0, 6.0),
        ("rna-hierarchical", 10.0, 6.0),
    ],
)
def test_a_rank_that_is_slow_for_good_holds_nobody_up(
    policy: str, slow: float, least: float
) -> None:
    simulation, ran = run(policy, slow)
    assert plain_s(slow) / simulation.now >= least
    used = np.zeros((2, 128 * 300), int)
    for trained_ in ran:
        used[trained_.plan.epoch][trained_.plan.assignment.samples] += 1
        assert trained_.features.samples.sum() == trained_.plan.assignment.counts.sum()
    assert (used == 1).all()
    # Times of steps sum up to the run's, and loads to what was trained.
    assert sum(each.evened_s.sum() for each in ran) == pytest.approx(simulation.now)
    late = [each for each in ran if each.plan.first_step >= 64]
    if policy != "local-sgd":  # a mean every 8 steps: the slow rank trains one batch in between
        own = sum(int(each.features.samples[:, 3].sum()) for each in late)
        allowed = 1 / slow / (7 + 1 / slow)
        assert own / sum(int(each.features.samples.sum()) for each in late) >= 0.8 * allowed


def test_under_ssp_all_make_the_slowest_ranks_rate() -> None:
    """Fast ranks are at most `staleness` steps ahead, so in the long run they gain nothing."""
    simulation, _ = run("ssp", 5.0, parameters={"staleness": 3})
    assert simulation.now == pytest.approx(plain_s(5.0), rel=1e-6)
