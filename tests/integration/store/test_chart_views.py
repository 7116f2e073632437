"""Views: small for any run, and no spike is lost."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pytest

from paceline.wire import StepBatch
from paceline_backend.store import Store, chart_views, runs, telemetry
from paceline_backend.store.chart_views import heat_of
from support.records import add_run, hello, record

Time = Callable[[int, int], float]


def fill(store: Store, world: int, first: int, end: int, compute_s: Time) -> int:
    """A run's steps; its key."""
    batches: list[tuple[str, Any]] = [
        (
            "r",
            StepBatch(
                [
                    record(step, rank, compute_s=compute_s(step, rank), load=100.0)
                    for step in range(at, min(at + 100, end))
                    for rank in range(world)
                ]
            ),
        )
        for at in range(first, end, 100)
    ]
    telemetry.write(store, batches)
    with store.read() as connection:
        return runs.key_of(connection, "r")


def new_run(store: Store, world: int) -> None:
    add_run(store, "r", nproc=world)
    telemetry.write(store, [("r", hello(world))])


def shown(store: Store, key: int, world: int, **asked: Any) -> dict[str, Any]:
    with store.read() as connection:
        return chart_views.view(connection, key, world, **asked)


def decoded(heat: dict[str, Any]) -> npt.NDArray[np.float64]:
    """Seconds by row and column; NaN: unknown."""
    codes = np.frombuffer(base64.b64decode(heat["cells"]), np.uint8).astype(float)
    table = codes.reshape(heat["rows"], len(heat["step"]))
    low, high = heat["low"], heat["high"]
    values = low * (high / low) ** ((table - 1) / 254)
    return np.where(table == 0, np.nan, values)


def test_steps_of_a_short_run_have_a_column_each(store: Store) -> None:
    new_run(store, 3)
    key = fill(store, 3, 0, 40, lambda step, rank: 0.1 + 0.1 * rank + 0.001 * step)
    view = shown(store, key, 3)
    heat, lines = view["heat"], view["worker_steps"]
    assert (heat["bucket"], heat["step"], heat["together"]) == (1, [*range(40)], 1)
    expected = np.array(
        [[0.1 + 0.1 * rank + 0.001 * step for step in range(40)] for rank in (0, 1, 2)]
    )
    assert decoded(heat) == pytest.approx(expected, rel=0.006)
    assert heat["compute_p50"][0] == pytest.approx(0.2)
    assert np.array(lines["compute_s"]) == pytest.approx(expected, rel=1e-4)
    assert lines["compute_s_max"] == lines["compute_s"]
    assert view["steps"]["step"] == [*range(40)]


@pytest.mark.parametrize(
    ("world", "steps", "columns"), [(3, 1150, 8), (3, 1150, 400), (260, 60, 20)]
)
def test_a_spike_of_one_rank_in_one_step_is_in_its_column(
    store: Store, world: int, steps: int, columns: int
) -> None:
    spikes = {(7, 1), (steps // 2, 0), (steps - 3, world - 1)}  # not all are rolled up
    new_run(store, world)
    key = fill(store, world, 0, steps, lambda step, rank: 2.0 if (step, rank) in spikes else 0.1)
    view = shown(store, key, world, points=columns, columns=columns)
    heat = view["heat"]
    table, starts = decoded(heat), np.array(heat["step"])
    assert len(starts) <= columns
    assert heat["rows"] == -(-world // heat["together"]) <= 256
    places = {
        (rank // heat["together"], int(np.searchsorted(starts, step, "right")) - 1)
        for step, rank in spikes
    }
    assert {tuple(place) for place in np.argwhere(table > 1).tolist()} == places
    tops = np.array(view["steps"]["compute_max_max"])
    bucket = view["steps"]["bucket"]
    spiked = {step // bucket * bucket for step, _ in spikes}
    assert {view["steps"]["step"][at] for at in np.flatnonzero(tops > 1)} == spiked


def test_a_rank_without_a_record_is_unknown(store: Store) -> None:
    new_run(store, 2)
    telemetry.write(store, [("r", StepBatch([record(0, 0), record(0, 1), record(1, 0)]))])
    with store.read() as connection:
        heat = chart_views.view(connection, runs.key_of(connection, "r"), 2)["heat"]
    assert np.isnan(decoded(heat)).tolist() == [[False, False], [False, True]]


def test_the_columns_of_the_newest_steps_are_those_of_the_view(store: Store) -> None:
    new_run(store, 300)
    key = fill(
        store, 300, 0, 6, lambda step, rank: 3.0 if (step, rank) == (4, 299) else 0.1 * step + 0.1
    )
    with store.read() as connection:
        heat = chart_views.newest(connection, key, 300, 2)["heat"]
        whole = chart_views.view(connection, key, 300)["heat"]
        none = chart_views.newest(connection, key, 300, 0)
    assert (heat["step"], heat["rows"], heat["together"]) == ([4, 5], 150, 2)
    assert decoded(heat) == pytest.approx(decoded(whole)[:, [4, 5]], rel=0.02)
    assert decoded(heat)[149, 0] == pytest.approx(3.0)
    assert none["steps"]["step"] == none["worker_steps"]["step"] == none["heat"]["step"] == []


def test_a_run_without_steps(store: Store) -> None:
    new_run(store, 4)
    with store.read() as connection:
        key = runs.key_of(connection, "r")
        for view in (
            chart_views.view(connection, key, 4),
            chart_views.newest(connection, key, 4, 100),
        ):
            assert (view["heat"]["step"], view["heat"]["cells"], view["coasts"]) == ([], "", [])
            assert (view["heat"]["from"], view["steps"]["step"]) == (None, [])


def test_the_newest_steps_have_a_point_each_however_long_the_run(store: Store) -> None:
    new_run(store, 2)
    key = fill(store, 2, 0, 700, lambda step, rank: 0.1 + step / 1000)
    with store.read() as connection:
        view = chart_views.newest(connection, key, 2, 600)
    assert (view["steps"]["bucket"], view["steps"]["step"]) == (1, [*range(100, 700)])
    assert (view["heat"]["bucket"], view["heat"]["step"]) == (1, [*range(189, 700)])


def test_a_whole_heat_map_of_noise_has_at_most_150_kb() -> None:
    times = np.random.default_rng(0).lognormal(0, 1, (256, 512))
    rows = [(row, step, x, 1.0, x, x, x) for (row, step), x in np.ndenumerate(times)]
    heat = heat_of(rows, 10_000)
    assert (heat["rows"], heat["together"], len(heat["step"])) == (250, 40, 512)
    assert len(gzip.compress(orjson.dumps(heat), 5)) <= 150_000


@pytest.mark.parametrize(("world", "steps"), [(4, 300), (16, 600), (300, 40)])
def test_a_view_has_at_most_300_kb(store: Store, world: int, steps: int) -> None:
    rng = np.random.default_rng(world)
    new_run(store, world)
    key = fill(store, world, 0, steps, lambda step, rank: float(rng.lognormal(0, 0.5)))
    with store.read() as connection:
        both = (
            chart_views.view(connection, key, world),
            chart_views.newest(connection, key, world, 512),
        )
    for view in both:
        assert len(gzip.compress(orjson.dumps(view), 5)) <= 300_000
