"""Plans computed again from the database are the plans that ran, whatever happened meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.amounts.shapes import Shapes
from paceline_backend import policies
from paceline_backend.store import Store
from support.drawn_parts import Kind
from support.drawn_runs import Chances, DrawnRun

EVERY = policies.names()
# Training stays that of plain DDP under these, so they keep a token budget.
EXACT = [name for name in EVERY if policies.make(name).changes == "nothing"]
CHRONICA = [("chronica", {}), ("chronica", {"picks": "paper"}), ("bsp", {}), ("paceline", {})]
NODES = [(0, 1, 2), (0, 0, 1), (0, 0, 1, 1), (0, 1, 1, 2)]


def plainly(*names: str) -> list[tuple[str, dict[str, Any]]]:
    return [(name, {}) for name in names]


KINDS: dict[str, tuple[list[Kind], list[tuple[str, dict[str, Any]]]]] = {
    "any policy": (
        [Kind(name, profiled=True) for name in EVERY],
        [*plainly(*EVERY), ("paceline", {"mode": "free"}), ("sata", {"every_steps": 2})],
    ),
    "an incomplete step is dropped": (
        [Kind("paceline", samples=61, drop_last=True)],
        plainly(*EVERY),
    ),
    "nodes": (
        [Kind(name, world=4, placement=("a", "a", "b", "c")) for name in ("chronica", "rna")],
        plainly("chronica", "rna-hierarchical", "adaptive", "bsp"),
    ),
    "data on nodes": (
        [Kind("chronica", world=len(n), nodes=n, spare=s) for n in NODES for s in (1.0, 2.0)],
        CHRONICA,
    ),
    "a token budget": (
        [
            Kind("paceline", token_budget=80.0),
            Kind("sata", token_budget=60.0, token_limits=(50.0, 40.0, 30.0)),
            Kind("paceline", token_budget=80.0, micro=(25.0, 30.0, 40.0)),
        ],
        plainly(*EXACT),
    ),
    "a stream": ([Kind("paceline", stream=True)], plainly("bsp", "paceline")),
    "shapes": (
        [Kind("paceline", shapes=Shapes(2, length)) for length in (0.0, 5.0)],
        plainly("paceline", "chronica", "lbb", "rna", "bsp"),
    ),
    "memory and micro-batches": (
        [Kind("paceline", limits=(3, 4, 5)), Kind("boa", limits=(4, 4, 4), micro=(2.0, 2.0, 2.0))],
        plainly(*EXACT),
    ),
    "shared batches": (
        [Kind(name, uneven_steps=True) for name in ("paceline-relaxed", "rna", "flexrr")],
        plainly("local-sgd", "adaptive", "paceline-relaxed", "ad-psgd", "paceline"),
    ),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    path = tmp_path_factory.mktemp("drawn") / "paceline.db"
    with Store.open(f"sqlite:///{path}") as opened:
        yield opened


def chances(names: list[tuple[str, dict[str, Any]]]) -> st.SearchStrategy[Chances]:
    return st.builds(
        Chances,
        switch=st.sampled_from([0.0, 0.03]),
        takeover=st.sampled_from([0.0, 0.02, 0.1]),
        away=st.sampled_from([0.0, 0.02]),
        hurry=st.sampled_from([0.02, 0.2]),
        late=st.sampled_from([0.0, 0.03]),
        fails=st.sampled_from([0.0, 0.1]),
        restart=st.sampled_from([0.0, 0.01]),
        lost=st.sampled_from([0.0, 1.0]),
        noise=st.sampled_from([0.0, 0.1, 0.5]),
        policies=st.just(tuple(names)),
    )


@pytest.mark.parametrize("what", KINDS)
@given(data=st.data())
def test_replay_makes_each_plan_again(what: str, store: Store, data: st.DataObject) -> None:
    """Invariant 6, across switches, takeovers, coasting, late reports, restarts and lost ranks."""
    kinds, names = KINDS[what]
    kind, seed = data.draw(st.sampled_from(kinds)), data.draw(st.integers(0, 2**32))
    run = DrawnRun(store, kind, data.draw(chances(names)), seed)
    run.train()
    for report in run.reports:
        assert report.exact, report
