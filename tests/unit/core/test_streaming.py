"""A stream's ledger and the claims of shards: each sample once, balanced, whatever ranks read."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.ledger import BatchRules
from paceline.core.streaming.ledger import (
    LEAST_BATCHES,
    WAITS,
    Speeds,
    StreamLedger,
    counts_in_time,
    picked,
)
from paceline.core.streaming.reading import PARTS, ShardClaims, next_claim
from paceline.wire import ALLREDUCE, Paces, Plan


@dataclass
class Ranks:
    """Ranks that read a source by the rules of `Reader`, as far as their buffers have room."""

    ledger: StreamLedger
    left: list[list[float]]  # sizes that each rank has still to read
    used: list[list[int]] = field(default_factory=list)  # of each rank: its numbers

    def __post_init__(self) -> None:
        self.used = [[] for _ in self.left]
        self.steps: list[np.ndarray] = []  # load of each rank, [W]
        self.counts: list[np.ndarray] = []

    def read(self, most: int) -> None:
        """Each rank reads so many samples, if there is room; it knows which is its last."""
        for rank, left in enumerate(self.left):
            if self.ledger.ended_ranks[rank]:
                continue
            held = self.ledger.known[rank] - len(self.used[rank])
            count = min(most, len(left), max(0, self.ledger.rooms[rank] - held))
            if count == 0 and left:
                continue
            self.left[rank] = left[count:]
            ended = not self.left[rank]
            self.ledger.record(rank, np.array(left[:count]), ended=ended)

    def train(self, steps: int, paces: Paces | None) -> None:
        self.ledger.paces = paces
        taken = self.ledger.coast(steps, len(self.left), self.ledger.sizes, [1.0] if paces else [])
        assert taken
        for step in taken:
            for rank, numbers in enumerate(step):
                self.used[rank] += numbers.tolist()
            self.ledger.use(np.concatenate(step))
            self.steps.append(np.array([self.ledger.sizes[n].sum() for n in step]))
            self.counts.append(np.array([len(n) for n in step]))

    def epoch(self, steps: int, most: int, paces: Paces | None) -> None:
        for _ in range(10_000):
            idle = 0
            while not self.ledger.ready():
                self.read(most)
                idle += 1
                assert idle < 10_000, "the plan waits for ever"
            if self.ledger.finished:
                return
            self.train(steps, paces)
        raise AssertionError("the epoch does not end")


def ledger(
    world: int, batch: int, buffer: int, seed: int | None = 0, *, drop_last: bool = False
) -> StreamLedger:
    return StreamLedger(0, world, BatchRules(batch, drop_last), buffer, seed)


def equal(world: int, a: list[float] | None = None) -> Paces:
    return Paces(a or [1.0] * world, [0.0] * world, [0.0] * world)


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(LEAST_BATCHES, 20),
    st.integers(1, 50),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_each_sample_is_trained_once_whatever_ranks_have(
    parts: list[int],
    batch: int,
    batches: int,
    most: int,
    steps: int,
    balanced: bool,
    drop_last: bool,
    seed: int,
) -> None:
    """Uneven parts, some of them empty; any buffer; ranks read any number of samples at once."""
    rng = np.random.default_rng(seed)
    sizes = [rng.lognormal(0, 1, part).tolist() for part in parts]
    ranks = Ranks(ledger(len(parts), batch, batch * batches, seed, drop_last=drop_last), sizes)
    paces = Paces(*(rng.uniform(0.1, 3, len(parts)).tolist() for _ in range(3)))
    ranks.epoch(steps, most, paces if balanced else None)
    used = [number for of_rank in ranks.used for number in of_rank]
    total, rest = sum(parts), sum(parts) % batch if drop_last else 0
    assert len(used) == len(set(used)) == total - rest
    assert all(counts.sum() == batch for counts in ranks.counts[:-1])
    for rank, numbers in enumerate(ranks.used):
        places = ranks.ledger.places[numbers]
        assert len(set(places.tolist())) == len(numbers) <= parts[rank], "a rank's own, each once"
    if not rest:
        assert sorted(ranks.ledger.used()) == sorted(used)


@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 2**31))
def test_limits_of_memory_hold(world: int, batch: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    limits = np.full(world, -(-batch // world)) + rng.integers(0, 3, world)
    made = StreamLedger(0, world, BatchRules(batch, limits=limits), 8 * batch, seed)
    ranks = Ranks(made, [rng.uniform(1, 2, 30).tolist() for _ in range(world)])
    ranks.epoch(4, 7, equal(world, rng.uniform(0.1, 3, world).tolist()))
    assert (np.array(ranks.counts) <= limits).all()
    assert sum(map(len, ranks.used)) == 30 * world


def test_ranks_end_together_by_their_speeds() -> None:
    """Speeds of 1 to 3, sizes over an order of magnitude; ranks have what suits their speeds."""
    rng = np.random.default_rng(3)
    a = np.array([1.0, 1.0, 1.5, 3.0])
    share = (1 / a) / (1 / a).sum()
    sizes = [rng.lognormal(0, 0.8, round(20_000 * s)).tolist() for s in share]
    ranks = Ranks(ledger(4, 64, 2048), sizes)
    ranks.epoch(4, 64, equal(4, a.tolist()))
    load = np.array(ranks.steps)
    fluid_s = load.sum() / (1 / a).sum()
    assert (load * a).max(axis=1).sum() < 1.03 * fluid_s
    early = load[: len(load) // 2]
    assert (early * a).max(axis=1).sum() < 1.01 * early.sum() / (1 / a).sum()


def test_long_samples_do_not_stay_behind() -> None:
    """A sample gives way in a few steps only: then it is trained, whatever it weighs."""
    rng = np.random.default_rng(0)
    sizes = [rng.choice([1.0, 40.0], 1000, p=[0.97, 0.03]).tolist() for _ in range(2)]
    ranks = Ranks(ledger(2, 8, 256, None), sizes)
    ranks.epoch(4, 64, equal(2))
    steps = np.concatenate(
        [np.repeat(step, counts.sum()) for step, counts in enumerate(ranks.counts)]
    )
    assert len(steps) == 2000
    for rank, numbers in enumerate(ranks.used):
        done = np.repeat(np.arange(len(ranks.counts)), [c[rank] for c in ranks.counts])
        places = ranks.ledger.places[numbers]
        # In the order of the source the sample would come in this step of the rank.
        planned = np.searchsorted(np.cumsum([c[rank] for c in ranks.counts]), places, side="right")
        assert (done - planned).max() <= 2 * WAITS


def test_shuffling_depends_on_the_seed_and_reaches_over_the_buffer() -> None:
    def order(seed: int) -> list[int]:
        ranks = Ranks(ledger(1, 4, 64, seed), [[1.0] * 200])
        ranks.epoch(4, 16, None)
        return ranks.ledger.places[ranks.used[0]].tolist()

    assert order(1) == order(1) != order(2)
    moved = np.abs(np.array(order(1)) - np.arange(200))
    assert moved.max() <= 2 * 64
    assert moved.mean() > 8


def proposal(**fields: object) -> Plan:
    values: dict[str, object] = {
        "seq": 0, "epoch": 0, "first_step": 0, "counts": [[0, 0]] * 3, "indices": b"",
        "policy": "paceline", "version": 0, "source": "controller", "epoch_end": False,
    }  # fmt: skip
    return Plan(**(values | fields))  # type: ignore[arg-type]


def test_a_proposal_is_filled_and_what_has_samples_is_refused() -> None:
    made = ledger(2, 4, 16)
    for rank in range(2):
        made.record(rank, np.arange(1.0, 7.0), ended=True)
    assert "lists samples" in str(made.refusal(proposal(counts=[[1, 0]], indices=b"\0\0\0\0"), 2))
    assert "epoch 1, not 0" in str(made.refusal(proposal(epoch=1), 2))
    assert "paces.a has 1 values for 2 ranks" in str(
        made.refusal(proposal(paces=Paces([1.0], [0.0], [0.0])), 2)
    )
    asked = proposal(paces=equal(2, [1.0, 3.0]), shares=[0.75, 0.25])
    assert made.refusal(asked, 2) is None
    filled = made.filled(asked)
    assert filled.defect(2, 12) is None
    assert [sum(row) for row in filled.counts] == [4, 4, 4]
    assert filled.epoch_end
    assert np.array(filled.ett_s).shape == (3, 2)
    assert filled.synchroniser == ALLREDUCE
    assert sorted(np.frombuffer(filled.indices, "<u4")) == list(range(12))


@given(st.integers(1, 40), st.lists(st.floats(0.1, 10), min_size=1, max_size=8), st.integers(0, 99))
def test_counts_add_up_and_no_other_division_is_much_sooner(
    total: int, a: list[float], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    most = rng.integers(0, 20, len(a)) + -(-total // len(a))
    typical = rng.uniform(0.5, 2, len(a))
    speeds = Speeds(
        Paces(a, rng.uniform(0, 1, len(a)).tolist(), rng.uniform(0, 1, len(a)).tolist())
    )
    counts = counts_in_time(total, typical, most, speeds)
    assert counts.sum() == total
    assert (counts >= 0).all()
    assert (counts <= most).all()
    slowest = speeds.step_s(counts, counts * typical)
    # One sample fewer on the slowest rank is a sample more on another one, which then is as late.
    late = int(slowest.argmax())
    for other in range(len(a)):
        if other != late and counts[other] < most[other] and counts[late]:
            moved = counts.copy()
            moved[late] -= 1
            moved[other] += 1
            after = speeds.step_s(moved, moved * typical).max()
            assert (
                after
                >= slowest.max() * (1 - 1e-6)
                - speeds.b.max()
                - (speeds.a * typical + speeds.c).max()
            )


def test_picked_samples_come_near_the_load_and_due_ones_stay() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(0, 1, 300)
    due = np.zeros(300, bool)
    for load in (8.0, 16.0, 40.0):
        places = picked(sizes, 10, load, due)
        assert len(set(places.tolist())) == 10
        assert abs(sizes[places].sum() - load) < 0.02 * load
    due[:4] = True
    assert set(range(4)) <= set(picked(sizes, 10, 40.0, due).tolist())
    assert picked(sizes, 10, None, due).tolist() == list(range(10))


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**31))
def test_each_part_of_each_shard_is_claimed_once(shards: int, world: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.ones(world))
    word = [""]

    def change(old: str, new: str) -> str:
        if word[0] == old:
            word[0] = new
        return word[0]

    claims = [ShardClaims(lambda: word[0], change, rank) for rank in range(world)]
    taken: list[tuple[int, int]] = []
    able = list(range(world))
    while able:
        rank = int(rng.choice(able))
        claim = claims[rank].take(shards, float(shares[rank]))
        if claim is None:
            able.remove(rank)
            continue
        taken += [(claim.shard, part) for part in range(claim.first, claim.end)]
        assert [claim.has(sample) for sample in range(PARTS)] == [
            claim.first <= part < claim.end for part in range(PARTS)
        ]
    assert sorted(taken) == [(shard, part) for shard in range(shards) for part in range(PARTS)]


def test_claims_of_ranks_at_once_do_not_overlap() -> None:
    lock, word = threading.Lock(), [""]

    def change(old: str, new: str) -> str:
        with lock:
            if word[0] == old:
                word[0] = new
            return word[0]

    taken: list[tuple[int, int]] = []

    def claim(rank: int) -> None:
        claims = ShardClaims(lambda: word[0], change, rank)
        while (claim := claims.take(200, 0.25)) is not None:
            taken.extend((claim.shard, part) for part in range(claim.first, claim.end))

    threads = [threading.Thread(target=claim, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == len(set(taken)) == 200 * PARTS


def test_a_rank_whose_view_is_old_claims_what_others_left() -> None:
    """Both would have written the same number of claimed parts, in their first try."""
    word = [""]

    def change(old: str, new: str) -> str:
        if word[0] == old:
            word[0] = new
        return word[0]

    first = ShardClaims(lambda: word[0], change, 0).take(100, 0.25)
    second = ShardClaims(lambda: "", change, 1).take(100, 0.25)
    assert (first, second) == ((0, 0, PARTS), (1, 0, PARTS))


def test_a_slow_rank_claims_little_towards_the_end() -> None:
    assert next_claim(0, 100, 0.1) == (0, 0, PARTS)
    assert next_claim(100 * PARTS - 2 * PARTS, 100, 0.1) == (98, 0, 1)
    assert next_claim(100 * PARTS - 2 * PARTS, 100, 0.6) == (98, 0, 4)
    assert next_claim(100 * PARTS, 100, 0.1) is None
