"""Relaxed rounds on the ranks' devices: CPUs stand for GPUs here, and gloo for NCCL.

All else is the code that GPUs run. `test_gpu.py` has what runs on GPUs, which none has seen yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.wire import ALLREDUCE
from paceline.wire.synchronisation import convert
from support import relaxing
from support.ranks import RankError, Ranks
from support.relaxing import SAMPLES

pytestmark = pytest.mark.ranks
WORLD = 3
ALL = convert("partial", {"quorum": WORLD, "staleness": 0, "waits": True, "mean": False})
KINDS = {
    "rna": convert("partial", {"probes": 2, "staleness": 4, "mean": True}),
    "ssp": convert("partial", {"quorum": 1, "staleness": None, "lead": 2, "mean": False}),
    "backup": convert("partial", {"spare": 1, "staleness": 0, "waits": True, "mean": False}),
    "hierarchical": convert(
        "hierarchical",
        {"groups": [[0, 1], [2]], "every": 2, "probes": 2, "staleness": 4, "mean": True},
    ),
}
MEANS = {"local": convert("averaging", {"every": 3}), "pairwise": convert("pairwise")}
SCRIPTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "schedule": {"schedule": True, "optimiser": "AdamW"},
    "accumulate": {"accumulate": 3},
    "scaler": {"scaler": True, "clip": True},
    "slow": {"slow": {2: 0.01}},
    "shared": {"uneven": True, "slow": {2: 0.01}},
}
ON_DEVICES = {"on_devices": True}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(WORLD)
    yield pool
    pool.stop()


def flat(replica: list[object]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.concatenate([np.ravel(np.array(part, np.float64)) for part in replica])


@pytest.mark.parametrize(
    ("kind", "script"),
    [(kind, script) for kind in KINDS for script in SCRIPTS if kind == "rna" or script == "slow"],
)
def test_replicas_are_the_same_in_the_end(ranks: Ranks, kind: str, script: str) -> None:
    answers = ranks.run(relaxing.train, [KINDS[kind]], SCRIPTS[script] | ON_DEVICES)
    assert [answer["error"] for answer in answers] == [None] * WORLD
    assert all(answer["replica"] == answers[0]["replica"] for answer in answers)
    for epoch in range(2):
        used = [index for answer in answers for index in answer["used"][epoch]]
        assert sorted(used) == list(range(SAMPLES))
    assert np.isfinite(flat(answers[0]["replica"])).all()
    assert answers[0]["segments"], "it was in force"


@pytest.mark.parametrize("given", [{}, {"accumulate": 3}, {"shares": [0.8, 0.2, 0.0]}], ids=str)
def test_a_round_of_all_is_an_all_reduce(ranks: Ranks, given: dict[str, Any]) -> None:
    rounds, reduced = (
        ranks.run(relaxing.train, [what], given | ON_DEVICES)[0] for what in (ALL, ALLREDUCE)
    )
    expected = pytest.approx(flat(reduced["replica"]), rel=1e-5, abs=1e-5)
    assert flat(rounds["replica"]) == expected
    assert rounds["dropped"] == 0


def test_rounds_of_all_are_the_same_through_the_host(ranks: Ranks) -> None:
    """As many bytes, too, but for rounds without a gradient: on devices these have facts alone."""
    on_devices, on_host = (
        ranks.run(relaxing.train, [ALL], {"on_devices": way})[0] for way in (True, False)
    )
    assert flat(on_devices["replica"]) == pytest.approx(flat(on_host["replica"]), abs=1e-6)
    assert on_devices["bytes"][-1:] == on_host["bytes"]
    assert len(on_devices["bytes"]) == 2


@pytest.mark.parametrize("kind", MEANS)
def test_means_stay_on_the_host(ranks: Ranks, kind: str) -> None:
    """So a collective in the loop's body is fine there."""
    answers = ranks.run(relaxing.train, [MEANS[kind]], ON_DEVICES | {"gather": True})
    assert [answer["error"] for answer in answers] == [None] * WORLD
    assert all(answer["replica"] == answers[0]["replica"] for answer in answers)


def test_a_chain(ranks: Ranks) -> None:
    chain = [KINDS["rna"], ALLREDUCE, KINDS["hierarchical"], MEANS["local"], KINDS["backup"]]
    answers = ranks.run(relaxing.train, chain, ON_DEVICES)
    assert [answer["error"] for answer in answers] == [None] * WORLD
    assert all(answer["replica"] == answers[0]["replica"] for answer in answers)


def test_a_closed_session_leaves_no_threads(ranks: Ranks) -> None:
    before = ranks.run(relaxing.threads_after, [ALLREDUCE])
    for kind in ("rna", "hierarchical"):
        assert ranks.run(relaxing.threads_after, [KINDS[kind]], ON_DEVICES) == before, kind


@pytest.mark.parametrize("kind", ["rna", "hierarchical"])
def test_all_leave_early(ranks: Ranks, kind: str) -> None:
    given = {"leave": (6, "break", -1), "slow": {1: 0.005}} | ON_DEVICES
    answers = ranks.run(relaxing.train, [KINDS[kind]], given)
    assert [answer["error"] for answer in answers] == [None] * WORLD
    assert all(answer["replica"] == answers[0]["replica"] for answer in answers)


def failures(kind: str, given: dict[str, Any], directory: Path) -> list[str | None]:
    """What ranks are told; None: nothing, being killed."""
    pool = Ranks(WORLD)
    with pytest.raises(RankError, match="rank 0: died"):
        pool.run(relaxing.survive, KINDS[kind], given | ON_DEVICES, str(directory), timeout_s=40)
    files = [directory / str(rank) for rank in range(WORLD)]
    return [file.read_text() if file.exists() else None for file in files]


@pytest.mark.parametrize("kind", ["rna", "hierarchical"])
def test_a_rank_that_is_killed_ends_the_others(kind: str, tmp_path: Path) -> None:
    messages = failures(kind, {"kill": (6, 1)}, tmp_path)
    assert messages[1] is None
    assert None not in (messages[0], messages[2])
    assert any("ranks were last seen in steps" in str(messages[rank]) for rank in (0, 2))


def test_a_rank_that_leaves_alone_is_named(tmp_path: Path) -> None:
    messages = failures("rna", {"leave": (6, "raise", 1), "still_s": 2.0}, tmp_path)
    assert messages[1] == "BoomError"
    words = ("rank 1 left its loop in step 6", "rank 1 left in step 6")
    assert any(word in str(messages[rank]) for word in words for rank in (0, 2))


def test_a_collective_beside_rounds_is_refused(tmp_path: Path) -> None:
    messages = failures("rna", {"gather": True}, tmp_path)
    assert any("leave out Session(device_rounds=True)" in str(message) for message in messages)


def test_ranks_without_gpus_are_refused(ranks: Ranks) -> None:
    """All of them learn it, before the first step."""
    for said in ranks.run(relaxing.refused):
        assert "rank 0's model is on a device of the kind cpu" in said
        assert "or leave device_rounds out" in said
