"""What a leader adopts can be stored: leader, controller and ingest call `Plan.defect`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from paceline import wire
from paceline.core.ledger import BatchRules, Ledger
from paceline.wire import Adopted, Moves, Paces, Plan
from paceline.wire.synchronisation import Averaging, AveragingRules, convert
from paceline_backend.store import Store, blobs, schema, telemetry
from support.records import add_run, hello

WORLD, SAMPLES, BATCH = 2, 32, 8
GOOD = Plan(
    seq=3,
    epoch=0,
    first_step=6,
    counts=[[3, 5], [8, 0]],
    indices=np.arange(16, dtype="<u4").tobytes(),
    policy="lbb",
    version=1,
    source="controller",
    epoch_end=False,
    ett_s=[[0.1, 0.2]] * 2,
    shares=[0.5, 0.5],
    feedback=[(0, 4)],
    memory={"counts": [1, 2]},
    threads=[1, 2],
    why="because",
)

edges = st.sampled_from([-1, 0, 2**15, 2**31, 2**53, 2**63, 2**64 - 1, 2**64, 2**70, -(2**63)])
whole = st.integers(0, 9) | st.integers() | edges
real = st.floats(0.0, 1.0) | st.floats()
# With NUL and lone surrogates.
text = st.text(st.characters()) | st.text("a\0\ud800", max_size=5)
plain = st.recursive(
    st.none() | st.booleans() | whole | real | text | st.binary(max_size=3),
    lambda inner: st.lists(inner) | st.dictionaries(text | st.integers(), inner),
    max_leaves=8,
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "seq": whole,
    "epoch": whole,
    "first_step": whole,
    "counts": st.lists(st.lists(whole, max_size=3), max_size=3),
    "indices": st.permutations(range(20)).map(lambda of: np.array(of[:16], "<u4").tobytes()),
    "policy": text,
    "version": whole,
    "source": st.sampled_from(["controller", "coast"]) | text,
    "epoch_end": st.booleans(),
    "ett_s": st.lists(st.lists(real, min_size=2, max_size=2), min_size=2, max_size=2),
    "shares": st.lists(real, min_size=2, max_size=2) | st.lists(real),
    "feedback": st.lists(st.tuples(whole, whole), max_size=3),
    "shuffled": st.booleans(),
    "moved": whole,
    "across": whole,
    "plan_s": real,
    "memory": st.dictionaries(text, plain),
    "threads": st.lists(whole, min_size=2, max_size=2) | st.lists(whole),
    "synchroniser": st.sampled_from(
        [
            convert("pairwise"),
            convert("averaging", {"every": 3}),
            Averaging(AveragingRules(every=0)),
            convert("partial", {"quorum": 5, "staleness": None, "mean": False}),
        ]
    ),
    "why": text,
    "pooled": st.booleans(),
    "moves": st.none()
    | st.builds(
        lambda moved, ranks: Moves.of(np.array(moved), np.resize(ranks, len(moved))),
        st.lists(st.integers(0, SAMPLES), max_size=4),
        st.lists(st.integers(0, WORLD), min_size=1, max_size=4),
    )
    | st.builds(Moves, st.binary(max_size=9), st.binary(max_size=9)),
    "homes": st.booleans(),
    "paces": st.none() | st.builds(Paces, *[st.lists(real, max_size=3)] * 3),
    "anew": st.booleans(),
}


@st.composite
def segments(draw: st.DrawFn) -> Plan:
    """`GOOD` with up to three fields changed to what their types allow."""
    names = draw(st.lists(st.sampled_from(list(FIELDS)), max_size=3, unique=True))
    return msgspec.structs.replace(GOOD, **{name: draw(FIELDS[name]) for name in names})


def ledger() -> Ledger:
    return Ledger(0, np.arange(SAMPLES), BatchRules(BATCH))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path_factory.mktemp('store') / 'x.db'}") as opened:
        yield opened


@pytest.fixture(scope="module")
def names() -> Iterator[str]:
    return (f"run-{number}" for number in count())


def adopt(store: Store, run: str, plan: Plan) -> None:
    """Sends a segment to the store as a leader does."""
    key = add_run(store, run)
    message = Adopted(0, plan, 50.0)
    assert wire.decode(wire.encode(message, run)) == (run, message)
    telemetry.write(store, [(run, hello(WORLD)), (run, message)])
    with store.read() as connection:
        c = schema.segments.c
        body = connection.execute(sa.select(c.body).where(c.run == key)).scalar_one()
    assert blobs.plan(body, WORLD, SAMPLES) == plan


def test_every_field_is_drawn() -> None:
    assert set(FIELDS) == set(Plan.__struct_fields__)


def test_no_sample_moves_that_there_is_not() -> None:
    moves = Moves.of(np.array([SAMPLES]), np.array([0]))
    refusal = ledger().refusal(msgspec.structs.replace(GOOD, moves=moves), WORLD)
    assert refusal == "moves.samples holds sample 32, but there are 32 samples"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(segment=segments())
def test_what_a_leader_adopts_is_stored(store: Store, names: Iterator[str], segment: Plan) -> None:
    assume(ledger().refusal(segment, WORLD) is None)
    assert telemetry.defect(Adopted(0, segment, 50.0), WORLD, SAMPLES) is None
    adopt(store, next(names), segment)


@pytest.mark.parametrize(
    "changes",
    [
        {"moved": -1},
        {"moves": Moves(b"1234", b"")},
        {"moves": Moves.of(np.array([3, 3]), np.array([0, 0]))},
        {"moves": Moves.of(np.array([3]), np.array([WORLD]))},
        {"paces": Paces([1.0], [0.0], [0.0])},
        {"paces": Paces([0.0, 1.0], [0.0, 0.0], [0.0, 0.0])},
        {"paces": Paces([1.0, 1.0], [0.0, 0.0], [0.0, float("nan")])},
        {"paces": Paces([1.0, 1e308], [0.0, 0.0], [0.0, 0.0])},
        {"across": -1},
        {"version": 2**31},
        {"version": -1},
        {"seq": 2**63},
        {"first_step": 2**53},
        {"plan_s": math.nan},
        {"source": "somewhere"},
        {"feedback": [(5, 5)]},
        {"feedback": [(0, 2**20 + 1)]},
        {"ett_s": [[math.nan, 1.0]] * 2},
        {"shares": [0.0, 0.0]},
        {"threads": [0, 1]},
        {"policy": "\ud800"},
        {"why": "\ud800"},
        {"memory": {"a": [2**64]}},
        {"memory": {"\ud800": 1}},
        {"memory": {"a": "\ud800"}},
        {"memory": {"a": b"bytes"}},
        {"counts": [[-3, 11], [8, 0]]},
    ],
    ids=str,
)
def test_what_no_database_takes_is_neither_adopted_nor_stored(changes: dict[str, Any]) -> None:
    segment = msgspec.structs.replace(GOOD, **changes)
    assert ledger().refusal(GOOD, WORLD) is None
    assert ledger().refusal(segment, WORLD) is not None
    assert (telemetry.defect(Adopted(0, segment, 50.0)) or "").startswith("Adopted.plan: ")


def test_text_may_hold_nul(store: Store, names: Iterator[str]) -> None:
    """Postgres has no NUL in text: columns get U+FFFD, the stored segment stays as it was."""
    segment = msgspec.structs.replace(GOOD, policy="l\0bb", why="be\0cause", memory={"\0": "\0"})
    assert ledger().refusal(segment, WORLD) is None
    adopt(store, next(names), segment)
