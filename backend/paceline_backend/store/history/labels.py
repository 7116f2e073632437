"""Tags and notes: what people say about runs, so that they find them again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import sqlalchemy as sa

from paceline_backend.store.database import insert
from paceline_backend.store.schema import run_tags, runs

MOST_TAGS = 50  # of a run


class TooManyTagsError(ValueError):
    """The run has as many tags as it may have."""


def add_tag(connection: sa.Connection, run: int, tag: str) -> bool:
    """Gives a run a tag; False: it has it already.

    Args:
        connection: to write with.
        run: key of the run.
        tag: a short word.

    Raises:
        TooManyTagsError: it has `MOST_TAGS` others.
    """
    if tag in (present := tags(connection, [run])[run]):
        return False
    if len(present) >= MOST_TAGS:
        raise TooManyTagsError(f"the run has {MOST_TAGS} tags already: remove some first")
    row = insert(connection, run_tags).values(run=run, tag=tag)
    connection.execute(row.on_conflict_do_nothing())
    return True


def remove_tag(connection: sa.Connection, run: int, tag: str) -> bool:
    """Takes a tag from a run; False: it has no such tag."""
    mine = sa.delete(run_tags).where(run_tags.c.run == run, run_tags.c.tag == tag)
    return connection.execute(mine).rowcount > 0


def tags(connection: sa.Connection, keys: Sequence[int]) -> dict[int, list[str]]:
    """The tags of runs by their keys, in alphabetical order."""
    query = sa.select(run_tags.c.run, run_tags.c.tag).where(run_tags.c.run.in_(keys))
    known: dict[int, list[str]] = defaultdict(list)
    for run, tag in connection.execute(query):
        known[run].append(tag)
    return defaultdict(list, {run: sorted(of_run) for run, of_run in known.items()})


def counted(connection: sa.Connection) -> list[dict[str, object]]:
    """All tags, and how many runs have each; those of most runs first."""
    tag, count = run_tags.c.tag, sa.func.count().label("runs")
    query = sa.select(tag, count).join(runs, runs.c.key == run_tags.c.run)
    query = query.where(runs.c.pruned_at.is_(None)).group_by(tag).order_by(count.desc(), tag)
    return [{"tag": row.tag, "runs": row.runs} for row in connection.execute(query)]


def set_note(connection: sa.Connection, run: int, note: str) -> None:
    """Writes a note in place of the one before.

    Args:
        connection: to write with.
        run: key of the run.
        note: of any length; empty: none.
    """
    connection.execute(sa.update(runs).where(runs.c.key == run).values(note=note))
