"""Whose sample it is, as the leader knows it, and coasting that keeps to it."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.ledger import BatchRules, Ledger
from paceline.train.plan.homes import Homes
from paceline.wire import Moves, Plan
from support.records import adopted, pack_indices
from support.sharded import shards


def segment(parts: list[list[list[int]]], **fields: object) -> Plan:
    counts, indices = pack_indices([[np.array(r, np.int64) for r in step] for step in parts])
    made = adopted(0, 0).plan
    return msgspec.structs.replace(made, counts=counts, indices=indices, **fields)


def held(part: bytes | None) -> list[int] | None:
    return None if part is None else np.frombuffer(part, "<u4").tolist()


def test_a_sample_lives_where_it_was_trained_or_moved_to() -> None:
    homes = Homes(shards((0, 0, 1), (99, 99), np.full(8, 5), np.array([0, 1] + [-1] * 6)))
    assert homes.prefetchers == [0, 2]
    homes.enter(0)
    first, second = homes.node_shards(
        segment([[[0], [2], [3]], [[4], [], [5, 6]]], epoch_end=False)
    )
    assert (held(first.trained), held(second.trained)) == ([0, 2, 4], [3, 5, 6])
    assert first.holds is None
    moves = Moves.of(np.array([0, 3]), np.array([2, 1]))
    first, second = homes.node_shards(segment([[[1], [], [7]]], moves=moves, epoch_end=False))
    assert (held(first.holds), held(second.holds)) == ([1, 2, 3, 4], [0, 5, 6, 7])
    homes.enter(0)
    assert homes.of.tolist() == [0, 0, 0, 1, 0, 1, 1, 1], "not before the next epoch"
    homes.enter(1)
    assert homes.of.tolist() == [1, 0, 0, 0, 0, 1, 1, 1]


def test_without_moves_a_node_holds_what_it_trained() -> None:
    homes = Homes(shards((0, 1), (99, 99), np.full(4, 5)))
    homes.enter(0)
    first, second = homes.node_shards(segment([[[2, 0], [1, 3]]], epoch_end=True))
    assert (held(first.holds), held(second.holds)) == ([0, 2], [1, 3])


@given(st.data())
def test_coasting_keeps_samples_on_their_nodes(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 5))
    samples, batch = data.draw(st.integers(world, 60)), data.draw(st.integers(1, 20))
    batch = min(batch, samples)
    nodes = np.array(data.draw(st.lists(st.integers(0, 2), min_size=world, max_size=world)))
    of = np.array(data.draw(st.lists(st.integers(-1, 2), min_size=samples, max_size=samples)))
    shares = data.draw(st.sampled_from([[], [1.0] * world, [float(r) for r in range(world)]]))
    if sum(shares) == 0:
        shares = []
    sizes = np.arange(1.0, samples + 1)
    ledger = Ledger(0, np.random.default_rng(0).permutation(samples), BatchRules(batch))
    used = []
    while not ledger.finished:
        for step in ledger.coast(3, world, sizes, shares, (nodes, of)):
            for rank, part in enumerate(step):
                at_home = (of[part] == nodes[rank]) | ~np.isin(of[part], nodes)
                assert at_home.all()
                used.extend(part.tolist())
            ledger.use(np.concatenate(step))
    assert sorted(used) == list(range(samples))


def test_a_full_rank_gives_samples_to_other_nodes() -> None:
    ledger = Ledger(0, np.arange(6), BatchRules(6, limits=np.array([2, 4])))
    homes = np.array([0, 1]), np.zeros(6, np.int64)
    [step] = ledger.coast(1, 2, np.ones(6), [], homes)
    assert [len(part) for part in step] == [2, 4]
