"""Which nodes are left out as too slow."""

from __future__ import annotations

from typing import Any

import pytest

from paceline_backend.backends.base import NewRunError
from paceline_backend.backends.checks import check_factor, fast_enough, slower
from paceline_backend.store.new_runs import NewRun


def node(name: str, compute: float | None = 40.0, memory: float = 10.0) -> dict[str, Any]:
    speeds = {"compute_gflops": compute, "memory_gbps": memory, "disk_mbps": None}
    return {"id": name, "check": None if compute is None else speeds}


FAST = [node("n1"), node("n2", 44.0), node("n3", 42.0)]


def test_a_slow_node_is_left_out_with_the_reason() -> None:
    slow = node("n4", 20.0)
    assert slower(slow, FAST, 1.5) == (
        "n4 computes 2.1 times slower than the median of 3 nodes (20 GFLOP/s per core, median 42)"
    )
    assert slower(slow, FAST, 3.0) is None
    assert slower(slow, FAST, 0.0) is None
    assert slower(node("n5", memory=4.0), FAST, 1.5) == (
        "n5 copies memory 2.5 times slower than the median of 3 nodes (4 GB/s, median 10)"
    )
    taken, reasons = fast_enough([*FAST, slow], [*FAST, slow], 1.5)
    assert [each["id"] for each in taken] == ["n1", "n2", "n3"]
    assert len(reasons) == 1


def test_what_is_not_known_leaves_nobody_out() -> None:
    unknown = node("n4", None)
    assert slower(unknown, FAST, 1.5) is None
    assert slower(node("n5", 1.0), [unknown], 1.5) is None
    assert slower(node("n5", 1.0), [], 1.5) is None


def test_a_runs_own_nodes_stay() -> None:
    slow = node("n4", 20.0)
    taken, reasons = fast_enough([slow], FAST, 1.5, known=["n4"])
    assert (taken, reasons) == ([slow], [])


def test_a_node_that_does_nothing_is_slow() -> None:
    assert "infinitely slower" in str(slower(node("n4", 0.0), FAST, 1.5))


@pytest.mark.parametrize("factor", [0.5, 0.99])
def test_a_factor_leaves_the_median_in(factor: float) -> None:
    with pytest.raises(NewRunError, match="join_check: give 1 or more, or 0"):
        check_factor(NewRun("r", "train.py", 1, "bsp", join_check=factor))
    for good in (0.0, 1.0, 1.5):
        check_factor(NewRun("r", "train.py", 1, "bsp", join_check=good))
