"""A run's page in a browser."""

from __future__ import annotations

import time
from typing import Any

import httpx
from playwright.sync_api import Page, expect

from paceline_backend.store import Store, runs
from paceline_backend.store.outcomes import forecasts


def open_run(page: Page, web: httpx.Client, run: str) -> None:
    """Opens a run's page and waits for the live stream."""
    page.goto(str(web.base_url.join(f"/runs/{run}")))
    expect(page.locator("#connection-status")).to_have_text("live")


def wait_for_chart(page: Page, chart: str, step: int) -> None:
    page.wait_for_function(
        "([id, step]) => document.getElementById(id)?.data?.some(t => t.x?.at(-1) === step)",
        arg=[f"chart-{chart}", step],
    )


def heat_colour(page: Page, row: int, part: float) -> list[int]:
    """Red, green, blue and opacity of a cell of the heat map."""
    page.wait_for_function("() => Number(document.getElementById('heatmap')?.dataset.rows) > 0")
    colour: list[int] = page.evaluate(
        """([row, part]) => {
          const canvas = document.getElementById('heatmap');
          const high = canvas.height / Number(canvas.dataset.rows);
          const [x, y] = [part * (canvas.width - 1), (row + 0.4) * high];
          return [...canvas.getContext('2d').getImageData(x, y, 1, 1).data];
        }""",
        [row, part],
    )
    return colour


def wait_for_range(page: Page, chart: str, first: float, last: float) -> None:
    """Waits until a chart's axis goes from one step to another: charts are drawn one by one."""
    page.wait_for_function(
        """([id, range]) => {
          const now = document.getElementById(id)?.layout?.xaxis?.range;
          return JSON.stringify(now) === JSON.stringify(range);
        }""",
        arg=[f"chart-{chart}", [first, last]],
    )


def open_switch_dialog(page: Page, policy: str | None = None) -> None:
    """Opens the switch dialog of a run's page, and chooses a preset there if one is given."""
    page.click("#switch-open")
    if policy is not None:
        page.check(f"#policy-preset-{policy}")


def confirm_switch(page: Page) -> None:
    """Requests the switch that the open dialog describes; says yes to a changed training."""
    if page.locator("#switch-accept").is_visible():
        page.check("#switch-accept")
    page.click("#switch-confirm")


def layout_of(page: Page, chart: str) -> dict[str, Any]:
    """A chart's shapes, texts and range, as Plotly has them."""
    layout: dict[str, Any] = page.evaluate(
        """id => {
          const {shapes, annotations, xaxis} = document.getElementById(id).layout;
          return {shapes: shapes.map(s => [s.type, s.x0, s.x1]),
                  texts: annotations.map(a => a.text), range: xaxis.range};
        }""",
        f"chart-{chart}",
    )
    return layout


def preset(policy: str, saving: float, half: float, **parameters: Any) -> dict[str, Any]:
    """A preset's forecast; bsp takes 0.4 s."""
    step_s = 0.4 * (1 - saving)
    return {
        "policy": policy,
        "parameters": parameters,
        "step_time_s": step_s,
        "low_s": step_s - 0.4 * half,
        "high_s": step_s + 0.4 * half,
        "saving": saving,
        "saving_low": saving - half,
        "saving_high": saving + half,
        "words": f"{policy} would save {100 * saving:.0f} % ± {100 * half:.0f} of the time",
        "relaxed": False,
        "changes": "nothing",
        "label": policy,
        "in_force": policy == "bsp",
        "warnings": [],
        "harmful": False,
        "alone": 0,
        "stale": False,
    }


def keep_forecast(store: Store, run: str, *, decided: bool = True) -> None:
    """A forecast as `GET whatif` leaves it; `decided`: with a decision, as `auto` leaves it."""
    with store.read() as connection:
        version = forecasts.version(connection, runs.key_of(connection, run))
    current = {"policy": "bsp", "parameters": {}, "version": version, "step_time_s": 0.4}
    current |= {"measured_s": None, "measured_steps": 0}
    decision = {
        "decided": "recommend",
        "reason": "it would save 50 %",
        "policy": "chronica",
        "parameters": {"window": 32},
        "saving": 0.5,
        "low": 0.4,
        "high": 0.6,
    }
    body = {
        "run": run,
        "made_at": time.time(),
        "step": 39,
        "first_step": 0,
        "steps": 40,
        "current": current,
        "fit_error": 0.012,
        "forecasts": [
            preset("chronica", 0.5, 0.1, window=32),
            preset("bsp", 0.0, 0.0),
            preset("boa", -0.25, 0.05),
        ],
        "left_out": [{"policy": "ep4ddl", "reason": "threads are not recorded"}],
        "decision": decision if decided else None,
    }
    with store.write() as connection:
        forecasts.add(connection, runs.key_of(connection, run), body)
