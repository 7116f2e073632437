"""The controller proposes, the leader disposes: what it adopts, what it refuses, when it coasts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

import paceline
from paceline import wire
from paceline.core.ledger import BatchRules, Ledger
from paceline.core.terms import Terms
from paceline.train.checkpoint.position import Position
from paceline.train.epochs import epoch_order
from paceline.train.plan import leader
from paceline.train.plan.follower import Follower
from paceline.train.plan.leader import MOST_ALONE, Leader
from paceline.train.plan.proposals import ControlStream, Proposals
from paceline.train.plan_shard import LocalStep
from paceline.wire import Plan, Proposal, StopTraining, bus
from paceline_backend.server.embedded import EmbeddedBus
from support import sessions
from support.contexts import met, run_context
from support.ranks import Ranks
from support.records import pack_indices
from support.waiting import until

RUN = "r1"
WORLD = 2


@dataclass
class Run:
    """A leader of two ranks in one process, and both ranks' view of the plan."""

    bus_url: str
    samples: int = 20
    global_batch: int = 4
    drop_last: bool = False
    adopted: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = bus.connect(self.bus_url)
        self.proposals = Proposals(attempt=0)
        self.stream = ControlStream(self.bus_url, RUN, self.proposals)
        terms = Terms(self.samples, self.global_batch, 0, self.drop_last, "samples", 2)
        store = HashStore()
        self.sizes = np.arange(1.0, self.samples + 1)
        self.leader = Leader(
            run_context(terms),
            met(WORLD, self.sizes, store),
            Position(),
            proposals=self.proposals,
            announce=lambda adopted: self.adopted.append(adopted.plan),
        )
        self.ranks = [Follower(store, 0, self.leader), Follower(store, 1, None)]

    def propose(self, plan: Plan, attempt: int = 0) -> None:
        """Sends a proposal and waits until the leader has heard it."""
        before = self.proposals.received
        proposal = Proposal(attempt, plan, "test")
        bus.publish(self.client, wire.control(RUN), proposal, RUN)
        if attempt == 0:
            until(lambda: self.proposals.received > before)

    def epoch(self, number: int = 0) -> Iterator[list[LocalStep]]:
        return zip(*[follower.steps(number) for follower in self.ranks], strict=True)

    def close(self) -> None:
        self.ranks[1].close()
        self.stream.close()
        self.client.close()


@pytest.fixture
def run(bus_url: str) -> Iterator[Run]:
    made = Run(bus_url)
    yield made
    made.close()


def segment(assignments: list[list[list[int]]], **changes: Any) -> Plan:
    counts, indices = pack_indices([[np.array(p) for p in row] for row in assignments])
    made = Plan(0, 0, 0, counts, indices, "chronica", 3, "controller", False)
    return msgspec.structs.replace(made, **changes)


FIRST = segment(
    [[[0, 1, 2], [3]], [[], [7, 6, 5, 4]]], ett_s=[[0.3, 0.1], [0.0, 0.4]], shares=[0.75, 0.25]
)


def test_a_proposal_is_adopted_and_reaches_each_rank(run: Run) -> None:
    run.propose(FIRST)
    first, second = next(e := run.epoch()), next(e)
    assert [s.indices for s in first] == [[0, 1, 2], [3]]
    assert [s.indices for s in second] == [[], [7, 6, 5, 4]]
    assert [(s.load, s.weight, s.ett_s) for s in first] == [(6.0, 0.75, 0.3), (4.0, 0.25, 0.1)]
    assert [(s.load, s.weight, s.ett_s) for s in second] == [(0.0, 0.0, 0.0), (26.0, 1.0, 0.4)]
    assert run.adopted == [FIRST]


def test_ranks_keep_equal_parts_where_the_loss_allows_no_others(run: Run) -> None:
    run.leader.keep_equal("the loss is wrong")
    run.propose(FIRST)
    steps = list(run.epoch())
    assert {step.samples for both in steps for step in both} == {2}
    assert {(each.source, each.why) for each in run.adopted} == {("equal", "the loss is wrong")}
    assert max(each.steps for each in run.adopted) > 2, "no switch waits for a segment's end"


def test_a_later_proposal_supersedes_an_earlier_one(run: Run) -> None:
    run.propose(segment([[[8, 9], [10, 11]]]))
    run.propose(FIRST)
    next(run.epoch())
    assert run.adopted == [FIRST]


def test_what_was_said_before_the_leader_began_counts(bus_url: str) -> None:
    with redis.Redis.from_url(bus_url) as client:
        bus.publish(client, wire.control(RUN), Proposal(0, FIRST, "early"), RUN)
    run = Run(bus_url)
    until(lambda: run.proposals.received == 1)
    next(run.epoch())
    assert run.adopted == [FIRST]
    run.close()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (msgspec.structs.replace(FIRST, epoch=1), "epoch 1"),
        (msgspec.structs.replace(FIRST, first_step=2), "begins at step 2"),
        (msgspec.structs.replace(FIRST, epoch_end=True), "epoch_end"),
        (msgspec.structs.replace(FIRST, ett_s=[[0.1, 0.1]]), "ett_s"),
        (msgspec.structs.replace(FIRST, shares=[1.0]), "shares"),
        (msgspec.structs.replace(FIRST, shares=[0.0, 0.0]), "shares"),
        (msgspec.structs.replace(FIRST, indices=FIRST.indices[:-1]), "bytes"),
        (msgspec.structs.replace(FIRST, counts=[[5, -1], [0, 4]]), "negative"),
        (segment([[[0, 1, 2]]]), "2 ranks"),
        (segment([]), "at least one step"),
        (segment([[[0, 1], [2]]]), "samples"),
        (segment([[[0, 1, 2], [3, 4]]]), "samples"),
        (segment([[[0, 1, 2], [2]]]), "twice"),
        (segment([[[0, 1, 2], [20]]]), "sample 20"),
    ],
)
def test_an_invalid_proposal_is_refused_and_the_leader_coasts(
    run: Run, wrong: Plan, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    run.propose(wrong)
    next(run.epoch())
    assert [s.source for s in run.adopted] == ["coast"]
    assert why in caplog.text


def test_used_samples_are_refused_and_other_attempts_not_heard(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.propose(FIRST, attempt=1)
    run.propose(FIRST)
    run.propose(segment([[[9, 10], [11, 1]]], seq=1, first_step=2))
    assert len([step for step, _ in zip(run.epoch(), range(3), strict=False)]) == 3
    assert [s.source for s in run.adopted] == ["controller", "coast"]
    assert "sample 1 was already used" in caplog.text


def test_coasting_keeps_the_last_shares_and_policy(run: Run) -> None:
    run.propose(FIRST)
    steps = list(run.epoch())
    coasted = run.adopted[1]
    assert (coasted.source, coasted.policy, coasted.version) == ("coast", "chronica", 3)
    assert coasted.shares == FIRST.shares
    loads = np.array([[s.load for s in row] for row in steps[2:]])
    share = loads[:, 0].sum() / loads.sum()
    assert 0.65 < share < 0.85
    assert sorted(chain(*(s.indices for row in steps for s in row))) == list(range(20))


def test_the_leader_waits_only_for_a_controller_that_speaks(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a plan that came in time it waits a moment for the next; coasting, it waits no more."""
    run.propose(FIRST)
    epoch = run.epoch()
    next(epoch), next(epoch)
    timer = threading.Timer(
        0.01, run.propose, [segment([[[8, 9], [10, 11]]], seq=1, first_step=2, epoch_end=False)]
    )
    timer.start()
    next(epoch)
    timer.join()
    assert [s.source for s in run.adopted] == ["controller", "controller"]
    next(epoch)
    assert run.adopted[-1].source == "coast"
    monkeypatch.setattr(leader, "PROPOSAL_WAIT_S", 3600.0)  # a leader that waited would hang
    next(run.epoch(1))
    assert run.adopted[-1].source == "coast"


@pytest.mark.parametrize(
    ("late", "coasted"), [(12, [2, 4, 8, 16]), (40, [2, 4, 8, 16, 32, 64]), (100, [2, 4, 8, 16])]
)
def test_a_controller_that_plans_for_many_steps_comes_in_time_in_the_end(
    late: int, coasted: list[int], bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning takes as long as so many steps, and coasting 2: the leader coasts for longer."""
    if late == 100:  # steps that are not short: it never comes in time
        monkeypatch.setattr(leader, "MOST_COASTED_S", 0.0)
    run = Run(bus_url, samples=4000)
    epoch = run.epoch()
    next(epoch)
    asked = run.adopted[-1]  # what the controller plans on
    for step in range(1, 900):
        if step == asked.first_step + late:
            used = set(chain(*(np.frombuffer(s.indices, "<u4").tolist() for s in run.adopted)))
            free = [n for n in range(4000) if n not in used]
            at = asked.first_step + asked.steps
            run.propose(segment([[free[:3], free[3:4]]], seq=asked.seq + 1, first_step=at))
            asked = run.adopted[-1]
        next(epoch)
        if run.adopted[-1].source == "controller":
            break
    lengths = [s.steps for s in run.adopted[:-1]]
    assert sorted(set(lengths)) == coasted
    assert (run.adopted[-1].source == "controller") == (late < 100)
    if late < 100:
        next(epoch), next(epoch)
        assert (run.adopted[-1].source, run.adopted[-1].steps) == ("coast", 2), "in time: no need"
    run.close()


def test_where_coasting_cannot_be_longer_the_leader_waits_for_a_plan_at_times(
    bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs have two steps, so each plan comes too late, however long the leader would coast."""
    monkeypatch.setattr(leader, "FIRST_WAIT_S", 2.5)
    monkeypatch.setattr(leader, "BETWEEN_WAITS", 0.0)
    run = Run(bus_url, samples=8)
    for number in range(leader.MOST_LATE + 1):
        steps = run.epoch(number)
        next(steps)
        asked = run.adopted[-1]
        assert (asked.source, asked.seq, asked.steps) == ("coast", number, 2)
        if number < leader.MOST_LATE:  # the leader has just begun what this was for
            run.propose(segment([[[0, 1], [2, 3]]], seq=number, epoch=number))
            list(steps)
    plan = segment(
        [[[0, 1, 2], [3]], [[4], [5, 6, 7]]],
        seq=number + 1,
        epoch=number + 1,
        first_step=asked.first_step + 2,
        epoch_end=True,
    )
    run.propose(segment([[[0, 1], [2, 3]]], seq=number, epoch=number))
    list(steps)
    with ThreadPoolExecutor() as pool:
        began = pool.submit(next, run.epoch(number + 1))
        run.propose(plan)
        began.result()
    assert run.adopted[-1] == plan
    assert len(list(run.epoch(number + 2))) == 2
    assert run.adopted[-1].source == "coast", "and not again: it waits for no controller that rests"
    run.close()


def test_stop_ends_all_ranks_at_the_next_segment(run: Run) -> None:
    epoch = run.epoch()
    next(epoch)
    bus.publish(run.client, wire.control(RUN), StopTraining("operator", 0), RUN)
    until(lambda: run.proposals.stop_reason)
    assert len(list(epoch)) == 1, "the segment that was adopted is finished"
    assert [follower.stopped for follower in run.ranks] == [True, True]
    assert list(run.epoch(1)) == []


def test_a_run_that_goes_on_obeys_no_order_of_before(bus_url: str) -> None:
    """On a bus without users, whoever read it may send it once more."""
    proposals = Proposals(attempt=3)
    with (
        closing(ControlStream(bus_url, RUN, proposals, first_attempt=2)),
        redis.Redis.from_url(bus_url) as client,
    ):
        for message in (StopTraining("again", 1), Proposal(3, FIRST, "test")):
            bus.publish(client, wire.control(RUN), message, RUN)
        until(lambda: proposals.received)
        assert proposals.stop_reason is None
        bus.publish(client, wire.control(RUN), StopTraining("now", 2), RUN)
        until(lambda: proposals.stop_reason == "now")


def test_what_is_no_message_is_logged_and_skipped(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.client.xadd(wire.control(RUN), {"v": "999", "run": RUN, "data": b""})
    run.client.xadd(wire.control(RUN), {"v": "1", "run": RUN, "data": b"\xc1"})
    run.propose(FIRST)
    next(run.epoch())
    assert run.adopted == [FIRST]
    assert caplog.text.count("unreadable message") == 2


def test_the_leader_hears_again_after_an_outage(tmp_path: Path) -> None:
    server = EmbeddedBus(tmp_path).start()
    run = Run(server.url, samples=40)
    epoch = run.epoch()
    next(epoch)
    server.kill()
    with EmbeddedBus(tmp_path, server.port):
        next(epoch), next(epoch)
        used = set(
            chain(*(part.tolist() for s in run.adopted for part in chain(*s.assignment.parts)))
        )
        rest = sorted(set(range(40)) - used)
        plan = segment([[rest[:3], rest[3:4]]], seq=2, first_step=4)
        until(lambda: _reachable(run.client))
        run.propose(plan)
        next(epoch), next(epoch)
        assert run.adopted[-1] == plan
        run.close()


def _reachable(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


# The ledger of an epoch


@st.composite
def epochs(draw: st.DrawFn) -> tuple[int, int, int, bool]:
    samples = draw(st.integers(1, 60))
    return samples, draw(st.integers(1, samples)), draw(st.integers(1, 5)), draw(st.booleans())


@given(shape=epochs(), data=st.data())
def test_coasting_uses_every_sample_once_and_is_valid(
    shape: tuple[int, int, int, bool], data: st.DataObject
) -> None:
    """Also from the middle of an epoch whose order somebody else has broken."""
    samples, batch, world, drop_last = shape
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    begun = data.draw(st.integers(0, samples // batch)) * batch
    used = random.permutation(samples)[:begun]
    ledger = Ledger(1, epoch_order(samples, 5, 1), BatchRules(batch, drop_last), used)
    sizes = random.lognormal(size=samples)
    shares = data.draw(st.sampled_from([[], (random.random(world) + 0.01).tolist()]))
    seen = used.tolist()
    while not ledger.finished:
        parts = ledger.coast(data.draw(st.integers(1, 4)), world, sizes, shares)
        counts, indices = pack_indices(parts)
        flat = np.concatenate(list(chain(*parts)))
        left = ledger.left - len(flat)
        over = left == 0 or (drop_last and left < batch)
        made = Plan(0, 1, 0, counts, indices, "bsp", 0, "coast", over)
        assert ledger.refusal(made, world) is None
        ledger.use(flat)
        seen += flat.tolist()
    assert len(set(seen)) == len(seen) == samples - (samples % batch if drop_last else 0)


@pytest.mark.parametrize("lookahead", [0, 4])
def test_the_leader_keeps_the_samples_of_steps_ahead_only(lookahead: int) -> None:
    session = paceline.Session(sessions.Sized(200), global_batch=2)
    loading = {"num_workers": 2, "prefetch_factor": 2} if lookahead else {}
    kept = []
    for _ in session.loader(**loading):
        wiring = session._loop.wiring
        assert wiring is not None and wiring.leader is not None
        kept.append(len(wiring.leader._ahead))
    session.close()
    assert len(kept) == 100
    assert max(kept) <= lookahead + MOST_ALONE + 1


# Real ranks under a controller


@pytest.mark.ranks
def test_a_state_taken_after_a_stop_goes_on_with_the_rest_of_the_epoch(bus_url: str) -> None:
    """Stopped at step 3 of 10; after the loop the script saves and leaves."""
    pool = Ranks(WORLD)
    env = {"PACELINE_RUN": RUN, "PACELINE_BUS": bus_url}
    before = pool.run(
        sessions.train, 40, 3, {"global_batch": 4}, {}, None, None,
        sessions.stop_at, 3, bus_url,
        env=env,
    )  # fmt: skip
    after = pool.run(sessions.train, 40, 1, {"global_batch": 4}, {}, before[0].state)
    pool.stop()
    assert all(log.stopped for log in before)
    done = [i for log in before for _, _, indices in log.batches for i in indices]
    rest = [i for log in after for epoch, _, indices in log.batches if epoch == 0 for i in indices]
    assert 16 <= len(done) < 40
    assert sorted(done + rest) == list(range(40))
    assert after[0].batches[0][1] == len(before[0].batches), "steps go on where they ended"


@pytest.mark.ranks
def test_a_rank_may_be_late_to_read_the_order_to_stop(bus_url: str) -> None:
    pool = Ranks(WORLD)
    env = {"PACELINE_RUN": RUN, "PACELINE_BUS": bus_url}
    assert pool.run(sessions.linger, bus_url, 3.5, env=env) == [(3, True), (3, True)]
    pool.stop()
