"""Pictures of the dashboard's pages for docs/images, from trainings that run on this machine.

The program starts Paceline as `make demo` does, and trains examples/plaid with two real ranks.
Nothing is emulated, simulated or written into the database. Rank 1 is slow for a real reason: each
rank has a core of its own, and a process that only computes shares that of rank 1. Three runs are
made, one after the other: one under `paceline`, one whose rank 1 is killed, and one under `bsp`,
which trains while the pages are photographed.

Beside each picture lies its provenance (benchmarks/provenance.py). View the pictures before you
commit them. Another load on this machine is in the pictures, too: run the program on an idle one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from find_chromium import find_chromium
from playwright.sync_api import Browser, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import provenance

from paceline_backend.server.stack import Stack

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
SHOWS = "two real ranks, the second of which shares its core with another process"
COMMAND = "python scripts/screenshots.py"
MOST_BYTES = 250_000  # of a picture
RANKS, SLOW = 2, 1
LAPTOP = (1440, 900)
WAIT_S = 600.0
# True when no text on the page announces a later answer.
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


@dataclass(frozen=True)
class Picture:
    """A page to photograph.

    Args:
        path: of the page; `{bsp}`, `{paceline}` and `{failed}` are the ids of the runs.
        act: is done on the page before.
        scheme: "light" or "dark".
    """

    path: str
    act: Callable[[Page], None] | None = None
    scheme: str = "light"


PICTURES = {
    "runs": Picture("/"),
    "run": Picture("/runs/{bsp}"),
    "run-dark": Picture("/runs/{bsp}", scheme="dark"),
    "rank": Picture(f"/runs/{{bsp}}/ranks/{SLOW}"),
    "compare": Picture("/compare?side={bsp}&side={paceline}"),
    "run-failed": Picture("/runs/{failed}"),
    "switch": Picture("/runs/{bsp}", _switch),  # last: forecasts need most of the server's time
}


def start(stack: Stack, script: Path, policy: str, epochs: int) -> str:
    """Start a training; return the run's id."""
    body = {
        "name": f"plaid-{policy}",
        "script": str(script),
        "args": ["--epochs", str(epochs)],
        "nproc": RANKS,
        "policy": policy,
    }
    return str(stack.api("POST", "/runs", body)["id"])


def wait(stack: Stack, run: str, until: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until a condition on a run holds; end the program if it does not in ten minutes."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        now = stack.api("GET", f"/runs/{run}")
        if until(now):
            return
        if now["ended_at"] is not None:
            raise SystemExit(f"run {run} {now['state']} too early: {now['message']}")
        time.sleep(0.2)
    raise SystemExit(f"run {run} is {now['state']} at step {now['step']} after {WAIT_S:.0f} s")


def after_step(step: int) -> Callable[[dict[str, Any]], bool]:
    """Return the condition that a run has trained a step."""
    return lambda run: (run["step"] or 0) >= step


def ended(run: dict[str, Any]) -> bool:
    """Return true once a run has ended."""
    return run["ended_at"] is not None


def process_of(run: str, rank: int) -> int:
    """Return the process id of a rank on this machine."""
    wanted = {f"PACELINE_RUN={run}".encode(), f"RANK={rank}".encode()}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                return int(folder.name)
        except OSError:
            continue
    raise SystemExit(f"rank {rank} of run {run} has no process on this machine")


def pin(run: str, cores: list[int]) -> None:
    """Give each rank of a run, with all its threads, a core of its own."""
    for rank in range(RANKS):
        for thread in Path(f"/proc/{process_of(run, rank)}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {cores[rank]})


def burn(core: int) -> subprocess.Popen[bytes]:
    """Start a process that computes on a core, in a session of its own as another user's would."""
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


def train(stack: Stack, script: Path, cores: list[int]) -> dict[str, str]:
    """Make the three runs; return their ids. The last one still trains."""
    runs = {"paceline": start(stack, script, "paceline", 40)}
    wait(stack, runs["paceline"], after_step(1))
    pin(runs["paceline"], cores)
    wait(stack, runs["paceline"], ended)
    runs["failed"] = start(stack, script, "sata", 40)
    wait(stack, runs["failed"], after_step(60))
    os.kill(process_of(runs["failed"], SLOW), signal.SIGKILL)
    wait(stack, runs["failed"], ended)
    runs["bsp"] = start(stack, script, "bsp", 1000)
    wait(stack, runs["bsp"], after_step(1))
    pin(runs["bsp"], cores)
    wait(stack, runs["bsp"], after_step(400))
    return runs


def photograph(browser: Browser, stack: Stack, picture: Picture, runs: dict[str, str]) -> bytes:
    """Return a page of the dashboard as PNG."""
    page = browser.new_page(
        viewport={"width": LAPTOP[0], "height": LAPTOP[1]},
        color_scheme="dark" if picture.scheme == "dark" else "light",
    )
    page.goto(stack.login_link())
    page.goto(stack.url + picture.path.format(**runs))
    page.wait_for_function(SETTLED, timeout=120_000)
    page.wait_for_timeout(8_000)  # charts, and answers that the first answers lead to
    page.wait_for_function(SETTLED, timeout=120_000)
    if picture.act is not None:
        picture.act(page)
        page.wait_for_timeout(500)
    content = page.screenshot()
    page.close()
    return content


def main() -> None:
    """Train, and make the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGES)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    made = provenance.made_by(Path(__file__).resolve(), COMMAND)
    cores = sorted(os.sched_getaffinity(0))[:RANKS]
    if len(cores) < RANKS:
        raise SystemExit(f"the pictures need {RANKS} cores, and this machine lends {len(cores)}")
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="plaid-")))
        script = Path(shutil.copytree(ROOT / "examples" / "plaid", folder / "plaid")) / "train.py"
        stack = held.enter_context(Stack(folder / "data", 0))
        burning = burn(cores[SLOW])
        held.callback(burning.wait)
        held.callback(burning.kill)
        runs = train(stack, script, cores)
        playwright = held.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        held.callback(browser.close)
        for name, picture in PICTURES.items():
            content = photograph(browser, stack, picture, runs)
            if len(content) > MOST_BYTES:
                raise SystemExit(f"{name}.png is larger than {MOST_BYTES:,} bytes")
            (out / f"{name}.png").write_bytes(content)
            provenance.record(out / f"{name}.png", SHOWS, made)
            print(f"{name}.png: {len(content):,} bytes", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
