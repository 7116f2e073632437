"""Labels that users give to runs: tags, notes and targets. Ended runs accept labels, too.

A tag is added and removed on its own, so two users cannot overwrite each other's tags, and no
revision is needed. A note or target is replaced as a whole, so a request to replace it must name
the revision of the run that the user has read. A target is the value of a metric that the run's
evaluations should reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_backend.requests.errors import ConflictError
from paceline_backend.store import Store, runs
from paceline_backend.store.audit import RequestedChange, Requester, record, record_change
from paceline_backend.store.history import labels
from paceline_backend.store.quality import target as stored


def tag(store: Store, run: str, word: str, by: Requester) -> None:
    """Add a tag to a run, or raise `ConflictError` if the run has too many tags. Idempotent."""
    with store.write() as connection:
        key = runs.key_of(connection, run)
        try:
            new = labels.add_tag(connection, key, word)
        except labels.TooManyTagsError as error:
            raise ConflictError(str(error)) from error
        if new:
            record(connection, by, "run.tag", run=run, target=word)


def untag(store: Store, run: str, word: str, by: Requester) -> None:
    """Remove the tag `word` from a run. Idempotent."""
    with store.write() as connection:
        if labels.remove_tag(connection, runs.key_of(connection, run), word):
            record(connection, by, "run.untag", run=run, target=word)


def annotate(store: Store, change: RequestedChange, note: str) -> None:
    """Replace the note of a run. An empty text removes it."""
    with store.write() as connection:
        record_change(connection, change, "run.note")
        labels.set_note(connection, runs.key_of(connection, change.run), note)


def set_target(store: Store, change: RequestedChange, target: Mapping[str, Any] | None) -> None:
    """Replace the target of a run.

    `target` has the keys `metric`, `value` and `direction`; None removes the target.
    """
    with store.write() as connection:
        details = {"target": None if target is None else dict(target)}
        record_change(connection, change, "run.target", details)
        stored.set_target(connection, runs.key_of(connection, change.run), target)
