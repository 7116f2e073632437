"""Plans computed again from the database are the plans that ran, whatever happened meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import policies
from paceline.core.batch_limits.shapes import Shapes
from paceline_backend.insight.replay import replay
from paceline_backend.store import Store, blobs, schema
from support.drawn_parts import Kind
from support.drawn_runs import Chances, DrawnRun

EXAMPLES = settings.default.max_examples  # of the profile in force: 10, 30 or 500
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
        plainly("chronica", "rna-hierarchical", "paceline-relaxed", "bsp"),
    ),
    "data on nodes": (
        [
            Kind("chronica", world=len(nodes), nodes=nodes, batch=4, spare=spare)
            for nodes in NODES
            for spare in (1.0, 2.0)
        ],
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
        plainly("local-sgd", "paceline-relaxed", "ad-psgd", "paceline"),
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
@settings(max_examples=EXAMPLES // 4 if EXAMPLES >= 500 else max(3, EXAMPLES // 6))
@given(data=st.data())
def test_replay_makes_each_plan_again(what: str, store: Store, data: st.DataObject) -> None:
    """Invariant 6, across switches, takeovers, coasting, late reports, restarts and lost ranks."""
    kinds, names = KINDS[what]
    kind, seed = data.draw(st.sampled_from(kinds)), data.draw(st.integers(0, 2**32))
    run = DrawnRun(store, kind, data.draw(chances(names)), seed)
    run.train()
    for report in run.reports:
        assert report.exact, report


@pytest.fixture(scope="module")
def run(store: Store) -> DrawnRun:
    """Tests that change what is stored of it change it back."""
    run = DrawnRun(store, Kind("chronica", epochs=2), Chances(hurry=0.0), seed=3)
    run.train()
    assert run.reports[0].exact
    return run


def change(run: DrawnRun, seq: int, **fields: Any) -> None:
    """Change what is stored of a segment; without fields: back."""
    changed = msgspec.structs.replace(run.segments[0][seq], **fields)
    c = schema.segments.c
    with run.store.write() as connection:
        query = sa.update(schema.segments).where(c.run == run.key, c.seq == seq)
        connection.execute(query.values(body=blobs.pack(changed)))


def test_what_rests_on_an_unknown_placement_is_unknown_and_not_different(run: DrawnRun) -> None:
    """The first segment's policy cannot be made, so nor can the placement that it began with."""
    segments = run.segments[0]
    shuffled = [plan.seq for plan in segments if plan.shuffled]
    assert (len(shuffled), shuffled[0]) == (2, 0), "at each epoch's start"
    change(run, 0, version=7)
    report = replay(run.store, run.id)
    change(run, 0)
    assert report.first_difference is not None
    assert "the switch to version 7 is missing from the database" in report.first_difference
    assert (report.unknown, report.identical) == (shuffled[1], len(segments) - shuffled[1])


def test_a_difference_is_told_with_what_the_plan_rested_on(run: DrawnRun) -> None:
    last = run.segments[0][-1]
    change(run, last.seq, ett_s=[[*last.ett_s[0][:-1], 0.5], *last.ett_s[1:]])
    words = replay(run.store, run.id).first_difference
    change(run, last.seq)
    steps = f"steps {last.first_step} to {last.first_step + last.steps - 1}; epoch 1"
    feedback = [list(span) for span in last.feedback]
    assert words == (
        f"segment {last.seq} ({steps}; chronica, version 0; feedback {feedback}): ett_s differ. "
        f"ett_s: [0][2] {last.ett_s[0][2]!r} replayed, 0.5 recorded"
    )


def test_a_policy_that_fails_is_a_difference(
    run: DrawnRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bad policy")

    monkeypatch.setattr(policies, "plan", fails)
    report = replay(run.store, run.id)
    assert report.identical == 0
    assert "planning failed: ZeroDivisionError: a bad policy" in str(report.first_difference)
