"""Authentication of telemetry by its stream: each node and each run has a stream of its own.

Ingest gets the list of streams to read from `Writers`, and passes each entry to `Writers.receive`
first. An entry is rejected if the writer of its stream may not report about the entry's run or
node.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from paceline.wire import (
    TELEMETRY,
    Message,
    NodeState,
    RunState,
    State,
    WireError,
    node_telemetry,
    writer_of,
)
from paceline.wire.parts import without_arrays
from paceline_backend.control.consumer import Entry
from paceline_backend.requests.streams import telemetry_streams
from paceline_backend.server.bus_limits import LARGEST_ARGUMENT
from paceline_backend.store import Store, StoreError, telemetry
from paceline_backend.store.telemetry import writers
from paceline_backend.store.telemetry.writers import PermittedWriters

# Maximum delay until ingest reads the stream of a node or run that has just received credentials.
REFRESH_S = 0.5
# Maximum size of a message that is not a batch of records, not counting its arrays of samples.
_MOST_PLAIN = 2**20  # bytes


class _StepsShape(msgspec.Struct, tag="steps"):
    pass


class _Rounds(msgspec.Struct, tag="rounds"):
    pass


class _Metrics(msgspec.Struct, tag="metrics"):
    pass


_records = msgspec.msgpack.Decoder(_StepsShape | _Rounds | _Metrics)


@dataclass(slots=True)
class Received:
    """Decoded entry: run and message, or the reason why the entry is rejected."""

    entry: Entry
    run: str = ""
    message: Message | None = None
    reason: str | None = None
    came_at: float = field(default_factory=time.monotonic)


class Writers:
    """Registry of telemetry streams and of the nodes and runs that own them. Not thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._at = 0.0
        # By stream: kind and name of its writer.
        self._streams: dict[str, tuple[str, str]] = {TELEMETRY: ("", "")}
        self._permitted: dict[str, PermittedWriters] = {}

    def due(self) -> bool:
        """Return True if the caller should call `streams` again."""
        return time.monotonic() >= self._at

    def streams(self) -> list[str]:
        """Return the streams of all nodes and runs that may report now.

        While the database is unavailable, return the last known streams.
        """
        try:
            streams = telemetry_streams(self._store)
        # Ingest logs the outage when it fails to store what it reads.
        except StoreError:
            return list(self._streams)
        self._at = time.monotonic() + REFRESH_S
        self._permitted = {}
        self._streams = {stream: writer_of(stream) for stream in streams}
        return streams

    def receive(self, entries: Iterable[Entry]) -> list[Received]:
        """Decode entries, and reject those whose writer may not report about their run or node."""
        received = [_decoded(entry) for entry in entries]
        self._load_owners({item.run for item in received if item.message is not None and item.run})
        self._check(received)
        # The cached owner of a run may be stale, for example after a launch on another node.
        if refused := {item.run for item in received if item.message and item.reason}:
            for run in refused:
                self._permitted.pop(run, None)
            self._load_owners(refused - {""})
            self._check(received)
        return received

    def _check(self, received: Iterable[Received]) -> None:
        for item in received:
            if item.message is not None:
                item.reason = self._problem(item.entry.stream, item.run, item.message)

    def _load_owners(self, runs: set[str]) -> None:
        unknown = runs - self._permitted.keys()
        if unknown:
            with self._store.read() as connection:
                self._permitted |= writers.permitted_writers(connection, unknown)

    def _problem(self, stream: str, run: str, message: Message) -> str | None:
        # Accept messages of unknown runs here: `Checks` rejects them later.
        kind, writer = self._streams.get(stream, ("", ""))
        owner = self._permitted.get(run)
        if isinstance(message, NodeState):
            return self._of_node(kind, writer, message)
        if kind == "run" and run != writer:
            return f"run {writer} may not report about run {run!r}"
        if kind == "node" and owner is not None and writer not in owner.nodes:
            return f"node {writer} may not report about run {run}, which is not on this node"
        if kind == "" and owner is not None and owner.signed:
            return f"run {run} must report on its own streams, not on {TELEMETRY}"
        return None

    def _of_node(self, kind: str, writer: str, state: NodeState) -> str | None:
        if kind == "node":
            own = state.node == writer
            return None if own else f"node {writer} may not report about node {state.node!r}"
        if kind == "run":
            return f"run {writer} may not report about nodes"
        # A node that has a session must use its own stream, because an entry of `TELEMETRY` does
        # not show who wrote it.
        if node_telemetry(state.node) in self._streams:
            return (
                f"node {state.node} has a session and must report on its own stream, not on "
                f"{TELEMETRY}: give an agent without a session another name (--node)"
            )
        return None


def ends(item: Received) -> bool:
    """Return True if an entry reports the end of a run."""
    return isinstance(item.message, RunState) and State(item.message.state).final


def _decoded(entry: Entry) -> Received:
    data = entry.fields.get(b"data", b"")
    # Decoded records take many times their encoded size. The limit leaves room for one record from
    # each of 2¹⁷ ranks.
    if len(data) > LARGEST_ARGUMENT:
        return Received(
            entry,
            reason=f"the message has {len(data):,} bytes: the limit is {LARGEST_ARGUMENT:,}",
        )
    # Decoded lists of lists, such as counts by step and rank, can take 64 times their encoded size,
    # so a message that is not a batch of records must be small, apart from arrays of samples.
    if len(data) > _MOST_PLAIN and entry.stream != TELEMETRY and not _of_records(data):
        plain = without_arrays(data)
        if plain > _MOST_PLAIN:
            reason = f"{plain:,} bytes are outside arrays of samples: the limit is {_MOST_PLAIN:,}"
            return Received(entry, reason=reason)
    try:
        run, message = telemetry.decode(entry.fields)
    except WireError as error:
        return Received(entry, reason=str(error))
    return Received(entry, run, message)


def _of_records(data: bytes) -> bool:
    """Return True if a message is a batch of records, without creating objects for them."""
    try:
        _records.decode(data)
    except (ValueError, RecursionError):
        return False
    return True
