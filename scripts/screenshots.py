"""Pictures of the dashboard's pages, for docs/images and for whoever works on their look.

Runs are simulated and stored as ranks would report them, then a real browser photographs the pages.
Look at the pictures before you commit them. With `--all` there are more: each page at three sizes
and in both colour schemes, and the states in which there is little or nothing to show.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import sqlalchemy as sa
from find_chromium import find_chromium
from playwright.sync_api import Browser, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from glance import GLANCES, Glance, messages

from paceline.wire import Hello, NodeState
from paceline_backend.control.fleet.watch import FleetWatch
from paceline_backend.insight import hangs
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.server.prices import Price
from paceline_backend.store import Store, audit, nodes, schema, telemetry
from paceline_backend.store.alerts import rows as alerts
from paceline_backend.store.fleet import verdicts
from paceline_backend.store.fleet.tables import waiting_days
from paceline_backend.store.fleet.waiting import DAY_S
from support.outcomes import keep_outcome
from support.records import add_run, waiting_day
from support.web import SIGNED_IN, serving

ROOT = Path(__file__).parents[1]
MOST_BYTES = 250_000  # of a picture in docs/images
LAPTOP, PHONE, WALL = (1440, 900), (390, 844), (1920, 1080)
NOTHING = "nothing"  # a server that knows no run
# The runs that the list of runs has, and what they are called there.
LISTED = {
    "healthy": "conformer-large",
    "slow node": "speech-large",
    "two causes": "translate-de-en",
    "coasting": "vit-finetune",
    "failed": "graph-molecules",
    "ended": "speech-base",
}
# True when nothing on the page still says that it is on its way.
SETTLED = """() => {
  const shown = [...document.querySelectorAll("main *")].filter(e => e.checkVisibility());
  const own = e => [...e.childNodes].filter(n => n.nodeType === 3).map(n => n.data).join("");
  const status = document.getElementById("connection-status")?.textContent ?? "";
  const awaited = /^(loading…|Loading…|Looking at the newest steps…|Simulating the next .*)$/;
  return status !== "" && status !== "connecting…" && !shown.some(e => awaited.test(own(e)));
}"""


def _switch(page: Page) -> None:
    page.click("#switch-open")
    page.locator("#switch-dialog .preset").first.wait_for()
    page.locator("#switch-forecast", has_text="bars bound").wait_for(timeout=120_000)


def _whatif(page: Page) -> None:
    page.click("#whatif-ask")
    page.locator("#whatif-forecasts li").first.wait_for(timeout=120_000)
    page.locator("#whatif-ask").scroll_into_view_if_needed()


def _lower(page: Page) -> None:
    page.evaluate("scrollTo(0, 820)")


def _stop(page: Page) -> None:
    page.click("#stop-open")


@dataclass(frozen=True)
class Picture:
    """What to photograph.

    Args:
        path: of the page; `{run}` is the run.
        run: the scenario of its run, as in benchmarks/glance.py; empty: any that is there.
        act: done on the page before.
        kept: it belongs to docs/images.
        whole: all of the page, not only what is seen without scrolling.
        size: of the window, in pixels.
        scheme: "light" or "dark".
    """

    path: str
    run: str = ""
    act: Callable[[Page], None] | None = None
    kept: bool = False
    whole: bool = False
    size: tuple[int, int] = LAPTOP
    scheme: str = "light"


_COMPARE = "/compare?side=healthy&side=slow-node"
# In this order: pages of all runs come first, while the runs in their lists are fresh.
PICTURES = {
    "runs": Picture("/", kept=True),
    "fleet": Picture("/fleet?by=tag", kept=True),
    "alerts": Picture("/alerts", kept=True),
    "forecasts": Picture("/forecasts", kept=True),
    "launch": Picture("/launch?from={run}", "slow node", kept=True),
    "compare": Picture(_COMPARE, kept=True),
    "run": Picture("/runs/{run}", "slow node", kept=True),
    "run-dark": Picture("/runs/{run}", "slow node", kept=True, scheme="dark"),
    "run-phone": Picture("/runs/{run}", "slow node", kept=True, size=PHONE),
    "rank": Picture("/runs/{run}/ranks/5", "slow node", kept=True),
    "switch": Picture("/runs/{run}", "slow node", _switch, kept=True),
    "whatif": Picture("/runs/{run}", "slow node", _whatif),
    "stop": Picture("/runs/{run}", "slow node", _stop),
    "run-lower": Picture("/runs/{run}", "two causes", _lower),
    "run-healthy": Picture("/runs/{run}", "healthy"),
    "run-hung": Picture("/runs/{run}", "hung rank"),
    "run-coasting": Picture("/runs/{run}", "coasting"),
    "run-failed": Picture("/runs/{run}", "failed", kept=True),
    "run-ended": Picture("/runs/{run}", "ended"),
    "run-wide": Picture("/runs/{run}", "group of 512"),
    "run-no-steps": Picture("/runs/begun"),
    "run-unknown": Picture("/runs/3f9a1c07be52"),
    "rank-unknown": Picture("/runs/healthy/ranks/99"),
    "missing": Picture("/elsewhere"),
    "runs-empty": Picture("/", NOTHING),
    "fleet-empty": Picture("/fleet", NOTHING),
    "alerts-empty": Picture("/alerts", NOTHING),
    "forecasts-empty": Picture("/forecasts", NOTHING),
    "compare-empty": Picture("/compare", NOTHING),
}


def every() -> dict[str, Picture]:
    """All pictures, and those of the kept ones in other sizes and schemes."""
    made = dict(PICTURES)
    for name in ("runs", "fleet", "alerts", "forecasts", "compare", "rank", "switch", "run-failed"):
        picture = PICTURES[name]
        made[f"{name}-dark"] = dataclasses.replace(picture, scheme="dark", kept=False)
        made[f"{name}-phone"] = dataclasses.replace(picture, size=PHONE, kept=False, whole=True)
    made["run-wall"] = dataclasses.replace(PICTURES["run"], size=WALL, kept=False)
    made["run-whole"] = dataclasses.replace(PICTURES["run"], whole=True, kept=False)
    return made


def photograph(browser: Browser, url: str, picture: Picture, now: float) -> bytes:
    """A page of the dashboard as PNG; the browser's clock stands still at a Unix time."""
    page = browser.new_page(
        viewport={"width": picture.size[0], "height": picture.size[1]},
        extra_http_headers=SIGNED_IN,
        color_scheme="dark" if picture.scheme == "dark" else "light",
    )
    page.clock.set_fixed_time(now)
    page.goto(url)
    page.wait_for_function(SETTLED, timeout=120_000)
    page.wait_for_timeout(8_000)  # charts, and what is asked for after the first answers
    page.wait_for_function(SETTLED, timeout=120_000)
    page.wait_for_timeout(1_500)  # what follows from the last answer
    if picture.act is not None:
        picture.act(page)
        page.wait_for_timeout(500)
    content = page.screenshot(full_page=picture.whole)
    page.close()
    return content


def train(store: Store, glance: Glance, run: str, now: float) -> None:
    """Stores a run that a controller plans, and of which there is news until now."""
    world = glance.scenario.get("workers", 8)
    name = LISTED.get(glance.name, "speech-large")
    key = add_run(store, run, nproc=world, name=name, created_at=now - 400)
    lease = {"owner": "planner-1", "expires_at": now + (0 if glance.coasting else 3600)}
    with store.write() as connection:
        first = {"policy": "bsp", "parameters": {}, "requested_at": now - 400}
        connection.execute(
            sa.insert(schema.switches).values(run=key, version=0, requested_by="start", **first)
        )
        connection.execute(sa.insert(schema.leases).values(run=key, **lease))
        tag = "speech" if "speech" in name else "nightly"
        connection.execute(sa.insert(schema.run_tags).values(run=key, tag=tag))
    for message in messages(glance, now):
        if isinstance(message, Hello):
            message = msgspec.structs.replace(message, epochs=24, device="NVIDIA H100")
        telemetry.write(store, [("" if isinstance(message, NodeState) else run, message)])


def fill(store: Store, now: float) -> None:
    """Runs, weeks of history, alerts and switches until now, so that no page is empty."""
    known = {glance.name: glance for glance in GLANCES}
    for name in LISTED:
        train(store, known[name], name.replace(" ", "-"), now)
    add_run(store, "begun", state="running", name="speech-small", created_at=now - 4)
    today = int(now // DAY_S)
    with store.write() as connection:
        for node in ("gpu-b3", "gpu-c1", "gpu-c2"):
            nodes.expect(connection, node)
        machine = {"cores": 32, "memory_bytes": 2**37, "paceline": "0.1.0"}
        connection.execute(sa.update(schema.nodes).values(machine))
        cordon = {"node": "gpu-c2", "at": (today - 3) * DAY_S, "by": "ada"}
        connection.execute(
            sa.insert(schema.cordons).values(**cordon, reason="its fans are to be replaced")
        )
        connection.execute(sa.update(schema.nodes).values(heartbeat_at=time.time(), left=False))
    weeks = list(_weeks(store, today))
    with store.write() as connection:
        connection.execute(sa.insert(waiting_days), weeks)
    _verdicts(store, today)
    _alerts(store)
    random = np.random.default_rng(5)
    for number, saving in enumerate(random.uniform(-0.05, 0.5, 40)):
        policy = ("paceline", "chronica", "lbb", "rna")[number % 4]
        measured = float(saving + random.normal(0, 0.02))
        keep_outcome(store, f"r{number:02d}", float(saving), measured, policy=policy)
    watch, never = FleetWatch(store, "screenshots"), threading.Event()
    for _ in range(6):
        watch.look(never)


def _weeks(store: Store, today: int) -> Iterator[dict[str, object]]:
    """What three teams' runs waited in the last four weeks."""
    random = np.random.default_rng(1)
    for number, (owner, tag) in enumerate(
        [("ada", "speech"), ("grace", "vision"), ("linus", "nightly"), ("ada", "nightly")]
    ):
        run = f"past-{number}"
        began = time.time() - 30 * DAY_S - number
        times = {"created_at": began, "ended_at": began + 29 * DAY_S}
        key = add_run(store, run, state="finished", name=f"{tag}-{number}", **times)
        with store.write() as connection:
            connection.execute(sa.insert(schema.run_tags).values(run=key, tag=tag))
            audit.record(connection, audit.Requester(owner), "run.create", run=run)
        for day in range(today - 27, today + 1):
            hours = float(random.uniform(60, 190))
            share = float(random.uniform(0.04, 0.2 if number else 0.35))
            worker_s = 3600 * hours
            yield waiting_day(day, run, worker_s, share * worker_s, steps=1_000)


def _verdicts(store: Store, today: int) -> None:
    """Nodes that were named in the last four weeks."""
    random = np.random.default_rng(2)
    named = []
    for node, likely in (("gpu-b2", 0.6), ("gpu-c2", 0.4), ("gpu-b1", 0.1)):
        for day in range(today - 27, today):
            if random.uniform() > likely:
                continue
            began = day * DAY_S + float(random.uniform(0, 10)) * 3600
            until = began + float(random.uniform(0.5, 14)) * 3600
            share = {node: {"ranks": [3], "kinds": ["node"], "share": 0.2, "factor": 1.8}}
            kept = verdicts.Kept(
                f"past-{node}", began, until, 0, 1, 8, 0.2, 0.2, 1.8, share, {"causes": []}
            )
            named.append(vars(kept))
    with store.write() as connection:
        connection.execute(sa.insert(verdicts.verdicts), named)


def _alerts(store: Store) -> None:
    now = time.time()
    raised = [
        ("run-waste", "slow-node", "warning", "Ranks wait for 24 % of their time."),
        ("run-hangs", "two-causes", "critical", "No step has ended for 31 s: rank 6 computes."),
        ("disk-low", "", "warning", "9 % of the disk with the database is free."),
    ]
    for number, (rule, run, severity, words) in enumerate(reversed(raised)):
        at = now - 3600 * (len(raised) - number)
        values = {"rule": rule, "run": run, "severity": severity, "words": words}
        times = {"value": 0.24, "threshold": 0.2, "since": at - 600, "raised_at": at}
        with store.write() as connection:
            alerts.add(connection, values | times)


def main() -> None:
    """Makes the pictures."""
    asking = argparse.ArgumentParser(description=__doc__)
    asking.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    asking.add_argument("--only", nargs="+", choices=every(), help="these pictures")
    asking.add_argument("--all", action="store_true", help="also those that are not in docs/images")
    options = asking.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = {
        name: picture
        for name, picture in every().items()
        if (name in options.only if options.only else options.all or picture.kept)
    }
    nodes.ALIVE_S = hangs.FRESH_S = math.inf  # agents and ranks would go on saying what they do
    known = {glance.name: glance for glance in GLANCES}
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        bus = held.enter_context(EmbeddedBus(folder / "bus"))
        urls = {}
        for name in ("", NOTHING):
            url = f"sqlite:///{folder / (name or 'paceline')}.db"
            store = held.enter_context(Store.open(url))
            web = held.enter_context(serving(store, bus.url, hour_price=Price(2.5, "EUR")))
            urls[name] = (store, str(web.base_url).rstrip("/"))
        full = urls[""][0]
        filled_at = time.time()
        fill(full, filled_at)
        playwright = held.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        held.callback(browser.close)
        for number, (name, picture) in enumerate(chosen.items()):
            run = f"8c4f{number:02d}e1b7a2"
            now = time.time() if picture.run in known else filled_at
            if picture.run in known:
                train(full, known[picture.run], run, now)
            server = urls[NOTHING if picture.run == NOTHING else ""][1]
            content = photograph(browser, server + picture.path.format(run=run), picture, now)
            (options.out / f"{name}.png").write_bytes(content)
            sys.stdout.write(f"{name}.png: {len(content):,} bytes\n")
            sys.stdout.flush()
            if picture.kept and len(content) > MOST_BYTES:
                raise SystemExit(f"{name}.png is larger than {MOST_BYTES:,} bytes")


if __name__ == "__main__":
    main()
