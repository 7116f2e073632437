"""A server and its runs as Python objects.

Methods that call the server raise `PacelineError` if the server does not answer or requires a
token, and `InputError` if the server rejects the request.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast
from urllib.parse import quote

from paceline.client import frames
from paceline.client.frames import DataFrame
from paceline.core.errors import InputError
from paceline.node.client import Client

DEFAULT_SERVER = "http://127.0.0.1:8000"
Table = Literal["steps", "worker-steps", "rounds", "segments", "switches"]
Format = Literal["csv", "ndjson", "parquet"]
_FORMATS = {".csv": "csv", ".ndjson": "ndjson", ".jsonl": "ndjson", ".parquet": "parquet"}
_PAGE = 500
# Maximum size in bytes of an export that is held in memory; a larger one goes to a temporary file.
_IN_MEMORY = 64 << 20
# Maximum number of steps that a figure shows for each metric.
_FIGURE_POINTS = 2_000


def connect(url: str | None = None, token: str | None = None, *, frames: str = "pandas") -> Server:
    """Connect to a server; use the connection in a ``with``, or call `Server.close`.

    Args:
        url: URL of the server; None: ``PACELINE_SERVER``, else http://127.0.0.1:8000.
        token: None: ``PACELINE_TOKEN``, else the token that a server on this machine stores for its
            user.
        frames: library of the data frames: ``pandas`` or ``polars``.

    Raises:
        InputError: the URL or `frames` is invalid.
    """
    url = url or os.environ.get("PACELINE_SERVER") or DEFAULT_SERVER
    return Server(Client(url, token or os.environ.get("PACELINE_TOKEN")), frames)


class Server:
    """A client of one control plane; `connect` creates it."""

    def __init__(self, client: Client, frames_of: str = "pandas") -> None:
        self.client = client
        self.frames = frames.checked(frames_of)

    def run(self, run: str) -> Run:
        """Return a run by its id, or by a prefix that no other run's id has."""
        return Run(self, self.client.run(run))

    def runs(self, *, limit: int | None = None, sort: str = "-created_at", **which: Any) -> Runs:
        """Return the runs that match a filter, sorted.

        Args:
            limit: maximum number of runs; None: all runs.
            sort: ``created_at``, ``waste``, ``cost`` and so on. A leading ``-`` sorts in descending
                order.
            which: parameters of ``GET /runs``, such as ``tag="nightly"``, ``waste_min=0.2`` or
                ``state=["failed", "stopped"]``.
        """
        rows = list(self._pages({**which, "sort": sort}, limit))
        return Runs(self, rows)

    def _pages(self, query: dict[str, Any], limit: int | None) -> Iterator[dict[str, Any]]:
        left = limit
        cursor: str | None = None
        while left is None or left > 0:
            asked = {**query, "limit": _PAGE if left is None else min(_PAGE, left)}
            asked |= {} if cursor is None else {"cursor": cursor}
            page = self.client.call("GET", "/runs", params=_given(asked))
            yield from page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                return
            left = None if left is None else left - len(page["items"])

    def history(self, by: Sequence[str] | str = ("day",), **which: Any) -> DataFrame:
        """Return the totals and the cost of each group of runs, a row for each group.

        Args:
            by: properties that define the groups: any of ``day``, ``run``, ``node``, ``policy``,
                ``tag``, ``device``, ``backend``.
            which: as in `runs`; also ``from_day`` and ``to_day``, Unix times.
        """
        groups = [by] if isinstance(by, str) else list(by)
        rows = self.client.call("GET", "/history", params=_given({**which, "by": groups}))
        return frames.of_rows(rows, self.frames)

    def compare(self, *sides: str) -> dict[str, Any]:
        """Compare two to six runs, or parts of runs; return the answer of ``GET /compare``.

        Each of `sides` is ``RUN``, ``RUN:100-499`` (steps) or ``RUN@1`` (policy version).
        """
        whole = [self._side(side) for side in sides]
        return dict(self.client.call("GET", "/compare", params={"side": whole}))

    def _side(self, side: str) -> str:
        end = min((at for at in map(side.find, ":@") if at >= 0), default=len(side))
        return self.client.run(side[:end]) + side[end:]

    def tags(self) -> DataFrame:
        """Return all tags, and the number of runs with each."""
        return frames.of_rows(self.client.call("GET", "/tags"), self.frames)

    def close(self) -> None:
        """Close the connection."""
        self.client.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Runs(list["Run"]):
    """A list of runs in the requested order."""

    def __init__(self, server: Server, rows: Sequence[dict[str, Any]]) -> None:
        super().__init__(Run(server, row["id"], row) for row in rows)
        self._frames = server.frames

    def table(self) -> DataFrame:
        """Return a data frame with a row for each run, and columns for its metrics and its cost."""
        rows = [
            {**run.about, **(run.about["figures"] or {}), **_cost_of(run.about)} for run in self
        ]
        names = list(dict.fromkeys(name for row in rows for name in row if name != "figures"))
        flat = [{name: row.get(name) for name in names} for row in rows]
        return frames.of_rows(flat, self._frames)


class Run:
    """A run, as `Server.run` and `Server.runs` return it.

    `about` is the server's description of the run; None: it is requested at first use.
    """

    def __init__(self, server: Server, run: str, about: dict[str, Any] | None = None) -> None:
        self.id = run
        self._server = server
        self._about = about

    def __repr__(self) -> str:
        return f"Run({self.id!r})"

    @property
    def about(self) -> dict[str, Any]:
        """The server's description of the run (``GET /runs/{id}``); `refresh` updates it."""
        return self._about if self._about is not None else self.refresh()

    def refresh(self) -> dict[str, Any]:
        """Request the server's description of the run again, and return it."""
        self._about = dict(self._get(""))
        return self._about

    def steps(
        self,
        first: int | None = None,
        last: int | None = None,
        *,
        since: float | None = None,
        until: float | None = None,
    ) -> DataFrame:
        """Return complete steps, a row for each: times in seconds, SE, waste, loss and so on.

        Args:
            first: first step; None: the first step of the run.
            last: last step, included; None: the last step of the run.
            since: only steps that ended at this Unix time or later.
            until: only steps that ended before this Unix time.
        """
        return self._table("steps", {"from": first, "to": last, "since": since, "until": until})

    def worker_steps(
        self,
        first: int | None = None,
        last: int | None = None,
        *,
        ranks: Sequence[int] | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> DataFrame:
        """Return the steps of each rank, a row for each step and rank, with all stored fields.

        `first`, `last`, `since` and `until` select steps as in `steps`. `ranks` None: all ranks.
        """
        query = {"from": first, "to": last, "since": since, "until": until}
        return self._table("worker-steps", {**query, "ranks": _ranks(ranks)})

    def rounds(self) -> DataFrame:
        """Return the rounds of relaxed synchronisation."""
        return self._table("rounds", {})

    def segments(self) -> DataFrame:
        """Return the run's segments, a row for each."""
        return self._table("segments", {})

    def switches(self) -> DataFrame:
        """Return the run's policy switches, a row for each requested policy."""
        return self._table("switches", {})

    def epochs(self) -> DataFrame:
        """Return a summary of each epoch."""
        return self._rows("/epochs")

    def effects(self) -> DataFrame:
        """Return the measured effect of each switch."""
        return self._rows("/effects")

    def workers(self) -> DataFrame:
        """Return recent measurements of each rank."""
        return self._rows("/workers")

    def devices(self) -> dict[str, Any]:
        """Return the device of each rank, as ``GET /runs/{id}/devices`` answers."""
        return dict(self._get("/devices"))

    def forecasts(self) -> list[dict[str, Any]]:
        """Return the stored forecasts, with the decisions that `auto` based on them."""
        return list(self._get("/forecasts"))

    def samples(self, first: int, last: int) -> list[dict[str, Any]]:
        """Return each rank's samples in the steps from `first` to `last`, `last` included.

        Each item has ``step``, ``rank``, ``samples`` and so on.
        """
        items: list[dict[str, Any]] = []
        start: int | None = first
        while start is not None:
            page = self._get("/samples", {"from": start, "to": last})
            items += page["items"]
            start = page["next_from"]
        return items

    def verdict(self, first: int | None = None, last: int | None = None) -> dict[str, Any]:
        """Return the verdict: which ranks slow the run down, why, since when, and the cost."""
        return dict(self._get("/verdict", {"from": first, "to": last}))

    def plot(self, metrics: Sequence[str] = ("step_s", "waste", "loss")) -> Any:
        """Plot metrics over steps, with a line at each policy's first step; return a Plotly figure.

        Metrics are any of ``step_s``, ``waste``, ``se``, ``loss``, ``comm_s``, ``compute_max``,
        ``dif``, ``ett_error``.
        """
        columns = self._get("/steps", {"points": _FIGURE_POINTS})
        title = f"{self.about['name']} ({self.id})"
        return frames.figure(title, columns, self._get("/switches"), metrics)

    def export(self, file: str | Path, table: Table = "steps", form: Format | None = None) -> Path:
        """Write all rows of a table to a file while they arrive.

        `form` None: the extension of the file's name determines the format.

        Raises:
            InputError: the file's name has no known extension.
            PacelineError: the server does not answer, or cannot write Parquet.
            OSError: the file cannot be written.
        """
        path = Path(file)
        query = {"table": table, "format": form or form_of(path)}
        pieces = self._server.client.download(f"/runs/{self.id}/export", query)
        # The request is sent before the file is opened, so that an existing file is not emptied if
        # the server rejects the request.
        first = next(pieces, b"")
        with path.open("wb") as opened:
            opened.writelines(chain([first], pieces))
        return path

    def tag(self, tag: str) -> None:
        """Add a tag to the run."""
        self._about = self._server.client.call("PUT", f"/runs/{self.id}/tags/{quote(tag, '')}")

    def untag(self, tag: str) -> None:
        """Remove a tag from the run."""
        self._about = self._server.client.call("DELETE", f"/runs/{self.id}/tags/{quote(tag, '')}")

    def note(self, text: str) -> None:
        """Replace the run's note.

        Raise an InputError if another client has changed the run at the same moment.
        """
        self._about = self._server.client.change("PUT", self.id, "note", {"note": text})

    def _get(self, path: str, query: dict[str, Any] | None = None) -> Any:
        return self._server.client.call("GET", f"/runs/{self.id}{path}", params=_given(query or {}))

    def _rows(self, path: str) -> DataFrame:
        return frames.of_rows(self._get(path), self._server.frames)

    def _table(self, table: Table, query: dict[str, Any]) -> DataFrame:
        asked = _given({**query, "table": table, "format": "csv"})
        pieces = self._server.client.download(f"/runs/{self.id}/export", asked)
        with tempfile.SpooledTemporaryFile(_IN_MEMORY) as file:
            file.writelines(pieces)
            file.seek(0)
            return frames.of_csv(file, self._server.frames)


def _cost_of(run: dict[str, Any]) -> dict[str, Any]:
    cost = run["cost"] or {}
    names = {"cost": "amount", "waited_cost": "waited", "currency": "currency"}
    return {name: cost.get(of_run) for name, of_run in names.items()}


def form_of(path: Path) -> Format:
    """Return the format of a file's name extension; raise an InputError if it is unknown."""
    form = _FORMATS.get(path.suffix)
    if form is None:
        raise InputError(f"{path}: the name must end with {', '.join(_FORMATS)}")
    return cast(Format, form)


def _given(query: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in query.items() if value is not None}


def _ranks(ranks: Sequence[int] | None) -> str | None:
    return None if ranks is None else ",".join(map(str, ranks))
