"""Relaxed synchronisers in training scripts that know nothing of them: the contract of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.wire import ALLREDUCE
from paceline.wire.synchronisation import convert
from support import relaxing
from support.ranks import RankError, Ranks
from support.relaxing import SAMPLES, STEPS

pytestmark = pytest.mark.ranks
WORLD = 3
KINDS = {
    "rna": convert("partial", {"probes": 2, "staleness": 4, "mean": True}),
    "majority": convert("partial", {"probes": 1, "staleness": 4, "mean": False}),
    "n-soft": convert("partial", {"parts": 2, "staleness": 4, "mean": False}),
    "ssp": convert("partial", {"quorum": 1, "staleness": None, "lead": 2, "mean": False}),
    "backup": convert("partial", {"spare": 1, "staleness": 0, "waits": True, "mean": False}),
    "flexrr": convert("partial", {"quorum": 1, "staleness": None, "mean": False}),
    "local": convert("averaging", {"every": 3}),
    "osa": convert("averaging", {"every": None}),
    "streaming": convert(
        "averaging",
        {
            "every": 4,
            "parts": 2,
            "overlap": 2,
            "keep": 0.5,
            "outer": {"rate": 0.7, "momentum": 0.9},
        },
    ),
    "pairwise": convert("pairwise"),
    "hierarchical": convert(
        "hierarchical",
        {"groups": [[0, 1], [2]], "every": 2, "probes": 2, "staleness": 4, "mean": True},
    ),
}
EACH = convert("averaging", {"every": 1})
ALL = convert("partial", {"quorum": WORLD, "staleness": 0, "waits": True, "mean": False})
SCRIPTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "adam": {"optimiser": "AdamW"},
    "schedule": {"schedule": True, "optimiser": "AdamW"},
    "accumulate": {"accumulate": 3},  # over segments' ends, too
    "clip": {"clip": True},
    "scaler": {"scaler": True, "clip": True},
    "fused": {"scaler": True, "fused": True},
    "frozen": {"frozen": True},
    "late": {"late": True},
    "workers": {"workers": 1},
    "gather": {"gather": True, "slow": {1: 0.005}},
    "slow": {"slow": {2: 0.01}},
    "uneven": {"shares": [0.8, 0.2, 0.0]},
    "shared": {"uneven": True, "slow": {2: 0.01}},
    "shared, workers": {"uneven": True, "slow": {2: 0.01}, "workers": 1},
    "shared, schedule": {"uneven": True, "slow": {0: 0.01}, "schedule": True},
    "shared, scaler": {"uneven": True, "slow": {1: 0.01}, "scaler": True},
}


def flat(replica: list[object]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.concatenate([np.ravel(np.array(part, np.float64)) for part in replica])


ANY = ("accumulate", "slow", "uneven", "usual", "workers", "shared", "shared, workers")


SOME = ("rna", "local", "pairwise")  # one for each way to combine; `make test-all` tries all


def of_kinds(*values: Any, some: bool) -> Any:
    """A case of a test that is long, unless it is one of some."""
    return pytest.param(*values, marks=() if some else pytest.mark.long)


@pytest.mark.parametrize(
    ("kind", "script"),
    [
        of_kinds(kind, script, some=kind in SOME)
        for kind in KINDS
        for script in SCRIPTS
        if script in ANY or kind in ("rna", "local", "streaming")
    ],
)
def test_replicas_are_the_same_in_the_end(ranks: Ranks, kind: str, script: str) -> None:
    answers = ranks.run(relaxing.train, [KINDS[kind]], SCRIPTS[script])
    assert [answer["error"] for answer in answers] == [None] * WORLD
    assert all(answer["replica"] == answers[0]["replica"] for answer in answers)
    for epoch in range(2):
        used = [index for answer in answers for index in answer["used"][epoch]]
        assert sorted(used) == list(range(SAMPLES))
    assert np.isfinite(flat(answers[0]["replica"])).all()
    assert answers[0]["segments"], "it was in force"
    assert not answers[1]["segments"], "one rank tells"


def test_a_closed_session_leaves_no_threads(ranks: Ranks) -> None:
    before = ranks.run(relaxing.threads_after, [ALLREDUCE])
    for kind in KINDS.values():
        assert ranks.run(relaxing.threads_after, [kind]) == before, kind


def test_a_slow_rank_is_not_waited_for(ranks: Ranks) -> None:
    given = {"slow": {2: 0.02}, "segment": STEPS}
    for kind in ("rna", "n-soft", "ssp"):
        answers = ranks.run(relaxing.train, [KINDS[kind]], given)
        assert min(answers[0]["contributors"]) < WORLD, kind
    answers = ranks.run(relaxing.train, [ALL], given)
    assert set(answers[0]["contributors"]) == {WORLD}


@pytest.mark.parametrize("workers", [0, 1])
def test_work_of_a_slow_rank_is_taken_over(ranks: Ranks, workers: int) -> None:
    """It trains less, all of it counts, and the whole weighs as much as before."""
    given = {"slow": {2: 0.05}, "workers": workers, "uneven": True}
    answers = ranks.run(relaxing.train, [KINDS["flexrr"]], given)
    assert answers[2]["samples"] < 0.95 * 2 * SAMPLES / WORLD
    used = [index for answer in answers for index in answer["used"][1]]
    assert sorted(used) == list(range(SAMPLES))
    assert sum(answer["weight"] for answer in answers) == pytest.approx(2 * STEPS)
    assert answers[0]["dropped"] == 0


@pytest.mark.parametrize(
    "chain", [["rna", "", "local", "", "backup"], ["ssp", "osa", "rna"], ["streaming", "local", ""]]
)
def test_a_chain(ranks: Ranks, chain: list[str]) -> None:
    answers = ranks.run(relaxing.train, [KINDS.get(name, ALLREDUCE) for name in chain])
    assert all(answer["replica"] == answers[0]["replica"] for answer in answers)
    assert sum(answer["samples"] for answer in answers) == 2 * SAMPLES


@pytest.mark.parametrize(
    "given",
    [{}, {"schedule": True}, {"accumulate": 3}, {"scaler": True}, {"shares": [0.8, 0.2, 0.0]}],
    ids=str,
)
def test_a_round_of_all_is_an_all_reduce(ranks: Ranks, given: dict[str, Any]) -> None:
    rounds, reduced = (
        ranks.run(relaxing.train, [synchronisation], given)[0]
        for synchronisation in (ALL, ALLREDUCE)
    )
    expected = pytest.approx(flat(reduced["replica"]), rel=1e-5, abs=1e-5)
    assert flat(rounds["replica"]) == expected
    assert rounds["dropped"] == 0


@pytest.mark.parametrize("kind", ["rna", "local"])
def test_gradients_are_scaled_alike_where_they_are_reduced_again(ranks: Ranks, kind: str) -> None:
    """One rank's had an overflow while each stepped for itself."""
    given = {"scaler": True, "overflow": (5, 1)}
    answers = ranks.run(relaxing.train, [KINDS[kind], ALLREDUCE], given)
    assert [answer["scale"] for answer in answers] == [128.0] * WORLD
    assert all(answer["replica"] == answers[0]["replica"] for answer in answers)


def test_accumulated_gradients_are_scaled_anew(ranks: Ranks) -> None:
    """How far the scale fell makes no difference: the switch is in the middle of three steps."""
    given = {"scaler": True, "overflow": (5, 1), "accumulate": 3}
    half, quarter = (
        ranks.run(relaxing.train, [ALL, ALLREDUCE], given | {"backoff": backoff})
        for backoff in (0.5, 0.25)
    )
    assert [answer["scale"] for answer in half + quarter] == [128.0] * WORLD + [64.0] * WORLD
    assert flat(quarter[0]["replica"]) == pytest.approx(flat(half[0]["replica"]), abs=1e-5)


def test_fused_optimisers_unscale_once(ranks: Ranks) -> None:
    fused, plain = (
        ranks.run(
            relaxing.train, [KINDS["local"]], {"scaler": True, "fused": fused, "uneven": False}
        )[0]
        for fused in (True, False)
    )
    assert flat(fused["replica"]) == pytest.approx(flat(plain["replica"]), abs=1e-5)


@pytest.mark.parametrize(
    "script",
    [
        {"optimisers": 2},
        {"closure": True},
        {"closure": True, "at_once": True},
        {"closure": True, "optimiser": "LBFGS", "at_once": True},
        {"criterion": True},
        {"scaler": True, "scalers": 2},
    ],
    ids=str,
)
def test_scripts_that_keep_the_all_reduce(ranks: Ranks, script: dict[str, Any]) -> None:
    relaxed, reduced = (
        ranks.run(relaxing.train, [synchronisation], script)
        for synchronisation in (KINDS["rna"], ALLREDUCE)
    )
    assert relaxed == reduced


def test_an_optimiser_of_something_else_may_step_with_a_closure(ranks: Ranks) -> None:
    for at_once in (False, True):
        answers = ranks.run(relaxing.train, [KINDS["rna"]], {"temper": True, "at_once": at_once})
        assert [answer["error"] for answer in answers] == [None] * WORLD
        assert answers[0]["segments"], "it was in force"


def test_a_closure_that_comes_too_late_is_told_of(tmp_path: Path) -> None:
    given = {"closure_from": 6}
    for message in failures("rna", given, tmp_path):
        assert "passes a closure to its optimiser for the first time" in str(message)


def test_gradients_are_reduced_again_where_the_next_synchroniser_does_not_suit(
    ranks: Ranks,
) -> None:
    """From local steps to RNA's, which another optimiser prevents: replicas must not part."""
    chain = [KINDS["local"], KINDS["rna"], KINDS["rna"]]
    answers = ranks.run(relaxing.train, chain, {"spare_at": 5})
    assert all(answer["replica"] == answers[0]["replica"] for answer in answers)
    parts = ranks.run(relaxing.train, chain, {"spare_at": 5, "leave": (9, "break", -1)})
    assert all(answer["replica"] == parts[0]["replica"] for answer in parts)


@pytest.mark.parametrize(
    ("kind", "step"),  # within a segment, at its end, at an epoch's
    [
        of_kinds(kind, step, some=step == 6 or kind in SOME)
        for kind in KINDS
        for step in (6, 7, STEPS - 1)
    ],
)
def test_all_leave_early(ranks: Ranks, kind: str, step: int) -> None:
    given = {"leave": (step, "break", -1), "slow": {1: 0.005}}
    answers = ranks.run(relaxing.train, [KINDS[kind]], given)
    assert [answer["error"] for answer in answers] == [None] * WORLD
    assert all(answer["replica"] == answers[0]["replica"] for answer in answers)


@pytest.mark.parametrize("kind", ["rna", "local", "backup"])
@pytest.mark.parametrize("step", [6, 7, STEPS - 1])
def test_all_leave_by_an_exception(ranks: Ranks, kind: str, step: int) -> None:
    given = {"leave": (step, "raise", -1), "slow": {1: 0.005}}
    answers = ranks.run(relaxing.train, [KINDS[kind]], given)
    assert [answer["error"] for answer in answers] == ["BoomError"] * WORLD
    assert all(answer["replica"] == answers[0]["replica"] for answer in answers)


def test_a_break_waits_for_a_rank_that_is_late(ranks: Ranks) -> None:
    """As one is that evaluates alone: only an exception's waiting ends so soon."""
    given = {"leave": (6, "break", -1), "late_once": (6, 1, 0.5), "still_s": 0.1}
    answers = ranks.run(relaxing.train, [KINDS["rna"]], given)
    assert [answer["error"] for answer in answers] == [None] * WORLD


@pytest.mark.parametrize("kind", ["rna", "local", "pairwise"])
@pytest.mark.parametrize("how", ["break", "raise"])
def test_ranks_that_share_batches_leave_no_loop_early(kind: str, how: str, tmp_path: Path) -> None:
    """They have no step in common after which all could leave, and all learn it at once."""
    given = {"leave": (9, how, 1), "uneven": True, "slow": {2: 0.05}}
    messages = failures(kind, given, tmp_path)
    assert None not in messages
    word = "BoomError" if how == "raise" else "do not leave the loop"
    assert word in str(messages[1])


@pytest.mark.parametrize("kind", ["rna", "local"])
def test_a_collective_where_ranks_share_batches_is_refused(kind: str, tmp_path: Path) -> None:
    given = {"gather": True, "uneven": True, "slow": {2: 0.02}}
    messages = failures(kind, given, tmp_path)
    assert any("not all ranks reach this collective" in str(message) for message in messages)


def failures(kind: str, given: dict[str, Any], directory: Path) -> list[str | None]:
    """What ranks are told; None: nothing, being killed."""
    pool = Ranks(WORLD)
    with pytest.raises(RankError, match="rank 0: died"):
        pool.run(
            relaxing.survive, {**KINDS, "each": EACH}[kind], given, str(directory), timeout_s=40
        )
    files = [directory / str(rank) for rank in range(WORLD)]
    return [file.read_text() if file.exists() else None for file in files]


@pytest.mark.parametrize(
    ("kind", "how", "step"),
    [
        of_kinds(kind, how, step, some=how == "break" or kind == "rna")
        for kind in ("rna", "ssp", "local", "pairwise", "hierarchical")
        for how, step in (("break", 6), ("raise", 6), ("raise", 7))
    ],
)
def test_a_rank_that_leaves_alone_is_named(kind: str, how: str, step: int, tmp_path: Path) -> None:
    messages = failures(kind, {"leave": (step, how, 1), "still_s": 2.0}, tmp_path)
    assert None not in messages
    # The one that learns it first may be gone when the other looks, with the store if it is rank 0.
    words = (f"rank 1 left its loop in step {step}", f"rank 1 left in step {step}")
    assert any(word in str(messages[rank]) for word in words for rank in (0, 2))
    if how == "raise":
        assert messages[1] == "BoomError"


@pytest.mark.parametrize(("kind", "step"), [("rna", 6), ("rna", 27), ("rna", 15), ("each", 6)])
def test_a_rank_that_raises_before_a_collective_ends_all(
    kind: str, step: int, tmp_path: Path
) -> None:
    """Within a segment, at its end, at an epoch's, and where the synchroniser waits for all."""
    given = {"gather": True, "fail": (step, 1), "still_s": 0.5}
    messages = failures(kind, given, tmp_path)
    assert messages[1] == "BoomError"
    assert None not in messages


# Where a mean is on its way, ranks wait at the store until the launcher ends them.
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"streaming"}))
def test_a_rank_that_is_killed_ends_the_others(kind: str, tmp_path: Path) -> None:
    messages = failures(kind, {"kill": (6, 1)}, tmp_path)
    assert messages[1] is None
    assert None not in (messages[0], messages[2])
    assert any("ranks were last seen in steps" in str(messages[rank]) for rank in (0, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_late_once_changes_nothing_else(ranks: Ranks, kind: str) -> None:
    given = {"late_once": (STEPS + 1, 1, 0.5), "segment": STEPS}
    answers = ranks.run(relaxing.train, [KINDS[kind]], given)
    assert [answer["error"] for answer in answers] == [None] * WORLD
    assert all(answer["replica"] == answers[0]["replica"] for answer in answers)
    if kind in ("rna", "n-soft", "backup"):  # two of three ranks are enough for these
        assert min(answers[0]["contributors"]) < WORLD, "others went on"


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"streaming"}))  # it has an outer optimiser
def test_each_gradient_is_applied_once(ranks: Ranks, kind: str) -> None:
    """Also of batches that another rank takes over: they weigh as planned."""
    answers = ranks.run(relaxing.counted, KINDS[kind], 0.05, STEPS)
    for answer in answers:
        if kind in ("rna", "hierarchical"):  # several gradients of a rank may count as one
            assert 0.5 * 3 * STEPS < answer["steps"] <= 3 * STEPS * 1.0001
        elif kind in ("local", "osa"):  # the mean of replicas leans to those that made more steps
            assert 3 * STEPS * 0.9999 < answer["steps"] == answers[0]["steps"]
        else:
            expected = 3 * STEPS - answers[0]["dropped"]
            assert answer["steps"] == pytest.approx(expected, rel=1e-4)
    turns = [answer["turns"] for answer in answers]
    assert sum(turns) == 3 * STEPS * WORLD
    pooled = kind != "ssp"
    assert (turns[-1] < 3 * STEPS) == pooled  # by how much depends on the machine
