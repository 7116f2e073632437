"""An engine in this process: its jobs are what a test says they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any, ClassVar

import msgspec
import pytest
import redis

from paceline_backend import backends, requests
from paceline_backend.backends import Availability, Engine, EngineOptions, Job, Order, registry
from paceline_backend.control import engines
from paceline_backend.control.engines import Engines
from paceline_backend.requests import enlist
from paceline_backend.store import Store, runs, tokens
from paceline_backend.store.new_runs import NewRun
from support.groups import ReportedRuns


class TableEngine(Engine):
    """Its jobs stand in a table, of the class: objects keep no state."""

    name: ClassVar[str] = "table"
    title: ClassVar[str] = "Table"
    options: ClassVar[type[msgspec.Struct]] = EngineOptions
    jobs: ClassVar[dict[str, Job]] = {}
    orders: ClassVar[list[Order]] = []
    away: ClassVar[bool] = False
    refuses: ClassVar[str] = ""
    looks: ClassVar[int] = 0
    cordons: ClassVar[list[tuple[str, str | None]]] = []  # as they were asked for

    def availability(self) -> Availability:
        return Availability(not self.away, "1", "away" if self.away else None)

    def submit(self, order: Order) -> str:
        self._answer()
        if self.refuses:
            raise backends.EngineRefusedError(self.refuses)
        ref = str(len(self.jobs) + 1)
        self.orders.append(order)
        self.jobs[ref] = Job(order.label, ref, "queued", "Resources")
        return ref

    def look(self, prefix: str) -> Sequence[Job]:
        self._answer()
        type(self).looks += 1
        return [job for job in self.jobs.values() if job.label.startswith(prefix)]

    def stop(self, refs: Sequence[str]) -> None:
        self._answer()
        for ref in refs:
            become(ref, "ended", "CANCELLED", type(self))

    def cordon(self, host: str, reason: str | None) -> None:
        self._answer()
        if self.refuses:
            raise backends.EngineRefusedError(self.refuses)
        self.cordons.append((host, reason))

    def _answer(self) -> None:
        if self.away:
            raise backends.EngineAwayError("no route")


class FarEngine(TableEngine):
    name: ClassVar[str] = "far"
    title: ClassVar[str] = "Far"


_ENGINES = {kind.name: kind for kind in (TableEngine, FarEngine)}


def become(ref: str, state: str, reason: str = "", of: type[TableEngine] = TableEngine) -> None:
    cancelled = reason.startswith("CANCELLED")
    of.jobs[ref] = replace(of.jobs[ref], state=state, reason=reason, cancelled=cancelled)


@contextmanager
def table_engine(name: str = "table") -> Iterator[type[TableEngine]]:
    """The engine is registered beside those that are, and has no jobs."""
    kind = _ENGINES[name]
    entry = metadata.EntryPoint(name, f"{__name__}:{kind.__name__}", registry.GROUP)
    known = [*registry.entry_points(group=registry.GROUP), entry]
    kind.jobs, kind.orders, kind.cordons = {}, [], []
    kind.away, kind.refuses, kind.looks = False, "", 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", lambda group: known)
        patch.setattr(engines, "ENGINE_LEASE_S", 600.0)  # on a busy machine a look may take 10 s
        registry._backends.cache_clear()
        yield kind
    registry._backends.cache_clear()


class TableRuns(ReportedRuns):
    """Runs on the table's engine, the worker that looks after them, and time that a test sets."""

    now = 1000.0

    def __init__(self, store: Store, bus: redis.Redis, bus_url: str) -> None:
        super().__init__(store, bus, bus_url)
        self.worker = self.another()
        self.enlist = partial(enlist, store, bus_url)

    def clock(self) -> float:
        return self.now

    def another(self, name: str = "worker") -> Engines:
        """A worker: another one, or the first started again."""
        return Engines(self.store, name, clock=self.clock)

    def look(self) -> None:
        self.worker.look(self.bus)

    def after(self, seconds: float, every_s: float = 1.0) -> None:
        """Looks every second, or less often, until so much time is over."""
        end = self.now + seconds
        while self.now < end:
            self.now += every_s
            self.look()

    def begin(self, least: int = 1, most: int = 1) -> str:
        fields: dict[str, Any] = {"nodes_min": least, "nodes_max": most, "backend": "table"}
        new = NewRun("r", "/shared/train.py", 1, "bsp", server="http://head:1", **fields)
        return requests.launch(self.store, self.bus_url, new, self.by, start=True)

    def come(self, run: str, *names: str) -> None:
        self.answer(*names, run=run)
        for name in names:
            assert self.enlist(run, name).needed

    def shown(self, run: str) -> tuple[str, str | None]:
        known = self.row(run)
        return known["state"], known["message"]

    def jobs(self, run: str) -> Any:
        return self.row(run)["backend_jobs"]["jobs"]

    def key(self, run: str) -> int:
        with self.store.read() as connection:
            return runs.key_of(connection, run)

    def valid(self, run: str) -> int:
        """How many tokens of a run are worth something."""
        with self.store.read() as connection:
            known = tokens.listed(connection)
        return sum(token["run"] == run and token["revoked_at"] is None for token in known)
