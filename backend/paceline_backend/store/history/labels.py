"""Tags and notes that users give to runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import sqlalchemy as sa

from paceline_backend.store.database import insert
from paceline_backend.store.schema import run_tags, runs

MOST_TAGS = 50


class TooManyTagsError(ValueError):
    """The run already has `MOST_TAGS` tags."""


def add_tag(connection: sa.Connection, run: int, tag: str) -> bool:
    """Add a tag to a run; return False if the run has it already.

    Raises:
        TooManyTagsError: the run has `MOST_TAGS` other tags.
    """
    if tag in (present := tags(connection, [run])[run]):
        return False
    if len(present) >= MOST_TAGS:
        raise TooManyTagsError(f"the run has {MOST_TAGS} tags already: remove some first")
    row = insert(connection, run_tags).values(run=run, tag=tag)
    connection.execute(row.on_conflict_do_nothing())
    return True


def remove_tag(connection: sa.Connection, run: int, tag: str) -> bool:
    """Remove a tag from a run; return False if the run does not have it."""
    mine = sa.delete(run_tags).where(run_tags.c.run == run, run_tags.c.tag == tag)
    return connection.execute(mine).rowcount > 0


def tags(connection: sa.Connection, keys: Sequence[int]) -> dict[int, list[str]]:
    """Return the sorted tags of each run, by the run's key."""
    query = sa.select(run_tags.c.run, run_tags.c.tag).where(run_tags.c.run.in_(keys))
    known: dict[int, list[str]] = defaultdict(list)
    for run, tag in connection.execute(query):
        known[run].append(tag)
    return defaultdict(list, {run: sorted(of_run) for run, of_run in known.items()})


def counted(connection: sa.Connection) -> list[dict[str, object]]:
    """Return all tags with the number of runs that have each, the most frequent first."""
    tag, count = run_tags.c.tag, sa.func.count().label("runs")
    query = sa.select(tag, count).join(runs, runs.c.key == run_tags.c.run)
    query = query.where(runs.c.pruned_at.is_(None)).group_by(tag).order_by(count.desc(), tag)
    return [{"tag": row.tag, "runs": row.runs} for row in connection.execute(query)]


def set_note(connection: sa.Connection, run: int, note: str) -> None:
    """Replace the note of a run; an empty note removes it."""
    connection.execute(sa.update(runs).where(runs.c.key == run).values(note=note))
