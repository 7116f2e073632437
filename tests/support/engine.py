"""An engine in this process: its jobs are what a test says they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from typing import ClassVar

import msgspec
import pytest

from paceline_backend import backends
from paceline_backend.backends import Engine, EngineOptions, Facts, Job, Order, registry
from paceline_backend.control import engines


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

    def facts(self) -> Facts:
        return Facts(not self.away, "1", "away" if self.away else None)

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
    """Another one, with a table of its own."""

    name: ClassVar[str] = "far"
    title: ClassVar[str] = "Far"


_ENGINES = {kind.name: kind for kind in (TableEngine, FarEngine)}


def become(ref: str, state: str, reason: str = "", of: type[TableEngine] = TableEngine) -> None:
    """Changes a job."""
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
        patch.setattr(engines, "LEASE_S", 600.0)  # on a busy machine a look may take 10 s
        registry._backends.cache_clear()
        yield kind
    registry._backends.cache_clear()
