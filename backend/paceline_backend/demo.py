"""Commands `paceline up` and `paceline demo`.

`up` starts a control plane and an agent with one command. `demo` also starts both, and trains the
PLAID example there with emulated device speeds.

Packages that only the demo needs are imported in its functions, so that the process of `paceline
up`, which only waits, stays small.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import webbrowser
from collections.abc import Callable, Mapping
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console

from paceline.commands.options import DEFAULT_SERVER
from paceline.core.errors import InputError, MissingExtraError, PacelineError
from paceline_backend.server.stack import Stack

if TYPE_CHECKING:
    from paceline.node.starting.screen import Screen

# Emulated devices of the demo. With 36 µs per point and 5 ms per step, a balanced step of 64
# recordings takes about 0.25 s, which is long compared to the scheduling noise of four ranks on two
# cores.
SECONDS_PER_UNIT = 36e-6
SECONDS_PER_STEP = 5e-3

err = Console(stderr=True, highlight=False)


def example(name: str) -> Path:
    """Return an example's folder, in the source tree or in the installed package."""
    here = Path(__file__).resolve()
    for folder in (here.parents[2] / "examples" / name, here.parent / "_examples" / name):
        if folder.is_dir():
            return folder
    raise PacelineError(f"the example {name} is not installed; run from a source checkout")


def emulation(slowdowns: list[float]) -> dict[str, list[float]]:
    """Return the value of PACELINE_EMULATE; `slowdowns` multiply each rank's time per unit."""
    from paceline.node.starting import foreground

    text = ",".join(str(factor) for factor in slowdowns)
    return foreground.emulation(text, SECONDS_PER_UNIT, SECONDS_PER_STEP, None)


def start_run(
    stack: Stack, slowdowns: list[float], epochs: int, policy: str, result: Path
) -> dict[str, Any]:
    """Start PLAID training with one rank per slowdown. Return the run as REST returns it."""
    result.unlink(missing_ok=True)
    run: dict[str, Any] = stack.api(
        "POST",
        "/runs",
        {
            "name": "plaid",
            "script": str(example("plaid") / "train.py"),
            "args": ["--epochs", str(epochs), "--result", str(result)],
            "nproc": len(slowdowns),
            "policy": policy,
            "env": {"PACELINE_EMULATE": json.dumps(emulation(slowdowns))},
        },
    )
    return run


def follow(
    stack: Stack,
    run: str,
    *,
    until: Callable[[Mapping[str, Any]], bool],
    screen: Screen,
) -> dict[str, Any]:
    """Poll a run until a condition holds or it has ended. Raise PacelineError if the run fails."""
    from paceline.wire import ENDED, State

    while True:
        _check(stack)
        try:
            now: dict[str, Any] = stack.api("GET", f"/runs/{run}")
        except InputError:
            raise
        except PacelineError:
            # Retry, because the supervisor may be restarting the web process. Training continues
            # meanwhile.
            time.sleep(0.5)
            continue
        screen.tick()
        if now["state"] == State.FAILED:
            raise PacelineError(f"the run failed: {now['message']}")
        if now["state"] in ENDED or until(now):
            return now
        time.sleep(0.25)


def report(
    stack: Stack, slowdowns: list[float], epochs: int, switch_at: int, policies: tuple[str, str]
) -> dict[str, Any]:
    """Train under two policies with a switch at step `switch_at`; return the metrics of both."""
    from paceline.node.starting.progress import ProgressPoller
    from paceline.node.starting.screen import shown
    from paceline.wire import State

    result = (stack.data / "result.json").resolve()
    run = start_run(stack, slowdowns, epochs, policies[0], result)["id"]
    with stack.client() as client, shown(ProgressPoller(client, run)) as screen:
        follow(stack, run, until=lambda now: (now["step"] or 0) >= switch_at, screen=screen)
        stack.api("POST", f"/runs/{run}/policy", {"policy": policies[1], "by": "demo"})
        ended = follow(stack, run, until=lambda _: False, screen=screen)
    if ended["state"] != State.FINISHED:
        raise PacelineError(f"the run was {ended['state']} before its end: {ended['message']}")
    figures: dict[str, Any] = stack.api("GET", f"/runs/{run}/report")
    figures["run"] = run
    figures["switches"] = stack.api("GET", f"/runs/{run}/switches")
    figures["accuracy"] = json.loads(result.read_text())["accuracy"]
    figures["emulated"] = {"slowdowns": slowdowns, **emulation(slowdowns)}
    return figures


def print_report(figures: Mapping[str, Any]) -> None:
    """Print the report as tables on standard output."""
    from rich.table import Table

    out = Console(highlight=False)
    title = "results per preset, without the first steps after its start"
    table = Table(title=title, title_justify="left")
    names = list(figures["presets"])
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    rows = (
        ("steps", "steps", "{:.0f}"),
        ("time per step, s", "step_time_s", "{:.3f}"),
        ("SE", "se", "{:.3f}"),
        ("step DIF, points", "step_dif", "{:.0f}"),
        ("waste", "waste", "{:.1%}"),
        ("ETT error (MAPE)", "ett_mape", "{:.1%}"),
        ("time ÷ fluid limit", "time_over_fluid", "{:.3f}"),
        ("speed-up over bsp", "speedup", "{:.2f}"),
        ("speed-up over bsp at the fluid limit", "speedup_limit", "{:.2f}"),
    )
    for title, key, form in rows:
        values = [figures["presets"][name][key] for name in names]
        table.add_row(title, *("–" if v is None else form.format(v) for v in values))
    out.print(table)
    coverage = Table(title="coverage: every sample once per epoch?", title_justify="left")
    for column in ("epoch", "samples", "used", "missing", "duplicated", "exact"):
        coverage.add_column(column, justify="right")
    for epoch in figures["coverage"]["epochs"]:
        coverage.add_row(
            *(str(epoch[k]) for k in ("epoch", "samples", "used", "missing", "duplicated")),
            "yes" if epoch["exact"] else "NO",
        )
    out.print(coverage)
    if figures["coverage"]["dropped"]:
        out.print(f"the gradients of {figures['coverage']['dropped']} samples were not applied")
    for relaxed in figures["synchronisation"]:
        out.print(relaxed["words"])
    for choice in figures["chosen"]:
        out.print(f"{choice['policy']}, from step {choice['from']}: {choice['why']}")
    for fallback in figures["fallbacks"]:
        out.print(
            f"{fallback['policy']} ({fallback['synchroniser']}): {fallback['segments']} segments "
            f"in steps {fallback['from']}–{fallback['to']} were all-reduced, because "
            f"{fallback['why']}."
        )
    switched = figures["switches"][-1]
    out.print(f"switched to {switched['policy']} at step {switched['effective_step']}")
    out.print(f"held-out accuracy {figures['accuracy']:.3f}")
    factors = ", ".join(f"{s:g}" for s in figures["emulated"]["slowdowns"])
    out.print(f"The ranks' device speeds are emulated: time per point × {factors}.")


def _slowdowns(text: str) -> list[float]:
    from paceline.node.starting import foreground

    # Parsing raises an error if the text is not a list of factors.
    emulated = foreground.emulation(text, 1.0, 0.0, None)
    return emulated["a_s"]


class _Interrupted(BaseException):
    """SIGINT or SIGTERM, as an exception, so that context managers stop every child."""


def _on_signal(number: int, _frame: object) -> None:
    raise _Interrupted(number)


def _guarded(work: Callable[[], None]) -> None:
    """Run a command. Turn a signal into an exit code (see docs/internals.md)."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _on_signal)
    try:
        work()
    except _Interrupted as stop:
        err.print("\nstopped")
        raise typer.Exit(128 + stop.args[0]) from None


Slowdown = Annotated[
    str,
    typer.Option(
        "--slowdown", help="Emulated slowness of each rank: factors of the time per size unit."
    ),
]
Port = Annotated[int, typer.Option(help="Port of dashboard and REST.")]
_DATA = "Directory for database, logs and runs."
Data = Annotated[Path, typer.Option(help=_DATA)]


def register(app: typer.Typer) -> None:
    """Add `up` and `demo` to the command line."""

    @app.command()
    def up(
        port: Port = 8000,
        host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
        data: Annotated[Path, typer.Option(envvar="PACELINE_DATA", help=_DATA)] = Path(".paceline"),
        token: Annotated[
            str | None,
            typer.Option(
                envvar="PACELINE_TOKEN",
                help="Token for admins, required if --host is not a loopback address.",
            ),
        ] = None,
    ) -> None:
        """Start control plane, dashboard, bus, database and an agent. Ctrl-C stops all."""

        def work() -> None:
            _starting()
            with Stack(data, port, host, token) as stack:
                typer.echo(f"Paceline on {stack.url} (Ctrl-C stops it)")
                _let_in(stack, "/")
                _wait_for_end(stack)

        _guarded(work)

    @app.command()
    def demo(
        slowdown: Slowdown = "1,1,1.5,3",
        port: Annotated[
            int | None,
            typer.Option(
                help="Port of dashboard and REST; default: 8000, or any free port with --report."
            ),
        ] = None,
        data: Data = Path(".paceline/demo"),
        epochs: Annotated[
            int | None,
            typer.Option(min=1, help="Number of epochs; default: 60, or 15 with --report."),
        ] = None,
        as_report: Annotated[
            bool,
            typer.Option(
                "--report",
                help="Train under bsp, switch the policy during the run, and print a report.",
            ),
        ] = False,
        to: Annotated[str, typer.Option(help="With --report: policy to switch to.")] = "chronica",
        switch_at: Annotated[
            int, typer.Option(min=1, help="With --report: step at which the policy is switched.")
        ] = 64,
        as_json: Annotated[
            bool, typer.Option("--json", help="With --report: print the report as JSON.")
        ] = False,
    ) -> None:
        """Train a real model with emulated device speeds, to watch in a browser or for a report."""
        slowdowns = _slowdowns(slowdown)
        example("plaid")
        # The example trains on recordings that sktime provides.
        if find_spec("sktime") is None:
            raise MissingExtraError("paceline demo", "demo", "sktime")

        def work() -> None:
            if as_report:
                with Stack(data, 0 if port is None else port) as stack:
                    err.print(f"training on {stack.url}; device speeds are emulated: {slowdown}")
                    figures = report(stack, slowdowns, epochs or 15, switch_at, ("bsp", to))
                if as_json:
                    sys.stdout.write(json.dumps(figures) + "\n")
                else:
                    print_report(figures)
                if not figures["coverage"]["exact"]:
                    raise PacelineError("an epoch did not use each sample exactly once")
            else:
                _starting()
                with Stack(data, 8000 if port is None else port) as stack:
                    _watch(stack, slowdowns, epochs or 60)

        _guarded(work)


def _starting() -> None:
    err.print("starting control plane, dashboard, bus, database and an agent …")


def _watch(stack: Stack, slowdowns: list[float], epochs: int) -> None:
    from paceline.node.starting.progress import ProgressPoller
    from paceline.node.starting.screen import shown

    result = (stack.data / "result.json").resolve()
    run = start_run(stack, slowdowns, epochs, "bsp", result)
    err.print(f"Paceline on {stack.url}/runs/{run['id']} (Ctrl-C stops it)")
    _let_in(stack, f"/runs/{run['id']}")
    factors = ", ".join(f"{factor:g}" for factor in slowdowns)
    err.print(
        f"The ranks' device speeds are emulated: time per point × {factors}. "
        "Switch the policy to chronica in the browser."
    )
    with stack.client() as client, shown(ProgressPoller(client, run["id"])) as screen:
        follow(stack, run["id"], until=lambda _: False, screen=screen)
    err.print("the run has ended; the dashboard runs until Ctrl-C")
    _wait_for_end(stack)


def _let_in(stack: Stack, page: str) -> None:
    """Print a link that logs a browser in, and open it if this machine has a screen."""
    link = f"{stack.login_link()}&next={quote(page)}"
    err.print(f"Link to log one browser in, within ten minutes: {link}", soft_wrap=True)
    other = "" if stack.url == DEFAULT_SERVER else f" --server {stack.url}"
    err.print(f"`paceline open{other}` prints another link.", soft_wrap=True)
    screen = sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    if screen and err.is_terminal:
        # Other users of the machine can read the browser's arguments, so a file contains the link.
        path = (stack.data / "open.html").resolve()
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f'<meta http-equiv="refresh" content="0;url={escape(link)}">')
        webbrowser.open(path.as_uri())


def _wait_for_end(stack: Stack) -> None:
    while True:
        _check(stack)
        # A signal ends the pause.
        time.sleep(1)


def _check(stack: Stack) -> None:
    for name, child in (("server", stack.server), ("agent", stack.agent)):
        if child is not None and child.poll() is not None:
            log = stack.data / f"{name}.log"
            raise PacelineError(f"paceline {name} ended with code {child.returncode}; see {log}")
