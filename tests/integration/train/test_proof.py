"""The proof of a loss: which setting reproduces the gradient of a batch as a whole."""

from __future__ import annotations

import pytest

from paceline.train.proof import PROVEN, UNKNOWN, WRONG
from support import proving
from support.ranks import Ranks

pytestmark = pytest.mark.ranks


WANTED = {
    ("mean", None): (PROVEN, "samples"),
    ("mean", "ranks"): (WRONG, "samples"),
    ("sum", None): (WRONG, "ranks"),
    ("sum", "ranks"): (PROVEN, "ranks"),
    ("divided", None): (WRONG, "ranks"),
    ("divided", "ranks"): (PROVEN, "ranks"),
    ("filler counted", "ranks"): (WRONG, ""),
    ("classes", None): (WRONG, ""),
    ("masked", None): (WRONG, ""),
    ("rare class", None): (WRONG, ""),
    ("in batch", None): (WRONG, ""),
    ("gathered", None): (WRONG, ""),
    ("fixed", None): (WRONG, ""),
    ("noisy", None): (UNKNOWN, ""),
    ("out of memory", None): (UNKNOWN, ""),
    ("mixed", None): (UNKNOWN, ""),
    ("in model", "ranks"): (PROVEN, "ranks"),
    ("no statistics", None): (UNKNOWN, ""),
}


def test_which_setting_fits_a_loss(ranks: Ranks) -> None:
    each_rank = ranks.run(proving.proven, list(WANTED))
    assert each_rank[0] == each_rank[1]
    answers = dict(zip(WANTED, each_rank[0], strict=True))
    assert {asked: (a.verdict, a.setting) for asked, a in answers.items()} == WANTED
    assert "leave" in answers["filler counted", "ranks"].do.lower()
    for name in ("classes", "masked", "in batch"):
        assert (answers[name, None].equal or 0) > 0.01, name


def test_healthy_loops_are_proven_and_left_as_they_were(ranks: Ranks) -> None:
    """Gradients, buffers, random numbers and counts are as if nothing had been computed."""
    names = list(proving.HEALTHY)
    each_rank = ranks.run(proving.healthy, names)
    for of_rank in each_rank:
        verdicts = {n: s["verdict"] for n, s in zip(names, of_rank, strict=True)}
        assert verdicts == dict.fromkeys(names, PROVEN)
        for name, seen in zip(names, of_rank, strict=True):
            assert seen["losses"] <= 1
            if "kept" in seen:
                kept = {key: seen[key] for key in ("kept", "gradients", "calls", "training")}
                wanted = {"kept": True, "gradients": False, "calls": 0, "training": True}
                assert kept == wanted, name


def test_random_numbers_continue_as_without_a_proof(ranks: Ranks) -> None:
    for workers in (0, 1):
        with_proof = ranks.run(proving.drawn, True, workers)
        assert with_proof == ranks.run(proving.drawn, False, workers)


@pytest.mark.parametrize(
    ("over", "counts"), [("rank", [0, 96]), ("ranks", [96, 96]), ("gather", [102, 102])]
)
def test_a_filler_leaves_the_models_buffers_as_they_were(
    ranks: Ranks, over: str, counts: list[int]
) -> None:
    """Sums over all ranks are without the filler, gathers have it; in both cases ranks agree."""
    first, second = ranks.run(proving.counted, over)
    assert (sum(first[2]), sum(second[2])) == (0, 96)
    assert [first[0], second[0]] == counts
    if over != "gather":  # the mean is each rank's own there
        assert first[1] == ([0.0] * 4 if over == "rank" else second[1])
