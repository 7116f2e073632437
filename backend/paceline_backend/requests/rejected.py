"""Rejected messages: notes on the bus about messages that ingest could not store.

Ingest adds a note with the reason (`add`) and deletes the message. Then it drops the oldest notes
of each writer that has too many (`bound`), so that no run evicts the notes of another run.
Operators list and count the notes (`newest`, `counts`), and admins drop them (`drop`), over REST
and with `paceline rejected`. Functions raise `redis.RedisError` if the bus is unavailable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import redis

from paceline.core.errors import PacelineError
from paceline.wire import writer_of
from paceline_backend.store import Store
from paceline_backend.store.audit import Requester, record

REJECTED = "paceline:rejected"

# Maximum number of notes on the bus, and of notes about messages of one writer.
MOST_REJECTED = 10_000
MOST_OF_WRITER = 500
# Maximum length of a reason.
_LONGEST_REJECTION = 2_000  # bytes
# Maximum length of a run's id, and of a message's type.
_LONGEST_ID = 200  # bytes
# Seconds for which the list of a writer's notes is kept after the newest note.
_INDEX_S = 30 * 86_400


class UnknownMessageError(PacelineError):
    """No rejected message has this number."""


class _Tag(msgspec.Struct):
    type: str


def add(
    pipeline: Any, stream: str, number: bytes, fields: Mapping[bytes, bytes], why: str, tries: int
) -> None:
    """Add a note about a message. Call `bound` afterwards.

    `pipeline` belongs to the transaction in which the message is deleted from its stream. `number`
    and `fields` come from the message's entry in this stream.
    """
    note: dict[Any, Any] = {
        b"stream": stream.encode(),
        b"entry": number,
        b"reason": why.encode(errors="backslashreplace")[:_LONGEST_REJECTION],
        b"tries": tries,
    }
    if (run := fields.get(b"run")) is not None:
        note[b"run"] = run[:_LONGEST_ID]
    if (kind := _kind_of(fields.get(b"data", b""))) is not None:
        note[b"kind"] = kind
    pipeline.xadd(REJECTED, note, maxlen=MOST_REJECTED)


def bound(client: redis.Redis, added: Iterable[tuple[str, bytes]]) -> None:
    """Drop the oldest notes of writers that have more than `MOST_OF_WRITER`.

    `added` holds the rejected message's stream and the note's number, for each new note.
    """
    by_stream: dict[str, list[bytes]] = {}
    for stream, note in added:
        by_stream.setdefault(stream, []).append(note)
    for stream, notes in by_stream.items():
        index = _index(stream)
        over: Any = client.rpush(index, *notes)
        client.expire(index, _INDEX_S)
        if over > MOST_OF_WRITER:
            oldest: Any = client.lpop(index, over - MOST_OF_WRITER)
            client.xdel(REJECTED, *oldest)


def _index(stream: str) -> str:
    return f"{REJECTED}:{stream}"


def newest(client: redis.Redis, limit: int) -> list[dict[str, Any]]:
    """Return the newest rejected messages, newest first, in the format of REST."""
    notes: Any = client.xrevrange(REJECTED, count=limit)
    return [_document(number, fields) for number, fields in notes]


def counts(client: redis.Redis) -> tuple[int, int]:
    """Return the number of stored notes, and of all messages ever rejected on this bus."""
    if not client.exists(REJECTED):
        return 0, 0
    about: Any = client.xinfo_stream(REJECTED)
    return int(about["length"]), int(about["entries-added"])


def drop(store: Store, client: redis.Redis, entry: str, by: Requester) -> dict[str, Any]:
    """Delete the note about a rejected message, and return it.

    Raises:
        UnknownMessageError: there is no note with this number.
    """
    notes: Any = client.xrange(REJECTED, entry, entry)
    if not notes:
        raise UnknownMessageError(f"no rejected message {entry}; GET /rejected lists them")
    number, fields = notes[0]
    message = _document(number, fields)
    # Write the audit log first, so that no note is deleted without a record of it.
    details = {"run": message["run"], "kind": message["kind"]}
    with store.write() as connection:
        record(connection, by, "rejected.drop", target=entry, details=details)
    client.xdel(REJECTED, number)
    client.lrem(_index(fields[b"stream"].decode()), 1, number)
    return message


def _document(number: bytes, fields: dict[bytes, bytes]) -> dict[str, Any]:
    texts = {name: value.decode(errors="backslashreplace") for name, value in fields.items()}
    role, writer = writer_of(texts[b"stream"])
    return {
        "entry": number.decode(),
        "run": texts.get(b"run"),
        "kind": texts.get(b"kind"),
        "writer": f"{role} {writer}" if role else None,
        "reason": texts[b"reason"],
        "tries": int(texts[b"tries"]),
        "written_at": _time_of(texts[b"entry"]),
        "rejected_at": _time_of(number.decode()),
    }


def _kind_of(data: bytes) -> bytes | None:
    try:
        kind = msgspec.msgpack.decode(data, type=_Tag).type
    # msgspec's errors are subclasses of ValueError.
    except (ValueError, RecursionError):
        return None
    return kind.encode(errors="backslashreplace")[:_LONGEST_ID]


def _time_of(number: str) -> float:
    return int(number.partition("-")[0]) / 1000
