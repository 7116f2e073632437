"""The protocol of shared batches: each is trained once, everybody stops, nobody waits for long."""

from __future__ import annotations

import heapq
import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import pool
from paceline.core.pool import Pace, RankQueue, Stance
from paceline.wire.synchronisation import ALLREDUCE, Synchronisation, convert

PARTIAL = {"probes": 2, "staleness": 4, "mean": True}
GROUPS = PARTIAL | {"groups": [[0], [1]], "every": 4}


@pytest.mark.parametrize(
    ("what", "pooled"),
    [
        (ALLREDUCE, False),
        (convert("averaging", {"every": 4}), True),
        (convert("pairwise"), True),
        (convert("partial", PARTIAL), True),
        (convert("hierarchical", GROUPS), True),
        (convert("partial", PARTIAL | {"lead": 3}), False),
        (convert("partial", PARTIAL | {"paced": True}), False),
        (convert("partial", PARTIAL | {"waits": True}), False),
        (convert("partial", {"spare": 1, "staleness": 0, "mean": False, "waits": True}), True),
    ],
)
def test_where_ranks_share_batches(what: Synchronisation, pooled: bool) -> None:
    assert pool.is_pooled(what) is pooled


def test_a_span_ends_with_a_mean_and_with_its_segment() -> None:
    averaging = convert("averaging", {"every": 4, "parts": 2})
    ends = [step for step in range(9) if pool.ends_span(averaging, step, last=step == 6)]
    assert ends == [1, 3, 5, 6, 7]
    rna = convert("partial", PARTIAL)
    assert [step for step in range(9) if pool.ends_span(rna, step, last=step == 6)] == [6]


@dataclass
class Span:
    """Ranks that train a span of batches, by the protocol of the module, as real ranks do.

    Between any two looks at the queues, or changes of them, other ranks may come: `drawn` says who.
    A change fails where the queue is another one than the rank saw, as a compare-and-set does.

    Attributes:
        queues: batches of each rank, [W].
        batch_s: what a batch takes each rank, [W].
        drawn: decides who comes next where several could.
        paces: known to each rank from earlier spans, [W]; 0: not known.
        known: all ranks know each other's paces from the beginning.
    """

    queues: list[int]
    batch_s: list[float]
    drawn: random.Random
    paces: list[float]
    known: bool = False
    rank_queues: list[RankQueue] = field(default_factory=list)
    trained: list[tuple[int, int]] = field(default_factory=list)  # whose batch, and its number
    own: list[int] = field(default_factory=list)
    ended_at: list[float] = field(default_factory=list)
    failed: int = 0  # changes

    def run(self) -> None:
        world = len(self.queues)
        paces = self.paces if self.known else [0.0] * world
        self.rank_queues = [RankQueue(0, count, paces[k]) for k, count in enumerate(self.queues)]
        self.own, self.ended_at = [0] * world, [0.0] * world
        ranks = [self.rank(rank) for rank in range(world)]
        due = [(0.0, self.drawn.random(), rank) for rank in range(world)]
        heapq.heapify(due)
        for _ in range(100_000):
            if not due:
                return
            now, _, rank = heapq.heappop(due)
            lasts_s = next(ranks[rank], None)
            if lasts_s is None:
                self.ended_at[rank] = now
            else:
                heapq.heappush(due, (now + lasts_s, self.drawn.random(), rank))
        raise AssertionError("ranks do not stop")

    def rank(self, rank: int) -> Iterator[float]:
        """What a rank does; yields how long each thing takes it."""
        pace = Pace()
        pace.batch_s = self.paces[rank]
        leaves = False
        for _ in range(self.queues[rank]):
            yield 0.0
            if leaves or not pool.is_worth_it(self.rank_queues, rank, pace.batch_s):
                leaves = yield from self.leaves(rank, leaves)
                if leaves:
                    continue
            number = yield from self.begins(rank, pace)
            if number is not None:
                self.own[rank] += 1
                yield from self.trains(rank, rank, number, pace)
        while True:
            yield 0.0
            seen = list(self.rank_queues)
            if seen[rank].stance is Stance.LEAVES:
                return
            other = pool.slowest(seen, rank)
            if other is None or not pool.is_worth_it(seen, rank, pace.batch_s):
                if (yield from self.stops(rank)):
                    return
                continue
            yield 0.0
            if self.rank_queues[other] != seen[other]:
                self.failed += 1
                continue
            self.rank_queues[other] = seen[other].give()
            yield from self.trains(rank, other, seen[other].end - 1, pace)

    def leaves(self, rank: int, leaves: bool) -> Generator[float, None, bool]:
        if leaves:
            return True
        self.rank_queues[rank] = self.rank_queues[rank].leave()
        yield 0.0
        if pool.has_working_peer(self.rank_queues, rank):
            return True
        self.rank_queues[rank] = self.rank_queues[rank].resume()
        return False

    def begins(self, rank: int, pace: Pace) -> Generator[float, None, int | None]:
        while self.rank_queues[rank].left:
            seen = self.rank_queues[rank]
            yield 0.0
            if self.rank_queues[rank] == seen:
                self.rank_queues[rank] = seen.begin(pace.batch_s)
                return seen.begun
            self.failed += 1
        return None

    def trains(self, rank: int, whose: int, number: int, pace: Pace) -> Iterator[float]:
        self.trained.append((whose, number))
        yield self.batch_s[rank]
        pace.add(self.batch_s[rank])

    def stops(self, rank: int) -> Generator[float, None, bool]:
        self.rank_queues[rank] = self.rank_queues[rank].stop()
        yield 0.0
        left, looked = (
            pool.is_left(self.rank_queues, rank),
            pool.has_working_peer(self.rank_queues, rank),
        )
        if not left or looked:
            return True
        self.rank_queues[rank] = self.rank_queues[rank].resume()
        return False


worlds = st.integers(1, 8).flatmap(
    lambda world: st.tuples(
        st.lists(st.integers(0, 12), min_size=world, max_size=world),
        st.lists(st.sampled_from([0.01, 1.0, 1.1, 2.0, 5.0, 10.0]), min_size=world, max_size=world),
        st.integers(0, 2**31),
        st.booleans(),
    )
)


@given(worlds)
def test_each_batch_is_trained_once_and_everybody_stops(
    given: tuple[list[int], list[float], int, bool],
) -> None:
    queues, batch_s, seed, known = given
    span = Span(queues, batch_s, random.Random(seed), batch_s if known else [0.0] * len(queues))
    span.run()
    everything = [(rank, number) for rank, count in enumerate(queues) for number in range(count)]
    assert sorted(span.trained) == everything


@given(
    st.lists(
        st.tuples(st.integers(4, 14), st.sampled_from([1.0, 1.1, 2.0, 5.0, 10.0])),
        min_size=2,
        max_size=8,
    ),
    st.integers(0, 2**31),
)
def test_nobody_waits_much_longer_than_for_a_batch_of_its_own(
    ranks: list[tuple[int, float]], seed: int
) -> None:
    """Where speeds are constant and known. Two batches are the most, and rare."""
    queues, batch_s = [count for count, _ in ranks], [seconds for _, seconds in ranks]
    span = Span(queues, batch_s, random.Random(seed), batch_s, known=True)
    span.run()
    end = max(span.ended_at)
    for seconds, ended_at in zip(batch_s, span.ended_at, strict=True):
        assert end - ended_at <= 2.5 * seconds


def test_others_come_between_a_look_and_a_change() -> None:
    """Otherwise the tests above show nothing about it."""
    failed = 0
    for seed in range(50):
        span = Span([6] * 6, [1.0, 1.0, 1.0, 1.0, 1.0, 9.0], random.Random(seed), [0.0] * 6)
        span.run()
        failed += span.failed
    assert failed > 20
