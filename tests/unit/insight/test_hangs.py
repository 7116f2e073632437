"""Which ranks wait for which, told from what each of them says that it has been doing for long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from paceline.wire import LongPhase, Phase
from paceline_backend.insight.hangs import Hang, explain
from paceline_backend.store.telemetry.phases import RunPhases

Does = Mapping[int, tuple[int, Phase, float]]  # by rank: step, phase, seconds


def hang(does: Does, **changes: Any) -> Hang:
    phases = {
        rank: LongPhase(0, rank, step, phase, since_s, 1e9)
        for rank, (step, phase, since_s) in does.items()
    }
    standing = {"state": "running", "world": 4, "placement": [], "step": 119, "steps_s": [0.4]}
    standing["begun"] = range(4)
    return explain(RunPhases(**{**standing, **changes}, phases=phases))


SYNC = (120, Phase.SYNC, 95.0)
BATCH: Does = {0: SYNC, 1: SYNC, 2: (119, Phase.DATA, 96.0), 3: SYNC}


def test_ranks_wait_for_one_that_has_no_batch() -> None:
    seen = hang(BATCH)
    assert (seen.hung, seen.waiting, seen.holding, seen.silent) == (True, [0, 1, 3], [2], [])
    assert seen.words == (
        "No step has ended for 95 s; a step takes 0.4 s. Ranks 0, 1 and 3 are in the reduction of "
        "the gradients. They wait for rank 2, which is waiting for a batch."
    )


def test_a_rank_that_was_never_heard_is_on_its_way_to_its_loop() -> None:
    waits = (-1, Phase.PLAN, 50.0)
    seen = hang({0: waits, 1: waits}, world=3, step=None, steps_s=[], begun={0, 1})
    assert (seen.hung, seen.waiting, seen.holding, seen.silent) == (True, [0, 1], [2], [])
    assert seen.scripted
    assert "They wait for rank 2, which is in the script's own code" in seen.words
    cut_off = hang({0: waits, 1: waits}, world=3, step=None, steps_s=[], begun={0, 1, 2})
    assert (cut_off.silent, cut_off.scripted) == ([2], False)


SAVES = (119, Phase.CHECKPOINT, 60.0)


def test_all_that_save_a_checkpoint_wait_for_the_disk() -> None:
    seen = hang(dict.fromkeys(range(4), SAVES))
    assert not seen.hung
    assert seen.words.endswith("Ranks 0, 1, 2 and 3 are saving a checkpoint.")


def test_ranks_wait_for_one_that_saves_a_checkpoint() -> None:
    seen = hang({**BATCH, 2: SAVES})
    assert (seen.hung, seen.waiting, seen.holding) == (True, [0, 1, 3], [2])
    assert seen.scripted, "how long that may take, nobody knows"
    assert seen.words.endswith("They wait for rank 2, which is saving a checkpoint.")


@pytest.mark.parametrize("other", [None, Phase.COMPUTE])
def test_ranks_that_save_wait_for_one_that_does_not(other: Phase | None) -> None:
    does = {0: SAVES, 1: SAVES, 3: SAVES}
    seen = hang(does if other is None else {**does, 2: (119, other, 70.0)})
    assert (seen.hung, seen.waiting, seen.holding) == (True, [0, 1, 3], [2])
    assert seen.silent == ([2] if other is None else [])
    assert not seen.scripted
    assert "Ranks 0, 1 and 3 are saving a checkpoint." in seen.words


def test_nodes_are_named_where_there_are_several() -> None:
    words = hang(BATCH, placement=["n1", "n1", "n2", "n2"]).words
    assert "Ranks 0 (n1), 1 (n1) and 3 (n2) are" in words
    assert "rank 2 (n2), which" in words


def test_a_rank_that_says_nothing_is_held_to_be_suspended() -> None:
    seen = hang({0: SYNC, 1: SYNC, 3: SYNC})
    assert (seen.hung, seen.holding, seen.silent) == (True, [2], [2])
    assert seen.words.endswith("No reports from rank 2: suspended, or disconnected from the bus.")


def test_all_wait() -> None:
    seen = hang(dict.fromkeys(range(4), SYNC))
    assert (seen.hung, seen.holding) == (True, [])
    assert "a collective that not all ranks called" in seen.words


def test_all_wait_for_the_leader() -> None:
    plan = (119, Phase.PLAN, 80.0)
    seen = hang({0: (119, Phase.SCRIPT, 81.0), 1: plan, 2: plan, 3: plan})
    assert (seen.waiting, seen.holding) == ([1, 2, 3], [0])
    assert "waiting for the plan" in seen.words


def test_an_evaluation_is_no_hang() -> None:
    seen = hang(dict.fromkeys(range(4), (119, Phase.SCRIPT, 200.0)))
    assert (seen.hung, seen.since_s) == (False, 200.0)
    assert seen.words.endswith("are in the script's own code outside of the loop.")


@pytest.mark.parametrize(
    ("since_s", "changes", "hung"),
    [
        (299.0, {}, False),  # an evaluation in the loop's body, perhaps
        (300.0, {}, True),
        (300.0, {"steps_s": [4.0]}, False),
        (400.0, {"steps_s": [4.0]}, True),
        (9_000.0, {"steps_s": [], "step": None}, False),  # a first step may compile for long
    ],
)
def test_all_are_in_the_loops_body(since_s: float, changes: dict[str, Any], hung: bool) -> None:
    seen = hang(dict.fromkeys(range(4), (120, Phase.COMPUTE, since_s)), **changes)
    assert (seen.hung, seen.waiting, seen.holding) == (hung, [], [])
    assert "Ranks 0, 1, 2 and 3 are in the loop's body." in seen.words
    assert ("No rank waits as far as Paceline knows." in seen.words) == hung
    assert seen.scripted, "it may be an evaluation: nobody ends it"


def test_one_of_all_in_the_loops_body_is_elsewhere() -> None:
    body = (120, Phase.COMPUTE, 900.0)
    assert not hang({**dict.fromkeys(range(4), body), 2: (119, Phase.SCRIPT, 900.0)}).hung


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"state": "finished"}, "it has ended"),
        ({"steps_s": [12.0]}, "such steps take long"),
    ],
)
def test_what_is_no_hang(changes: dict[str, Any], why: str) -> None:
    seen = hang(BATCH, **changes)
    assert (seen.hung, seen.words) == (False, ""), why


def test_many_ranks_are_counted() -> None:
    does = dict.fromkeys(range(1, 20), SYNC) | {0: (119, Phase.DATA, 96.0)}
    words = hang(does, world=20).words
    assert "Ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more are" in words
    assert "rank 0, which is" in words


def test_before_the_first_step() -> None:
    seen = hang(BATCH, step=None, steps_s=[])
    assert (seen.hung, seen.expected_s) == (True, None)
    assert seen.words.startswith("No step has ended for 95 s. ")
