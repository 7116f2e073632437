"""Data that lives on nodes: what the plan moves, when, and what stays where it is."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from paceline import policies
from paceline.core.terms import Terms
from paceline.planning.history import AHEAD_SHARE, ROOM, History
from paceline.planning.offer import offer
from paceline.train.checkpoint.position import Position
from paceline.train.plan.leader import Leader
from paceline.train.plan_shard import decode_shard, get_shard
from paceline.wire import Moves, Plan
from paceline.wire.synchronisation import Partial, PartialRules
from support.contexts import met, run_context
from support.records import adopted, pack_indices
from support.sharded import VirtualRun, sharded_hello, shards


def a_run(
    seed: int = 0,
    samples: int = 240,
    batch: int = 16,
    nodes: tuple[int, ...] = (0, 0, 1, 2),
    slowness: tuple[float, ...] = (1e-4, 1e-4, 2e-4, 3e-4),
    spare: float = 2.0,
    epochs: int = 4,
    policy: str = "chronica",
) -> VirtualRun:
    """A run of which each node can keep `spare` times its equal share."""
    rng = np.random.default_rng(seed)
    sizes, lengths = rng.lognormal(4, 0.6, samples), rng.integers(100, 1000, samples)
    count = max(nodes) + 1
    limits = [int(spare * lengths.sum() / count / ROOM)] * count
    hello = sharded_hello(sizes, shards(nodes, limits, lengths), batch, epochs)
    return VirtualRun(hello, [list(slowness)], policy)


@given(
    seed=st.integers(0, 10_000),
    samples=st.integers(40, 300),
    batch=st.integers(4, 40),
    nodes=st.sampled_from([(0, 1), (0, 0, 1), (0, 1, 2), (0, 1, 0, 1), (0, 0, 1, 1, 2)]),
    spare=st.floats(0.5, 3.0),
    data=st.data(),
)
def test_each_sample_is_trained_once_an_epoch_where_it_is(
    seed: int,
    samples: int,
    batch: int,
    nodes: tuple[int, ...],
    spare: float,
    data: st.DataObject,
) -> None:
    """Whatever speeds and storage: no sample is trained elsewhere than where it was moved to."""
    slowness = data.draw(
        st.lists(st.floats(1e-5, 1e-3), min_size=len(nodes), max_size=len(nodes)), "slowness"
    )
    run = a_run(seed, samples, min(batch, samples), nodes, tuple(slowness), spare, epochs=3)
    run.train()
    assert {epoch: sorted(used) for epoch, used in run.used.items()} == {
        epoch: list(range(samples)) for epoch in range(3)
    }
    assert run.strays == 0


def test_moves_are_decided_before_the_epoch_ends_and_are_few() -> None:
    run = a_run()
    run.train()
    deciding = [plan for plan in run.segments if plan.moves is not None]
    assert [plan.epoch for plan in deciding] == [0, 1, 2], "not for an epoch after the last"
    per_epoch = 240 / 16
    for plan in deciding:
        left = per_epoch * (plan.epoch + 1) - plan.first_step - plan.steps
        assert left <= AHEAD_SHARE * per_epoch
        assert plan.homes
    # Speeds stay the same, so the first decision is the large one.
    counts = [len(plan.moves.arrays()[0]) for plan in deciding if plan.moves]
    assert counts[2] <= counts[0] / 2 and counts[2] <= 20, counts
    assert [s.epoch for s in run.segments if s.shuffled] == [0]


def test_a_node_that_slows_down_gives_samples_up_within_the_room_of_the_others() -> None:
    run = a_run(spare=1.25, epochs=6)
    run.slowness = [[1e-4] * 4] * 2 + [[3e-4, 3e-4, 1e-4, 1e-4]] * 4
    room = np.array(run.hello.shards.limits) * ROOM  # type: ignore[union-attr]
    loads = []
    while not run.history.finished:
        epoch = run.history.epoch
        run.advance()
        if run.history.epoch > epoch:
            loads.append(run.held())
            assert (loads[-1] <= room).all(), epoch
    assert loads[-1][0] < 0.9 * loads[0][0], "node 0 has slowed down"
    assert run.strays == 0


def test_a_controller_that_takes_over_knows_from_the_segments_what_moves() -> None:
    run = a_run()
    while not (run.segments and run.segments[-1].moves is not None):
        run.advance()
    again = History(run.hello)
    for segment in run.segments:
        again.adopt(segment)
    while run.history.epoch == 0:
        again.adopt(run.advance())
    assert np.array_equal(again.problem(2, 0, shuffle=False).placement, run.history._holder)
    assert not again.must_shuffle(0), "the epoch begins with what was decided before it"
    assert again.must_shuffle(1), "another policy version places anew"
    first, second = (offer(h, run.window, run.made, 0)[0] for h in (run.history, again))
    assert msgspec.structs.replace(first, plan_s=second.plan_s) == second


def test_what_moves_does_not_depend_on_who_decides_it() -> None:
    """A controller that takes over does not know what the shuffler made before. A replay does."""
    for seed in range(10):
        run = a_run(seed, nodes=(0, 1, 2), slowness=(1e-4, 2e-4, 3e-4), epochs=2)
        while offer(run.history, run.window, run.made, 0)[0].moves is None:
            run.advance()
        taken_over = History(run.hello)
        for segment in run.segments:
            taken_over.adopt(segment)
        made, _ = offer(taken_over, run.window, run.made, 0)
        assert made.shuffled
        problem = run.history.problem(made.steps, 0, shuffle=True)
        again, _ = policies.plan(
            run.made, problem, run.window.feedback(), shuffle=True, ahead=run.history.next_epoch(0)
        )
        assert again.moves == made.moves


def test_a_controller_that_takes_over_after_the_shuffler_ran_runs_it_again() -> None:
    """In an epoch that began with moves. What the shuffler made meanwhile is in no segment."""
    run = a_run(nodes=(0, 0, 1, 1), epochs=3)
    while run.history.epoch < 1:
        run.advance()
    again = History(run.hello)
    for segment in run.segments:
        again.adopt(segment)
    assert not again.must_shuffle(0)
    shuffled = msgspec.structs.replace(offer(again, run.window, run.made, 0)[0], shuffled=True)
    again.adopt(shuffled)
    assert again.must_shuffle(0), "another controller ran it"
    segment, shuffle = offer(again, run.window, run.made, 0)
    assert shuffle is not None
    again.shuffled(segment, shuffle)
    again.adopt(segment)
    assert not again.must_shuffle(0), "this one ran it"


def test_who_missed_what_moves_does_not_know_who_holds_what() -> None:
    """Though each sample has been used since: some may have moved afterwards."""
    of = shards((0, 1), [10_000, 10_000], np.full(4, 10))
    whole = sharded_hello(np.ones(4), of, 4, 9)
    history = History(msgspec.structs.replace(whole, uneven_steps=False))

    def trained(seq: int, epoch: int, *, moves: Moves | None = None) -> None:
        counts, indices = pack_indices([[np.array([0, 1]), np.array([2, 3])]])
        fields = {"counts": counts, "indices": indices, "moves": moves}
        made = adopted(seq, seq, epoch=epoch, epoch_end=True, **fields).plan
        history.adopt(made)

    trained(0, 0)
    assert not history.lost
    trained(2, 2)  # the segment before may have said who holds what in this epoch
    assert history.lost
    trained(3, 3)
    assert not history.lost, "an epoch was seen whole"
    trained(5, 5, moves=Moves.of(np.array([0]), np.array([1])))
    assert not history.lost, "what moves now was seen"
    assert history.problem(1, 0, shuffle=True).placement.tolist() == [1, 0, 1, 1]


def test_a_switch_in_mid_epoch_leaves_samples_on_their_nodes() -> None:
    run = a_run(policy="bsp")
    while run.history.epoch < 1 or not len(run.history.used):
        run.advance()
    strays = run.strays
    assert all(plan.moves is None and not plan.homes for plan in run.segments)
    run.made = policies.make("chronica", {})
    epoch, first = run.history.epoch, True
    while run.history.epoch == epoch:
        plan, shuffle = offer(run.history, run.window, run.made, 1)
        assert plan.shuffled == first
        if first and shuffle is not None:
            run.history.shuffled(plan, shuffle)
        run.take(plan)
        first = False
    assert run.strays == strays


def test_what_is_on_a_disk_when_an_attempt_begins_stays_there() -> None:
    run = a_run()
    run.train()
    lengths = run.hello.shards.lengths_array()  # type: ignore[union-attr]
    held = run.homes.of.copy()
    held[held == 2] = -1  # node 2 is lost; ranks 0, 1 and 2 go on
    limits = run.hello.shards.limits[:2]  # type: ignore[union-attr]
    left = sharded_hello(run.hello.sizes_array(), shards((0, 0, 1), limits, lengths, held), 16, 3)
    on = VirtualRun(left, [[1e-4, 1e-4, 2e-4]])
    on.train()
    assert on.strays == 0
    assert all(sorted(used) == list(range(240)) for used in on.used.values())


def test_batches_that_ranks_share_have_nothing_that_is_for_one_node() -> None:
    """What nodes hold is as long as the data set, and only its node needs it."""
    store, terms = HashStore(), Terms(8, 4, 0, False, "samples", 2)
    held = shards((0, 1), (99, 99), np.full(8, 10))
    context = run_context(terms, data=SimpleNamespace(shards=held))
    leader = Leader(context, met(2, np.ones(8), store), Position(), uneven=lambda: True)
    synchroniser = Partial(parameters=PartialRules(staleness=None, mean=False, quorum=1))
    counts, indices = pack_indices(np.arange(8).reshape(2, 2, 2))
    own = leader._adopt(
        Plan(0, 0, 0, counts, indices, "x", 0, "controller", True, synchroniser=synchroniser)
    )
    shared = [decode_shard(store.get(f"pool/0/shard/{rank}")) for rank in range(2)]
    assert [shard.node for shard in shared] == [None, None]
    nodes = [own.node, get_shard(store, 0, 1).node]
    assert [node and np.frombuffer(node.holds or b"", "<u4").tolist() for node in nodes] == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
    ]
