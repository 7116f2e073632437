"""The server's REST API as the command line and the agent use it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from paceline.core import runid
from paceline.core.errors import InputError, PacelineError
from paceline.wire import PROTOCOL_VERSION

_PAGE = 500  # runs in an answer: the most that the server allows


class ServerUnreachable(PacelineError):  # noqa: N818 - reads as what happened
    """No working Paceline server answers at the address."""


class Client:
    """A connection to one server; a context manager.

    Args:
        server: base URL.
        token: for a server that is not on this machine.
        timeout_s: of each call.
    """

    def __init__(self, server: str, token: str | None = None, timeout_s: float = 10.0) -> None:
        self.server = server.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            host = httpx.URL(self.server).host
        except httpx.InvalidURL as error:
            raise InputError(f"--server {server}: {error}") from error
        self._http = httpx.Client(
            base_url=self.server,
            headers=headers,
            timeout=timeout_s,
            trust_env=host
            not in ("127.0.0.1", "::1", "localhost"),  # no proxy reaches our loopback
        )

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> Any:
        """The JSON answer of a call below ``/api/v1``.

        Raises:
            InputError: the server refused the request; the message holds the server's reason.
            ServerUnreachable: nothing answers, the address is no Paceline server's, or the server's
                database or bus is away.
            PacelineError: the server wants a token, or failed.
        """
        try:
            answer = self._http.request(method, f"/api/v1{path}", json=body, params=params)
        except (httpx.TransportError, httpx.UnsupportedProtocol) as error:
            raise ServerUnreachable(f"no server answers at {self.server} ({error})") from error
        kind = answer.headers.get("content-type", "").partition(";")[0]
        if answer.is_error and kind != "application/problem+json":  # our server's errors all are
            raise ServerUnreachable(
                f"what answers at {self.server} is no Paceline server "
                f"({answer.status_code} {answer.reason_phrase})"
            )
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise PacelineError(
                f"the server {self.server} wants a token: give --token or PACELINE_TOKEN"
            )
        try:
            content = answer.json()
        except ValueError as error:
            raise ServerUnreachable(
                f"what answers at {self.server} is no Paceline server"
            ) from error
        if answer.is_client_error:
            raise InputError(_reason(content))
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise ServerUnreachable(f"the server {self.server} cannot work now: {_reason(content)}")
        if answer.is_error:
            raise PacelineError(f"the server failed: {_reason(content)}")
        return content

    def version(self) -> dict[str, Any]:
        """``{version, protocol, id, bus}`` of a server that speaks our protocol version.

        Raises:
            ServerUnreachable: as `call`.
            PacelineError: the server refuses the call, or speaks another protocol version.
        """
        try:
            answer = self.call("GET", "/version")
            protocol = answer["protocol"]
        except InputError as error:
            raise PacelineError(f"the server {self.server} refuses: {error}") from error
        except (KeyError, TypeError) as error:
            raise ServerUnreachable(
                f"what answers at {self.server} is no Paceline server"
            ) from error
        if protocol != PROTOCOL_VERSION:
            raise PacelineError(
                f"the server {self.server} (paceline {answer.get('version')}) speaks protocol "
                f"version {protocol}, this paceline {PROTOCOL_VERSION}: "
                "install the same release on both"
            )
        return dict(answer)

    def run(self, given: str) -> str:
        """The whole id of a run.

        Args:
            given: the id, or a beginning that no other run's id has.

        Raises:
            InputError: no run's id begins with `given`, or several do; the message lists them.
            PacelineError: as `call`.
        """
        runid.checked(given)
        try:
            return str(self.call("GET", f"/runs/{given}")["id"])
        except InputError:  # no run has this id
            return runid.chosen(given, self._run_ids())

    def _run_ids(self) -> Iterator[str]:
        query: dict[str, Any] = {"limit": _PAGE}
        while True:
            page = self.call("GET", "/runs", params=query)
            yield from (run["id"] for run in page["items"])
            if page["next_cursor"] is None:
                return
            query = {"limit": _PAGE, "cursor": page["next_cursor"]}

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reason(problem: Any) -> str:
    """The reason in an RFC 9457 problem, in one line."""
    if not isinstance(problem, dict):
        return str(problem)
    return str(problem.get("detail") or problem.get("title") or problem)
