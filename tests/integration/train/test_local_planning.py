"""Rank 0 plans while no controller does: without a server, and while it is away."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from paceline import policies
from paceline.core import epoch_report
from paceline.planning.feedback import Window
from paceline.planning.history import History
from paceline.planning.planner import Planner
from paceline.planning.policy_in_force import PolicyInForce
from paceline.train.plan import local
from paceline.train.plan.local import LocalPlanner
from paceline.train.plan.proposals import Proposals
from paceline.train.times_queue import QUEUE, TimesQueue
from paceline.wire import Adopted, Hello, Plan, Proposal, StepRecord
from support import local_planning
from support.ranks import RankError, Ranks
from support.waiting import DEADLINE_S, until

SAMPLES = 384
# A rank that trains until an epoch is planned stops by itself before this.
TRAINS_S = DEADLINE_S + 60
KEY = b"key of the ranks"
OPTIONS: dict[str, Any] = {"global_batch": 24, "seed": 3}


def environment(ranks: Ranks, data: Path, policy: str = "paceline") -> dict[str, str]:
    """The last rank is half as fast as the others."""
    a_s = [0.0005] * (ranks.world - 1) + [0.001]
    emulated = json.dumps({"a_s": a_s, "b_s": [0.0] * ranks.world})
    return {
        "PACELINE_POLICY": policy,
        "PACELINE_EMULATE": emulated,
        "PACELINE_DATA": str(data),
    }


def test_ranks_are_balanced_without_a_server(ranks: Ranks, tmp_path: Path) -> None:
    """Each sample is trained once, and training is that of one process."""
    env = environment(ranks, tmp_path)
    trained = ranks.run(local_planning.train, SAMPLES, OPTIONS, env=env, timeout_s=TRAINS_S)
    assert set(trained[0].sources[-1]) == {"local"}
    for samples in zip(*(rank.samples for rank in trained), strict=True):
        assert sorted(chain(*samples)) == list(range(SAMPLES))
    loads = np.sum([rank.loads[-1] for rank in trained], axis=1)
    speeds = np.array([1.0] * (ranks.world - 1) + [0.5])
    assert loads / loads.sum() == pytest.approx(speeds / speeds.sum(), abs=0.05)
    alone = local_planning.train(SAMPLES, OPTIONS, len(trained[0].samples))
    for rank in trained:
        torch.testing.assert_close(rank.parameters, alone.parameters)


def test_a_planning_process_that_dies_is_started_again(ranks: Ranks, tmp_path: Path) -> None:
    env = environment(ranks, tmp_path)
    trained = ranks.run(
        local_planning.train, SAMPLES, OPTIONS, None, 1, env=env, timeout_s=TRAINS_S
    )
    planned = [set(sources) == {"local"} for sources in trained[0].sources]
    assert sum(planned) >= 2 and planned[-1]
    for samples in zip(*(rank.samples for rank in trained), strict=True):
        assert sorted(chain(*samples)) == list(range(SAMPLES))


@pytest.mark.parametrize("policy", ["local-sgd", "ad-psgd"])
def test_relaxed_presets_train_without_a_server(ranks: Ranks, tmp_path: Path, policy: str) -> None:
    """Replicas are equal after each epoch, in which each sample is trained once."""
    env = environment(ranks, tmp_path, policy)
    trained = ranks.run(local_planning.train, SAMPLES, OPTIONS, env=env, timeout_s=TRAINS_S)
    assert set(trained[0].sources[-1]) == {"local"}
    assert "AllReduce" not in trained[0].kinds[-1]
    for samples in zip(*(rank.samples for rank in trained), strict=True):
        assert sorted(chain(*samples)) == list(range(SAMPLES))
    for rank in trained[1:]:
        torch.testing.assert_close(rank.parameters, trained[0].parameters)


def test_each_epoch_is_reported(ranks: Ranks, tmp_path: Path) -> None:
    """The last one, too, although the script ends at once. The last rank is half as fast."""
    env = environment(ranks, tmp_path)
    trained = ranks.run(local_planning.train, 2 * SAMPLES, OPTIONS, env=env, timeout_s=TRAINS_S)
    [run] = epoch_report.runs(tmp_path)
    reports = epoch_report.read(tmp_path, run)
    assert trained[0].lines == [epoch_report.sentence(report) for report in reports]
    assert not any(rank.lines for rank in trained[1:])
    assert [(each.epoch, each.steps, each.whole) for each in reports] == [
        (epoch, 32, True) for epoch in range(len(trained[0].samples))
    ]
    last = reports[-1]
    assert last.policy == "paceline"
    assert last.epoch_s == pytest.approx(trained[0].epoch_s[-1], rel=0.1, abs=0.1)
    assert last.speeds[0] > last.speeds[-1]
    assert last.equal is not None
    assert last.equal.epoch_s > last.epoch_s


def test_a_script_that_sets_up_no_logging_sees_the_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lone = logging.Logger("paceline.lone")
    monkeypatch.setattr(local, "logger", lone)
    local._print("epoch 3 took 62.7 s")
    assert capsys.readouterr().err == "paceline: epoch 3 took 62.7 s\n"
    lines = list[str]()
    lone.addHandler(local_planning.Lines(lines))
    local._print("epoch 4 took 62.7 s")
    assert (capsys.readouterr().err, lines) == ("", ["epoch 4 took 62.7 s"])


@pytest.mark.parametrize("error", [None, BrokenPipeError(), ValueError("closed file")])
def test_a_line_that_cannot_be_printed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    monkeypatch.setattr(local, "logger", logging.Logger("paceline.lone"))
    stderr = mock.Mock()
    stderr.write.side_effect = error
    monkeypatch.setattr(sys, "stderr", stderr if error else None)
    local._print("epoch 3 took 62.7 s")
    assert stderr.write.called == bool(error)


def test_a_policy_that_rank_0_cannot_use_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    options = {"token_budget": 48.0, "seed": 3}
    with pytest.raises(RankError, match="policy='ad-psgd': ad-psgd relaxes synchronisation, so"):
        ranks.run(
            local_planning.train, SAMPLES, options, 1, env=environment(ranks, tmp_path, "ad-psgd")
        )


def test_bsp_plans_and_reports_nothing(ranks: Ranks, tmp_path: Path) -> None:
    env = environment(ranks, tmp_path, "bsp")
    trained = ranks.run(local_planning.train, SAMPLES, OPTIONS, 2, env=env)
    assert set(chain(*trained[0].sources)) == {"coast"}
    assert not trained[0].lines
    assert not epoch_report.runs(tmp_path)


@pytest.mark.parametrize(
    ("first", "further", "policy"),
    [
        ("lbb", {}, "lbb"),
        ("bsp", {}, "bsp"),
        ("lbb", {"PACELINE_POLICY": "sata"}, "sata"),
        # After a restart the policy may be another one.
        ("lbb", {"PACELINE_ATTEMPT": "1"}, "boa"),
    ],
)
def test_a_second_session_follows_the_policy_of_the_run(
    ranks: Ranks, tmp_path: Path, first: str, further: dict[str, str], policy: str
) -> None:
    env = {"PACELINE_RUN": f"second-{policy}", "PACELINE_FIRST_POLICY": json.dumps({first: {}})}
    env = environment(ranks, tmp_path, "") | env | further
    options, epochs = OPTIONS | {"policy": "boa"}, 1 if policy == "bsp" else None
    train = local_planning.train_second
    trained = ranks.run(train, SAMPLES, options, epochs, env=env, timeout_s=TRAINS_S)
    assert {rank.planned for rank in trained} == {policy != "bsp"}
    assert trained[0].policies[-1] == {policy}


def test_an_unknown_policy_is_named(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no policy 'pacelin'; did you mean 'paceline'"):
        ranks.run(
            local_planning.train, SAMPLES, OPTIONS, 1, env=environment(ranks, tmp_path, "pacelin")
        )


def _record(plan: Plan, step: int, rank: int) -> StepRecord:
    samples = plan.counts[step - plan.first_step][rank]
    compute_s = 0.01 * (rank + 1) * samples
    times = 0.0, compute_s, 0.0, 0.1, 1.0
    return StepRecord(0, rank, step, step, plan.epoch, plan.seq, samples, float(samples), *times)


class Attempt:
    """An attempt of two ranks without ranks: a test plays the leader and the controller."""

    def __init__(
        self,
        policy: PolicyInForce | None,
        *,
        alone: bool,
        epochs: int | None = None,
        reports: Path | None = None,
    ) -> None:
        sizes = np.linspace(1.0, 5.0, 64)
        self.hello = Hello(
            *(0, 2, 8, 0, sizes.astype("<f8").tobytes(), "samples", False, epochs, 2, 1.0),
            *("0", "2", "cpu"),
        )
        self.store, self.proposals = HashStore(), Proposals(0)
        self.times = TimesQueue(self.store, 2, KEY)
        self.controller = Planner(History(self.hello), Window(2, 0))
        self.local = LocalPlanner(
            *(self.store, KEY, self.hello, self.proposals, policy), alone=alone, reports=reports
        )

    def adopt(self, plan: Plan) -> None:
        """The leader adopts a segment; both ranks report its steps."""
        self.local.adopted(Adopted(0, plan, 1.0))
        self.controller.adopt(plan)
        steps = range(plan.first_step, plan.first_step + plan.steps)
        records = [_record(plan, step, rank) for step in steps for rank in range(2)]
        self.times.add(records)
        self.times.send()
        self.controller.add(records)

    def controlled(self) -> Plan:
        """The controller proposes the next segment, and the leader adopts it."""
        plan = self.controller.plan()
        self.proposals.offer(Proposal(0, plan, "one", {"mode": "free"}))
        self.adopt(plan)
        return plan

    def planned_here(self) -> Plan:
        """The plan of rank 0 for the next segment, which the leader adopts."""
        seq = self.controller.history.seq

        def offered() -> Proposal | None:
            newest = self.proposals.newest
            return newest if newest and newest.plan.seq == seq else None

        until(lambda: offered() is not None)
        proposal = self.proposals.take(seq, 0.0)
        assert proposal is not None
        self.adopt(proposal.plan)
        return proposal.plan


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempt]:
    """An attempt whose controller counts as away at once."""
    monkeypatch.setattr(local, "AWAY_S", 0.0)
    attempt = Attempt(None, alone=False)
    attempt.controller.use(policies.make("paceline", {"mode": "free"}), 3)
    yield attempt
    attempt.local.close()


def test_rank_0_goes_on_with_the_controllers_policy(away: Attempt) -> None:
    first = away.controlled()
    made = [away.planned_here() for _ in range(3)]
    assert [(plan.source, plan.policy, plan.version) for plan in made] == [
        ("local", "paceline", 3)
    ] * 3
    assert [plan.seq for plan in made] == [1, 2, 3]
    newest = away.proposals.newest
    assert newest is not None
    assert newest.parameters == {"mode": "free"}
    used = np.concatenate([plan.assignment.samples for plan in (first, *made)])
    assert len(np.unique(used)) == len(used)


def test_a_controller_that_is_back_takes_over(away: Attempt) -> None:
    away.controlled()
    away.planned_here()
    assert len(local_planning.planners()) == 1
    away.controlled()
    away.proposals.offer(Proposal(0, away.controller.plan(), "one", {"mode": "free"}))
    until(lambda: not local_planning.planners())


def test_a_controller_that_answers_is_not_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its segments are shorter than the planner's pauses."""
    monkeypatch.setattr(local, "AWAY_S", 0.3)
    attempt = Attempt(PolicyInForce("paceline"), alone=False)
    attempt.controller.use(policies.make("paceline"), 0)
    try:
        until_s = time.monotonic() + 3 * local.AWAY_S
        while time.monotonic() < until_s:
            attempt.controlled()
            assert not local_planning.planners()
    finally:
        attempt.local.close()


def test_nothing_is_planned_after_the_last_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "AWAY_S", 0.0)
    attempt = Attempt(PolicyInForce("paceline"), alone=True, epochs=1)
    try:
        until(local_planning.planners)
        attempt.controller.use(policies.make("bsp"), 0)
        while not attempt.controller.history.finished:
            attempt.adopt(msgspec.structs.replace(attempt.controller.plan(), source="coast"))
        until(lambda: not local_planning.planners())
    finally:
        attempt.local.close()


def test_nothing_is_planned_where_batches_must_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "AWAY_S", 0.0)
    attempt = Attempt(PolicyInForce("paceline"), alone=True)
    try:
        until(local_planning.planners)
        attempt.controller.use(policies.make("bsp"), 0)
        attempt.adopt(msgspec.structs.replace(attempt.controller.plan(), source="equal"))
        until(lambda: not local_planning.planners())
    finally:
        attempt.local.close()


def test_a_switch_before_the_controller_went_away_again_counts(away: Attempt) -> None:
    away.controlled()
    away.planned_here()
    away.controller.use(policies.make("lbb"), 4)
    plan = away.controller.plan()
    away.proposals.offer(Proposal(0, plan, "one"))
    away.adopt(msgspec.structs.replace(plan, source="coast", policy="paceline", version=3))
    made = away.planned_here()
    while made.policy != "lbb":
        made = away.planned_here()
    assert (made.source, made.version) == ("local", 4)


def test_a_record_that_no_rank_has_signed_is_ignored(
    away: Attempt, caplog: pytest.LogCaptureFixture
) -> None:
    away.store.queue_push(QUEUE, b"x" * 40)
    until(lambda: "it was not written by a rank" in caplog.text)


def test_a_controllers_proposal_counts_before_a_local_one() -> None:
    attempt = Attempt(PolicyInForce("paceline"), alone=True)
    try:
        until(lambda: attempt.proposals.newest is not None)
        attempt.controller.use(policies.make("bsp"), 1)
        plan = attempt.controller.plan()
        attempt.proposals.offer(Proposal(0, plan, "one"))
        made = attempt.proposals.newest
        assert made is not None
        attempt.proposals.offer(
            msgspec.structs.replace(made, plan=msgspec.structs.replace(plan, source="local"))
        )
        taken = attempt.proposals.take(0, 0.0)
        assert taken is not None
        assert taken.plan.source == "controller"
    finally:
        attempt.local.close()


def test_a_policy_that_is_not_here_is_named(
    away: Attempt, caplog: pytest.LogCaptureFixture
) -> None:
    plan = msgspec.structs.replace(away.controller.plan(), policy="theirs")
    with caplog.at_level(logging.WARNING):
        away.proposals.offer(Proposal(0, plan, "one"))
        away.adopt(plan)
        until(lambda: "rank 0 cannot plan with theirs" in caplog.text)
        until(lambda: not local_planning.planners())
    assert "no policy 'theirs'" in caplog.text
    assert "it repeats the last split" in caplog.text


def test_closing_does_not_wait_for_a_report_that_never_comes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The newest epoch has no complete step, so it is not reported."""
    monkeypatch.setattr(local, "_LAST_REPORT_S", 10 * DEADLINE_S)
    path = epoch_report.new_file(tmp_path, "train.py")
    attempt = Attempt(PolicyInForce("paceline"), alone=True, reports=path)
    try:
        until(local_planning.planners)
        attempt.controller.use(policies.make("bsp"), 0)
        attempt.local.adopted(Adopted(0, attempt.controller.plan(), 1.0))
        until(attempt.local._report_pending)
    finally:
        attempt.local.close()
    assert not attempt.local._thread.is_alive()
    assert not epoch_report.runs(tmp_path)
