"""`paceline logs`: prints the output of a run's ranks, from all nodes of the run.

The command lists the run's logs, chooses those that the options select, and prints their last
lines. With ``--follow`` it then requests new lines until the run has ended. `Printer` writes the
lines of several logs to standard output, each with the rank that printed it.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from paceline.commands.options import Connection, Json, RunId, grouped
from paceline.commands.printing import local_time, print_json, print_table, safe, spans
from paceline.core.errors import InputError, PacelineError

if TYPE_CHECKING:
    from paceline.node.client import Client

_POLL_S = 1.0
_MOST_LOG_BYTES = 262_144
_FINAL = ("finished", "failed", "stopped")


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("logs")(logs)


@dataclass(frozen=True, kw_only=True)
class LogSelection:
    """The logs to print, and the number of lines to print from the end of each log."""

    rank: Annotated[
        list[int] | None,
        typer.Option(
            min=0, help="Print only logs of this rank; repeatable.", show_default="all ranks"
        ),
    ] = None
    launcher: Annotated[
        bool,
        typer.Option(
            "--launcher",
            help="Print the log of the launcher, the process that starts the ranks, instead of the "
            "ranks' logs.",
        ),
    ] = False
    attempt: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Print only logs of this attempt. Attempts are the starts of the ranks, numbered "
            "from 0.",
            show_default="the newest",
        ),
    ] = None
    output: Annotated[
        Literal["stdout", "stderr", "both"],
        typer.Option(help="Which of the ranks' output streams to print."),
    ] = "both"
    lines: Annotated[
        int,
        typer.Option(
            "--lines",
            "-n",
            min=0,
            max=10_000,
            help="Number of lines to print from the end of each log; 0: all lines.",
        ),
    ] = 50

    @property
    def ranks(self) -> frozenset[int]:
        """The selected ranks; empty: all ranks."""
        return frozenset(self.rank or ())

    @property
    def outputs(self) -> Sequence[str]:
        """The selected output streams of each rank."""
        return ("stdout", "stderr") if self.output == "both" else (self.output,)

    def of(self, files: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the selected logs. Ranks' logs are all of one attempt, by default the newest."""
        if self.launcher:
            return [file for file in files if file["rank"] is None]
        mine = [
            file
            for file in files
            if file["rank"] is not None
            and (not self.ranks or file["rank"] in self.ranks)
            and file["output"] in self.outputs
        ]
        newest = max((file["attempt"] for file in mine), default=0)
        wanted = newest if self.attempt is None else self.attempt
        return [file for file in mine if file["attempt"] == wanted]


@grouped
def logs(
    *,
    run_id: RunId,
    selection: LogSelection,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new output until the run has ended.")
    ] = False,
    listing: Annotated[
        bool, typer.Option("--list", help="List the run's logs and their nodes; print no log.")
    ] = False,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Print the output of a run's ranks, from all nodes of the run.

    If logs of several ranks are printed, each line begins with its rank. The token must have the
    role operator.
    """
    if as_json and not listing:
        raise InputError("--json: give --list, too; the logs themselves are plain text")
    if follow and (listing or selection.attempt is not None):
        raise InputError("--follow prints the newest attempt: leave out --attempt and --list")
    with connection.client() as client:
        run = client.run(run_id)
        if listing:
            _print_list(client.call("GET", f"/runs/{run}/logs"), as_json)
            return
        reader = LogReader(client, run, selection)
        try:
            missing = reader.follow() if follow else reader.once()
        except KeyboardInterrupt:
            raise typer.Exit(128 + signal.SIGINT) from None
        if missing:
            raise typer.Exit(PacelineError.exit_code)


class LogReader:
    """A reader and printer of the selected logs of a run."""

    def __init__(self, client: Client, run: str, selection: LogSelection) -> None:
        self._client = client
        self._run = run
        self._selection = selection
        self._lines = selection.lines
        self._printer = Printer()
        # For each log, the offset in bytes up to which it was printed.
        self._offsets: dict[Log, int] = {}
        # The attempt whose logs are being printed.
        self._attempt: int | None = None
        # Problems that were printed: each is printed only once.
        self._problems: set[str] = set()
        self._begun = False

    def once(self) -> bool:
        """Print the existing logs; return True if a node's logs cannot be read.

        Raise an InputError if no log is selected, or if a selected rank has none.
        """
        known = self._list()
        files = self._selection.of(known["logs"])
        missing = self._selection.ranks - {file["rank"] for file in files}
        if not files or (missing and not self._selection.launcher):
            raise InputError(self._nothing(missing))
        self._print(files)
        self._printer.finish()
        return bool(self._problems)

    def follow(self) -> bool:
        """Print output until the run has ended; return True if a node's logs cannot be read."""
        while not self._tried(self._followed):
            time.sleep(_POLL_S)
        self._printer.finish()
        if not self._offsets:
            raise InputError(self._nothing(self._selection.ranks))
        return bool(self._problems)

    def _followed(self) -> bool:
        known = self._list()
        self._begun = True
        return self._print_new(known)

    def _tried(self, call: Callable[[], bool]) -> bool:
        """Return the result of `call`, or False if it failed and a retry may help.

        Raise the error of `call` if no retry can help.
        """
        from paceline.node.client import ServerUnreachable

        try:
            return call()
        except PacelineError as error:
            hopeless = not self._begun and isinstance(error, InputError | ServerUnreachable)
            if hopeless or self._is_done():
                raise
            if str(error) not in self._problems:
                _say(str(error))
            self._problems = {str(error)}
        return False

    def _print_new(self, known: dict[str, Any]) -> bool:
        """Print new output; return True if the run has ended and all output was printed."""
        files = self._selection.of(known["logs"])
        # The rest of the earlier attempt's output is printed before the new attempt's output.
        earlier = [file for file in known["logs"] if Log.of(file) in self._offsets]
        newest = max((file["attempt"] or 0 for file in files), default=None)
        if newest is not None and newest != self._attempt:
            self._print([file for file in earlier if file not in files])
            if self._attempt is not None:
                self._printer.finish()
                _say(f"attempt {newest} starts")
                # The new attempt is printed from its start.
                self._lines = 0
            self._attempt = newest
        self._print(files)
        return known["state"] in _FINAL and not any(file["may_grow"] for file in files)

    def _print(self, files: Sequence[dict[str, Any]]) -> None:
        self._printer.several |= len(files) > 1
        self._printer.prefixed |= len({Log.of(file).prefix for file in files}) > 1
        for file in files:
            log = Log.of(file)
            if file["size"] < self._offsets.get(log, 0):
                # The log is shorter than before: another file has replaced it.
                self._offsets[log] = 0
            if file["size"] > self._offsets.get(log, 0):
                for text in self._parts(log):
                    self._printer.write(log, text)

    def _parts(self, log: Log) -> Iterator[str]:
        query: dict[str, Any] = {"limit": _MOST_LOG_BYTES, "node": log.node}
        if log.rank is not None:
            query |= {"output": log.output, "attempt": log.attempt}
        name = "launcher" if log.rank is None else str(log.rank)
        while True:
            if log in self._offsets or not self._lines:
                query["offset"] = self._offsets.get(log, 0)
            else:
                query["tail"] = self._lines
            part = self._client.call("GET", f"/runs/{self._run}/logs/{name}", params=query)
            query.pop("tail", None)
            if (gone := part["offset"] - query.get("offset", part["offset"])) > 0:
                of = f"{log.output} of rank {log.rank}" if log.rank is not None else "the launcher"
                _say(f"{of}: {gone} bytes are missing here; the middle of a long log is deleted")
            self._offsets[log] = part["next"]
            yield part["text"]
            if not part["text"] or part["next"] >= part["size"]:
                return

    def _list(self) -> dict[str, Any]:
        query = {"from_attempt": self._selection.attempt or self._attempt or 0}
        known: dict[str, Any] = self._client.call("GET", f"/runs/{self._run}/logs", params=query)
        problems = {node["problem"] for node in known["nodes"] if node["problem"]}
        for problem in sorted(problems - self._problems):
            _say(problem)
        self._problems = problems
        return known

    def _is_done(self) -> bool:
        from paceline.node.client import ServerUnreachable

        try:
            return self._client.call("GET", f"/runs/{self._run}")["state"] in _FINAL
        except ServerUnreachable:
            return False

    def _nothing(self, missing: frozenset[int]) -> str:
        files = self._client.call("GET", f"/runs/{self._run}/logs")["logs"]
        ranks = sorted({file["rank"] for file in files if file["rank"] is not None})
        attempts = sorted({file["attempt"] for file in files if file["attempt"] is not None})
        run = self._client.call("GET", f"/runs/{self._run}")
        if ranks and run.get("driver"):
            there = (
                "its script starts its ranks itself, so leave out --rank and --attempt: "
                "the log has the output of the script, and on Ray the output of the "
                "workers"
            )
        elif ranks:
            there = f"there are ranks {spans(ranks)} and attempts {spans(attempts)}"
        elif run["attempt"] is None:
            there = "no rank has started"
        else:
            there = (
                "no agent serves its logs; if `paceline run` started the run, start an agent on "
                "that machine with the same --data directory"
            )
        which = f"log of rank {spans(sorted(missing))}" if missing else "such log"
        return f"run {self._run} has no {which}: {there}; --list lists all"


def _say(line: str) -> None:
    typer.echo(f"paceline: {line}", err=True)


def _print_list(known: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(known)
        return
    for node in known["nodes"]:
        if node["problem"]:
            _say(node["problem"])
    rows = [
        {
            **file,
            "rank": "launcher" if file["rank"] is None else file["rank"],
            "modified": local_time(file["modified_at"]),
        }
        for file in known["logs"]
    ]
    print_table(("rank", "output", "attempt", "node", "size", "modified"), rows)


class Log(NamedTuple):
    """The fields that identify a log."""

    node: str
    rank: int | None
    output: str | None
    attempt: int | None

    @classmethod
    def of(cls, file: dict[str, Any]) -> Log:
        """Return the identity of a listed log."""
        return cls(file["node"], file["rank"], file["output"], file["attempt"])

    @property
    def prefix(self) -> str:
        """Prefix of this log's lines where lines of several ranks are printed together."""
        return f"[{self.node}] " if self.rank is None else f"[rank {self.rank}] "


@dataclass
class Printer:
    """A printer of logs to standard output; with several logs, it prints only complete lines."""

    several: bool = False
    # True if each line gets the prefix of its log, because the logs are of several ranks.
    prefixed: bool = False
    terminal: bool = field(default_factory=lambda: sys.stdout.isatty())
    # For each log, the start of a line whose end has not arrived yet.
    _rest: dict[Log, str] = field(default_factory=dict)

    def write(self, log: Log, text: str) -> None:
        """Print the next part of a log."""
        if not self.several:
            self._out(text)
            return
        *lines, rest = (self._rest.pop(log, "") + text).split("\n")
        prefix = log.prefix if self.prefixed else ""
        self._out("".join(f"{prefix}{line}\n" for line in lines))
        if rest:
            self._rest[log] = rest

    def finish(self) -> None:
        """Print last lines that do not end with a newline."""
        for log, rest in self._rest.items():
            self._out(f"{log.prefix if self.prefixed else ''}{rest}\n")
        self._rest.clear()

    def _out(self, text: str) -> None:
        if self.terminal:
            text = safe(text)
        sys.stdout.buffer.write(text.encode(errors="replace"))
        sys.stdout.buffer.flush()
