"""Simulation as a run of a control plane, with telemetry like that of a real run.

``paceline simulate --server`` registers a run and iterates over the `segments` of a `Broadcast`.
The control plane never plans the segments of a simulated run: the simulation plans them itself, and
applies an operator's switches and stops.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import numpy as np
import redis

from paceline import policies
from paceline.core.emulation import Emulation
from paceline.core.outage import Outage
from paceline.node.client import Client, ServerUnreachable
from paceline.policies.base import Floats
from paceline.wire import (
    TELEMETRY,
    Adopted,
    Message,
    RoundBatch,
    RoundRecord,
    RunState,
    State,
    StopTraining,
    WireError,
    control,
    decode,
    encode,
    encode_steps,
)
from paceline.wire.parts import encode_hello
from paceline_backend.simulator.scenario import Scenario
from paceline_backend.simulator.simulation import Simulation, TrainedSegment

log = logging.getLogger(__name__)

# A run's page lists the workers' devices only if there are at most this many workers.
EMULATED_SHOWN = 1_024
# Maximum number of records in a message, unless one step has more.
_RECORDS = 10_000
# A message on the bus counts as at least this many records, because each message takes memory.
_AS_RECORDS = 250
# Interval of heartbeats.
_SIGN_S = 3.0  # seconds
# Interval of polls for policy switches.
_POLL_S = 0.25  # seconds

T = TypeVar("T")


def register(server: Client, scenario: Scenario, script: str) -> str:
    """Register a simulated run with a control plane; return the run's public id.

    `script` is the path of the scenario's file.

    Raises:
        InputError: the server refused the run.
        PacelineError: the server does not answer, or failed.
    """
    body = {
        "name": scenario.name,
        "script": script,
        "nproc": scenario.workers,
        "policy": scenario.policy,
        "parameters": scenario.parameters,
        "launch": False,
        "backend": "simulated",
        "scenario": scenario.as_dict(),
    }
    return str(server.call("POST", "/runs", body)["id"])


class Broadcast:
    """A simulation that is reported as a registered run, from virtual time 0. Not thread-safe.

    All reported times are virtual, and may be ahead of the wall clock; virtual time 0 is the Unix
    time `started_at`. An operator's switch or stop takes effect at the next segment. The simulation
    waits while more than `waiting` of its records are on the bus and not stored yet, and while the
    bus or the server is unavailable.
    """

    def __init__(
        self,
        simulation: Simulation,
        run: str,
        bus: redis.Redis,
        server: Client,
        started_at: float,
        stream: str = TELEMETRY,
    ) -> None:
        self.state = State.STARTING
        self.waiting = 100_000
        self._simulation = simulation
        self._run = run
        self._bus = bus
        self._server = server
        self._stream = stream
        self._started_at = started_at
        # Id of the last message read from the stream control(run).
        self._position = "0-0"
        # The newest attempt whose Hello was sent (-1: none), the attempt's first step, and its
        # number of reduction rounds so far.
        self._attempt = -1
        self._first_step = 0
        self._rounds = 0
        # Monotonic times of the last heartbeat and of the last poll for policy switches.
        self._signed = self._polled = 0.0
        self._outage = Outage(log, "the simulation is paused", "the simulation continues")
        # Number of records in each message that may still be on the bus, oldest first.
        self._sent: deque[int] = deque()

    def segments(self) -> Iterator[tuple[TrainedSegment, Emulation]]:
        """Train to the end or to a stop; yield each segment and the devices that trained it."""
        simulation = self._simulation
        self._sign(State.STARTING)
        while not (simulation.finished or self.state.final):
            self._introduce()
            self._sign(State.RUNNING)
            self._obey()
            self._switch()
            if self._has_ended():
                return
            devices = simulation.devices
            trained = simulation.advance()
            self._tell(trained)
            yield trained, devices
        if not self._has_ended():
            self.end(State.FINISHED)

    def _has_ended(self) -> bool:
        """Return True if the run has ended.

        This is a method because a type checker assumes that an attribute keeps its value, but any
        call in `segments` may end the run.
        """
        return self.state.final

    def end(self, state: State, message: str | None = None) -> None:
        """Report that the run has ended in a final state, with a message for the operator."""
        self.state = state
        code = {State.FINISHED: 0, State.FAILED: 1}.get(state)
        self._send(RunState(state, self._time(), "", self._attempt, code, message))

    def _time(self, virtual: float | None = None) -> float:
        return self._started_at + (self._simulation.now if virtual is None else virtual)

    def _introduce(self) -> None:
        hello = self._simulation.hello
        if hello.attempt == self._attempt:
            return
        self._attempt, self._first_step, self._rounds = hello.attempt, hello.step, 0
        shown = hello.world <= EMULATED_SHOWN
        emulated = self._simulation.devices.as_dict() if shown else None
        started_at = self._time(hello.started_at)
        hello = msgspec.structs.replace(hello, started_at=started_at, emulated=emulated)
        for entry in encode_hello(hello, self._run):
            self._add(entry)

    def _sign(self, state: State) -> None:
        now = time.monotonic()
        if state != self.state or now >= self._signed + _SIGN_S:
            self.state, self._signed = state, now
            self._send(RunState(state, self._time(), "", max(self._attempt, 0)))

    def _tell(self, trained: TrainedSegment) -> None:
        self._wait_for_room()
        self._send(Adopted(trained.attempt, trained.plan, self._time(trained.begins_at)))
        steps, world = trained.compute_s.shape
        at_once = max(1, _RECORDS // world)
        for first in range(0, steps, at_once):
            part = slice(first, min(first + at_once, steps))
            columns = records(trained, part, self._first_step, self._started_at)
            self._add(encode_steps(columns, self._run), len(columns["step"]))
        round_records = rounds(trained, self._rounds, self._started_at)
        self._rounds += len(round_records)
        for first in range(0, len(round_records), _RECORDS):
            batch = round_records[first : first + _RECORDS]
            self._add(encode(RoundBatch(batch), self._run), len(batch))

    def _wait_for_room(self) -> None:
        while self._on_the_bus() > self.waiting:
            self._sign(self.state)
            time.sleep(0.005)

    def _on_the_bus(self) -> int:
        """Return an upper bound of the number of this run's records on the bus.

        Messages are ingested in sequence, so if the stream has n messages, at most the newest n
        messages of this run are on the bus.
        """
        length = self._patiently(lambda: int(self._bus.xlen(self._stream)))
        while len(self._sent) > length:
            self._sent.popleft()
        return sum(self._sent)

    def _obey(self) -> None:
        answer: Any = self._patiently(lambda: self._bus.xread({control(self._run): self._position}))
        for _, entries in answer:
            for number, fields in entries:
                self._position = number.decode()
                try:
                    message = decode(fields)[1]
                except WireError as error:
                    log.warning("an unreadable message is ignored: %s", error)
                    continue
                if isinstance(message, StopTraining):
                    self.end(State.STOPPED, message.reason)

    def _switch(self) -> None:
        simulation = self._simulation
        due = simulation.switches and simulation.switches[0].step <= simulation.step
        now = time.monotonic()
        if not due and now < self._polled + _POLL_S:
            return
        self._polled = now
        run = self._ask("GET", "")
        state = State(run["state"])
        # Continue in the state FAILED: the server also sets it if it has received no message for
        # long.
        if state.final and state is not State.FAILED:
            self.state = state
            return
        if run["version"] != simulation.version:
            wanted = self._ask("GET", "/switches")[-1]
            policy = policies.make(wanted["policy"], wanted["parameters"])
            simulation.switch(policy, wanted["version"])
        while simulation.switches and simulation.switches[0].step <= simulation.step:
            change = simulation.switches.popleft()
            body = {"policy": change.policy, "parameters": change.parameters, "by": "scenario"}
            # `if_match="*"`: the scenario's switches take effect regardless of operators' switches.
            made = self._ask("POST", "/policy", body, if_match="*")
            simulation.switch(policies.make(change.policy, change.parameters), made["version"])

    def _ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        if_match: str | None = None,
    ) -> Any:
        whole = f"/runs/{self._run}{path}"
        return self._patiently(lambda: self._server.call(method, whole, body, if_match=if_match))

    def _send(self, message: Message) -> None:
        self._add(encode(message, self._run))

    def _add(self, entry: dict[bytes, bytes], rows: int = 0) -> None:
        fields: dict[Any, Any] = {**entry}
        self._patiently(lambda: self._bus.xadd(self._stream, fields))
        self._sent.append(max(rows, _AS_RECORDS))

    def _patiently(self, call: Callable[[], T]) -> T:
        """Repeat `call` until bus and server answer; return its result."""
        while True:
            try:
                answer = call()
            except (redis.ConnectionError, redis.TimeoutError, ServerUnreachable) as error:
                time.sleep(self._outage.failed(error))
            else:
                self._outage.succeeded()
                return answer


def records(
    trained: TrainedSegment, part: slice, first_step: int, started_at: float
) -> dict[str, list[Any]]:
    """Return all ranks' records of some steps of a segment, as a list for each `StepRecord` field.

    `part` selects steps of the segment. `first_step` is the first step of the attempt, and
    `started_at` the Unix time of virtual time 0.
    """
    compute_s = trained.compute_s[part]
    count, world = compute_s.shape
    step = trained.plan.first_step + np.arange(part.start, part.start + count)
    step_s = trained.rank_step_s[part]
    ett_s = None if trained.ett_s is None else trained.ett_s[part]
    rows = count * world

    def of_step(values: Any) -> list[Any]:
        return list(np.repeat(values, world).tolist())

    def of_rank(values: Any) -> list[Any]:
        return list(np.ravel(values).tolist())

    return {
        "attempt": [trained.attempt] * rows,
        "rank": list(range(world)) * count,
        "seq": of_step(step - first_step),
        "step": of_step(step),
        "epoch": [trained.plan.epoch] * rows,
        "segment": [trained.plan.seq] * rows,
        "samples": of_rank(trained.features.samples[part]),
        "load": of_rank(trained.features.load[part]),
        "data_s": of_rank(trained.data_s[part]),
        "compute_s": of_rank(compute_s),
        "sync_s": of_rank(trained.wait_s[part] + trained.communication_s[part]),
        "step_s": of_rank(step_s),
        "ended_at": of_rank(started_at + trained.started_at[part] + step_s),
        "ett_s": [None] * rows if ett_s is None else _or_none(ett_s),
        "loss": [None] * rows,
        "memory_bytes": [0] * rows,
        "squares": of_rank(trained.features.squares[part]),
        "longest": of_rank(trained.features.longest[part]),
        "recompiles": [0] * rows,
    }


def _or_none(values: Floats) -> list[float | None]:
    numbers: list[float | None] = [*values.ravel().tolist()]
    for at in np.flatnonzero(np.isnan(values)):
        numbers[at] = None
    return numbers


def rounds(trained: TrainedSegment, seq: int, started_at: float) -> list[RoundRecord]:
    """Return the records that ranks would send about a segment's reduction rounds.

    `seq` is the number of the segment's first round, counted over all ranks from the attempt's
    start; real ranks count their own rounds. `started_at` is the Unix time of virtual time 0.
    """
    return [
        RoundRecord(
            attempt=trained.attempt,
            rank=round_.rank,
            seq=seq + k,
            segment=trained.plan.seq,
            number=round_.number,
            step=trained.plan.first_step + round_.step,
            world=trained.compute_s.shape[1] if round_.world is None else round_.world,
            contributors=round_.contributors,
            staleness=round_.staleness,
            dropped=round_.dropped,
            waited_s=round_.waited_s,
            reduced_s=round_.reduced_s,
            bytes=round_.bytes,
            ended_at=started_at + round_.ended_at,
            copied_s=0.0,
        )
        for k, round_ in enumerate(trained.rounds)
    ]
