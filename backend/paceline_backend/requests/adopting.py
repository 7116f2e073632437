"""Records a run when the first of its nodes, which somebody started by themselves, asks for it."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from pydantic import Field
from pydantic.dataclasses import dataclass

from paceline_backend import backends
from paceline_backend.requests import streams
from paceline_backend.requests.errors import ConflictError, InvalidRequestError, check_policy
from paceline_backend.store import Connection, Store, StoreRefusedError, meta, new_runs, runs
from paceline_backend.store.access import tokens
from paceline_backend.store.audit import Requester, newest, record
from paceline_backend.store.new_runs import NewRun

_SAME = ("script", "args", "cwd", "nproc", "nodes_min", "nodes_max")  # on all nodes
_ANOTHER = "choose another key with --run-key"
_SHOWN = ("name", "script", "nproc", "policy", "nodes_min", "nodes_max", "max_restarts")


@dataclass(frozen=True)
class Adoption:
    """What a node needs to ask for its part in the run. Secret."""

    run: str = Field(description="id", examples=["3f9a1c07be52"])
    token: str = Field(
        repr=False,
        description="for nodes of this run; it is worth nothing an hour after the run's end",
        examples=["pl_3f9a1c07_c0ffee"],
    )


def adopt(
    store: Store, bus_url: str, key: str, new: NewRun, by: Requester, *, whose: str
) -> Adoption:
    """The run of a key, which is recorded if it is not known. Each of its nodes asks once.

    Args:
        store: the database.
        bus_url: ``redis://…``.
        key: the same on all nodes of the run, and on no others.
        new: the run, as this node would have it.
        by: who asks.
        whose: identifies the token that asks: keys of others are others.

    Raises:
        InvalidRequestError: the policy or another field is wrong.
        ConflictError: the run of this key has ended or was deleted, or is another training.
        redis.RedisError: the bus is away.
        StoreError: or one of its kinds.
    """
    check_policy(new.policy, new.parameters, new.most_ranks)
    try:
        backends.check_nodes(new)
        backends.check_path(new)
    except backends.NewRunError as error:
        raise InvalidRequestError(error.field, error.message) from error
    run = _id(store, whose, key)
    new = replace(new, backend=backends.Adopted.name, signed=True)
    with streams.answering(bus_url):
        try:
            _find_or_create(store, run, key, new, by)
        except StoreRefusedError:  # another node has created it at the same moment
            _find_or_create(store, run, key, new, by)
    return Adoption(run, str(tokens.of_run(store, run)))


def _id(store: Store, whose: str, key: str) -> str:
    """The same for all nodes: so that of two that ask at once only one creates the run."""
    words = f"{whose}\0{key}".encode()
    secret = meta.secret(store)
    return hashlib.blake2b(words, key=secret, person=b"paceline adopted", digest_size=6).hexdigest()


def _find_or_create(store: Store, run: str, key: str, new: NewRun, by: Requester) -> None:
    with store.write() as connection:
        # The log of changes outlasts runs. It is read first, because another node may create the
        # run between the two questions.
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
    """Refuses a node that takes part in no run, or in another one than it should.

    Raises:
        UnknownRunError: there is no such run yet.
        ConflictError: it has ended, or is another training.
    """
    known, state = new_runs.stored(connection, run)
    if known.backend != backends.Adopted.name:
        raise ConflictError(f"key {key}: its run {run} went on elsewhere: {_ANOTHER}")
    if state.final:
        raise ConflictError(f"key {key}: its run {run} is {state}: {_ANOTHER}")
    for name in _SAME:
        ours, theirs = getattr(new, name), getattr(known, name)
        if (list(ours) != list(theirs)) if name == "args" else (ours != theirs):
            raise ConflictError(
                f"key {key}: run {run} has {name} {theirs!r}, and this node {ours!r}: give all "
                "nodes of a run the same, and another run another key"
            )
