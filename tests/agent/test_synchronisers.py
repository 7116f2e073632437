"""Relaxed synchronisers in a training script that knows nothing of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from paceline.wire import ALLREDUCE, Synchronisation
from support import relaxing
from support.ranks import Ranks

pytestmark = pytest.mark.ranks

RNA = Synchronisation("partial", {"probes": 2, "staleness": 4, "mean": True})
ALL = Synchronisation("partial", {"quorum": 3, "staleness": 0, "waits": True, "mean": False})
LOCAL = Synchronisation("averaging", {"every": 3})


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(3)
    yield pool
    pool.stop()


def flat(replica: list[object]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.concatenate([np.ravel(np.array(part, np.float64)) for part in replica])


@pytest.mark.parametrize("chain", [[RNA], [LOCAL], [RNA, ALLREDUCE, LOCAL, ALLREDUCE, ALL]])
def test_replicas_are_the_same_after_any_chain(ranks: Ranks, chain: list[Synchronisation]) -> None:
    found = ranks.run(relaxing.train, chain)
    assert all(one["replica"] == found[0]["replica"] for one in found)
    assert sum(one["samples"] for one in found) == 2 * relaxing.SAMPLES


def test_a_round_of_all_is_an_all_reduce(ranks: Ranks) -> None:
    rounds, reduced = (ranks.run(relaxing.train, [one])[0] for one in (ALL, ALLREDUCE))
    assert flat(rounds["replica"]) == pytest.approx(flat(reduced["replica"]), abs=1e-6)


def test_several_optimisers_keep_the_all_reduce(ranks: Ranks) -> None:
    relaxed, reduced = (ranks.run(relaxing.train, [one], 2) for one in (RNA, ALLREDUCE))
    assert relaxed == reduced
