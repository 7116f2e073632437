"""The report, with numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.wire import Message, StepBatch
from paceline_backend.insight.report import run_report
from paceline_backend.store import Store, telemetry
from paceline_backend.store.runs import UnknownRunError
from support.records import add_run, adopted, hello, pack_indices, record

EMULATED = {"a_s": [0.01, 0.03], "b_s": [0.1, 0.3]}
SIZES = np.ones(40).tobytes()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 'paceline.db'}") as opened:
        yield opened


def planned(
    step: int,
    policy: str,
    version: int,
    source: str = "controller",
    threads: Any = (),
    **more: Any,
) -> Message:
    """A segment of one step; each uses two samples of the epoch of 40."""
    counts, indices = pack_indices([[np.array([2 * step]), np.array([2 * step + 1])]])
    return adopted(
        step,
        step,
        version,
        policy=policy,
        source=source,
        counts=counts,
        indices=indices,
        epoch=0,
        epoch_end=step == 19,
        threads=list(threads),
        **more,
    )


def ran(step: int, loads: tuple[float, float], step_s: float, ett_s: float | None) -> Message:
    """Both ranks' records; compute times are those of the emulated devices."""
    rows = []
    for rank, load in enumerate(loads):
        compute = EMULATED["a_s"][rank] * load + EMULATED["b_s"][rank]
        rows.append(
            record(
                step,
                rank,
                segment=step,
                epoch=0,
                samples=1,
                load=load,
                compute_s=compute,
                sync_s=0.05 + rank,
                step_s=step_s,
                ett_s=None if ett_s is None else ett_s * compute,
            )
        )
    return StepBatch(rows)


def fill(
    store: Store,
    emulated: dict[str, Any] | None = EMULATED,
    sizes: bytes = SIZES,
    threads: Any = (),
) -> None:
    """Steps 0–9 under bsp (0 and 5 coasted), 10–19 under chronica, which learns in two."""
    add_run(store, "r")
    messages: list[Message] = [hello(sizes=sizes, emulated=emulated)]
    for step in range(20):
        version = step // 10
        policy = ("bsp", "chronica")[version]
        source = "coast" if step in (0, 5) else "controller"
        messages.append(planned(step, policy, version, source, threads))
        if version == 0:
            # Equal loads; the loads vary with the step, so that speeds can be fitted.
            messages.append(ran(step, (20.0 + 10 * (step % 2), 20.0 + 10 * (step % 2)), 1.2, None))
        else:
            learning = step < 12
            loads = (30.0, 30.0) if learning else (45.0, 15.0)
            messages.append(ran(step, loads, 9.9 if learning else 0.8, 0.9))
    telemetry.write(store, [("r", message) for message in messages])


def test_by_hand(store: Store) -> None:
    fill(store)
    report = run_report(store, "r", warmup=2)
    assert (report["warmup"], report["coasted"]) == (2, 2)
    assert asdict(report["fluid"]) == {
        **EMULATED,
        "communication_s": pytest.approx(0.05),
        "source": "emulated",
    }
    rate = 1 / 0.01 + 1 / 0.03  # Σ 1/a_j
    overhead = (0.1 / 0.01 + 0.3 / 0.03) / rate + 0.05
    assert overhead == pytest.approx(0.15 + 0.05)
    assert report["overhead_s"] == pytest.approx(overhead)
    assert list(report["presets"]) == ["bsp", "chronica"]

    # bsp: steps 2, 3, 4, 6, 7, 8, 9 are left. Loads (20, 20) in 2, 4, 6, 8 and (30, 30) in 3, 7, 9.
    bsp = report["presets"]["bsp"]
    load = 4 * 40 + 3 * 60
    assert bsp["steps"] == 7
    assert bsp["step_time_s"] == pytest.approx(1.2)
    light, heavy = (0.3, 0.9), (0.4, 1.2)  # compute times
    assert bsp["se"] == pytest.approx((4 * 0.6 / 0.6 + 3 * 0.8 / 0.8) / 7)
    assert bsp["waste"] == pytest.approx((4 * (1 - 0.6 / light[1]) + 3 * (1 - 0.8 / heavy[1])) / 7)
    assert bsp["step_dif"] == 0.0
    assert bsp["ett_mape"] is None
    assert bsp["time_over_fluid"] == pytest.approx(7 * 1.2 / (load / rate + 7 * overhead))
    assert bsp["speedup"] == pytest.approx(1.0)
    assert bsp["speedup_limit"] == pytest.approx(bsp["time_over_fluid"])

    # chronica: steps 12–19, loads (45, 15), compute times 0.55 and 0.75.
    chronica = report["presets"]["chronica"]
    assert chronica["steps"] == 8
    assert chronica["step_time_s"] == pytest.approx(0.8)
    assert chronica["se"] == pytest.approx(0.2 / 0.65)
    assert chronica["waste"] == pytest.approx(1 - 0.65 / 0.75)
    assert chronica["step_dif"] == pytest.approx(np.std([45, 15], ddof=1))
    assert chronica["ett_mape"] == pytest.approx(0.1)
    assert chronica["time_over_fluid"] == pytest.approx(0.8 / (60 / rate + overhead))
    assert chronica["speedup"] == pytest.approx((7 * 1.2 / load) / (0.8 / 60))
    assert chronica["speedup_limit"] == pytest.approx(
        (7 * 1.2 / load) / ((60 / rate + overhead) / 60)
    )
    assert report["coverage"]["exact"]


def test_speeds_are_fitted_where_none_are_emulated(store: Store) -> None:
    fill(store, emulated=None)
    fluid = run_report(store, "r", warmup=2)["fluid"]
    assert fluid.source == "fitted"
    assert fluid.a_s == pytest.approx(EMULATED["a_s"])
    assert fluid.b_s == pytest.approx(EMULATED["b_s"])


def test_what_samples_attention_and_input_cost_is_in_the_limit(store: Store) -> None:
    """Sizes 1 and 3 of equal number: κ·Σλ² is 2.5 κ for each unit of size, c half a sample's."""
    device = {**EMULATED, "c_s": [0.02, 0.0], "data_s": [0.0, 0.4], "cost": {"kappa": 2.0}}
    sizes = np.array([1.0, 3.0] * 20).tobytes()
    fill(store, emulated=device, sizes=sizes)
    fluid = run_report(store, "r", warmup=2)["fluid"]
    assert fluid.source == "emulated"
    assert fluid.a_s == pytest.approx([0.01 * 6 + 0.02 / 2, 0.03 * 6])
    assert fluid.b_s == pytest.approx([0.1, 0.7])


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        ({"cost": {"padded": True}}, "fitted"),
        ({"slowdowns": [{"ranks": [0], "factor": 2.0}]}, "fitted"),
        ({"delay_s": [0.0, 0.1]}, "fitted"),
        ({"a_s": [0.0, 0.03]}, "fitted"),
        ({"noise": 0.1, "serial": 0.5}, "emulated"),
    ],
)
def test_no_true_speeds_where_they_do_not_last_or_are_no_limit(
    store: Store, changes: dict[str, Any], source: str
) -> None:
    fill(store, emulated={**EMULATED, **changes})
    fluid = run_report(store, "r", warmup=2)["fluid"]
    assert fluid.source == source
    assert fluid.a_s == pytest.approx(EMULATED["a_s"])


@pytest.mark.parametrize(("serial", "source"), [(0.5, "fitted"), (1.0, "emulated")])
def test_threads_that_plans_set_change_speeds(store: Store, serial: float, source: str) -> None:
    fill(store, emulated={**EMULATED, "serial": serial}, threads=[1, 2])
    assert run_report(store, "r", warmup=2)["fluid"].source == source


def test_a_preset_that_only_coasted_is_none(store: Store) -> None:
    """Before the first plan comes, the leader coasts as bsp, whatever the run's policy is."""
    add_run(store, "r", policy="chronica")
    messages: list[Message] = [hello(sizes=SIZES, emulated=EMULATED)]
    for step in range(6):
        early = step < 2
        policy, source = ("bsp", "coast") if early else ("chronica", "controller")
        messages += [planned(step, policy, 0, source), ran(step, (45.0, 15.0), 0.8, None)]
    telemetry.write(store, [("r", message) for message in messages])
    report = run_report(store, "r", warmup=2)
    assert (list(report["presets"]), report["coasted"]) == (["chronica"], 2)
    assert report["presets"]["chronica"]["steps"] == 4


def test_without_steady_steps_there_are_no_figures(store: Store) -> None:
    fill(store)
    report = run_report(store, "r", warmup=50)
    assert report["fluid"] is None
    assert report["presets"]["bsp"]["steps"] == 0
    assert set(report["presets"]["bsp"].values()) == {0, None}
    with pytest.raises(UnknownRunError):
        run_report(store, "nobody")


def test_samples_that_went_to_another_node_are_counted_by_preset(store: Store) -> None:
    """Also those of warm-up; coasted segments have none."""
    add_run(store, "r")
    moves = {"moved": 5, "across": 2}
    made = [planned(0, "bsp", 0), *(planned(step, "chronica", 1, **moves) for step in (1, 2))]
    telemetry.write(store, [("r", message) for message in (hello(sizes=SIZES), *made)])
    presets = run_report(store, "r")["presets"]
    counted = {name: (row["moved"], row["across"]) for name, row in presets.items()}
    assert counted == {"bsp": (0, 0), "chronica": (10, 4)}
