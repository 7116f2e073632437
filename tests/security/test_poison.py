"""A training script that reports what no training does: its own run may look odd, nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import redis

from paceline import wire
from support.marks import some_long
from support.poison import NESTED, Raw, changed, fields, in_round, in_segment
from support.records import a_round, adopted, hello, record
from support.strangers import Field
from support.waiting import DEADLINE_S, until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]
MOST = 1.7e308  # the greatest numbers that are finite: their sum is not
LAST = 2**53 - 1
STATE = wire.RunState(wire.State.RUNNING, 5.0, "n")


def batch(*records: wire.StepRecord) -> bytes:
    return wire.encode(wire.StepBatch(list(records)))[b"data"]


def rounds(**values: Any) -> bytes:
    return in_round(**values)


def both(step: int = 6, **values: Any) -> bytes:
    return batch(*(record(step, rank, **values) for rank in range(2)))


MARKUP = "<img src=x onerror=alert(1)><script>alert(1)</script>"
# What can be decoded, and may even be stored.
ODD: dict[str, list[bytes]] = {
    "loads add up to infinity": [both(load=MOST)],
    "times add up to infinity": [both(compute_s=MOST), both(7, sync_s=MOST, step_s=MOST)],
    "squares add up to infinity": [both(squares=MOST, longest=MOST, ett_s=MOST, loss=MOST)],
    "times are tiny": [both(compute_s=5e-324, load=5e-324, step_s=5e-324, ett_s=5e-324)],
    "times are zero": [
        both(n, compute_s=0.0, load=0.0, step_s=0.0, samples=0) for n in range(5, 20)
    ],
    "the last step of all": [both(LAST), both(LAST - 1)],
    "steps far apart": [both(10**k) for k in range(2, 15)],
    "epochs far apart": [both(6, epoch=2**31 - 1), both(7, epoch=2**40)],
    "segments far away": [both(6, segment=2**31 - 1), both(7, segment=LAST)],
    "records far away": [both(6, seq=LAST)],
    "samples without end": [both(6, samples=LAST), both(7, samples=2**31 - 1)],
    "memory without end": [both(6, memory_bytes=LAST)],
    "ended before time": [both(6, ended_at=0.0), both(7, ended_at=5e-324)],
    "ended after time": [both(6, ended_at=1e300), both(7, ended_at=253402300800.0)],
    "one rank only": [batch(*(record(n, 1) for n in range(5, 200)))],
    "a step again and again": [both(6, load=float(n), seq=n) for n in range(200)],
    "a large batch": [batch(*(record(n // 2, n % 2) for n in range(10, 60_000)))],
    "an adopted segment far away": [in_segment(adopted(3, 6), first_step=2**50, seq=2**31 - 1)],
    "an adopted epoch far away": [in_segment(adopted(3, 6), epoch=2**31 - 1)],
    "a version far away": [in_segment(adopted(3, 6), version=2**31 - 1)],
    "a policy of markup": [in_segment(adopted(3, 6), policy=MARKUP, why=MARKUP)],
    "a policy without end": [in_segment(adopted(3, 6), policy="x" * 10**6, why="y" * 10**6)],
    "an adoption after time": [changed(adopted(3, 6), adopted_at=1e300)],
    "plans took for ever": [in_segment(adopted(3, 6), plan_s=MOST)],
    "forecast for ever": [in_segment(adopted(3, 6), ett_s=[[MOST, MOST], [MOST, MOST]])],
    "shares without end": [in_segment(adopted(3, 6), shares=[MOST, MOST])],
    "memory of a policy": [in_segment(adopted(3, 6), memory={"x": "y" * 10**6})],
    "rounds without end": [
        rounds(step=LAST, seq=LAST, number=2**31 - 1, world=2**31 - 1, bytes=LAST),
        rounds(waited_s=MOST, reduced_s=MOST, copied_s=MOST),
        rounds(seq=4, waited_s=MOST, reduced_s=MOST, copied_s=MOST, ended_at=1e300),
    ],
    "staleness without end": [
        rounds(staleness=[1] * 100_000),
        rounds(seq=5, staleness=[LAST, LAST]),
    ],
    "fallbacks": [wire.encode(wire.Fallback(0, n, MARKUP))[b"data"] for n in range(50)],
    "failed with much to say": [changed(STATE, state="failed", message=MARKUP + "x" * 10**6)],
    "failed with NUL and colours": [
        changed(STATE, state="failed", message="\0\x1b[31m\u202e\n" * 50)
    ],
    "failed with a great code": [changed(STATE, state="failed", exit_code=2**31 - 1)],
    "ended after the end of time": [changed(STATE, state="finished", at=1e300)],
    "ended before it began": [changed(STATE, state="finished", at=0.0)],
    "lost without end": [changed(STATE, dropped=LAST)],
    "on a node of markup": [changed(STATE, node=MARKUP), changed(STATE, node="x" * 10**6)],
    "to and fro": [changed(STATE, state=s) for s in ("finished", "running", "failed", "pending")],
    "a device of markup": [changed(hello(), attempt=0, device=MARKUP, torch="x" * 10**6)],
    "began after time": [changed(hello(), started_at=1e300)],
    "epochs without end": [changed(hello(), epochs=2**31 - 1), changed(hello(), epochs=LAST)],
    "a step far on": [changed(hello(), step=LAST, epoch=2**31 - 1)],
    "sizes add up to infinity": [changed(hello(), sizes=np.full(32, MOST).tobytes())],
    "sizes are tiny": [changed(hello(), sizes=np.full(32, 5e-324).tobytes())],
    "looks far ahead": [changed(hello(), lookahead=2**31 - 1)],
    "a batch of everything": [changed(hello(), global_batch=2**31 - 1)],
    "a million samples": [
        changed(hello(), sizes=np.linspace(1, 9, 10**6).tobytes(), global_batch=1, epochs=10**6)
    ],
    "profiles without end": [
        changed(hello(), profiles=[[[n + 1, MOST] for n in range(10**4)]] * 2)
    ],
    "emulated without end": [changed(hello(), emulated={"a_s": [MOST] * 2, "b_s": [MOST] * 2})],
    "nested": [
        changed(hello(), x=NESTED),
        changed(STATE, message=NESTED),
        changed(STATE, node=Raw(b"\xc1")),
    ],
}


# What is asked of another run, and of all runs, after each attack.
OTHERS = ["/api/v1/runs", "/api/v1/runs/{run}", "/api/v1/runs/{run}/workers", "/api/v1/nodes"]
OTHERS += ["/api/v1/runs/{run}/steps", "/api/v1/runs/{run}/view?last=9", "/metrics", "/readyz"]


@pytest.fixture(scope="module")
def client(field: Field) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {field.token}"}
    with httpx.Client(
        # A server's first forecast compiles its loops: minutes of low priority on a busy machine.
        base_url=field.stack.url,
        headers=headers,
        timeout=4 * DEADLINE_S,
        trust_env=False,
    ) as made:
        yield made


@pytest.fixture(scope="module")
def routes(client: httpx.Client) -> list[str]:
    """Every GET of OpenAPI but the endless stream, and the run's page."""
    document = client.get("/openapi.json").json()["paths"]
    paths = [path for path, methods in document.items() if "get" in methods]
    paths = [path for path in paths if "{" not in path or "{run}" in path]
    assert len(paths) > 25
    more = ["/api/v1/runs/{run}/steps?points=2&to=9007199254740991", "/runs/{run}", "/"]
    more += ["/api/v1/runs/{run}/steps?points=5000", "/api/v1/runs/{run}/worker-steps?points=5000"]
    more += [
        "/api/v1/runs/{run}/whatif?steps=16&refresh=true",
        "/api/v1/runs/{run}/segments?from=0",
    ]
    more += [
        "/api/v1/runs/{run}/view?last=100",
        "/api/v1/runs/{run}/coasts?points=2",
    ]
    more += ["/api/v1/runs/{run}/report?warmup=0", "/api/v1/runs/{run}/attribution?from=0"]
    return [path for path in paths if not path.endswith("/events")] + more


def a_run(field: Field) -> tuple[str, str]:
    """A run of two ranks that somebody starts by hand; its id and its URL of the bus."""
    body = {
        "script": "train.py",
        "nproc": 2,
        "launch": False,
        "node": field.run(field.mine)["node"],
    }
    run = str(field.stack.api("POST", "/runs", body)["id"])
    return run, str(field.stack.api("POST", f"/runs/{run}/session")["bus"])


def report(url: str, run: str, entries: list[dict[bytes, bytes]]) -> None:
    """Puts entries on the run's stream, and waits until ingest is done with them."""
    stream = wire.run_telemetry(run)
    with redis.Redis.from_url(url) as bus:
        for entry in entries:
            bus.xadd(stream, entry)


def drained(field: Field, run: str) -> None:
    with field.owner() as owner:
        until(
            lambda: owner.xlen(wire.run_telemetry(run)) == 0, "ingest to be done", DEADLINE_S, 0.05
        )


def faults(client: httpx.Client, routes: list[str], run: str) -> list[tuple[str, int, str]]:
    """Answers that blame the server, or that no strict parser of JSON reads."""
    bad = []
    for route in routes:
        answer = client.get(route.replace("{run}", run))
        text = answer.text
        if answer.status_code >= 500:
            bad.append((route, answer.status_code, text[:200]))
        elif "json" in answer.headers["content-type"] and re.search(r"\b(NaN|Infinity)\b", text):
            bad.append((route, answer.status_code, "no JSON"))
    return bad


def good(run: str) -> list[dict[bytes, bytes]]:
    """A run as it should be, of six steps."""
    messages: list[wire.Message] = [STATE, hello()]
    messages += [adopted(n, 2 * n) for n in range(3)]
    messages += [wire.StepBatch([record(n, 0), record(n, 1)]) for n in range(6)]
    messages += [wire.RoundBatch([a_round(n) for n in range(3)])]
    return [wire.encode(message, run) for message in messages]


def check(field: Field, client: httpx.Client, routes: list[str], run: str) -> None:
    drained(field, run)
    assert faults(client, routes, run) == []
    planned = field.planned(field.theirs)
    until(
        lambda: field.planned(field.theirs) > planned, "the worker to plan others", DEADLINE_S, 0.1
    )
    assert faults(client, OTHERS, field.theirs) == []


@pytest.mark.parametrize("name", some_long(ODD, 8))
def test_odd_telemetry(field: Field, client: httpx.Client, routes: list[str], name: str) -> None:
    run, url = a_run(field)
    report(url, run, good(run))
    drained(field, run)
    report(url, run, [fields(data, run.encode()) for data in ODD[name]])
    check(field, client, routes, run)
    assert field.run(field.theirs)["state"] == "running"


def test_numbers_of_entries(field: Field, client: httpx.Client, routes: list[str]) -> None:
    """Whoever may append chooses the entry's number: here the last one there is."""
    run, url = a_run(field)
    report(url, run, good(run))
    drained(field, run)
    with redis.Redis.from_url(url) as bus:
        stream = wire.run_telemetry(run)
        last = f"{2**64 - 1}-{2**64 - 2}"
        bus.xadd(stream, wire.encode(wire.StepBatch([record(6, 0)]), run), id=last)
    check(field, client, routes, run)
