"""Speed of a run's page, in a real browser with a real server.

- First chart: from the click on a link to the first drawn chart, with a warm cache, for a run of
  4 ranks × 300 steps and for 1,024 × 10,000, ended and live; and the sizes of the answers.
- Switch: from the click that confirms a switch to its mark in the charts.
- Pixel: from a step's end to its drawing, at 2 steps per second; each step must be drawn once.
- Spikes: 20 single slow steps of a rank among 100,000 steps, which must be visible in the chart of
  the whole run.

Ranks are simulated, but their records go through the bus, ingest and the database like real ones.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from harness import Check, finish, parser
from playwright.sync_api import Browser, Page, sync_playwright

from paceline.node import tokens
from paceline.wire import RunState, State, StepBatch, StepRecord, encode, run_telemetry
from paceline.wire.bus import connect
from paceline_backend.server.stack import Stack
from paceline_backend.store import Store, telemetry

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from find_chromium import find_chromium

from support.records import add_run, adopted, hello, record

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-timer-throttling"]
WAIT_MS = 120_000
RATE = 2.0  # steps per second
# Maximum size of an answer from which charts are drawn.
MOST_BYTES = 300_000
# Maximum time until the first chart.
BOUNDS = {"small": 1.5, "large": 2.5}  # seconds
# Maximum time from a step's end to its drawing, by number of ranks.
PIXEL_S = {64: 0.5, 1000: 1.0}
# Script in the page that records when the first chart has a line, and when each step was first
# drawn.
WATCH = """
window.seen = {first: null, drawn: {}};
const look = () => {
  const last = Number(document.getElementById('page')?.dataset.drawn ?? -1);
  const charts = [...document.querySelectorAll('.js-plotly-plot')];
  // The page says -1 while it has no steps.
  if (last >= 0 && charts.some(chart => chart.data?.some(trace => trace.x?.length)))
    window.seen.first ??= performance.now();
  if (last >= 0 && !(last in window.seen.drawn)) window.seen.drawn[last] = Date.now() / 1000;
  requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""
MARKED = """policy => [...document.querySelectorAll('.js-plotly-plot')].some(chart =>
  chart.layout?.annotations?.some(note => (note.text ?? '').startsWith('▸ ' + policy)))"""


def made(
    world: int, steps: range, slow: frozenset[int], ended_at: float | None = None
) -> list[StepRecord]:
    """Return records of all ranks. In the steps of `slow`, rank 1 takes 20 times as long."""
    noise = np.random.default_rng(steps.start).normal(1, 0.03, (len(steps), world))
    return [
        record(
            step,
            rank,
            load=100.0,
            compute_s=float(0.1 * noise[at, rank]) * (20 if step in slow and rank == 1 else 1),
            ended_at=ended_at or 1.7e9 + 0.5 * step,
        )
        for at, step in enumerate(steps)
        for rank in range(world)
    ]


def fill(
    store: Store, run: str, world: int, steps: int, *, ended: bool, slow: frozenset[int]
) -> None:
    """Store a run with complete steps and their roll-ups."""
    add_run(store, run, nproc=world, signed=True, created_at=time.time(), state="running")
    began = RunState(State.RUNNING, time.time() - 3600, "node-1")
    telemetry.write(
        store, [(run, began), (run, hello(world)), (run, adopted(0, 0, counts=[[4] * world] * 2))]
    )
    at_once = max(100, 100_000 // world // 100 * 100)
    for first in range(0, steps, at_once):
        part = range(first, min(first + at_once, steps))
        telemetry.write(store, [(run, StepBatch(made(world, part, slow)))])
    if ended:
        telemetry.write(store, [(run, RunState(State.FINISHED, time.time(), "node-1"))])


class Ranks:
    """Simulated ranks that end a step together, twice a second, while the context is open."""

    def __init__(self, bus: str, run: str, world: int, first: int) -> None:
        self.bus, self.run, self.world = bus, run, world
        self.first = first
        # Unix time at which each step ended, by step.
        self.ended: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._train)

    def __enter__(self) -> Ranks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _train(self) -> None:
        due = time.time()
        with connect(self.bus) as client:
            for step in range(self.first, sys.maxsize):
                due += 1 / RATE
                if self._stop.wait(max(0.0, due - time.time())):
                    return
                now = time.time()
                records = made(self.world, range(step, step + 1), frozenset(), now)
                pipeline = client.pipeline(transaction=False)
                # Each rank sends its own message.
                for each in records:
                    fields: dict[Any, Any] = dict(encode(StepBatch([each]), self.run))
                    pipeline.xadd(run_telemetry(self.run), fields)
                pipeline.execute()
                self.ended[step] = now


@contextmanager
def heard(bus: str, runs: list[str]) -> Iterator[None]:
    """Report every 5 s that runs are active, because the control plane fails silent runs."""
    stop = threading.Event()

    def speak() -> None:
        with connect(bus) as client:
            while not stop.is_set():
                for run in runs:
                    state = RunState(State.RUNNING, time.time(), "node-1")
                    fields: dict[Any, Any] = dict(encode(state, run))
                    client.xadd(run_telemetry(run), fields)
                stop.wait(5)

    thread = threading.Thread(target=speak)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def browsing(stack: Stack) -> Iterator[Browser]:
    """Yield a Chromium browser, in which `opened` creates pages that are signed in."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=ARGUMENTS)
        yield browser
        browser.close()


def opened(browser: Browser, stack: Stack) -> Page:
    """Return a page that is signed in, in a new browser context."""
    headers = {"Authorization": f"Bearer {tokens.kept(stack.url)}"}
    context = browser.new_context(
        extra_http_headers=headers, viewport={"width": 1440, "height": 900}
    )
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    page.add_init_script(WATCH)
    return page


def first_chart_s(page: Page, stack: Stack, run: str, repeats: int) -> float:
    """Return the median seconds from the navigation to the first chart."""
    took = []
    for turn in range(repeats + 1):
        page.goto(f"{stack.url}/runs/{run}")
        page.wait_for_function("() => window.seen?.first !== null")
        # The first visit only warms the cache.
        if turn:
            took.append(page.evaluate("window.seen.first") / 1000)
    return float(np.median(took))


def answer_bytes(stack: Stack, run: str) -> int:
    """Return the compressed size of the larger one of a page's two first answers."""
    headers = {"Authorization": f"Bearer {tokens.kept(stack.url)}", "Accept-Encoding": "gzip"}
    with httpx.Client(base_url=stack.url, headers=headers, timeout=120) as client:
        sizes = []
        for query in ("", "?last=511"):
            with client.stream("GET", f"/api/v1/runs/{run}/view{query}") as answer:
                answer.raise_for_status()
                sizes.append(sum(len(part) for part in answer.iter_raw()))
        return max(sizes)


def mark_s(page: Page, stack: Stack, run: str, repeats: int) -> float:
    """Return the median seconds from the confirmation of a switch to its mark."""
    page.goto(f"{stack.url}/runs/{run}")
    page.wait_for_function("() => window.seen?.first !== null")
    took = []
    for policy in ("lbb", "chronica", "boa", "lbb", "chronica")[: repeats + 1]:
        page.click("#switch-open")
        page.check(f"#policy-preset-{policy}")
        page.evaluate(
            """([policy, marked]) => {
              const seen = new Function('return ' + marked)();
              document.getElementById('switch-confirm').addEventListener('click', () => {
                const began = performance.now();
                const look = () => seen(policy)
                  ? (window.seen.mark = performance.now() - began) : requestAnimationFrame(look);
                window.seen.mark = null;
                requestAnimationFrame(look);
              }, {once: true, capture: true});
            }""",
            [policy, MARKED],
        )
        page.click("#switch-confirm")
        page.wait_for_function("() => window.seen.mark > 0")
        took.append(page.evaluate("window.seen.mark") / 1000)
        page.wait_for_function("() => !document.querySelector('dialog[open]')")
    return float(np.median(took[1:]))


def pixel_s(
    page: Page, stack: Stack, bus: str, run: str, world: int, duration_s: float
) -> tuple[float, int]:
    """Measure the times from a step's end to its drawing; return their 95th percentile in seconds.

    The second result is that of `wrong_points`.
    """
    page.goto(f"{stack.url}/runs/{run}")
    page.wait_for_function("() => window.seen?.first !== null")
    headers = {"Authorization": f"Bearer {tokens.kept(stack.url)}"}
    first = 1 + int(httpx.get(f"{stack.url}/api/v1/runs/{run}", headers=headers).json()["step"])
    with Ranks(bus, run, world, first) as ranks:
        page.wait_for_timeout(duration_s * 1000)
    last = max(ranks.ended)
    page.wait_for_function(
        "last => Number(document.getElementById('page').dataset.drawn) >= last", arg=last
    )
    drawn = {int(k): float(v) for k, v in page.evaluate("window.seen.drawn").items()}
    waits = []
    for step, ended in ranks.ended.items():
        # A drawing shows all steps up to its last one.
        at = min((when for latest, when in drawn.items() if latest >= step), default=np.inf)
        if at < ended:
            raise RuntimeError(f"step {step} was drawn {ended - at:.3f} s before it ended")
        # The first steps are warm-up.
        if step >= first + 4:
            waits.append(at - ended)
    return float(np.percentile(waits, 95)), wrong_points(page, first, last)


def wrong_points(page: Page, first: int, last: int) -> int:
    """Count steps of [first, last] that are not exactly once in the charts' longest line."""
    steps: list[int] = page.evaluate(
        """() => [...document.querySelectorAll('.js-plotly-plot')]
          .flatMap(chart => chart.data ?? [])
          .filter(trace => trace.x?.length && trace.type !== 'bar' && !trace.fill)
          .map(trace => [...trace.x].filter(Number.isInteger))
          .reduce((best, x) => (x.length > best.length ? x : best), [])"""
    )
    counts = dict.fromkeys(range(first, last + 1), 0)
    for step in steps:
        if step in counts:
            counts[step] += 1
    return sum(count != 1 for count in counts.values())


def spikes_seen(page: Page, stack: Stack, run: str, slow: frozenset[int]) -> int:
    """Count the slow steps that are visible in a chart of the whole run."""
    page.goto(f"{stack.url}/runs/{run}")
    page.wait_for_function("() => window.seen?.first !== null")
    page.select_option("#chart-window", "all")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.js-plotly-plot')].some("
        "chart => chart.data?.some(trace => trace.x?.[0] < 1000))"
    )
    points: list[tuple[float, float]] = page.evaluate(
        """() => [...document.querySelectorAll('.js-plotly-plot')]
          .flatMap(chart => chart.data ?? [])
          .flatMap(trace => [...(trace.x ?? [])].map((x, i) => [x, trace.y?.[i] ?? 0]))
          .filter(([, y]) => y > 1)"""
    )
    # The slow rank takes 2 s ± 10 %.
    at = np.array([x for x, y in points if y < 3])
    return sum(bool(np.any(np.abs(at - step) <= 200)) for step in slow)


def figures(
    browser: Browser,
    stack: Stack,
    bus: str,
    note: Callable[..., None],
    runs: dict[str, tuple[int, int]],
    slow: frozenset[int],
    quick: bool,
) -> None:
    """Record all figures of a server that has these runs."""
    repeats, long = (2, 20_000) if quick else (5, 100_000)
    page = opened(browser, stack)
    for name, (world, steps) in runs.items():
        for state in ("ended", "live"):
            run = f"{name}-{state}"
            words = f"{world:,} × {steps:,}, {state}"
            value = first_chart_s(page, stack, run, repeats)
            note(f"first chart of {words}, s", value, BOUNDS[name])
            note(f"largest answer of {words}, bytes", answer_bytes(stack, run), MOST_BYTES)
    note("spikes seen of 20", spikes_seen(page, stack, "long", slow), 20, ">=")
    note(f"largest answer of 4 × {long:,}, bytes", answer_bytes(stack, "long"), MOST_BYTES)
    for world, bound in PIXEL_S.items():
        p95, wrong = pixel_s(page, stack, bus, f"pixel-{world}", world, 10 if quick else 60)
        note(f"step's end to pixel, {world:,} workers, p95 s", p95, bound)
        note(f"steps lost or doubled, {world:,} workers", wrong, 0)
    with Ranks(bus, "small-live", 4, 300):
        note("confirmation to mark, s", mark_s(page, stack, "small-live", repeats), 1.0)


def measure(folder: Path, quick: bool) -> tuple[dict[str, float], list[Check]]:
    """Return all figures and checks."""
    large = (256, 1_000) if quick else (1_024, 10_000)
    long = 20_000 if quick else 100_000
    slow = frozenset(range(long // 40, long, long // 20))
    runs = {"small": (4, 300), "large": large}
    with Store.open(f"sqlite:///{folder / 'paceline.db'}") as store:
        for name, (world, steps) in runs.items():
            for state in ("ended", "live"):
                ended = state == "ended"
                fill(store, f"{name}-{state}", world, steps, ended=ended, slow=frozenset())
        fill(store, "long", 4, long, ended=True, slow=slow)
        for world in PIXEL_S:
            fill(store, f"pixel-{world}", world, 20, ended=False, slow=frozenset())
    results: dict[str, float] = {}
    checks: list[Check] = []

    def note(name: str, value: float, bound: float, op: str = "<=") -> None:
        results[name] = value
        checks.append(Check(name, value, bound, op))
        print(f"{name}: {value:.4g}", file=sys.stderr)

    live = [f"{name}-live" for name in runs] + [f"pixel-{world}" for world in PIXEL_S]
    with Stack(folder, 0) as stack:
        bus = stack.api("GET", "/version")["bus"]
        with heard(bus, live), browsing(stack) as browser:
            figures(browser, stack, bus, note, runs, slow, quick)
    return results, checks


def table(results: dict[str, float]) -> str:
    """Return a table of the figures."""
    return "\n".join(f"{name:55}{value:12,.3f}" for name, value in results.items())


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results, checks = measure(Path(folder), options.quick)
    finish(options, {"rate": RATE}, results, checks, table(results))


if __name__ == "__main__":
    main()
