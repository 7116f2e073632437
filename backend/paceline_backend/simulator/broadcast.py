"""A simulation as a run of a control plane: its telemetry goes over the bus as a real one's."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import numpy as np
import redis

from paceline.core.emulation import Emulation
from paceline.core.outage import Outage
from paceline.node.client import Client, ServerUnreachable
from paceline.wire import (
    TELEMETRY,
    Adopted,
    Message,
    RoundBatch,
    RoundRecord,
    RunState,
    State,
    StopTraining,
    control,
    decode,
    encode,
    encode_steps,
)
from paceline_backend import policies
from paceline_backend.policies.base import Floats
from paceline_backend.simulator.scenario import Scenario
from paceline_backend.simulator.simulation import Ran, Simulation

log = logging.getLogger(__name__)

EMULATED_SHOWN = 1_024  # workers: with more, the devices' numbers are too long for a run's page
_RECORDS = 10_000  # in a message: whole steps, or at least one of them
_AS_RECORDS = 250  # what a message counts at least while it waits: it takes memory too
_SIGN_S = 3.0  # of life
_POLL_S = 0.25  # how often the server is asked what an operator wants

T = TypeVar("T")


def register(server: Client, scenario: Scenario, script: str) -> str:
    """Tells a control plane of a simulated run; its public id.

    Args:
        server: the control plane's REST.
        scenario: what will be simulated.
        script: where that is from: shown as the run's script.

    Raises:
        InputError: the server refused it.
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
    """Runs a simulation as a registered run. For one thread.

    The run's clock is the virtual one: it begins at `started_at` and may be ahead of the wall's.
    An operator's switches take effect at the next segment, and so does a stop. Telemetry never
    outruns ingest. A bus or server that is away is waited for.

    Args:
        simulation: at its beginning, virtual time 0.
        run: its public id; registered as simulated.
        bus: client of the control plane's bus.
        server: the control plane's REST.
        started_at: Unix time.
        waiting: records that may be on the bus and not stored before more are made.
    """

    def __init__(
        self,
        simulation: Simulation,
        run: str,
        bus: redis.Redis,
        server: Client,
        started_at: float,
        waiting: int = 100_000,
    ) -> None:
        self.state = State.STARTING
        self._simulation = simulation
        self._run = run
        self._bus = bus
        self._server = server
        self._started_at = started_at
        self._position = "0-0"  # in control(run)
        self._attempt = -1  # the last that was introduced,
        self._first_step = 0  # its first step,
        self._rounds = 0  # and its rounds so far
        self._signed = self._polled = 0.0  # monotonic
        self._waiting = waiting
        self._outage = Outage(log, "the simulation waits", "the simulation goes on")
        self._sent: deque[int] = deque()  # records in each message that may be on the bus

    def segments(self) -> Iterator[tuple[Ran, Emulation]]:
        """Trains to the end, or until it is stopped; each segment with the devices it ran on."""
        simulation = self._simulation
        self._sign(State.STARTING)
        while not (simulation.finished or self._over()):
            self._introduce()
            self._sign(State.RUNNING)
            self._obey()
            self._switch()
            if self._over():
                return
            devices = simulation.devices
            ran = simulation.advance()
            self._tell(ran)
            yield ran, devices
        if not self._over():
            self.end(State.FINISHED)

    def _over(self) -> bool:
        return self.state.final

    def end(self, state: State, message: str | None = None) -> None:
        """Tells with which final state the run ended."""
        self.state = state
        code = {State.FINISHED: 0, State.FAILED: 1}.get(state)
        self._send(RunState(state, self._time(), "", self._attempt, code, message))

    def _time(self, virtual: float | None = None) -> float:
        return self._started_at + (self._simulation.now if virtual is None else virtual)

    def _introduce(self) -> None:
        """Says hello, once in each attempt."""
        hello = self._simulation.hello
        if hello.attempt == self._attempt:
            return
        self._attempt, self._first_step, self._rounds = hello.attempt, hello.step, 0
        shown = hello.world <= EMULATED_SHOWN
        emulated = self._simulation.devices.as_dict() if shown else None
        started_at = self._time(hello.started_at)
        self._send(msgspec.structs.replace(hello, started_at=started_at, emulated=emulated))

    def _sign(self, state: State) -> None:
        """A state, if it is new, or old enough to need repeating."""
        now = time.monotonic()
        if state != self.state or now >= self._signed + _SIGN_S:
            self.state, self._signed = state, now
            self._send(RunState(state, self._time(), "", max(self._attempt, 0)))

    def _tell(self, ran: Ran) -> None:
        self._wait_for_room()
        self._send(Adopted(ran.attempt, ran.segment, self._time(ran.begins_at)))
        steps, world = ran.compute_s.shape
        at_once = max(1, _RECORDS // world)
        for first in range(0, steps, at_once):
            part = slice(first, min(first + at_once, steps))
            columns = records(ran, part, self._first_step, self._started_at)
            self._add(encode_steps(columns, self._run), len(columns["step"]))
        batches = rounds(ran, self._rounds, self._started_at)
        self._rounds += len(batches)
        for first in range(0, len(batches), _RECORDS):
            batch = batches[first : first + _RECORDS]
            self._add(encode(RoundBatch(batch), self._run), len(batch))

    def _wait_for_room(self) -> None:
        """Until ingest has stored most of what was sent."""
        while self._on_the_bus() > self._waiting:
            self._sign(self.state)
            time.sleep(0.005)

    def _on_the_bus(self) -> int:
        """Records of ours that are there at most: ingest takes messages in their order."""
        length = self._patiently(lambda: int(self._bus.xlen(TELEMETRY)))
        while len(self._sent) > length:
            self._sent.popleft()
        return sum(self._sent)

    def _obey(self) -> None:
        """Notes that somebody wants it to stop."""
        answer: Any = self._patiently(lambda: self._bus.xread({control(self._run): self._position}))
        for _, entries in answer:
            for number, fields in entries:
                self._position = number.decode()
                message = decode(fields)[1]
                if isinstance(message, StopTraining):
                    self.end(State.STOPPED, message.reason)

    def _switch(self) -> None:
        """Does the scenario's switches that are due, and those that an operator has asked for."""
        simulation = self._simulation
        due = simulation.switches and simulation.switches[0].step <= simulation.step
        now = time.monotonic()
        if not due and now < self._polled + _POLL_S:
            return
        self._polled = now
        run = self._ask("GET", "")
        state = State(run["state"])
        if state.final and state is not State.FAILED:  # "failed" may be just assumed
            self.state = state
            return
        if run["version"] != simulation.version:
            wanted = self._ask("GET", "/switches")[-1]
            policy = policies.make(wanted["policy"], wanted["parameters"])
            simulation.switch(policy, wanted["version"])
        while simulation.switches and simulation.switches[0].step <= simulation.step:
            change = simulation.switches.popleft()
            body = {"policy": change.policy, "parameters": change.parameters, "by": "scenario"}
            made = self._ask("POST", "/policy", body)
            simulation.switch(policies.make(change.policy, change.parameters), made["version"])

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._patiently(lambda: self._server.call(method, f"/runs/{self._run}{path}", body))

    def _send(self, message: Message) -> None:
        self._add(encode(message, self._run))

    def _add(self, entry: dict[bytes, bytes], rows: int = 0) -> None:
        fields: dict[Any, Any] = {**entry}
        self._patiently(lambda: self._bus.xadd(TELEMETRY, fields))
        self._sent.append(max(rows, _AS_RECORDS))

    def _patiently(self, call: Callable[[], T]) -> T:
        """What `call` returns, as soon as bus or server answer."""
        while True:
            try:
                answer = call()
            except (redis.ConnectionError, redis.TimeoutError, ServerUnreachable) as error:
                time.sleep(self._outage.failed(error))
            else:
                self._outage.over()
                return answer


def records(ran: Ran, part: slice, first_step: int, started_at: float) -> dict[str, list[Any]]:
    """The fields of `StepRecord` as columns, of all ranks' records of some steps.

    Args:
        ran: what was trained.
        part: which of its steps.
        first_step: of the attempt.
        started_at: Unix time of virtual time 0.
    """
    compute_s = ran.compute_s[part]
    count, world = compute_s.shape
    step = ran.segment.first_step + np.arange(part.start, part.start + count)
    step_s = ran.rank_step_s[part]
    ett_s = None if ran.ett_s is None else ran.ett_s[part]
    rows = count * world

    def of_step(values: Any) -> list[Any]:
        return list(np.repeat(values, world).tolist())

    def of_rank(values: Any) -> list[Any]:
        return list(np.ravel(values).tolist())

    return {
        "attempt": [ran.attempt] * rows,
        "rank": list(range(world)) * count,
        "seq": of_step(step - first_step),
        "step": of_step(step),
        "epoch": [ran.segment.epoch] * rows,
        "segment": [ran.segment.seq] * rows,
        "samples": of_rank(ran.features.samples[part]),
        "load": of_rank(ran.features.load[part]),
        "data_s": of_rank(ran.data_s[part]),
        "compute_s": of_rank(compute_s),
        "sync_s": of_rank(ran.wait_s[part] + ran.communication_s[part]),
        "step_s": of_rank(step_s),
        "ended_at": of_rank(started_at + ran.started_at[part] + step_s),
        "ett_s": [None] * rows if ett_s is None else _or_none(ett_s),
        "loss": [None] * rows,
        "memory_bytes": [0] * rows,
        "squares": of_rank(ran.features.squares[part]),
        "longest": of_rank(ran.features.longest[part]),
    }


def _or_none(values: Floats) -> list[float | None]:
    """Flat, None for NaN."""
    numbers: list[float | None] = [*values.ravel().tolist()]
    for at in np.flatnonzero(np.isnan(values)):
        numbers[at] = None
    return numbers


def rounds(ran: Ran, seq: int, started_at: float) -> list[RoundRecord]:
    """What ranks would tell of a segment's rounds.

    Args:
        ran: what was trained.
        seq: of the first, in its attempt. (Real ranks each count their own.)
        started_at: Unix time of virtual time 0.
    """
    return [
        RoundRecord(
            attempt=ran.attempt,
            rank=entry.rank,
            seq=seq + k,
            segment=ran.segment.seq,
            number=entry.number,
            step=ran.segment.first_step + entry.step,
            world=ran.compute_s.shape[1] if entry.world is None else entry.world,
            contributors=entry.contributors,
            staleness=entry.staleness,
            dropped=entry.dropped,
            waited_s=entry.waited_s,
            reduced_s=entry.reduced_s,
            bytes=entry.bytes,
            ended_at=started_at + entry.ended_at,
        )
        for k, entry in enumerate(ran.rounds)
    ]
