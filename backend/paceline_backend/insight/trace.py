"""Export of a range of a run's steps as a trace for Perfetto (https://ui.perfetto.dev) and Chrome.

The output is the JSON object of the trace event format. Each node is a process and each rank one of
its threads. A rank's slice of a step holds slices for `data`, `compute`, `wait` and `reduce`.
Reduction rounds of relaxed synchronisation have threads of their own, with slices for `wait`,
`copy` and `reduce`, because ranks compute meanwhile. The run is a process, too, with instant events
for policy switches and for the causes of a verdict.

Times come from the nodes' clocks. `ts` counts from the start of the first slice, rounded down to a
full second. `otherData.began_at` is the Unix time of `ts` 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from paceline.policies.base import Floats
from paceline_backend.insight import verdict as verdicts
from paceline_backend.insight.verdict import Verdict
from paceline_backend.store import Store, attempts, records, rounds, runs, switches
from paceline_backend.store.reads import Range
from paceline_backend.store.switches import Switch

# Number of the newest steps in a trace if the caller gives no range.
TRACE_STEPS = 100  # steps
# Rows are read in chunks, so that memory use does not depend on the length of the range.
_CHUNK_ROWS = 20_000
# Process numbers of the run and of the first node in the trace.
_RUN, _FIRST_NODE = 1, 2
# Number of the thread with rank 0's reduction rounds; the threads of other ranks follow.
_ROUNDS_THREAD = 1_000_000
_COLUMNS = (
    *("attempt", "epoch", "samples", "load", "loss", "ett_s", "memory_bytes"),
    *("data_s", "compute_s", "sync_s", "step_s", "ended_at"),
)

Event = dict[str, Any]


@dataclass(frozen=True)
class Traced:
    """Data of a trace, except for the steps, which `stream` reads.

    `last` is below `first` if there is no step. `placements` has the node of each rank, by attempt.
    """

    store: Store
    run: dict[str, Any]
    key: int
    first: int
    last: int
    placements: Mapping[int, Sequence[str]]
    switches: Sequence[Switch]
    verdict: Verdict
    began_at: float


def begin(store: Store, run_id: str, span: Range) -> Traced:
    """Prepare the trace of a range of steps, and raise errors before the HTTP response starts.

    `span` gives the first and last step. If both are missing, the newest `TRACE_STEPS` steps are
    used.
    """
    run = runs.get(store, run_id)
    with store.read() as connection:
        key = runs.key_of(connection, run_id)
        first, last = records.reported(connection, key, span)
        if span == (None, None):
            first = max(first, last - TRACE_STEPS + 1)
        placed = {number: nodes for number, _, nodes in attempts.placements(connection, key, -1)}
        at_last = attempts.placement(connection, key, max(last, 0))
        seen = verdicts.read_observed(connection, key, (first, last), at_last)
        history = switches.history(connection, key)
        begins = records.between(connection, key, ("step_s", "ended_at", "data_s"), first, first)
    starts = begins[:, 3] - begins[:, 2] - begins[:, 4]
    began_at = float(np.floor(starts.min())) if len(starts) else 0.0
    judged = verdicts.judge(seen)
    return Traced(store, run, key, first, last, placed, history, judged, began_at)


def stream(traced: Traced) -> Iterator[bytes]:
    """Yield the JSON text in chunks."""
    run = traced.run
    about = {
        "run": run["id"],
        "name": run["name"],
        "policy": run["policy"],
        "first_step": traced.first,
        "last_step": traced.last,
        "began_at": traced.began_at,
    }
    yield b'{"displayTimeUnit":"ms","otherData":' + msgspec.json.encode(about)
    yield b',"traceEvents":[\n'
    events = _events(traced)
    first = True
    while batch := list(itertools.islice(events, 1_000)):
        text = b",\n".join(msgspec.json.encode(event) for event in batch)
        yield text if first else b",\n" + text
        first = False
    yield b"\n]}\n"


def _events(traced: Traced) -> Iterator[Event]:
    tracks = _Tracks(traced)
    yield from tracks.named_run()
    # Start of each step that has an instant event.
    starts: dict[int, float] = {}  # µs, by step
    wanted = {cause.since for cause in traced.verdict.causes}
    steps = traced.verdict.seen.step
    wanted_steps = {int(steps[at]) for at in wanted if at is not None}
    wanted_steps |= {each.effective_step for each in traced.switches if each.effective_step}
    chunk = max(1, _CHUNK_ROWS // max(traced.run["world"] or 1, 1))
    for low in range(traced.first, traced.last + 1, chunk):
        high = min(low + chunk - 1, traced.last)
        with traced.store.read() as connection:
            rows = records.between(connection, traced.key, _COLUMNS, low, high)
            exchanges = rounds.rows(connection, traced.key, (low, high), _CHUNK_ROWS)
        for step, ranks in _by_step(rows):
            slices = [event for row in ranks for event in tracks.step(row, _least(ranks))]
            if int(step) in wanted_steps and slices:
                starts[int(step)] = min(event["ts"] for event in slices if "dur" in event)
            yield from slices
        for exchange in exchanges:
            yield from tracks.round(exchange)
    yield from _instants(traced, starts)


def _by_step(rows: Floats) -> Iterator[tuple[float, Floats]]:
    cuts = np.flatnonzero(np.diff(rows[:, 0])) + 1
    for part in np.split(rows, cuts):
        if len(part):
            yield float(part[0, 0]), part


def _least(ranks: Floats) -> float:
    """Return the seconds of the reduction: the `sync_s` of the last rank, which does not wait."""
    return float(ranks[:, 2 + _COLUMNS.index("sync_s")].min())


@dataclass
class _Tracks:
    """Processes and threads of a trace; an event names each of them when it first occurs."""

    traced: Traced
    nodes: dict[str, int] = field(default_factory=dict)
    threads: set[tuple[int, int]] = field(default_factory=set)
    # End of the newest slice, by thread.
    ends: dict[int, float] = field(default_factory=dict)  # µs

    def named_run(self) -> Iterator[Event]:
        yield _named("process_name", _RUN, 0, name=f"run {self.traced.run['name']}")
        yield _named("process_sort_index", _RUN, 0, sort_index=-1)
        yield _named("thread_name", _RUN, 0, name="switches and verdicts")

    def step(self, row: Floats, reduce_s: float) -> Iterator[Event]:
        """Yield a rank's slice of a step, and its phases; `row` holds step, rank and `_COLUMNS`."""
        step, rank = int(row[0]), int(row[1])
        value = dict(zip(_COLUMNS, row[2:].tolist(), strict=True))
        process, named = self._thread(int(value["attempt"]), rank, rank + 1, f"rank {rank}")
        yield from named
        start = value["ended_at"] - value["step_s"]
        reduced_s = min(reduce_s, value["sync_s"])
        waited_s = value["sync_s"] - reduced_s
        phases = (
            ("data", start - value["data_s"], start),
            ("compute", start, start + value["compute_s"]),
            ("wait", start + value["compute_s"], start + value["compute_s"] + waited_s),
            ("reduce", start + value["compute_s"] + waited_s, value["ended_at"]),
        )
        limits = (value["ended_at"], start + value["compute_s"] + value["sync_s"])
        slices = self._within(rank + 1, phases, min(limits))
        if not slices:
            return
        names = ("epoch", "samples", "load", "loss", "ett_s", "memory_bytes")
        args = {name: _plain(value[name]) for name in names} | {"step": step}
        begin, end = slices[0][1], slices[-1][2]
        yield self._slice(process, rank + 1, f"step {step}", begin, end, args)
        for name, low, high in slices:
            yield self._slice(process, rank + 1, name, low, high)

    def round(self, exchange: dict[str, Any]) -> Iterator[Event]:
        rank, number = exchange["rank"], _ROUNDS_THREAD + exchange["rank"]
        process, named = self._thread(exchange["attempt"], rank, number, f"rank {rank}, rounds")
        yield from named
        called = exchange["ended_at"] - exchange["reduced_s"]
        copied = called - exchange["copied_s"]
        phases = (
            ("wait", called - max(exchange["waited_s"], exchange["copied_s"]), copied),
            ("copy", copied, called),
            ("reduce", called, exchange["ended_at"]),
        )
        slices = self._within(number, phases, exchange["ended_at"])
        if not slices:
            return
        names = ("number", "segment", "step", "world", "contributors", "dropped", "bytes")
        args = {name: exchange[name] for name in names}
        begin, end = slices[0][1], slices[-1][2]
        yield self._slice(process, number, f"round {exchange['number']}", begin, end, args)
        for name, low, high in slices:
            yield self._slice(process, number, name, low, high)

    def _within(
        self, thread: int, phases: Sequence[tuple[str, float, float]], limit: float
    ) -> list[tuple[str, float, float]]:
        """Return the phases in µs, cut so that no two phases of the thread overlap.

        The clocks of a device and its host differ by some µs, and viewers drop slices that overlap.
        """
        made, end = [], self.ends.get(thread, -np.inf)
        for name, low, high in phases:
            begin = max(self._at(low), end)
            stop = self._at(min(high, limit))
            if stop > begin:
                made.append((name, begin, stop))
                end = stop
        self.ends[thread] = end
        return made

    def _at(self, moment: float) -> float:
        return round(1e6 * (moment - self.traced.began_at), 1)

    def _slice(
        self,
        process: int,
        thread: int,
        name: str,
        begin: float,
        end: float,
        args: Event | None = None,
    ) -> Event:
        event: Event = {"ph": "X", "name": name, "cat": "step" if args else "phase", "pid": process}
        event |= {"tid": thread, "ts": begin, "dur": round(end - begin, 1)}
        return event | {"args": args} if args else event

    def _thread(
        self, attempt: int, rank: int, thread: int, name: str
    ) -> tuple[int, Sequence[Event]]:
        nodes = self.traced.placements.get(attempt, ())
        node = nodes[rank] if rank < len(nodes) else self.traced.run["node"] or "unknown node"
        made: list[Event] = []
        if node not in self.nodes:
            self.nodes[node] = _FIRST_NODE + len(self.nodes)
            made.append(_named("process_name", self.nodes[node], thread, name=f"node {node}"))
        process = self.nodes[node]
        if (process, thread) not in self.threads:
            self.threads.add((process, thread))
            made.append(_named("thread_name", process, thread, name=name))
            made.append(_named("thread_sort_index", process, thread, sort_index=thread))
        return process, made


def _named(what: str, process: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _instants(traced: Traced, starts: dict[int, float]) -> Iterator[Event]:
    event = {"ph": "i", "s": "g", "pid": _RUN, "tid": 0}
    for switch in traced.switches:
        if (step := switch.effective_step) in starts:
            args = {"step": step, "version": switch.version, "parameters": switch.parameters}
            words = f"switch to {switch.policy}"
            yield {**event, "name": words, "cat": "switch", "ts": starts[step], "args": args}
    judged = traced.verdict
    for cause in judged.causes:
        since = None if cause.since is None else int(judged.seen.step[cause.since])
        words = verdicts.cause_words(judged, cause)
        args = {"since": since, "to_do": verdicts.to_do(judged, cause), "cost_s": cause.cost_s}
        at = starts.get(since, 0.0) if since is not None else 0.0
        yield {**event, "name": words, "cat": f"verdict {cause.kind}", "ts": at, "args": args}


def _plain(value: float) -> float | int | None:
    if np.isnan(value):
        return None
    return int(value) if value == int(value) else value
