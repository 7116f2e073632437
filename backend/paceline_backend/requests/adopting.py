"""Adoption of runs whose nodes a user starts without Paceline.

All nodes of a run call `adopt` with the same key. The first call records the run.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from pydantic import Field
from pydantic.dataclasses import dataclass

from paceline_backend import backends
from paceline_backend.requests import streams
from paceline_backend.requests.errors import ConflictError, InvalidRequestError, check_policy
from paceline_backend.store import (
    Connection,
    Store,
    StoreRefusedError,
    meta,
    new_runs,
    runs,
    tokens,
)
from paceline_backend.store.audit import Requester, newest, record
from paceline_backend.store.new_runs import NewRun

# Fields that must be equal on all nodes.
_SAME = ("script", "args", "cwd", "nproc", "nodes_min", "nodes_max")
_ANOTHER = "choose another key with --run-key"
_SHOWN = ("name", "script", "nproc", "policy", "nodes_min", "nodes_max", "max_restarts")


@dataclass(frozen=True)
class Adoption:
    """Credentials with which a node enlists in its run. Secret."""

    run: str = Field(description="public id of the run", examples=["3f9a1c07be52"])
    token: str = Field(
        repr=False,
        description="token for the nodes of the run; expires one hour after the run's end",
        examples=["pl_3f9a1c07_c0ffee"],
    )


def adopt(
    store: Store, bus_url: str, key: str, new: NewRun, by: Requester, *, whose: str
) -> Adoption:
    """Return the credentials of the run with this key; if there is no such run, record it first.

    `new` is the run as this node describes it. `whose` identifies the caller's token, because the
    same key with another token means another run.

    Raises:
        ConflictError: the run of this key has ended, was deleted or moved to another backend, or
            its settings differ from `new`.
    """
    check_policy(new.policy, new.parameters, new.most_ranks)
    try:
        backends.check_nodes(new)
        backends.check_path(new)
    except backends.NewRunError as error:
        raise InvalidRequestError(error.field, error.message) from error
    run = _id(store, whose, key)
    new = replace(new, backend=backends.AdoptedBackend.name, signed=True)
    with streams.answering(bus_url):
        try:
            _find_or_create(store, run, key, new, by)
        # Another node has created the run at the same moment, so find it now.
        except StoreRefusedError:
            _find_or_create(store, run, key, new, by)
    return Adoption(run, str(tokens.of_run(store, run)))


def _id(store: Store, whose: str, key: str) -> str:
    # The id depends only on token and key. So if two nodes call at once, they compute the same id,
    # and only one of them can create the run.
    words = f"{whose}\0{key}".encode()
    secret = meta.secret(store)
    return hashlib.blake2b(words, key=secret, person=b"paceline adopted", digest_size=6).hexdigest()


def _find_or_create(store: Store, run: str, key: str, new: NewRun, by: Requester) -> None:
    with store.write() as connection:
        # A run that is in the audit log but not in the store was deleted. Read the log first: if
        # another node creates the run between the two queries, the run must not count as deleted.
        before = newest(connection, run, ("run.create",))
        try:
            _refuse_other(connection, run, key, new)
        except runs.UnknownRunError:
            if before is not None:
                raise ConflictError(f"key {key}: its run {run} was deleted: {_ANOTHER}") from None
            new_runs.create(connection, new, by.name, run)
            details = {name: getattr(new, name) for name in _SHOWN}
            details |= {"backend": new.backend, "key": key}
            record(connection, by, "run.create", run=run, revision=0, details=details)


def _refuse_other(connection: Connection, run: str, key: str, new: NewRun) -> None:
    known, state = new_runs.stored(connection, run)
    if known.backend != backends.AdoptedBackend.name:
        raise ConflictError(f"key {key}: its run {run} was moved to another backend: {_ANOTHER}")
    if state.final:
        raise ConflictError(f"key {key}: its run {run} is {state}: {_ANOTHER}")
    for name in _SAME:
        ours, theirs = getattr(new, name), getattr(known, name)
        if (list(ours) != list(theirs)) if name == "args" else (ours != theirs):
            raise ConflictError(
                f"key {key}: run {run} has {name} {theirs!r}, and this node {ours!r}: use the same "
                "value on all nodes of a run, and another key for another run"
            )
