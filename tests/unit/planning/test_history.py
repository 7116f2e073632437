"""The history of a run: which steps count as feedback, and what of an epoch is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from paceline import policies
from paceline.planning.feedback import Window
from paceline.planning.history import History
from paceline.policies import Feedback, plan
from paceline.wire import Adopted
from support.records import adopted, hello, pack_indices, record


def test_records_of_ranks_and_steps_that_there_are_not_do_not_count() -> None:
    window = Window(world=2, attempt=0)
    window.add([record(step, rank) for step in (-1, 3) for rank in (0, 1, 2, -1, 2**31)])
    assert window.ranges() == [(3, 4)]


def segment(seq: int, epoch: int = 0, *, end: bool = False) -> Adopted:
    return adopted(seq, 2 * seq, epoch=epoch, epoch_end=end)


def test_feedback_of_another_attempt_does_not_count() -> None:
    window = Window(world=2, attempt=1)
    window.add([record(5, 0, attempt=0), record(5, 1, attempt=1), record(6, 0, 1)])
    assert window.newest == -1
    window.add([record(6, 1, 1), record(6, 1, 1), record(5, 0, 1)])
    assert window.ranges() == [(5, 7)]
    assert window.feedback().rank.tolist() == [0, 1, 0, 1]


def test_feedback_is_of_the_last_64_complete_steps() -> None:
    window = Window(world=1, attempt=0)
    window.add([record(step, 0) for step in range(100) if step != 80])
    assert window.ranges() == [(35, 80), (81, 100)]
    assert len(window.feedback()) == 64
    window.add([record(3, 0)])
    assert window.ranges() == [(35, 80), (81, 100)], "too old to come back"


def test_a_rank_whose_records_never_come_costs_no_memory() -> None:
    window = Window(world=2, attempt=0)
    window.add([record(0, rank) for rank in range(2)])
    for step in range(1, 1000):
        window.add([record(step, 0)])
    assert len(window._rows) <= 1 + 2 * 64 + 1
    assert window.ranges() == [(0, 1)]
    window.add([record(500, 1), record(999, 1)])
    assert window.ranges() == [(0, 1), (999, 1000)], "500 is given up"


def test_a_rank_that_gets_no_samples_keeps_its_last_rows() -> None:
    window = Window(world=2, attempt=0)
    starved: dict[str, Any] = {"samples": 0, "load": 0.0}

    def train(step: int, rest: dict[str, Any]) -> None:
        window.add([record(step, 0), record(step, 1, **rest)])

    for step in range(12):
        train(step, {})
    for step in range(12, 200):
        train(step, starved)
    assert window.ranges() == [(4, 12), (136, 200)]
    feedback = window.feedback()
    assert len(feedback) == 2 * (8 + 64)
    assert feedback.of(1).step.tolist() == list(range(4, 12))
    train(200, {})
    assert window.ranges() == [(5, 12), (137, 201)]
    for step in range(201, 11 + 1024):
        train(step, starved)
    assert window.ranges()[0] == (11, 12)
    for step in range(11 + 1024, 200 + 1024):
        train(step, starved)
    assert window.ranges()[0] == (200, 201)
    train(200 + 1024, starved)
    assert window.ranges() == [(1161, 1225)], "so old that the rank is tried again"


def test_history_is_lost_after_a_gap_until_an_epoch_was_seen_whole() -> None:
    """Who used a sample in the gap is not known before each has been used again."""
    history = History(hello(uneven_steps=False))
    history.adopt(segment(0).plan)
    lost = []
    for later in (segment(2), segment(3, end=True), segment(4, epoch=1)):
        history.adopt(later.plan)
        lost.append(history.lost)
    parts = [[np.arange(4 + k, 32, 2) for k in range(2)]]
    counts, indices = pack_indices(parts)
    whole = adopted(5, 10, epoch=1, epoch_end=True, counts=counts, indices=indices)
    history.adopt(whole.plan)
    assert [*lost, history.lost] == [True, True, True, False]
    assert (history.epoch, history.seq, history.step) == (2, 6, 11)
    assert len(history.problem(1, 0, shuffle=True).remaining) == 32


def test_after_a_gap_it_is_unknown_which_batches_were_shared() -> None:
    """Records of the gap's steps may be of several batches: they go out of the newest segments."""
    history, parts = History(hello(uneven_steps=True)), [[np.arange(16), np.arange(16, 32)]]
    counts, indices = pack_indices(parts)
    lost = []
    for seq in (0, *range(2, 11)):
        made = adopted(seq, seq, epoch=seq, epoch_end=True, counts=counts, indices=indices)
        history.adopt(made.plan)
        lost.append(history.lost)
    assert lost == [False, *[True] * 7, False, False]


def test_after_a_gap_the_memory_is_forgotten() -> None:
    """The policy's memory may have gone on in the gap. The plan says that it began anew."""
    history = History(hello(uneven_steps=False))
    remembers = msgspec.structs.replace(segment(0).plan, memory={"known": 1})
    history.adopt(remembers)
    assert (history.memory(0), history.anew) == ({"known": 1}, False)
    coasted = adopted(2, 4, source="coast").plan
    history.adopt(coasted)
    assert (history.memory(0), history.anew) == ({}, True)
    history.adopt(msgspec.structs.replace(remembers, seq=3, first_step=6))
    assert (history.memory(0), history.anew) == ({"known": 1}, False)


def test_an_epoch_that_the_script_left_early() -> None:
    history = History(hello())
    history.adopt(segment(0).plan)
    assert len(history.problem(1, 0, shuffle=True).remaining) == 28
    history.adopt(segment(1, epoch=1).plan)
    assert not history.lost
    assert history.epoch == 1
    assert len(history.problem(1, 0, shuffle=True).remaining) == 28


def test_placement_given_to_the_shuffler_is_who_used_a_sample_last() -> None:
    history = History(hello())
    before = history.problem(1, 0, shuffle=True).placement
    assert before.tolist() == [i % 2 for i in range(32)]
    made, shuffle = plan(
        policies.make("bsp"), history.problem(1, 0, shuffle=True), Feedback.empty(), shuffle=True
    )
    history.shuffled(made, replace(shuffle, placement=np.zeros(32, np.int64)))
    assert not history.must_shuffle(0)
    assert history.must_shuffle(1)
    history.adopt(segment(0).plan)  # 0, 1 and 3 on rank 0, 2 on rank 1
    assert history.problem(1, 0, shuffle=False).placement.tolist() == [0] * 32
    assert history.problem(1, 0, shuffle=True).placement[:5].tolist() == [0, 0, 1, 0, 0]
    history.adopt(segment(1, end=True).plan)
    assert history.must_shuffle(0)


def test_the_memory_of_the_attempt_before_is_taken_up_where_feedback_reaches_back_to_it() -> None:
    before = adopted(3, 4, version=2).plan
    before = msgspec.structs.replace(before, memory={"known": 1}, feedback=[(0, 4)])
    history = History(hello(attempt=1, step=6), before)
    assert history.feedback == [(0, 4)]
    history.recall([(2, 6)])
    assert history.memory(2) == {"known": 1}
    assert history.memory(1) == {}, "another version of the policy"
    history.recall([(6, 9)])
    assert history.memory(2) == {}
    history.recall([(2, 6)])
    own = msgspec.structs.replace(adopted(0, 6, version=2, source="controller").plan)
    history.adopt(msgspec.structs.replace(own, memory={"known": 2}))
    history.recall([(2, 8)])
    assert history.memory(2) == {"known": 2}, "this attempt has its own"


def test_a_policy_that_forgets_does_not_recall() -> None:
    before = msgspec.structs.replace(adopted(3, 4).plan, memory={"known": 1})
    history = History(hello(attempt=1, step=6), before)
    history.forget_memory()
    history.recall([(2, 6)])
    assert history.memory(0) == {}
