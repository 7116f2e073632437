"""Dead letters: messages that ingest could not store, kept with their reason for people.

Ingest puts a message aside (`put_aside`) and keeps the stream of dead letters small (`bound`).
People look at them (`page`, `get`), put them back where they came from (`retry`) or drop them, over
REST and with `paceline dead`.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import redis

from paceline.core.errors import PacelineError
from paceline.wire import TELEMETRY, writer_of
from paceline_backend.requests.errors import ConflictError
from paceline_backend.requests.streams import telemetry_streams
from paceline_backend.store import Store
from paceline_backend.store.audit import Requester, record

DEAD = "paceline:dead"

MOST = 10_000  # letters
MOST_BYTES = 256 * 2**20  # of all letters
MOST_OF_WRITER = 500  # letters
MOST_BYTES_OF_WRITER = 8 * 2**20  # but the newest letter is kept in any case
LARGEST = 8 * 2**20  # bytes of a message; of a larger one the letter tells only how large it was
_LONGEST = 2_000  # characters of a reason, and of a message as text
_SHOWN_BYTES = 64 * 2**10  # of a message: larger ones are shown as bytes
_LONGEST_RUN = 200  # characters
_INDEX_S = 30 * 86_400  # until a writer's letters that nothing was added to count no longer
_CHUNK = 50  # letters read at once: each may be large

_OURS = (b"entry", b"reason", b"stream", b"tries", b"first", b"bytes")


class UnknownLetterError(PacelineError):
    """No dead letter has this number."""


@dataclass(frozen=True)
class Letter:
    """What is known about a message that was put aside."""

    entry: str  # its number among the dead
    run: str | None  # that it says it is of
    kind: str | None  # of message; None: unreadable
    stream: str  # that it came from
    writer: str | None  # who may write to that stream: "run …", "node …"; None: anybody
    reason: str
    tries: int
    first_at: float  # Unix time at which it was first put on the bus
    last_at: float  # and at which it was last put aside
    bytes: int
    whole: bool  # it is kept whole, and so can be put back


class Added(NamedTuple):
    """A letter that was just added."""

    stream: str  # that the message came from
    entry: bytes  # number of the letter
    bytes: int


class _Tag(msgspec.Struct):
    type: str


def put_aside(
    pipeline: Any, stream: str, number: bytes, fields: Mapping[bytes, bytes], why: str, tries: int
) -> int:
    """Add a message to the dead; return how many bytes of it are kept. Call `bound` afterwards.

    Args:
        pipeline: of a transaction in which the message also leaves its stream.
        stream: that it came from.
        number: of its entry there.
        fields: of that entry. `retry` leaves in them how often the message was tried before.
        why: it cannot be stored.
        tries: how often that was tried now.
    """
    size = sum(len(name) + len(value) for name, value in fields.items())
    small = {k: v for k, v in fields.items() if k in (b"v", b"run", b"first", b"tries")}
    kept = fields if size <= LARGEST else {k: v[:_LONGEST_RUN] for k, v in small.items()}
    letter: dict[Any, Any] = {
        **{k: v for k, v in kept.items() if k not in _OURS},
        b"entry": number,
        b"reason": why[:_LONGEST].encode(errors="backslashreplace"),
        b"stream": stream.encode(),
        b"tries": tries + _number(kept.get(b"tries"), 0),
        b"first": _number(kept.get(b"first"), _ms(number)),
    }
    if kept is not fields:
        letter[b"bytes"] = size
    pipeline.xadd(DEAD, letter, maxlen=MOST)
    return sum(len(name) + len(value) for name, value in kept.items())


def bound(client: redis.Redis, added: Iterable[Added]) -> None:
    """Drop the oldest letters of writers that are over their bounds, then those of all writers.

    A writer's bounds keep one run from evicting the letters of others.

    Raises:
        redis.RedisError: the bus is away.
    """
    by_stream: dict[str, list[Added]] = {}
    for letter in added:
        by_stream.setdefault(letter.stream, []).append(letter)
    for stream, letters in by_stream.items():
        _bound_writer(client, stream, letters)
    while (client.memory_usage(DEAD, samples=0) or 0) > MOST_BYTES:
        client.xtrim(DEAD, maxlen=int(client.xlen(DEAD)) // 2, approximate=False)


def _bound_writer(client: redis.Redis, stream: str, added: Sequence[Added]) -> None:
    index = _index(stream)
    sizes: dict[Any, Any] = {letter.entry: letter.bytes for letter in added}
    client.hset(index, mapping=sizes)
    client.expire(index, _INDEX_S)
    known: Any = client.hgetall(index)
    newest = sorted(known, key=lambda entry: tuple(map(int, entry.split(b"-"))), reverse=True)
    taken = accumulate(int(known[entry]) for entry in newest)
    over = [
        entry
        for place, (entry, size) in enumerate(zip(newest, taken, strict=True))
        if place and (place >= MOST_OF_WRITER or size > MOST_BYTES_OF_WRITER)
    ]
    for first in range(0, len(over), 1_000):
        part = over[first : first + 1_000]
        client.xdel(DEAD, *part)
        client.hdel(index, *part)


def _index(stream: str) -> str:
    """Return the key of a writer's letters: how many bytes each has, by its number."""
    return f"{DEAD}:{stream}"


def page(
    client: redis.Redis, limit: int, before: str | None = None, run: str | None = None
) -> tuple[list[Letter], str | None]:
    """Letters, newest first, and where the next page begins (None: this was the last).

    Args:
        client: of the bus.
        limit: how many letters at most.
        before: only older ones: what the page before gave.
        run: only those that say they are of this run.

    Raises:
        redis.RedisError: the bus is away.
    """
    if before is not None and not any(map(int, before.split("-"))):
        return [], None  # nothing is older than 0-0; the bus would refuse to look
    letters: list[Letter] = []
    newest = "+" if before is None else f"({before}"
    while len(letters) <= limit:
        entries: Any = client.xrevrange(DEAD, newest, "-", _CHUNK)
        letters += [
            letter
            for letter in (_letter(number, fields) for number, fields in entries)
            if run is None or letter.run == run
        ]
        if len(entries) < _CHUNK:
            break
        newest = f"({entries[-1][0].decode()}"
    more = len(letters) > limit
    return letters[:limit], letters[limit - 1].entry if more else None


def counts(client: redis.Redis) -> tuple[int, int]:
    """How many letters are kept, and how many messages were ever put aside on this bus.

    Raises:
        redis.RedisError: the bus is away.
    """
    if not client.exists(DEAD):
        return 0, 0
    about: Any = client.xinfo_stream(DEAD)
    return int(about["length"]), int(about["entries-added"])


def get(client: redis.Redis, entry: str) -> tuple[Letter, str]:
    """A letter, and its message as text: pure ASCII, and cut where it is long.

    Raises:
        UnknownLetterError: there is none of this number.
        redis.RedisError: the bus is away.
    """
    fields = _fields(client, entry)
    return _letter(entry.encode(), fields), _text(fields.get(b"data", b""))


def retry(store: Store, client: redis.Redis, entry: str, by: Requester) -> Letter:
    """Puts a message back into the stream that it came from; the letter that it was.

    A message that is put back twice is stored once, like any other message.

    Raises:
        UnknownLetterError: there is none of this number.
        ConflictError: the message was too large to be kept, or nobody reads its stream any more.
        redis.RedisError: the bus is away.
        StoreError: or one of its kinds.
    """
    fields = _fields(client, entry)
    letter = _letter(entry.encode(), fields)
    if not letter.whole:
        raise ConflictError(
            f"dead letter {entry}: its message of {letter.bytes:,} bytes was too large to be kept, "
            "so it cannot be put back"
        )
    if letter.stream not in telemetry_streams(store):
        raise ConflictError(
            f"dead letter {entry}: it came from {letter.stream}, which nobody reads any more, "
            "so it cannot be put back"
        )
    message = {name: value for name, value in fields.items() if name not in _OURS}
    again: dict[Any, Any] = {
        **message,
        b"first": int(letter.first_at * 1000),
        b"tries": letter.tries,
    }
    _note(store, by, "dead.retry", letter)
    pipeline = client.pipeline(transaction=True)
    pipeline.xadd(letter.stream, again)
    pipeline.xdel(DEAD, entry)
    pipeline.hdel(_index(letter.stream), entry)
    pipeline.execute()
    return letter


def drop(store: Store, client: redis.Redis, entry: str, by: Requester) -> Letter:
    """Forgets a message for good.

    Raises:
        UnknownLetterError: there is none of this number.
        redis.RedisError: the bus is away.
        StoreError: or one of its kinds.
    """
    letter = _letter(entry.encode(), _fields(client, entry))
    _note(store, by, "dead.drop", letter)
    client.xdel(DEAD, entry)
    client.hdel(_index(letter.stream), entry)
    return letter


def _note(store: Store, by: Requester, action: str, letter: Letter) -> None:
    """Writes down what will be done with a letter: nothing is done unseen."""
    details = {"run": letter.run, "kind": letter.kind}
    with store.write() as connection:
        record(connection, by, action, target=letter.entry, details=details)


def _fields(client: redis.Redis, entry: str) -> dict[bytes, bytes]:
    entries: Any = client.xrange(DEAD, entry, entry)
    if not entries:
        raise UnknownLetterError(f"no dead letter {entry}; GET /dead lists them")
    return dict(entries[0][1])


def _letter(number: bytes, fields: dict[bytes, bytes]) -> Letter:
    stream = fields.get(b"stream", TELEMETRY.encode()).decode(errors="backslashreplace")
    kind, writer = writer_of(stream)
    run = fields.get(b"run")
    message = {name: value for name, value in fields.items() if name not in _OURS}
    size = sum(len(name) + len(value) for name, value in message.items())
    return Letter(
        entry=number.decode(),
        run=None if run is None else run.decode(errors="backslashreplace")[:_LONGEST_RUN],
        kind=kind_of(fields.get(b"data", b"")),
        stream=stream,
        writer=f"{kind} {writer}" if kind else None,
        reason=fields.get(b"reason", b"").decode(errors="backslashreplace"),
        tries=_number(fields.get(b"tries"), 1),
        first_at=_number(fields.get(b"first"), _ms(fields.get(b"entry", number))) / 1000,
        last_at=_ms(number) / 1000,
        bytes=_number(fields.get(b"bytes"), size),
        whole=b"bytes" not in fields,
    )


def kind_of(data: bytes) -> str | None:
    """Which message it is, without decoding the rest; None: unreadable."""
    try:
        kind = msgspec.msgpack.decode(data, type=_Tag).type[:_LONGEST_RUN]
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None
    return kind.encode(errors="backslashreplace").decode()


def _text(data: bytes) -> str:
    value: Any = data[:_LONGEST]
    if len(data) <= _SHOWN_BYTES:
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            value = msgspec.msgpack.decode(data)
    try:
        words = ascii(value)
    except RecursionError:
        words = ascii(data)
    return words if len(words) <= _LONGEST else words[:_LONGEST] + " ..."


def _number(value: bytes | None, default: int) -> int:
    """A count or a time from the bus, where anybody may have written it."""
    return int(value) if value is not None and re.fullmatch(rb"[0-9]{1,15}", value) else default


def _ms(number: bytes) -> int:
    """When an entry was written: the first part of its number."""
    return _number(number.partition(b"-")[0], int(time.time() * 1000))
