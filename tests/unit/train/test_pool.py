"""A pool of batches in the ranks' store, without training: each batch is trained once."""

from __future__ import annotations

import heapq
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch.distributed import HashStore

from paceline.core.cost import Features
from paceline.core.emulation import Emulation
from paceline.train.device import Device
from paceline.train.plan_shard import LocalStep, PlanShard
from paceline.train.sync.pool import SharedBatches, ends_span, put, spans_of
from paceline.wire.synchronisation import Synchronisation, convert

RNA = convert("partial", {"probes": 2, "staleness": 4, "mean": True})
LOCAL = convert("averaging", {"every": 3})


def shards_of(
    counts: list[list[int]], what: Synchronisation, segment: int = 0, first_step: int = 0
) -> list[PlanShard]:
    """A shard for each rank: `counts` are [W][steps]; all samples are different."""
    numbers = iter(range(10**6))
    return [
        PlanShard(
            epoch=0,
            segment=segment,
            first_step=first_step,
            counts=of_rank,
            loads=[float(count) for count in of_rank],
            weights=[0.1] * len(of_rank),
            ett_s=[],
            indices=np.array([next(numbers) for _ in range(sum(of_rank))], "<u4").tobytes(),
            epoch_end=False,
            squares=[float(count) for count in of_rank],
            longest=[1.0] * len(of_rank),
            synchroniser=what,
            pooled=True,
        )
        for of_rank in counts
    ]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.sampled_from([RNA, LOCAL]),
    st.integers(0, 5),
    st.booleans(),
)
def test_put_counts_the_batches_of_each_span(
    counts: list[int], what: Synchronisation, first_step: int, pooled: bool
) -> None:
    store = HashStore()
    (shard,) = shards_of([counts], what, first_step=first_step)
    shard = replace(shard, pooled=pooled)
    put(store, [shard])
    spans = spans_of(shard)
    stored = [store.get(f"pool/0/{number}/0").decode().split()[:2] for number in range(len(spans))]
    assert stored == [["0", str(len(span))] for span in spans]
    assert not store.check([f"pool/0/{len(spans)}/0"])


class Rank:
    """One rank's loop, as `paceline.train.loader` drives it, on a virtual clock."""

    def __init__(self, rank: int, pool: SharedBatches, shard: PlanShard, batch_s: float) -> None:
        self.rank, self.pool, self.batch_s = rank, pool, batch_s
        self._planned = list(shard.steps())
        self.trained: list[LocalStep] = []
        self.stopped: list[float] = []  # when it was through with each span

    def turn(self, now: float, held: set[int]) -> float | None:
        """Begins the next batch; how long it takes, or None: it waits at a span's end."""
        while self._planned:
            step = self._planned[0]
            if step.samples and self.pool.begins(step, may_leave=True):
                self._planned.pop(0)
                if ends_span(step):
                    self._planned.insert(0, step.without_batch())
                return self._train(step)
            if ends_span(step):
                taken = self.pool.takes_over(step)
                if taken is not None:
                    return self._train(taken)
                self.stopped.append(now)
                held.add(self.rank)
                return None
            self._planned.pop(0)
        return None

    def go_on(self) -> None:
        """All ranks are at the span's end."""
        self.pool.end_span(self._planned.pop(0))

    @property
    def over(self) -> bool:
        return not self._planned

    def _train(self, step: LocalStep) -> float:
        self.trained.append(step)
        self.pool.worked(self.batch_s)
        return self.batch_s


def test_a_batch_that_was_taken_over_has_a_delay_of_its_own() -> None:
    """On an emulated device: such batches have the number of one step."""
    devices = Emulation([0.0, 0.0], [0.01, 0.02], delay_s=(0.0, 0.05))
    device = Device(json.dumps(devices.as_dict()), 1, 2)
    store = HashStore()
    ours = shards_of([[2, 2, 2], [2, 2, 2]], RNA)
    put(store, ours)
    pool = SharedBatches(store, 1, 2, [])
    *_, last = ours[1].steps()
    taken = [pool.takes_over(last) for _ in range(3)]
    assert [batch and batch.step for batch in taken] == [last.step] * 3
    held = [device.begin(batch) for batch in taken if batch is not None]
    alone = Features(2, 2.0, 2.0, 1.0)
    first = last.segment_first
    expected = [devices.rank_s(1, first + at, alone) for at in (2, 1, 0)]
    assert held == pytest.approx(expected)
    assert len(set(expected)) == 3


def train(
    store: HashStore, shards: list[PlanShard], batch_s: list[float], limits: list[int]
) -> list[Rank]:
    world = len(shards)
    put(store, shards)
    ranks = [
        Rank(rank, SharedBatches(store, rank, world, limits), shards[rank], batch_s[rank])
        for rank in range(world)
    ]
    held: set[int] = set()
    events = [(0.0, rank) for rank in range(world)]
    while events:
        now, rank = heapq.heappop(events)
        takes = ranks[rank].turn(now, held)
        if takes is not None:
            heapq.heappush(events, (now + takes, rank))
        elif len(held) == world:
            for each in ranks:
                each.go_on()
            events = [(now, each.rank) for each in ranks if not each.over]
            held.clear()
    return ranks


counts_of = st.integers(2, 5).flatmap(
    lambda world: st.integers(1, 8).flatmap(
        lambda steps: st.lists(
            st.lists(st.sampled_from([0, 1, 2, 2, 2]), min_size=steps, max_size=steps),
            min_size=world,
            max_size=world,
        )
    )
)


@given(counts_of, st.data(), st.sampled_from([RNA, LOCAL]))
def test_each_batch_is_trained_once(
    counts: list[list[int]], data: st.DataObject, what: Synchronisation
) -> None:
    store = HashStore()
    batch_s = [data.draw(st.floats(0.1, 10.0)) for _ in counts]
    limits = (
        [data.draw(st.sampled_from([1, 2])) for _ in counts] if data.draw(st.booleans()) else []
    )
    if limits:  # no rank gets more in the plan
        counts = [
            [min(n, most) for n in of_rank] for of_rank, most in zip(counts, limits, strict=True)
        ]
    shards = shards_of(counts, what)
    ranks = train(store, shards, batch_s, limits)
    trained = Counter(index for rank in ranks for step in rank.trained for index in step.indices)
    assert sorted(trained) == list(range(sum(map(sum, counts))))
    assert set(trained.values()) <= {1}
    assert store.num_keys() == 0, "all is cleaned up"


def test_ranks_train_as_much_as_their_speeds_allow() -> None:
    """Rank 2 is four times slower: 48 batches take 48/2.25 s where equal steps take 64."""
    ranks = train(HashStore(), shards_of([[2] * 16] * 3, RNA), [1.0, 1.0, 4.0], [])
    assert [len(rank.trained) for rank in ranks] == [22, 21, 5]
    assert max(rank.stopped[0] for rank in ranks) <= 23.0
    taken = [step for step in ranks[0].trained if step.shared]
    assert {step.step for step in taken} == {15}, "reported under the last step"
    assert not any(step.last for step in taken)


def test_a_rank_that_was_held_up_once_trains_again_after_a_while() -> None:
    clock, store = [0.0], HashStore()
    pools = [SharedBatches(store, rank, 2, [], lambda: clock[0]) for rank in range(2)]
    pools[0].worked(1.0)
    pools[1].worked(100.0)
    begun = []
    for segment, at in enumerate([0.0, 100.0, 1999.0, 2000.0, 2001.0]):
        clock[0] = at
        shards = shards_of([[2] * 8] * 2, RNA, segment, 8 * segment)
        put(store, shards)
        first, late = (next(shard.steps()) for shard in shards)
        assert pools[0].begins(first, may_leave=True)
        begun.append(pools[1].begins(late, may_leave=True))
        if begun[-1]:
            pools[1].worked(1.0)
    assert begun == [False, False, False, True, True], "the pace of before is forgotten"


def test_a_rank_takes_no_batch_that_its_memory_has_no_room_for() -> None:
    ranks = train(HashStore(), shards_of([[1] * 4, [3] * 4], RNA), [1.0, 9.0], [1, 3])
    assert {step.samples for step in ranks[0].trained} == {1}
    assert len(ranks[1].trained) == 4


def test_a_mean_waits_for_batches_of_its_steps_only() -> None:
    """Under local SGD batches of steps after a mean are not taken over before it."""
    ranks = train(HashStore(), shards_of([[1] * 6] * 2, LOCAL), [1.0, 5.0], [])
    for rank in ranks:
        assert len(rank.stopped) == 2
        before = [step.step for step in rank.trained]
        assert before == sorted(before)


def test_two_ranks_that_want_the_same_batch_do_not_both_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both write the same queue: only who wrote it tells them apart."""
    store = HashStore()
    shards = shards_of([[1], [1], [1, 1][:1]], RNA)
    put(store, shards)
    pools = [SharedBatches(store, rank, 3, []) for rank in range(3)]
    (first,), (second,), (third,) = (list(shard.steps()) for shard in shards)
    assert pools[0].begins(first, may_leave=False)
    assert pools[1].begins(second, may_leave=False)
    read, taken = pools[0]._read_entries, []

    def read_late() -> object:
        entries = read()
        monkeypatch.setattr(pools[0], "_read_entries", read)
        taken.append(pools[1].takes_over(second))  # between the read and the write
        return entries

    monkeypatch.setattr(pools[0], "_read_entries", read_late)
    assert pools[0].takes_over(first) is None
    assert taken[0] is not None
    assert taken[0].indices == third.indices
    assert not pools[2].begins(third, may_leave=False)


def test_of_two_ranks_that_leave_at_once_one_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have become slow, and know only how fast the other was: somebody must train the rest."""
    shards = shards_of([[2] * 4] * 2, RNA)
    store = HashStore()
    put(store, shards)
    pools = [SharedBatches(store, rank, 2, []) for rank in range(2)]
    steps = [list(shard.steps()) for shard in shards]
    for pool, (first, *_) in zip(pools, steps, strict=True):
        pool.worked(1.0)
        assert pool.begins(first, may_leave=True)
        pool.worked(1_000.0)
    read, begun = pools[0]._read_entries, []

    def read_late() -> object:
        entries = read()
        monkeypatch.setattr(pools[0], "_read_entries", read)
        begun.append(pools[1].begins(steps[1][1], may_leave=True))  # between the read and the write
        return entries

    monkeypatch.setattr(pools[0], "_read_entries", read_late)
    begun.append(pools[0].begins(steps[0][1], may_leave=True))
    assert begun == [False, True]
