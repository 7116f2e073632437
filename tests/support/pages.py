"""A run's page in a browser."""

from __future__ import annotations

from typing import Any

import httpx
from playwright.sync_api import Page, expect


def open_run(page: Page, web: httpx.Client, run: str) -> None:
    """Opens a run's page and waits for the live stream."""
    page.goto(str(web.base_url.join(f"/runs/{run}")))
    expect(page.locator("#connection-status")).to_have_text("live")


def wait_for_chart(page: Page, chart: str, step: int) -> None:
    """Until the chart's first line ends at a step."""
    page.wait_for_function(
        "([id, step]) => document.getElementById(id)?.data?.[0]?.x?.at(-1) === step",
        arg=[f"chart-{chart}", step],
    )


def layout_of(page: Page, chart: str) -> dict[str, Any]:
    """A chart's shapes, texts and range, as Plotly has them."""
    found: dict[str, Any] = page.evaluate(
        """id => {
          const {shapes, annotations, xaxis} = document.getElementById(id).layout;
          return {shapes: shapes.map(s => [s.type, s.x0, s.x1]),
                  texts: annotations.map(a => a.text), range: xaxis.range};
        }""",
        f"chart-{chart}",
    )
    return found
