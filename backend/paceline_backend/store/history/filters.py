"""Build the SQL conditions and order for lists of runs.

Figures of runs, such as waste, are means over all their complete steps, from `run_days`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from paceline_backend.store.rollups.metrics import ratio
from paceline_backend.store.schema import run_days, run_nodes, run_tags, runs, switches

Conditions = list[sa.ColumnElement[bool]]
FIGURES = ("step_s", "se", "waste")
_COLUMNS = ("created_at", "started_at", "ended_at", "name", "policy", "state")
# Name of a cost → column of `run_days` with the time to which it is proportional. A list that
# should be sorted by a cost is sorted by this time.
COSTS = {"cost": "worker_s", "waited_cost": "waited_s"}
SORTS = (*_COLUMNS, "steps", *FIGURES, *COSTS)


@dataclass(frozen=True)
class FigureBounds:
    """Inclusive bounds of a figure of runs, such as the waste; None: no bound."""

    least: float | None = None
    most: float | None = None


_ANY = FigureBounds()


@dataclass(frozen=True)
class RunFilter:
    """Filter for runs: a run must match all conditions.

    Args:
        states: any of these; empty: every state.
        policy: the policy that was requested last.
        used: a policy that was requested at any time, including the start of the run.
        parameters: parameters of the policy that was requested last: name → value.
        name: part of the name, case-insensitive.
        text: part of the name, script, note, policy, device, a tag or a node, or the start of the
            id.
        node: the run is or was on this node.
        device: part of the name of the ranks' device.
        tags: the run has all of these tags.
        since: created at this Unix time or later.
        until: created before this Unix time.
        active_since: trained at this Unix time or later.
        active_until: trained before this Unix time.
        step_s, se, waste: bounds of the means of step time (s), straggler effect and waste.
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
        """Return the SQL conditions; `dialect` is SQLAlchemy's name of the database."""
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
    """Return the SQL condition that a parameter of the policy requested last has the given value.

    Numbers are compared as numbers, so that 3 equals 3.0. Each type is compared only with itself,
    because Postgres refuses to convert text to a number.
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
    # CASE checks the type before it converts the value to a number; AND does not guarantee this
    # order.
    equal = sa.case((kind.in_(kinds), same), else_=sa.false())
    requested = sa.and_(switches.c.run == runs.c.key, switches.c.version == runs.c.version)
    return sa.exists().where(requested, equal).correlate(runs)


def figure(name: str) -> sa.ColumnElement[Any]:
    """Return a run's mean of a metric over its complete steps, or, for `steps`, their number.

    The expression is NULL if the run has no complete steps.
    """
    c = run_days.c
    total = {"steps": c.steps}.get(name, c.get(f"{name}_sum"))
    assert total is not None
    value: sa.ColumnElement[Any] = sa.func.sum(total)
    if name == "steps":
        # Postgres sums integers to a decimal.
        value = sa.cast(value, sa.BigInteger)
    else:
        count = c.steps if name == "step_s" else c[f"{name}_count"]
        value = ratio(value, sa.func.sum(count))
    return _of_run(value)


def _time(name: str) -> sa.ColumnElement[Any]:
    return sa.case((runs.c.backend != "simulated", _of_run(sa.func.sum(run_days.c[name]))))


def _of_run(value: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    # Correlate explicitly with `runs`, because the outer query may also select from `run_days`.
    return sa.select(value).where(run_days.c.run == runs.c.key).correlate(runs).scalar_subquery()


@dataclass(frozen=True)
class RunOrder:
    """Order of a list: by a name of `SORTS`, then newest first, with unknown values at the end."""

    by: str = "created_at"
    descending: bool = True

    @classmethod
    def of(cls, text: str) -> RunOrder:
        """Parse a text such as ``waste``, or ``-waste`` for the greatest first."""
        return cls(text.removeprefix("-"), text.startswith("-"))

    @property
    def newest_first(self) -> bool:
        """Return whether this is the order of creation, which is the order of the runs' keys."""
        return self.by == "created_at" and self.descending

    @property
    def value(self) -> sa.ColumnElement[Any]:
        """Return the expression that runs are sorted by."""
        if self.by in COSTS:
            return _time(COSTS[self.by])
        column: sa.ColumnElement[Any] = runs.c[self.by] if self.by in _COLUMNS else figure(self.by)
        return column

    def columns(self) -> list[sa.ColumnElement[Any]]:
        """Return the columns for ORDER BY."""
        if self.newest_first:
            return [runs.c.key.desc()]
        directed = self.value.desc() if self.descending else self.value.asc()
        return [self.value.is_(None), directed, runs.c.key.desc()]

    def after(self, value: Any, key: int) -> sa.ColumnElement[bool]:
        """Return the SQL condition for the runs after the run with this sort value and key."""
        below = runs.c.key < key
        if self.newest_first:
            return below
        if value is None:
            return sa.and_(self.value.is_(None), below)
        further = self.value < value if self.descending else self.value > value
        return sa.or_(further, sa.and_(self.value == value, below), self.value.is_(None))
