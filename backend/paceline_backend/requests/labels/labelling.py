"""Gives runs tags and notes, and takes them away."""

from __future__ import annotations

from paceline_backend.requests.errors import ConflictError
from paceline_backend.store import Store, runs
from paceline_backend.store.audit import RequestedChange, Requester, record, record_change
from paceline_backend.store.history import labels


def tag(store: Store, run: str, word: str, by: Requester) -> None:
    """Gives a run a tag; nothing changes if it has it already.

    Args:
        store: the database.
        run: the run's public id.
        word: the tag.
        by: who asks.

    Raises:
        UnknownRunError: no such run.
        ConflictError: the run has too many tags.
        StoreError: or one of its kinds.
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
    """Takes a tag from a run; nothing changes if it does not have it.

    Args:
        store: the database.
        run: the run's public id.
        word: the tag.
        by: who asks.

    Raises:
        UnknownRunError: no such run.
        StoreError: or one of its kinds.
    """
    with store.write() as connection:
        if labels.remove_tag(connection, runs.key_of(connection, run), word):
            record(connection, by, "run.untag", run=run, target=word)


def annotate(store: Store, change: RequestedChange, note: str) -> None:
    """Writes a run's note in place of the one before.

    Args:
        store: the database.
        change: the run, and who asks.
        note: the whole text; empty: none.

    Raises:
        UnknownRunError: no such run.
        RevisionError: the run has another revision than expected.
        StoreError: or one of its kinds.
    """
    with store.write() as connection:
        record_change(connection, change, "run.note")
        labels.set_note(connection, runs.key_of(connection, change.run), note)
