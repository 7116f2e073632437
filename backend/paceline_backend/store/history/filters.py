"""Which runs a list has, and in which order: conditions for the table of runs.

Figures of runs, such as waste, are means over all their complete steps, from `run_days`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from paceline_backend.store.rollups.metrics import over
from paceline_backend.store.schema import run_days, run_nodes, run_tags, runs, switches

Conditions = list[sa.ColumnElement[bool]]
FIGURES = ("step_s", "se", "waste")
_COLUMNS = ("created_at", "started_at", "ended_at", "name", "policy", "state")
COSTS = {"cost": "worker_s", "waited_cost": "waited_s"}  # each grows with its time
SORTS = (*_COLUMNS, "steps", *FIGURES, *COSTS)  # by what a list may be sorted


@dataclass(frozen=True)
class FigureBounds:
    """The least and the greatest that a figure may be; None: no bound."""

    least: float | None = None
    most: float | None = None


_ANY = FigureBounds()


@dataclass(frozen=True)
class RunFilter:
    """Which runs count: those for which all of this is true.

    Args:
        states: any of these; empty: every state.
        policy: in force, or requested last.
        used: a policy that was in force or requested at some time.
        parameters: of the policy in force, as they were asked for: name → value.
        name: a part of it, in upper or lower case.
        text: a part of the name, script, note, policy, device, of a tag or a node, or the beginning
            of the id.
        node: it is or was on this node.
        device: a part of the ranks' device.
        backend: that it trains on.
        tags: it has all of these.
        since: created at this Unix time or later,
        until: and before this one.
        active_since: it trained at this Unix time or later,
        active_until: and before this one.
        step_s: mean time of its steps, in seconds,
        se: their mean SE,
        waste: and their mean waste.
    """

    states: Sequence[str] = ()
    policy: str | None = None
    used: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    text: str | None = None
    node: str | None = None
    device: str | None = None
    backend: str | None = None
    tags: Sequence[str] = ()
    since: float | None = None
    until: float | None = None
    active_since: float | None = None
    active_until: float | None = None
    step_s: FigureBounds = _ANY
    se: FigureBounds = _ANY
    waste: FigureBounds = _ANY

    def conditions(self, dialect: str) -> Conditions:
        """As SQL.

        Args:
            dialect: SQLAlchemy's name of the database.
        """
        where = [*self._of_columns(), *self._of_times(), *self._of_figures()]
        where += [_tagged(run_tags.c.tag == tag) for tag in self.tags]
        if self.node is not None:
            where.append(_on_node(runs.c.node == self.node, run_nodes.c.node == self.node))
        if self.used is not None:
            used = sa.and_(switches.c.run == runs.c.key, switches.c.policy == self.used)
            where.append(sa.exists().where(used).correlate(runs))
        where += [_parameter(dialect, *pair) for pair in self.parameters.items()]
        if self.text:
            where.append(_mentions(self.text))
        return where

    def _of_columns(self) -> Conditions:
        c = runs.c
        where: Conditions = [c.state.in_(self.states)] if self.states else []
        for column, value in ((c.policy, self.policy), (c.backend, self.backend)):
            if value is not None:
                where.append(column == value)
        for column, part in ((c.name, self.name), (c.device, self.device)):
            if part is not None:
                where.append(column.icontains(part, autoescape=True))
        return where

    def _of_times(self) -> Conditions:
        c = runs.c
        where: Conditions = []
        if self.since is not None:
            where.append(c.created_at >= self.since)
        if self.until is not None:
            where.append(c.created_at < self.until)
        if self.active_since is not None or self.active_until is not None:
            where.append(c.started_at.is_not(None))
        if self.active_since is not None:
            where.append(sa.or_(c.ended_at.is_(None), c.ended_at >= self.active_since))
        if self.active_until is not None:
            where.append(c.started_at < self.active_until)
        return where

    def _of_figures(self) -> Conditions:
        where: Conditions = []
        for name, bounds in ((name, getattr(self, name)) for name in FIGURES):
            if bounds.least is not None:
                where.append(figure(name) >= bounds.least)
            if bounds.most is not None:
                where.append(figure(name) <= bounds.most)
        return where


def _tagged(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    return sa.exists().where(run_tags.c.run == runs.c.key, condition).correlate(runs)


def _on_node(
    alone: sa.ColumnElement[bool], several: sa.ColumnElement[bool]
) -> sa.ColumnElement[bool]:
    return sa.or_(alone, sa.exists().where(run_nodes.c.run == runs.c.key, several).correlate(runs))


def _mentions(text: str) -> sa.ColumnElement[bool]:
    c = runs.c
    columns = (c.name, c.script, c.note, c.policy, c.device)
    parts = [column.icontains(text, autoescape=True) for column in columns]
    on_node = _on_node(*(x.icontains(text, autoescape=True) for x in (c.node, run_nodes.c.node)))
    tagged = _tagged(run_tags.c.tag.icontains(text, autoescape=True))
    return sa.or_(c.id.startswith(text, autoescape=True), on_node, tagged, *parts)


def _parameter(dialect: str, name: str, value: Any) -> sa.ColumnElement[bool]:
    """The condition that a parameter of the policy in force has a value.

    Numbers are compared as numbers, whether they are written 3 or 3.0. Each type is compared with
    itself only: Postgres refuses to make a number of a text.
    """
    entry = switches.c.parameters[name]
    typed = sa.func.json_typeof if dialect == "postgresql" else sa.func.json_type
    kind = typed(entry) if dialect == "postgresql" else typed(switches.c.parameters, f'$."{name}"')
    kinds: tuple[str, ...]
    if isinstance(value, bool):
        text = entry.as_string() if dialect == "postgresql" else kind
        kinds, same = ("boolean", "true", "false"), text == ("true" if value else "false")
    elif isinstance(value, int | float):
        kinds, same = ("number", "integer", "real"), entry.as_float() == float(value)
    else:
        kinds, same = ("string", "text"), entry.as_string() == str(value)
    # CASE decides before the value is read as a number; AND may not.
    equal = sa.case((kind.in_(kinds), same), else_=sa.false())
    in_force = sa.and_(switches.c.run == runs.c.key, switches.c.version == runs.c.version)
    return sa.exists().where(in_force, equal).correlate(runs)


def figure(name: str) -> sa.ColumnElement[Any]:
    """A mean over all complete steps of a run, or how many steps; NULL: there is none."""
    c = run_days.c
    total = {"steps": c.steps}.get(name, c.get(f"{name}_sum"))
    assert total is not None
    value: sa.ColumnElement[Any] = sa.func.sum(total)
    if name == "steps":
        value = sa.cast(value, sa.BigInteger)  # of whole numbers, Postgres makes a decimal one
    else:
        count = c.steps if name == "step_s" else c[f"{name}_count"]
        value = over(value, sa.func.sum(count))
    return _of_run(value)


def _time(name: str) -> sa.ColumnElement[Any]:
    """Time of a run's ranks in all its complete steps; NULL: there is none, or it is virtual."""
    return sa.case((runs.c.backend != "simulated", _of_run(sa.func.sum(run_days.c[name]))))


def _of_run(value: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    # The query around it may add up the same table.
    return sa.select(value).where(run_days.c.run == runs.c.key).correlate(runs).scalar_subquery()


@dataclass(frozen=True)
class RunOrder:
    """The order of a list, then the newest first; unknown values last.

    Args:
        by: a name of `SORTS`.
        descending: the greatest first.
    """

    by: str = "created_at"
    descending: bool = True

    @classmethod
    def of(cls, text: str) -> RunOrder:
        """Of ``waste``, or ``-waste`` for the greatest first."""
        return cls(text.removeprefix("-"), text.startswith("-"))

    @property
    def newest_first(self) -> bool:
        """It is the order in which runs were created, which their keys have."""
        return self.by == "created_at" and self.descending

    @property
    def value(self) -> sa.ColumnElement[Any]:
        """By what runs are sorted."""
        if self.by in COSTS:
            return _time(COSTS[self.by])
        column: sa.ColumnElement[Any] = runs.c[self.by] if self.by in _COLUMNS else figure(self.by)
        return column

    def columns(self) -> list[sa.ColumnElement[Any]]:
        """For ORDER BY."""
        if self.newest_first:
            return [runs.c.key.desc()]
        directed = self.value.desc() if self.descending else self.value.asc()
        return [self.value.is_(None), directed, runs.c.key.desc()]

    def after(self, value: Any, key: int) -> sa.ColumnElement[bool]:
        """The condition for what comes after a run.

        Args:
            value: by which that run is sorted.
            key: of that run.
        """
        below = runs.c.key < key
        if self.newest_first:
            return below
        if value is None:
            return sa.and_(self.value.is_(None), below)
        further = self.value < value if self.descending else self.value > value
        return sa.or_(further, sa.and_(self.value == value, below), self.value.is_(None))
