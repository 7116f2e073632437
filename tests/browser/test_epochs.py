"""What each epoch came to, on a run's page."""

from __future__ import annotations

import httpx
import pytest
from playwright.sync_api import Page, expect

from paceline_backend.store import Store
from support.pages import open_run
from support.training import Training

pytestmark = pytest.mark.browser


def test_epochs_and_their_workers(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r")
    training.train(60)
    open_run(page, web, "r")
    page.locator("#epochs summary").click()
    answer = web.get("/api/v1/runs/r/epochs").json()
    newest = answer[-1]["epoch"]
    button = page.locator("#epochs-table button", has_text=f"epoch {newest}")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    workers = web.get(f"/api/v1/runs/r/epochs/{newest}/workers").json()
    rows = page.locator("#epochs-workers tbody tr")
    expect(rows).to_have_count(len(workers))
    slowest = max(workers, key=lambda worker: worker["slowest_share"])
    expect(rows.first).to_contain_text(f"rank {slowest['rank']}")
    expect(rows.first).to_contain_text(f"{100 * slowest['slowest_share']:.0f} %")
    expect(page.locator("#epochs-words")).to_have_text(f"Epoch {newest} by worker")
