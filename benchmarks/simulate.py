"""10,000 simulated workers through the whole control plane: how long, and does the run open?

There is a server with the embedded bus and SQLite, and a simulation in another process, as
`paceline simulate --server` starts it. Then the benchmark asks the server for all that the run's
page asks for.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from harness import Check, finish, parser

from paceline.node import tokens
from paceline.node.client import Client
from paceline_backend.server.stack import Stack
from paceline_backend.simulator import Scenario

WHOLE_S = 600.0
ANSWER_S = 5.0  # time of each answer to the page
# What the run's page asks, and what people ask besides.
OF_PAGE = {
    "run": "",
    "newest steps": "/view?last=511",
    "workers": "/workers?last=50",
    "attribution": "/attribution",
    "whole run": "/view",
}
OF_PEOPLE = {
    "segments": "/segments",
    "coverage": "/coverage",
    "report": "/report",
    "whatif": "/whatif",
}
OPEN_S = 10.0  # time until a browser shows the run, without Chromium's own start


def scenario(workers: int, steps: int, policy: str) -> Scenario:
    """Sizes and speeds as uneven as CHRONICA's heterogeneous cluster."""
    plain = {
        "name": f"{workers}-workers",
        "workers": workers,
        "global_batch": 4 * workers,
        "steps": steps,
        "sizes": {
            "distribution": "gamma",
            "mean": 45,
            "dif": 16,
            "samples": 100 * workers,
        },
        "devices": {
            "unit_s": 1.2e-3,
            "step_s": 0.005,
            "factors": [
                {"workers": workers // 2, "factor": 1},
                {"workers": workers - workers // 2, "factor": 2},
            ],
            "noise": 0.02,
        },
        "communication": {"latency_s": 1e-6, "bytes": 1e8, "bandwidth": 1.25e10},
        "policy": policy,
    }
    return Scenario.of(plain)


def simulate(stack: Stack, path: Path) -> dict[str, Any]:
    """Runs the simulation in a process of its own; its output, time and memory."""
    command = [sys.executable, "-m", "paceline", "simulate", str(path), "--server", stack.url]
    began = time.perf_counter()
    assert stack.server is not None
    server = psutil.Process(stack.server.pid)
    peaks: dict[str, int] = {}
    used: dict[str, float] = {}
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE) as process:
        child = psutil.Process(process.pid)
        while process.poll() is None:
            note(peaks, used, "simulator", child)
            for part in server.children(recursive=True):
                note(peaks, used, name_of(part), part)
            time.sleep(0.5)
        assert process.stdout is not None
        output = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"paceline simulate ended with code {process.returncode}")
    return {
        **json.loads(output),
        "simulated_s": time.perf_counter() - began,
        "peak_bytes": peaks,
        "cpu_s": used,
    }


def note(peaks: dict[str, int], used: dict[str, float], name: str, process: psutil.Process) -> None:
    """Notes a process's peak of resident memory, and its processor time."""
    try:
        peaks[name] = max(peaks.get(name, 0), process.memory_info().rss)
        used[name] = sum(process.cpu_times()[:2])
    except psutil.NoSuchProcess:
        return


def name_of(process: psutil.Process) -> str:
    """Which part of the server a process is."""
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return "ended"
    parts = [word for word in ("web", "worker") if word in words]
    return parts[0] if parts else Path(words[0]).name if words else "ended"


def answers(stack: Stack, run: str, questions: Mapping[str, str]) -> dict[str, float]:
    """Seconds until each answer, by the name of the question."""
    times = {}
    with Client(stack.url, timeout_s=300.0) as client:
        for name, path in questions.items():
            began = time.perf_counter()
            answer = client.call("GET", f"/runs/{run}{path}")
            times[name] = time.perf_counter() - began
            if name == "coverage" and any(epoch["duplicated"] for epoch in answer["epochs"]):
                raise RuntimeError(f"coverage: {answer}")
    return times


def opened(stack: Stack, run: str, last: int) -> float | None:
    """Seconds until a browser shows a run up to a step; None: there is no browser."""
    finder = Path(__file__).resolve().parents[1] / "scripts" / "find_chromium.py"
    chromium = subprocess.run([sys.executable, finder], capture_output=True, text=True, check=False)
    if chromium.returncode or find_spec("playwright") is None:
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium.stdout.strip(), args=["--no-sandbox"]
        )
        signed_in = {"Authorization": f"Bearer {tokens.kept(stack.url)}"}
        page = browser.new_page(extra_http_headers=signed_in)
        began = time.perf_counter()
        page.goto(f"{stack.url}/runs/{run}")
        page.wait_for_function(
            "last => document.getElementById('chart-compute')?.data?.[0]?.x?.at(-1) === last",
            arg=last,
            timeout=120_000,
        )
        took_s = time.perf_counter() - began
        browser.close()
    return took_s


def wait_stored(stack: Stack, run: str) -> float:
    """Seconds until the server shows the run's end."""
    began = time.perf_counter()
    while stack.api("GET", f"/runs/{run}")["state"] != "finished":
        time.sleep(0.1)
    return time.perf_counter() - began


def measure(simulated: Scenario, questions: Mapping[str, str]) -> dict[str, Any]:
    """All figures of a scenario that says how many steps it has, and of these questions."""
    assert simulated.steps is not None
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "scenario.yaml"
        path.write_text(json.dumps(simulated.as_dict()))
        stack = Stack(Path(directory) / "data", 0)
        stack.data.mkdir()
        (stack.data / "server.log").touch()
        try:
            stack.start_server()
            results = simulate(stack, path)
            results["stored_s"] = results["simulated_s"] + wait_stored(stack, results["run"])
            results["rows_per_s"] = simulated.workers * simulated.steps / results["stored_s"]
            results["database_bytes"] = sum(
                file.stat().st_size for file in stack.data.glob("*.db*")
            )
            results["opened_s"] = opened(stack, results["run"], simulated.steps - 1)
            results["answers_s"] = answers(stack, results["run"], questions)
        finally:
            stack.stop()
    return results


def checks_of(results: dict[str, Any]) -> list[Check]:
    """The figures against their goals."""
    slowest = max(results["answers_s"][name] for name in OF_PAGE)
    checks = [
        Check("simulated and stored, s", results["stored_s"], WHOLE_S, "<="),
        Check("slowest answer to the page, s", slowest, ANSWER_S, "<="),
    ]
    if results["opened_s"] is not None:
        checks.append(
            Check("its page shows the last step after, s", results["opened_s"], OPEN_S, "<=")
        )
    return checks


def main() -> None:
    """Runs the benchmark."""
    made = parser(__doc__)
    made.add_argument("--policy", default="paceline")
    made.add_argument("--workers", type=int)
    made.add_argument("--steps", type=int)
    options = made.parse_args()
    workers = options.workers or (1_000 if options.quick else 10_000)
    steps = options.steps or (100 if options.quick else 1_000)
    results = measure(scenario(workers, steps, options.policy), {**OF_PAGE, **OF_PEOPLE})
    config = {"workers": workers, "steps": steps, "policy": options.policy}
    finish(options, config, results, checks_of(results), table(results, workers * steps))


def table(results: dict[str, Any], rows: int) -> str:
    """The figures for people."""
    lines = [
        f"{rows:,} rows in {results['stored_s']:.1f} s, {results['rows_per_s']:,.0f} a second; "
        f"database {results['database_bytes'] / 2**20:,.0f} MiB",
        "processor, s: " + ", ".join(f"{k} {v:.0f}" for k, v in results["cpu_s"].items()),
        "peak memory, MiB: "
        + ", ".join(f"{k} {v / 2**20:,.0f}" for k, v in results["peak_bytes"].items()),
        "page in a browser, s: "
        + ("no browser" if results["opened_s"] is None else f"{results['opened_s']:.2f}"),
        "answers, s: " + ", ".join(f"{k} {v:.2f}" for k, v in results["answers_s"].items()),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
