"""A real run's time to target and completion time: REST, page and report as the script's clock."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from paceline_backend.server.stack import Stack
from support.e2e import PAUSE_S, wait_for_end
from support.waiting import until

pytestmark = [pytest.mark.browser, pytest.mark.ranks]

SCRIPT = Path(__file__).parents[1] / "support" / "quality_script.py"
TARGET = {"metric": "accuracy", "value": 0.75, "direction": ">="}


def shown_s(text: str, before: str) -> float:
    """The seconds that a text has after some words, such as "32.1 s" or "1.2 min"."""
    match = re.search(re.escape(before) + r"\s*([\d.]+) (s|min)\b", text)
    assert match is not None, text
    return float(match[1]) * (60 if match[2] == "min" else 1)


@pytest.mark.long
def test_times_agree_with_the_scripts_own_clock(page: Page, stack: Stack, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    body = {"script": str(SCRIPT), "args": [str(kept)], "nproc": 2, "policy": "bsp"}
    run = str(stack.api("POST", "/runs", body)["id"])
    assert stack.api("PUT", f"/runs/{run}/target", TARGET)["target"]["met"] is None
    page.context.set_extra_http_headers({})
    page.goto(stack.login_link())
    page.goto(f"{stack.url}/runs/{run}")
    now = wait_for_end(stack, run)
    clock = json.loads(kept.read_text())

    met = now["target"]["met"]
    assert (met["step"], met["epoch"]) == (clock["step"], clock["epoch"]) == (239, 29)
    assert (met["trained"], now["target"]["source"]) == (30 * 64, "evaluations")
    assert met["value"] == pytest.approx(0.75)  # of both ranks, by samples
    assert met["after_s"] == pytest.approx(clock["after_s"], rel=0.01)
    assert now["jct_s"] == pytest.approx(clock["whole_s"], rel=0.01)
    assert 0 <= now["queued_s"] == now["started_at"] - now["created_at"]

    expect(page.locator("#run-state")).to_have_text("finished")
    words = page.locator("#target-words")
    expect(words).to_contain_text("accuracy ≥ 0.75 was met after")
    assert shown_s(words.inner_text(), "met after") == pytest.approx(clock["after_s"], rel=0.01)
    facts = page.locator("#run-facts")
    expect(facts).to_contain_text("JCT")
    assert shown_s(facts.inner_text(), "JCT?") == pytest.approx(clock["whole_s"], rel=0.01)

    with stack.client() as client:
        parts = client.download(f"/runs/{run}/report", {"format": "html"})
        report = b"".join(parts).decode()
    text = re.sub(r"<[^>]+>", " ", report)
    assert shown_s(text, "Time to accuracy ≥ 0.75") == pytest.approx(clock["after_s"], rel=0.01)
    assert shown_s(text, "Job completion time:") == pytest.approx(clock["whole_s"], rel=0.01)
    document = stack.api("GET", f"/runs/{run}/report")["quality"]
    assert (document["target"], document["jct_s"]) == (now["target"], now["jct_s"])

    seen = stack.api("GET", f"/runs/{run}/evaluations")
    assert [each["step"] for each in seen] == [*range(7, 320, 8)]
    assert {each["ranks"] for each in seen} == {2}

    def whole() -> bool:
        return len(stack.api("GET", f"/runs/{run}/metrics")["metrics"]["rank"]["step"]) == 320

    until(whole, "the metrics of all steps", pause_s=PAUSE_S)
    # Both ranks had 4 of each 8 samples under bsp.
    values = stack.api("GET", f"/runs/{run}/metrics")["metrics"]["rank"]["value"]
    assert set(values) == {0.5}
