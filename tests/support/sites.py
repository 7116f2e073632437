"""A server with a run and a token of each role, to be attacked over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import sqlalchemy as sa

from paceline.wire import RunState, State, StepBatch
from paceline_backend.store import Store, schema, telemetry
from support.records import hello, record
from support.waiting import DEADLINE_S

ROLES = ["viewer", "operator", "agent", "admin"]
RUN = "r1"


class Site:
    """A server, its store, and a token of each role."""

    def __init__(self, store: Store, admin: httpx.Client) -> None:
        self.store, self.admin = store, admin
        self.url = str(admin.base_url).rstrip("/")
        self.clients = 1
        self.calls = self._calls()
        self.tokens = {role: self.token(role) for role in ROLES}

    def _calls(self) -> list[tuple[str, str]]:
        document = self.admin.get("/openapi.json").json()["paths"]
        return [(m.upper(), path) for path, methods in document.items() for m in methods]

    def token(self, role: str, **more: Any) -> dict[str, Any]:
        answer = self.admin.post("/api/v1/tokens", json={"name": role, "scope": role, **more})
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def client(self, **headers: str) -> httpx.Client:
        """At an address of its own: wrong tokens of others do not slow it down."""
        self.clients += 1
        transport = httpx.HTTPTransport(local_address=f"127.0.{self.clients}.1")
        return httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=DEADLINE_S,
            trust_env=False,
            transport=transport,
        )

    def bearer(self, token: str) -> httpx.Client:
        return self.client(Authorization=f"Bearer {token}")

    def browser(self, token: str) -> httpx.Client:
        """Logged in by the form; sends no Origin by itself."""
        made = self.client()
        answer = made.post("/login", data={"token": token, "next": "/"})
        assert answer.status_code in (302, 303), answer.text
        assert made.cookies
        return made

    def set(self, token: str, **columns: Any) -> None:
        with self.store.write() as connection:
            table = schema.tokens
            connection.execute(sa.update(table).where(table.c.id == token).values(**columns))


def a_run(store: Store, admin: httpx.Client) -> None:
    """The run `RUN`, which trains."""
    body = {"script": "x.py", "nproc": 2, "launch": False, "env": {"SESAME": "open-4711"}}
    made = admin.post("/api/v1/runs", json=body).json()["id"]
    with store.write() as connection:
        table = schema.runs
        connection.execute(sa.update(table).where(table.c.id == made).values(id=RUN, node="here"))
    state = RunState(State.RUNNING, 5.0, "here")
    telemetry.write(store, [(RUN, state), (RUN, hello()), (RUN, StepBatch([record(0, 0)]))])
