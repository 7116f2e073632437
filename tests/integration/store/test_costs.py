"""What runs cost: the time of each node times its price of then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from paceline.wire import NodeState, StepBatch
from paceline.wire.synchronisation import Averaging, AveragingRules
from paceline_backend.server.prices import Price, PriceError
from paceline_backend.store import Store, runs, telemetry
from paceline_backend.store.fleet import costs, prices, waiting
from paceline_backend.store.fleet.costs import Spent
from paceline_backend.store.fleet.tables import node_prices
from support.records import add_run, adopted, hello, record

DAY_S = 86_400.0
NUMBERS = count()


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with Store.open(database_url) as opened:
        yield opened


def have(store: Store, **types: str) -> None:
    """Nodes have these types."""
    for name, node_type in types.items():
        state = NodeState(name, name, 8, 2**30, [], 1.0, "0", type=node_type)
        telemetry.write(store, [("", state)])


def price(
    store: Store, node_type: str, amount: float, since: float = 0.0, per: Any = "node"
) -> None:
    with store.write() as connection:
        prices.put(connection, node_type, since, Price(amount, "EUR", per), "ada", None)


def trained(
    store: Store,
    run: str,
    placement: list[str],
    times: Mapping[int, tuple[float, list[float], list[float]]],
    attempt: int = 0,
) -> None:
    """Steps of a run: when each ended, how long each rank took for it, and for its computing."""
    world = len(placement)
    first = min(times)
    telemetry.write(
        store, [(run, hello(world=world, attempt=attempt, step=first, placement=placement))]
    )
    records = [
        record(
            *(step, rank, attempt),
            seq=step - first,
            compute_s=compute_s[rank],
            step_s=step_s[rank],
            ended_at=ended_at,
        )
        for step, (ended_at, step_s, compute_s) in times.items()
        for rank in range(world)
    ]
    telemetry.write(store, [(run, StepBatch(records))])


def count_all(store: Store, run: str, ended: bool = True) -> None:
    with store.write() as connection:
        key = runs.key_of(connection, run)
        while waiting.count(connection, key, ended=ended):
            pass


def spent(store: Store, run: str, default: Price | None = None) -> Spent:
    with store.read() as connection:
        return costs.of_runs(connection, [run], default).get(run, Spent())


def near(expected: Spent) -> Any:
    return pytest.approx(vars(expected), rel=1e-9, abs=1e-12)


@dataclass(frozen=True)
class _Course:
    """A run on nodes with prices."""

    placements: list[list[str]]  # of each attempt
    starts: list[int]  # first step of each attempt, and one past the last
    times: list[tuple[float, list[float], list[float]]]  # of each step, with as many ranks
    types: dict[str, str]
    prices: dict[tuple[str, float], tuple[float, str]]
    cuts: list[int]

    def placement(self, step: int) -> list[str]:
        attempt = max(k for k, first in enumerate(self.starts[:-1]) if first <= step)
        return self.placements[attempt]


@st.composite
def _courses(draw: st.DrawFn) -> _Course:
    nodes = ["a", "b", "c"][: draw(st.integers(1, 3))]
    world = draw(st.integers(1, 4))
    length = draw(st.integers(1, 12))
    starts = sorted({0, *draw(st.lists(st.integers(0, length - 1), max_size=2))})
    of_rank = st.lists(st.floats(0.01, 5.0), min_size=world, max_size=world)
    gaps = draw(st.lists(st.floats(1.0, 40_000.0), min_size=length, max_size=length))
    times, at = [], 3 * DAY_S
    for gap in gaps:
        at += gap
        times.append((at, draw(of_rank), draw(of_rank)))
    moments = st.sampled_from([0.0, *(ended_at for ended_at, _, _ in times)]) | st.floats(0.0, at)
    keys = st.tuples(st.sampled_from(["x", "y"]), moments)
    values = st.tuples(st.floats(0.0, 100.0), st.sampled_from(["node", "worker"]))
    return _Course(
        [draw(st.lists(st.sampled_from(nodes), min_size=world, max_size=world)) for _ in starts],
        [*starts, length],
        times,
        {node: draw(st.sampled_from(["x", "y", ""])) for node in nodes},
        draw(st.dictionaries(keys, values, max_size=4)),
        sorted(draw(st.sets(st.integers(1, max(1, length - 1)), max_size=3))),
    )


def _expected(course: _Course, default: Price | None, first: int, end: int) -> Spent:
    """Σ over nodes of time × price, by the words of the documents and nothing else."""
    total = Spent()
    for step in range(first, end):
        ended_at, step_s, compute_s = course.times[step]
        placement = course.placement(step)
        for node in set(placement):
            ranks = [rank for rank, on in enumerate(placement) if on == node]
            worker_s = sum(step_s[rank] for rank in ranks)
            waited_s = sum(max(compute_s) - compute_s[rank] for rank in ranks)
            held = [
                (since, value)
                for (node_type, since), value in course.prices.items()
                if node_type == course.types[node] and since <= ended_at
            ]
            if held:
                amount, per = max(held)[1]
            elif default is not None:
                amount, per = default.amount, "worker"
            else:
                total += Spent(worker_s, waited_s, unpriced_s=worker_s)
                continue
            hours = 3600 * (len(ranks) if per == "node" else 1)
            total += Spent(worker_s, waited_s, amount * worker_s / hours, amount * waited_s / hours)
    return total


@given(_courses(), st.sampled_from([None, Price(2.5, "EUR")]))
def test_a_run_costs_the_time_of_its_nodes_times_their_prices(
    tmp_path_factory: pytest.TempPathFactory, course: _Course, default: Price | None
) -> None:
    run = f"r{next(NUMBERS)}"
    with Store.open(f"sqlite:///{_database(tmp_path_factory)}") as store:
        with store.write() as connection:
            connection.execute(sa.delete(node_prices))
        have(store, **course.types)
        for (node_type, since), (amount, per) in course.prices.items():
            price(store, node_type, amount, since, per)
        key = add_run(store, run, state="running", nproc=len(course.times[0][1]), nodes_max=3)
        counted = [*course.cuts, course.starts[-1]]
        for attempt, (first, end) in enumerate(pairwise(course.starts)):
            times = {step: course.times[step] for step in range(first, end)}
            trained(store, run, course.placements[attempt], times, attempt)
        with pytest.MonkeyPatch.context() as patch:
            # However many steps are counted at once, the sums stay.
            patch.setattr(waiting, "MOST_STEPS", max(1, counted[0]))
            count_all(store, run)
        length = course.starts[-1]
        assert vars(spent(store, run, default)) == near(_expected(course, default, 0, length))
        with store.read() as connection:
            by_node = costs.of_run_nodes(connection, run, default)
            parts = [
                costs.of_steps(connection, key, first, end - 1, default)
                for first, end in pairwise([0, *course.cuts, length])
                if first < end
            ]
        # The parts, the nodes, and the whole: all add up to the same.
        whole = vars(spent(store, run, default))
        assert vars(sum(by_node.values(), Spent())) == pytest.approx(whole, rel=1e-9, abs=1e-12)
        assert vars(sum(parts, Spent())) == pytest.approx(whole, rel=1e-9, abs=1e-12)


_MADE: list[Path] = []


def _database(factory: pytest.TempPathFactory) -> Path:
    """One for all examples: tables take long to make."""
    if not _MADE:
        _MADE.append(factory.mktemp("costs") / "paceline.db")
    return _MADE[0]


def test_a_price_may_change_in_the_middle(store: Store) -> None:
    have(store, n="spot")
    add_run(store, "r", state="running", nproc=2, node="n")
    noon = 10 * DAY_S + DAY_S / 2
    price(store, "spot", 36.0)
    price(store, "spot", 72.0, noon)
    steps = {k: (noon + 10.0 * (k - 2), [1.0, 1.0], [0.5, 1.0]) for k in range(4)}
    trained(store, "r", ["n", "n"], steps)
    count_all(store, "r")
    # Two steps at 36 and two at 72 an hour: a second of the node is a cent or two.
    assert spent(store, "r").cost == pytest.approx(0.01 * 2 + 0.02 * 2)
    # One of two ranks waits for half of each step: a quarter of the node.
    assert spent(store, "r").waited_cost == pytest.approx((0.01 * 2 + 0.02 * 2) / 4)
    price(store, "spot", 0.0, noon)  # put right: the time counts anew
    assert spent(store, "r").cost == pytest.approx(0.01 * 2)
    with store.write() as connection:
        assert len(prices.remove(connection, "spot", noon)) == 1
    assert spent(store, "r").cost == pytest.approx(0.01 * 4)
    with store.write() as connection:
        assert len(prices.remove(connection, "spot", None)) == 1
    assert spent(store, "r") == Spent(8.0, 2.0, unpriced_s=8.0)
    assert spent(store, "r", Price(3600.0, "EUR")).cost == pytest.approx(8.0)


def test_a_price_that_is_learned_later_holds_for_the_days_after_it(store: Store) -> None:
    have(store, n="spot")
    add_run(store, "r", state="running", nproc=1, node="n")
    steps = {k: (10 * DAY_S + k * DAY_S / 2 + 60.0, [3600.0], [1.0]) for k in range(4)}
    trained(store, "r", ["n"], steps)
    count_all(store, "r")
    assert spent(store, "r").unpriced_s == 4 * 3600.0
    price(store, "spot", 5.0, 10 * DAY_S + 100.0)
    # Of its own day nobody knows any more which of the time was after it.
    assert spent(store, "r") == Spent(4 * 3600.0, 0.0, 10.0, 0.0, 2 * 3600.0)
    price(store, "spot", 5.0, 10 * DAY_S)
    assert spent(store, "r").cost == pytest.approx(20.0)


def test_a_node_that_changes_its_type_costs_what_it_cost(store: Store) -> None:
    have(store, n="small")
    price(store, "small", 1.0)
    price(store, "large", 9.0)
    add_run(store, "r", state="running", nproc=1, node="n")
    trained(store, "r", ["n"], {k: (DAY_S + k, [3600.0], [1.0]) for k in range(30)})
    count_all(store, "r", ended=False)  # all but the newest 20
    assert spent(store, "r").cost == pytest.approx(10.0)
    have(store, n="large")
    count_all(store, "r")
    assert spent(store, "r").cost == pytest.approx(10.0 + 9.0 * 20)


def test_ranks_that_a_smaller_world_does_not_have_are_left_out(store: Store) -> None:
    """Ranks choose the numbers of steps: the second attempt leaves out two of the first's."""
    have(store, a="x", b="x")
    add_run(store, "r", state="running", nproc=1, nodes_max=3)
    larger = {step: (DAY_S + step, [1.0] * 3, [1.0] * 3) for step in range(4)}
    trained(store, "r", ["a", "b", "b"], larger)
    telemetry.write(store, [("r", hello(world=2, attempt=1, step=2, placement=["a", "b"]))])
    ended_at = DAY_S + 9
    again = [record(4, rank, 1, step_s=2.0, compute_s=1.0, ended_at=ended_at) for rank in range(2)]
    telemetry.write(store, [("r", StepBatch(again))])
    count_all(store, "r")
    with store.read() as connection:
        nodes = costs.of_run_nodes(connection, "r", None)
    assert [nodes[node].worker_s for node in "ab"] == [2 + 2 + 2.0, 4 + 2 + 2.0]


def test_under_a_relaxed_synchroniser_no_node_waits(store: Store) -> None:
    have(store, a="x", b="y")
    price(store, "x", 1.0)
    price(store, "y", 10.0)
    add_run(store, "r", state="running", nproc=1, nodes_max=2)
    relaxed = Averaging(parameters=AveragingRules(every=4))
    segment = adopted(1, 2, counts=[[1, 1], [1, 1]], synchroniser=relaxed)
    trained(store, "r", ["a", "b"], {k: (DAY_S + k, [1.0, 1.0], [0.5, 1.0]) for k in range(4)})
    telemetry.write(store, [("r", adopted(0, 0, counts=[[1, 1], [1, 1]])), ("r", segment)])
    count_all(store, "r")
    with store.read() as connection:
        nodes = costs.of_run_nodes(connection, "r", None)
    assert [nodes[node].worker_s for node in "ab"] == [4.0, 4.0]
    assert [nodes[node].waited_s for node in "ab"] == [1.0, 0.0]


def test_the_same_price_again_changes_nothing(store: Store) -> None:
    with store.write() as connection:
        prices.put(connection, "x", 1.0, Price(1.0, "EUR"), "ada", None)
        prices.put(connection, "x", None, Price(1.0, "EUR"), "bob", None)
        [row] = prices.listed(connection)
        assert row["set_by"] == "ada"
        prices.put(connection, "x", None, Price(1.0, "EUR", "node"), "bob", None)
        assert [row["per"] for row in prices.listed(connection)] == ["node", "worker"]


def test_the_same_price_from_the_same_time_on_changes_nothing(store: Store) -> None:
    def put(amount: float, since: float, per: Any = "node") -> tuple[dict[str, Any], bool]:
        with store.write() as connection:
            wanted = Price(amount, "EUR", per)
            return prices.put(connection, "spot", since, wanted, str(amount), None)

    first, new = put(2.0, 100.0)
    assert new
    assert put(2.0, 100.0) == (first, False)
    assert put(2.0, 50.0)[1], "it holds earlier"
    assert put(2.0, 200.0)[1], "it holds whatever becomes of the price before"
    changed, new = put(3.0, 100.0)
    assert (new, changed["set_by"]) == (True, "3.0")
    assert put(3.0, 100.0, "worker")[1]


def test_a_price_set_now_is_put_right_from_its_second_on(store: Store) -> None:
    with store.write() as connection:
        wrong, _ = prices.put(connection, "x", None, Price(3277.0, "EUR"), "ada", None)
        assert wrong["since"] == int(wrong["since"]), "the command line takes whole seconds"
        prices.put(connection, "x", wrong["since"], Price(32.77, "EUR"), "ada", None)
        [row] = prices.listed(connection)
        assert row["amount"] == 32.77
        assert prices.in_force(connection, "x", row["set_at"], None) == Price(32.77, "EUR")


def test_a_price_set_now_holds_where_another_began_within_this_second(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prices, "now", lambda _: 100.75)
    with store.write() as connection:
        prices.put(connection, "x", 100.5, Price(1.0, "EUR"), "ada", None)
        prices.put(connection, "x", None, Price(2.0, "EUR"), "ada", None)
        assert prices.in_force(connection, "x", 100.75, None) == Price(2.0, "EUR")


def test_prices_are_in_one_currency(store: Store) -> None:
    with store.write() as connection:
        with pytest.raises(PriceError, match=r"--hour-price 2\.5 USD: prices of types of nodes"):
            prices.put(connection, "x", 0.0, Price(1.0, "EUR"), "ada", Price(2.5, "USD"))
        prices.put(connection, "x", 0.0, Price(1.0, "EUR"), "ada", Price(2.5, "EUR"))
        with pytest.raises(PriceError, match="currency is USD: the other prices are in EUR"):
            prices.put(connection, "x", 1.0, Price(1.0, "USD"), "ada", None)
        # In place of the only one, it may be in another.
        prices.put(connection, "x", 0.0, Price(1.0, "USD"), "bob", None)
        [row] = prices.listed(connection)
    assert (row["currency"], row["set_by"]) == ("USD", "bob")


@pytest.mark.parametrize(
    ("amount", "currency", "per", "words"),
    [
        (-1.0, "EUR", "node", "amount is -1.0: give 0 or more"),
        (float("nan"), "EUR", "node", "amount is nan"),
        (float("inf"), "EUR", "node", "amount is inf"),
        (1e6, "EUR", "node", "less than 1,000,000"),
        (1.0, "", "node", "currency is ''"),
        (1.0, "€", "node", "currency is '€': give 1 to 10 letters, such as EUR"),
        (1.0, "EUR", "rank", "per is 'rank': give worker or node"),
    ],
)
def test_what_is_no_price_is_refused(amount: float, currency: str, per: Any, words: str) -> None:
    with pytest.raises(PriceError, match=words):
        Price(amount, currency, per)
