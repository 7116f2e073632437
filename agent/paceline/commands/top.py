"""`paceline top`: runs, verdicts and nodes, live in a terminal."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.options import Server, Token, TokenFile, connected
from paceline.commands.printing import plain, print_table
from paceline.core.errors import InputError, PacelineError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from paceline.node.client import Client

_LISTED = 100  # newest runs
_ACTIVE = ("pending", "queued", "starting", "running")
_NAME = 24  # characters of a run's name
_TICK_S = 0.1
_DRAW_S = 0.5
_PATIENCE_S = 5.0  # without an answer, after which the screen says so
_KEYS = "s sort · r reverse · a ended runs · n nodes · ↑ ↓ scroll · q quit"
_STYLES = {"held-up": "bold red", "watch": "yellow", "healthy": "green"}
_WORDS = {"held-up": "Held up", "watch": "To watch", "healthy": "Healthy", "unknown": ""}
_RANK = {"held-up": 3, "watch": 2, "unknown": 1, "healthy": 0}

Every = Annotated[
    float, typer.Option("--every", min=0.2, max=3600, help="Seconds between two looks.")
]


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command()(top)


def top(
    every: Every = 2.0, server: Server = None, token: Token = None, token_file: TokenFile = None
) -> None:
    """Shows runs, verdicts and nodes, live; without a terminal, once as tables."""
    with connected(server, token, token_file) as client:
        first = look(client, {})
        if not (sys.stdout.isatty() and sys.stdin.isatty()):
            _print(first)
            return
        with client.twin() as own:
            watch(Feed(own, first, every))


@dataclass(frozen=True)
class Overview:
    """What the server knew at a time.

    Args:
        at: Unix time.
        runs: newest first, as REST shows them.
        nodes: as REST shows them.
        verdicts: of active runs, by id.
        problem: why there is nothing newer; empty: this is the newest.
    """

    at: float
    runs: Sequence[Mapping[str, Any]]
    nodes: Sequence[Mapping[str, Any]]
    verdicts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    problem: str = ""


def look(client: Client, known: Mapping[str, Mapping[str, Any]]) -> Overview:
    """Asks a server for all of it.

    Args:
        client: of the server.
        known: verdicts so far: of runs that have not come further since, they stay.

    Raises:
        PacelineError: the server does not answer, or refuses.
    """
    runs = client.call("GET", "/runs", params={"limit": _LISTED})["items"]
    nodes = client.call("GET", "/nodes")
    verdicts: dict[str, Mapping[str, Any]] = {}
    for run in runs:
        if run["state"] not in _ACTIVE or run["step"] is None:
            continue
        earlier = known.get(run["id"])
        same = earlier is not None and earlier["step"] == run["step"]
        try:
            answer = earlier if same else client.call("GET", f"/runs/{run['id']}/verdict")
        except InputError:  # deleted meanwhile
            continue
        if answer is not None:
            verdicts[run["id"]] = {**answer, "step": run["step"]}
    return Overview(time.time(), runs, nodes, verdicts)


class Feed:
    """Looks again and again, in a thread of its own: keys are heeded meanwhile.

    A context manager.

    Args:
        client: of the server, for the thread alone.
        first: the first overview.
        every_s: seconds between two looks.
    """

    def __init__(self, client: Client, first: Overview, every_s: float) -> None:
        self.server = client.server
        self._now = first
        self._asked_at: float | None = None  # monotonic; None: nothing is asked
        self._client = client
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="top", daemon=True)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    @property
    def now(self) -> Overview:
        """The newest overview, with the problem if the server has not answered for long."""
        asked_at = self._asked_at
        waited_s = 0.0 if asked_at is None else time.monotonic() - asked_at
        if self._now.problem or waited_s < _PATIENCE_S:
            return self._now
        return replace(self._now, problem=f"asked {waited_s:.0f} s ago")

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self._asked_at = time.monotonic()
            try:
                self._now = look(self._client, self._now.verdicts)
            except PacelineError as error:
                self._now = replace(self._now, problem=str(error))
            self._asked_at = None


@dataclass(frozen=True)
class Row:
    """A run in the table."""

    run: Mapping[str, Any]
    verdict: Mapping[str, Any]

    @property
    def level(self) -> str:
        """Of the verdict; of an ended run, empty."""
        return str(self.verdict.get("level", "unknown")) if self.verdict else ""

    def known(self, name: str) -> float:
        """A figure of the verdict, for sorting; below all others where it is not known."""
        value = self.verdict.get(name)
        return -1.0 if value is None else float(value)


_Order = Callable[[Row], Any]
ORDERS: dict[str, _Order] = {
    "newest": lambda row: row.run["created_at"],
    "verdict": lambda row: (_RANK.get(row.level, -1), row.known("waste_now")),
    "waste": lambda row: row.known("waste_now"),
    "time per step": lambda row: row.known("step_time_s"),
    "name": lambda row: row.run["name"],
    "state": lambda row: row.run["state"],
}


@dataclass
class View:
    """What is shown, and in which order; keys change it."""

    order: str = "newest"
    reverse: bool = False
    ended: bool = True
    nodes: bool = True
    offset: int = 0

    def press(self, key: str) -> bool:
        """Does what a key means; whether to go on."""
        names = list(ORDERS)
        if key in ("q", "Q", "\x03", "\x04", "\x1b"):
            return False
        if key == "s":
            self.order = names[(names.index(self.order) + 1) % len(names)]
        elif key == "r":
            self.reverse = not self.reverse
        elif key == "a":
            self.ended = not self.ended
        elif key == "n":
            self.nodes = not self.nodes
        elif key in ("\x1b[A", "k"):
            self.offset = max(0, self.offset - 1)
        elif key in ("\x1b[B", "j"):
            self.offset += 1
        return True

    def rows(self, now: Overview) -> list[Row]:
        """The runs in their order: the largest, newest or worst first."""
        rows = [Row(run, now.verdicts.get(run["id"], {})) for run in now.runs]
        if not self.ended:
            rows = [row for row in rows if row.run["state"] in _ACTIVE]
        by_name = self.order in ("name", "state")
        rows.sort(key=ORDERS[self.order], reverse=self.reverse == by_name)
        return rows


def watch(feed: Feed) -> None:
    """Draws until somebody quits."""
    from rich.console import Console
    from rich.live import Live

    console, view = Console(highlight=False, markup=False, emoji=False), View()

    def drawn() -> RenderableType:
        return draw(console, feed.server, feed.now, view)

    live = Live(
        get_renderable=drawn,
        console=console,
        screen=True,
        auto_refresh=False,
        redirect_stderr=False,
        redirect_stdout=False,
    )
    with feed, _keys() as key_of, live:
        drawn_at = 0.0
        while True:
            key = key_of(_TICK_S)
            if key and not view.press(key):
                return
            if key or time.monotonic() - drawn_at > _DRAW_S:
                live.refresh()
                drawn_at = time.monotonic()


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that gives the next key within some seconds, or an empty text."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def key_of(timeout_s: float) -> str:
        if not select.select([descriptor], [], [], timeout_s)[0]:
            return ""
        return os.read(descriptor, 16).decode(errors="replace") or "q"  # its end: nobody is there

    try:
        tty.setcbreak(descriptor)
        yield key_of
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def draw(console: Console, server: str, now: Overview, view: View) -> RenderableType:
    """The whole screen."""
    from rich.console import Group
    from rich.text import Text

    rows = view.rows(now)
    nodes = list(now.nodes) if view.nodes else []
    room = max(3, console.height - 8 - (min(len(nodes), console.height // 3) + 3 if nodes else 0))
    view.offset = max(0, min(view.offset, len(rows) - room))
    shown = rows[view.offset : view.offset + room]
    parts: list[RenderableType] = [_head(server, now), _runs(shown)]
    if nodes:
        parts.append(_nodes(nodes[: max(1, console.height // 3)]))
    order = f"{view.order}{', reversed' if view.reverse else ''}"
    hidden = f" · {len(rows) - len(shown)} more runs" if len(shown) < len(rows) else ""
    parts.append(Text(f"sorted by {order}{hidden}", "dim"))
    parts.append(Text(_KEYS, "dim"))
    return Group(*parts)


def _head(server: str, now: Overview) -> RenderableType:
    from rich.text import Text

    active = [run for run in now.runs if run["state"] in _ACTIVE]
    held_up = [each for each in now.verdicts.values() if each.get("level") == "held-up"]
    alive = [node for node in now.nodes if node["alive"]]
    words = f"{len(active)} active runs · {len(held_up)} held up"
    words += f" · {len(alive)} of {len(now.nodes)} nodes answer"
    clock = time.strftime("%H:%M:%S", time.localtime(now.at))
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append("paceline top", "bold cyan").append(f"  {server}  {clock}  {words}")
    if now.problem:
        head.append(f"\nno newer answer: {plain(now.problem)}", "bold red")
    return head


def _table(*columns: str) -> Table:
    """A table with columns of figures to the right; the last column gives way in a narrow terminal.

    Ids and names of nodes are for copying: they are never cut.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in columns:
        right = name in ("epoch", "step", "per step", "waste", "cores")
        last = name == columns[-1]
        table.add_column(name, justify="right" if right else "left", no_wrap=not last)
    return table


def _row_text(words: str, style: str = "") -> Text:
    """Words of people in one row of the terminal."""
    from rich.text import Text

    return Text(plain(words), style, no_wrap=True, overflow="ellipsis")


def _runs(rows: Sequence[Row]) -> RenderableType:
    from rich.text import Text

    from paceline.node.starting.progress import duration

    table = _table(
        *("run", "name", "state", "policy", "epoch", "step", "per step", "waste", "verdict")
    )
    for row in rows:
        run, verdict = row.run, row.verdict
        epoch = "" if run["epoch"] is None else f"{run['epoch'] + 1}"
        if epoch and run["epochs"]:
            epoch += f"/{run['epochs']}"
        step_s, waste = verdict.get("step_time_s"), verdict.get("waste_now")
        said = _WORDS.get(row.level, "")
        if row.level in ("held-up", "watch") and verdict.get("what"):
            said += f": {verdict['what']}"
        if not verdict and run["message"]:
            said = run["message"].partition("\n")[0]
        table.add_row(
            run["id"],
            plain(run["name"])[:_NAME],
            run["state"],
            plain(run["policy"]),
            epoch,
            "" if run["step"] is None else f"{run['step'] + 1:,}",
            "" if step_s is None else duration(step_s),
            "" if waste is None else f"{100 * waste:.0f} %",
            _row_text(said, _STYLES.get(row.level, "")),
        )
    return table if rows else Text("\nno runs\n", "dim")


def _nodes(nodes: Sequence[Mapping[str, Any]]) -> RenderableType:
    from rich.text import Text

    table = _table("node", "state", "cores", "GPUs", "runs", "cordoned")
    for node in nodes:
        alive = node["alive"]
        cordoned = node.get("cordoned")
        why = ""
        if cordoned is not None:
            why = f"by {cordoned['by']}" + (f": {cordoned['reason']}" if cordoned["reason"] else "")
        table.add_row(
            plain(node["id"]),
            Text("answers" if alive else "silent", "green" if alive else "red"),
            str(node["cores"]),
            f"{len(node['gpus'])}" if node["gpus"] else "",
            " ".join(node["runs"]),
            _row_text(why, "yellow"),
        )
    return table


def _print(now: Overview) -> None:
    """The overview once, as tables."""
    columns = ("id", "name", "state", "policy", "epoch", "step", "verdict")
    rows = []
    for row in View().rows(now):
        what = row.verdict.get("what") if row.level in ("held-up", "watch") else ""
        said = ": ".join(filter(None, (_WORDS.get(row.level, ""), what)))
        rows.append({**row.run, "verdict": said or row.run["message"]})
    print_table(columns, rows)
    states = {True: "answers", False: "silent"}
    table = [
        {**node, "state": states[node["alive"]], "runs": " ".join(node["runs"])}
        for node in now.nodes
    ]
    print_table(("id", "state", "cores", "runs"), table)
