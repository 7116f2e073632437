"""Lists of runs by any filter, tags and notes, sums by day; over both databases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from paceline.wire import StepBatch
from paceline_backend.insight import history
from paceline_backend.server.prices import Price
from paceline_backend.store import Store, runs, schema, telemetry
from paceline_backend.store.history import SORTS, FigureBounds, RunFilter, days, labels
from support.records import add_run, adopted, hello, put_switch, record

DAY_S = 86_400.0
STATES = ("pending", "running", "finished", "failed")
POLICIES = ("bsp", "paceline", "chronica")
NODES = ("n1", "n2", "n3")
TAGS = ("a", "b", "c")
VALUES: tuple[Any, ...] = (3, 3.0, True, False, "free", "3", "true", [1, 2], None)


def some(store: Store, number: int) -> dict[str, Any]:
    """A run of which all that filters ask for follows from its number; what it is, in plain."""
    at = 1_000.0 * number
    name = f"Train_{number % 7}%"
    state, node = STATES[number % 4], NODES[number % 3]
    known: dict[str, Any] = {
        "id": f"{number:03d}abc",
        "name": name,
        "state": state,
        "node": node,
        "backend": ("local", "slurm")[number % 2],
        "policy": POLICIES[number % 3],
        "version": number % 2,
        "created_at": at,
        "started_at": None if state == "pending" else at + 10,
        "ended_at": at + 500 if state in ("finished", "failed") else None,
        "device": (None, "cpu", "NVIDIA H100")[number % 3],
        "note": ("", "with new data")[number % 2],
    }
    key = add_run(store, **{"run": known["id"], **{k: v for k, v in known.items() if k != "id"}})
    parameters = {"mode": VALUES[number % len(VALUES)]} if number % 5 else {}
    used = {known["policy"]}
    with store.write() as connection:
        for version in range(known["version"] + 1):
            last = version == known["version"]
            policy = known["policy"] if last else POLICIES[(number + 1) % 3]
            used.add(policy)
            row = {"run": key, "version": version, "policy": policy, "requested_at": at}
            row |= {"requested_by": "me", "parameters": parameters if last else {"mode": 3}}
            put_switch(connection, row)
        tags = [tag for place, tag in enumerate(TAGS) if number >> place & 1]
        for tag in tags:
            labels.add_tag(connection, key, tag)
        nodes = {node}
        if number % 4 == 1:
            nodes.add("n9")
            row = {"run": key, "node": "n9", "first_attempt": 0, "state": state, "attempt": 0}
            row |= {"launched_at": at, "met": True, "lost": False, "leaving": False}
            connection.execute(sa.insert(schema.run_nodes).values(row))
        figures = dict.fromkeys(("step_s", "se", "waste", "steps", "cost", "waited_cost"))
        if number % 6:
            sums = {"steps": 4, "step_s_sum": 0.5 * number}
            sums |= {"worker_s": 1.0 * (number % 5), "waited_s": 0.25 * (number % 3)}
            sums |= {"se_sum": 0.25 * (number % 5), "se_count": 4}
            sums |= {"waste_sum": 0.125 * (number % 9), "waste_count": 4 if number % 7 else 0}
            row = {"run": key, "day": number, "version": known["version"], **sums}
            connection.execute(sa.insert(schema.run_days).values(row))
            figures = {
                "steps": 4,
                "step_s": 0.5 * number / 4,
                "se": 0.25 * (number % 5) / 4,
                "waste": 0.125 * (number % 9) / 4 if number % 7 else None,
                "cost": 1.0 * (number % 5),  # as many hours, at some price
                "waited_cost": 0.25 * (number % 3),
            }
    return {**known, **figures, "key": key, "tags": tags, "nodes": nodes, "used": used,
            "script": "train.py", "parameters": parameters}  # fmt: skip


def same(value: Any, wanted: Any) -> bool:
    """Whether a parameter has a value: 3 is 3.0, but neither "3" nor true."""
    kinds = [bool, (int, float), str]
    of = [next((k for k in kinds if isinstance(each, k)), None) for each in (value, wanted)]
    return of[0] is not None and of[0] == of[1] and bool(value == wanted)


def counts(run: dict[str, Any], which: RunFilter) -> bool:
    """The filter once more, in plain Python."""

    def has(part: str, *texts: str | None) -> bool:
        return any(part.lower() in text.lower() for text in texts if text is not None)

    def between(value: float | None, bounds: FigureBounds) -> bool:
        if bounds == FigureBounds():
            return True
        low = value is not None and (bounds.least is None or value >= bounds.least)
        return low and (bounds.most is None or (value or 0.0) <= bounds.most)

    text, ends = which.text, run["ended_at"]
    active = which.active_since is not None or which.active_until is not None
    tests: list[tuple[bool, Callable[[], bool]]] = [
        (bool(which.states), lambda: run["state"] in which.states),
        (which.policy is not None, lambda: run["policy"] == which.policy),
        (which.used is not None, lambda: which.used in run["used"]),
        (which.backend is not None, lambda: run["backend"] == which.backend),
        (which.node is not None, lambda: which.node in run["nodes"]),
        (which.name is not None, lambda: has(which.name or "", run["name"])),
        (which.device is not None, lambda: has(which.device or "", run["device"])),
        (which.since is not None, lambda: run["created_at"] >= which.since),
        (which.until is not None, lambda: run["created_at"] < which.until),
        (active, lambda: run["started_at"] is not None),
        (which.active_since is not None, lambda: ends is None or ends >= which.active_since),
        (which.active_until is not None, lambda: run["started_at"] < which.active_until),
        (
            bool(text),
            lambda: run["id"].startswith(text or "") or has(
                text or "", run["name"], run["script"], run["note"], run["policy"], run["device"],
                *run["tags"], *run["nodes"],
            ),
        ),
    ]  # fmt: skip
    return (
        all(test() for asked, test in tests if asked)
        and set(which.tags) <= set(run["tags"])
        and all(same(run["parameters"].get(k), v) for k, v in which.parameters.items())
        and all(between(run[name], getattr(which, name)) for name in ("step_s", "se", "waste"))
    )


MAYBE_TIME = st.none() | st.sampled_from([0.0, 5_000.0, 10_010.0, 10_500.0, 20_000.0])
BOUNDS = st.builds(
    FigureBounds, *[st.none() | st.sampled_from([0.0, 0.03125, 0.0625, 0.125, 1.0, 2.5])] * 2
)
FILTERS = st.builds(
    RunFilter,
    states=st.lists(st.sampled_from(STATES), max_size=2),
    policy=st.none() | st.sampled_from(POLICIES),
    used=st.none() | st.sampled_from(POLICIES),
    parameters=st.dictionaries(
        st.sampled_from(["mode", "window"]), st.sampled_from([3, 3.0, 4, True, False, "free", "3"]),
        max_size=1,
    ),
    name=st.none() | st.sampled_from(["train", "_3%", "%", "x"]),
    text=st.none() | st.sampled_from(["H100", "00", "n9", "new", "b", "%", "chron"]),
    node=st.none() | st.sampled_from([*NODES, "n9"]),
    device=st.none() | st.sampled_from(["nvidia", "cpu"]),
    backend=st.none() | st.sampled_from(["local", "slurm"]),
    tags=st.lists(st.sampled_from(TAGS), max_size=2),
    since=MAYBE_TIME, until=MAYBE_TIME, active_since=MAYBE_TIME, active_until=MAYBE_TIME,
    step_s=BOUNDS, se=BOUNDS, waste=BOUNDS,
)  # fmt: skip
# With all conditions at once hardly a run is left: most examples have two of them.
ORDERS = [sign + name for name in SORTS for sign in ("", "-")]
FEW = st.sets(st.sampled_from(sorted(RunFilter.__dataclass_fields__)), max_size=3)


def listed(store: Store, which: RunFilter, sort: str, limit: int) -> list[str]:
    """The ids on all pages."""
    ids: list[str] = []
    cursor = None
    while True:
        items, cursor = runs.page(store, which, sort=sort, limit=limit, cursor=cursor)
        assert len(items) <= limit
        ids += [item["id"] for item in items]
        if cursor is None:
            return ids
        assert len(items) == limit


def in_order(known: list[dict[str, Any]], sort: str) -> list[str]:
    by = sort.removeprefix("-")
    newest = sorted(known, key=lambda run: -run["key"])
    there = [run for run in newest if run[by] is not None]
    missing = [run for run in newest if run[by] is None]
    there.sort(key=lambda run: run[by])
    if sort.startswith("-"):  # equal ones stay newest first
        there.sort(key=lambda run: run[by], reverse=True)
    return [run["id"] for run in (*there, *missing)]


def test_a_filter_answers_the_runs_that_plain_python_answers(store: Store) -> None:
    known = [some(store, number) for number in range(40)]
    sizes = set()

    @given(FILTERS, FEW, st.sampled_from(ORDERS), st.integers(1, 15))
    def check(whole: RunFilter, few: set[str], sort: str, limit: int) -> None:
        which = RunFilter(**{name: getattr(whole, name) for name in few})
        wanted = in_order([run for run in known if counts(run, which)], sort)
        assert listed(store, which, sort, limit) == wanted
        sizes.add(len(wanted))

    check()
    assert len(sizes) > 2, "filters that differ"


def test_a_cursor_is_for_its_order_only(store: Store) -> None:
    for number in range(3):
        some(store, number)
    _, cursor = runs.page(store, sort="-waste", limit=1)
    assert cursor is not None
    for sort, wrong in (("waste", cursor), ("-waste", "e30"), ("name", "%%%"), ("-se", "NzU")):
        with pytest.raises(runs.CursorError, match="cursor"):
            runs.page(store, sort=sort, cursor=wrong)


def test_tags_and_notes(store: Store) -> None:
    first, second = add_run(store, "r1"), add_run(store, "r2")
    with store.write() as connection:
        assert labels.add_tag(connection, first, "b")
        assert labels.add_tag(connection, first, "a")
        assert not labels.add_tag(connection, first, "a")
        labels.add_tag(connection, second, "a")
        labels.set_note(connection, first, "two\nlines")
    row = runs.get(store, "r1")
    assert (row["tags"], row["note"]) == (["a", "b"], "two\nlines")
    with store.write() as connection:
        counted = labels.counted(connection)
        assert counted == [{"tag": "a", "runs": 2}, {"tag": "b", "runs": 1}]
        assert labels.remove_tag(connection, first, "a")
        assert not labels.remove_tag(connection, first, "a")
        for number in range(labels.MOST_TAGS - 1):
            labels.add_tag(connection, first, f"t{number}")
        with pytest.raises(labels.TooManyTagsError, match="remove some"):
            labels.add_tag(connection, first, "one more")


def train(store: Store, run: str, steps: range, at: float, **fields: Any) -> None:
    """Steps of two ranks that compute 0.1 s and 0.2 s; a step takes 0.3 s."""
    rows = [record(step, rank, ended_at=at + step, **fields) for step in steps for rank in (0, 1)]
    telemetry.write(store, [(run, hello()), (run, StepBatch(rows))])


@pytest.mark.parametrize("steps", [3, 250])
def test_sums_by_day(store: Store, steps: int) -> None:
    key = add_run(store, "r", node="n1")
    train(store, "r", range(steps), 5 * DAY_S)
    days.sum_up(store, key)
    days.sum_up(store, key)
    figures = runs.get(store, "r")["figures"]
    assert figures["steps"] == steps
    assert figures["wall_s"] == pytest.approx(0.3 * steps)
    means = [figures[name] for name in ("step_s", "se", "waste")]
    assert means == pytest.approx([0.3, 0.1 / 0.15, 1 - 0.15 / 0.2])
    with store.read() as connection:
        [row] = history.aggregates(connection, RunFilter(), ("day", "node"))
        assert (row["day"], row["node"], row["runs"], row["steps"]) == (
            *("1970-01-06", "n1", 1),
            steps,
        )
        assert row["worker_hours"] == pytest.approx(2 * 0.3 * steps / 3600)
        assert row["waiting_hours"] == pytest.approx(2 * 0.05 * steps / 3600)
        assert history.aggregates(connection, RunFilter(policy="none"), ()) == []


def test_days_are_told_apart_and_groups_add_up(store: Store) -> None:
    first, second = add_run(store, "r1", node="n1"), add_run(store, "r2", node="n2")
    train(store, "r1", range(10), 5 * DAY_S - 5)  # five steps before midnight
    train(store, "r2", range(4), 5 * DAY_S)
    with store.write() as connection:
        for tag in ("a", "b"):
            labels.add_tag(connection, first, tag)
    for key in (first, second):
        days.sum_up(store, key)

    def steps(*by: history.By, **bounds: float) -> dict[tuple[str, ...], int]:
        with store.read() as connection:
            rows = history.aggregates(connection, RunFilter(), by, **bounds)
        return {tuple(row[name] for name in by): row["steps"] for row in rows}

    assert steps() == {(): 14}
    assert steps("day") == {("1970-01-05",): 5, ("1970-01-06",): 9}
    assert steps("day", since=5 * DAY_S) == {("1970-01-06",): 9}
    assert steps("day", until=5 * DAY_S - 1) == {("1970-01-05",): 5}
    assert steps("run", "day")[("r1", "1970-01-06")] == 5
    assert steps("tag") == {("",): 4, ("a",): 10, ("b",): 10}
    assert steps("policy", "node") == {("bsp", "n1"): 10, ("bsp", "n2"): 4}


def test_groups_cost_their_hours(store: Store) -> None:
    key = add_run(store, "r1", nproc=1, nodes_max=2)
    train(store, "r1", range(10), 5 * DAY_S - 5)  # five steps before midnight
    with store.write() as connection:
        for node in ("n1", "n2"):
            row = {"run": key, "node": node, "first_attempt": 0, "state": "running", "attempt": 0}
            row |= {"launched_at": 0.0, "met": True, "lost": False, "leaving": False}
            connection.execute(sa.insert(schema.run_nodes).values(row))
    days.sum_up(store, key)

    def cost(*by: history.By, price: Price | None = Price(3600.0, "EUR")) -> dict[Any, Any]:  # noqa: B008
        names = ("cost", "waited_cost", "currency")
        with store.read() as connection:
            rows = history.aggregates(connection, RunFilter(), by, price=price)
        return {tuple(row[name] for name in by): [row[name] for name in names] for row in rows}

    # Of ten steps of 0.3 s, two ranks have 6 s, and one waits for 0.1 s in each.
    assert cost() == {(): [pytest.approx(6.0), pytest.approx(1.0), "EUR"]}
    assert cost(price=None) == {(): [None, None, None]}
    half = [pytest.approx(3.0), pytest.approx(0.5), "EUR"]
    assert cost("day") == {("1970-01-05",): half, ("1970-01-06",): half}
    assert cost("node") == {("n1",): half, ("n2",): half}, "in equal parts"


def test_runs_are_summed_up_until_their_last_record_is_old(store: Store) -> None:
    key = add_run(store, "r")
    add_run(store, "silent")  # its leader never said hello
    train(store, "r", range(3), 1_000.0)

    def due() -> list[int]:
        with store.read() as connection:
            return days.due(connection, 10)

    def later(**columns: float) -> None:
        with store.write() as connection:
            update = sa.update(schema.runs).where(schema.runs.c.key == key)
            connection.execute(update.values(columns))

    assert due() == [key]
    days.sum_up(store, key)
    assert due() == [], "a moment ago"
    later(summed_at=1_020.0, seen_at=1_000.0)
    assert due() == [key], "what was stored at the same time may not have been seen"
    later(summed_at=1_031.0, seen_at=1_000.0)
    assert due() == []
    later(seen_at=1_002.0)
    assert due() == [key]


def test_steps_of_a_run_that_was_switched_before_it_began(store: Store) -> None:
    """Its first policy planned nothing, so no step counts as its own."""
    key = add_run(store, "r1", policy="bsp")
    for version, policy in enumerate(("bsp", "paceline")):
        row = {"run": key, "version": version, "policy": policy, "parameters": {}}
        row |= {"requested_by": "me", "requested_at": 0.0}
        with store.write() as connection:
            put_switch(connection, row)
    telemetry.write(store, [("r1", hello()), ("r1", adopted(0, 0, version=1))])
    train(store, "r1", range(10), 5 * DAY_S)
    days.sum_up(store, key)
    with store.read() as connection:
        rows = history.aggregates(connection, RunFilter(), ("policy",))
    assert {row["policy"]: row["steps"] for row in rows} == {"paceline": 10}
