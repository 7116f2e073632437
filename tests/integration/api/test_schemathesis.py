"""What Schemathesis makes of the OpenAPI document: each answer is documented, none is a fault.

Each role asks all operations. Some requests are good, some are bad on purpose, and most name runs,
tokens and messages that exist.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import httpx
import pytest
import sqlalchemy as sa

from paceline.wire import (
    TELEMETRY,
    Message,
    RoundBatch,
    RunState,
    State,
    StepBatch,
)
from paceline.wire.bus import connect, publish
from paceline_backend.requests import asking
from paceline_backend.server import heartbeat
from paceline_backend.store import Store, nodes, schema
from support.answering import Node, node
from support.ingesting import ingest_all
from support.records import a_round, adopted, hello, record
from support.web import ADMIN, ANY, application

V1 = "/api/v1"
Asker = Literal["none", "viewer", "operator", "agent", "admin"]
ASKERS: tuple[Asker, ...] = get_args(Asker)
RUNS = ("trains", "failed", "waits")
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
)
# Requests of each operation that are drawn at random.
FEW, MANY = 3, 60
# Some of the answers that each gets; else the requests test little.
ANSWERS: dict[Asker, set[int]] = {
    "none": {200, 401},
    "viewer": {200, 403, 422},
    "operator": {200, 202, 403, 422},
    "agent": {200, 403},
    "admin": {200, 201, 202, 404, 405, 409, 412, 422, 428},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "asker",
    [pytest.param(each, marks=() if each == "admin" else pytest.mark.long) for each in ASKERS],
)
def test_each_answer_is_documented(
    client: httpx.Client,
    store: Store,
    here: Node,
    bus_url: str,
    tmp_path: Path,
    asker: Asker,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fill(client, store, bus_url)
    caplog.clear()
    caplog.set_level(logging.INFO, logger="uvicorn.access")
    # An admin may ask everything, so that every bound of every parameter is tried.
    phases = "examples,coverage,fuzzing" if asker == "admin" else "examples,fuzzing"
    schemathesis(client, tmp_path, asker, phases, FEW)
    requests = [record.args for record in caplog.records if record.name == "uvicorn.access"]
    assert ANSWERS[asker] <= {request[-1] for request in requests if isinstance(request, tuple)}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("asker", ASKERS)
def test_each_of_many_answers_is_documented(
    client: httpx.Client, store: Store, here: Node, bus_url: str, tmp_path: Path, asker: Asker
) -> None:
    fill(client, store, bus_url)
    schemathesis(client, tmp_path, asker, "examples,coverage,fuzzing,stateful", MANY)


@pytest.fixture
def here(
    store: Store, bus_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Node]:
    """The node of the runs, which answers for as long as a test lasts."""
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", 3600.0)
    monkeypatch.setattr(asking, "ANSWER_S", 60.0)  # a node that is too slow answers with 504
    with node(store, bus_url, "here", tmp_path) as made:
        for run in RUNS:
            made.run(run)
            made.log(run, 0, "loss 3\n")
        yield made


def fill(client: httpx.Client, store: Store, bus_url: str) -> None:
    """A run that trains, one that failed, one that waits, and what belongs to them."""
    for run in RUNS:
        body = {"script": "x.py", "name": run, "nproc": 2, "launch": False, "env": {"A": "b"}}
        made = client.post(f"{V1}/runs", json=body).raise_for_status().json()["id"]
        with store.write() as connection:
            table = schema.runs
            connection.execute(
                sa.update(table).where(table.c.id == made).values(id=run, node="here")
            )
    relaxed = adopted(1, 2, policy="rna", version=1)
    trained: list[Message] = [
        RunState(State.RUNNING, 5.0, "here"),
        hello(),
        *(adopted(0, 0), relaxed),
        StepBatch([record(step, rank) for step in range(4) for rank in range(2)]),
        RoundBatch([a_round(2), a_round(3)]),
    ]
    failed = [*trained, RunState(State.FAILED, 9.0, "here", exit_code=1, message="why")]
    with connect(bus_url) as bus:
        heartbeat.beat(bus, heartbeat.Beat("one", 0, 0, 0, None))
        for key in bus.scan_iter(match="paceline:worker:*"):
            bus.persist(key)  # a worker for as long as the test lasts
        for run, messages in (("trains", trained), ("failed", failed), ("stranger", trained)):
            for message in messages:
                publish(bus, TELEMETRY, message, run)
    ingest_all(store, bus_url)
    client.get(f"{V1}/runs/trains/logs/0").raise_for_status()  # its node answers
    switch = {"policy": "rna", "parameters": {"probes": 2}, "why": "a test"}
    for answer in (
        client.put(f"{V1}/runs/trains/auto", json={"mode": "recommend"}, headers=ANY),
        client.post(f"{V1}/runs/trains/policy", json=switch, headers=ANY),
    ):
        answer.raise_for_status()


def schemathesis(client: httpx.Client, folder: Path, asker: Asker, phases: str, count: int) -> None:
    """Lets Schemathesis ask, with the same requests each time; it must not find anything.

    Args:
        client: an admin's, of the server.
        folder: for files.
        asker: who asks.
        phases: the kinds of requests.
        count: requests of each operation that are drawn at random.
    """
    # An event stream ends at once, as when the server ends.
    application(client).state.closing = lambda: True
    document, settings = folder / "openapi.json", folder / "schemathesis.toml"
    document.write_bytes(client.get("/openapi.json").raise_for_status().content)
    settings.write_text(_settings(client))
    arguments = [
        *("--config-file", str(settings), "run", str(document), "--url", str(client.base_url)),
        *("--phases", phases, "--checks", ",".join(CHECKS), "--max-examples", str(count)),
        *("--generation-deterministic", "--suppress-health-check", "all"),
        *("--continue-on-failure", "--warnings", "off", "--no-color"),
    ]
    if asker != "none":
        arguments += ["--header", f"Authorization: Bearer {_token(client, asker)}"]
    command = [sys.executable, "-m", "schemathesis.cli", *arguments]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    assert " generated, " in said.stdout


def _token(client: httpx.Client, asker: Asker) -> str:
    if asker == "admin":
        return ADMIN
    made = client.post(f"{V1}/tokens", json={"name": asker, "scope": asker})
    return str(made.raise_for_status().json()["token"])


def _settings(client: httpx.Client) -> str:
    """Most requests name what exists."""
    tokens = [
        client.post(f"{V1}/tokens", json={"name": "spare", "scope": "viewer"}).json()["id"]
        for _ in range(2)
    ]
    rejected = [each["entry"] for each in client.get(f"{V1}/rejected").json()["items"]]
    existing: dict[str, list[str]] = {
        "path.run": [*RUNS],
        "path.node": ["here"],
        "path.token": tokens,
        "path.entry": rejected,
        "path.rank": ["0", "1", "launcher"],
        "header.if-match": ["*", '"1"'],
        "body.policy": ["rna", "chronica"],
    }
    lines = ["max-stream-events = 100", "request-timeout = 120"]
    for parameter, values in existing.items():
        assert values, parameter
        lines += [f'[dictionaries."{parameter}"]', f"values = {json.dumps(values)}"]
    lines += ["[parameters]"]
    lines += [
        f'"{parameter}" = {{ dictionary = "{parameter}", probability = 0.8 }}'
        for parameter in existing
    ]
    return "\n".join(lines)
