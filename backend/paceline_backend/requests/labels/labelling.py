"""Tags and notes of runs."""

from __future__ import annotations

from paceline_backend.requests.errors import ConflictError
from paceline_backend.store import Store, runs
from paceline_backend.store.audit import RequestedChange, Requester, record, record_change
from paceline_backend.store.history import labels


def tag(store: Store, run: str, word: str, by: Requester) -> None:
    """Add the tag `word` to a run. Idempotent.

    Raises:
        ConflictError: the run has too many tags.
    """
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
