"""A client of the server's REST API, for the command line and the agent.

Every call raises a `PacelineError` if the server requires a token, or fails. Two subclasses are
more specific: an `InputError` means that the server rejects the request, and a `ServerUnreachable`
that no server answers.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import httpx

from paceline.core import runid
from paceline.core.errors import InputError, PacelineError
from paceline.node import tokens

_CA_FILE = "PACELINE_CA_FILE"
CALL_TIMEOUT_S = 10.0
# Number of runs per page: the maximum that the server allows.
_PAGE = 500


class ServerUnreachable(PacelineError):  # noqa: N818 - the name says what happened
    """An error because no working Paceline server answers at the given address."""


class Client:
    """A connection to one server; a context manager.

    `token` None: the token that a server on this machine has stored for its user. `timeout_s`
    limits each call, in seconds; None: `CALL_TIMEOUT_S`.
    """

    def __init__(
        self, server: str, token: str | None = None, timeout_s: float | None = None
    ) -> None:
        self.server = server.rstrip("/")
        self._token = token
        try:
            host = httpx.URL(self.server).host
        except httpx.InvalidURL as error:
            raise InputError(f"--server {server}: {error}") from error
        verify: ssl.SSLContext | bool = True
        if ca_file := os.environ.get(_CA_FILE):
            try:
                verify = ssl.create_default_context(cafile=ca_file)
            except OSError as error:
                reason = error.strerror or error
                raise InputError(f"{_CA_FILE}: {ca_file} cannot be used: {reason}") from error
        self._http = httpx.Client(
            base_url=self.server,
            timeout=CALL_TIMEOUT_S if timeout_s is None else timeout_s,
            verify=verify,
            # A proxy cannot reach this machine's loopback interface.
            trust_env=host not in ("127.0.0.1", "::1", "localhost"),
        )

    def twin(self, timeout_s: float | None = None) -> Client:
        """Return another connection to the same server, for example for another thread."""
        return Client(self.server, self._token, timeout_s)

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        if_match: str | None = None,
    ) -> Any:
        """Call a path below ``/api/v1`` and return the JSON answer.

        `if_match` is the ETag of the run's revision to which a change applies; ``*``: any revision.
        """
        headers = self._headers() | ({} if if_match is None else {"If-Match": if_match})
        with self._translated():
            answer = self._http.request(
                method, f"/api/v1{path}", json=body, params=params, headers=headers
            )
        self._refuse_errors(answer)
        try:
            return answer.json()
        except ValueError as error:
            raise ServerUnreachable(f"{self.server} is not a Paceline server") from error

    def download(self, path: str, params: Mapping[str, Any] | None = None) -> Iterator[bytes]:
        """Yield the chunks of an answer as they arrive; the answer may be long, or not JSON."""
        request = self._http.build_request(
            "GET", f"/api/v1{path}", params=params, headers=self._headers()
        )
        with self._translated(), closing(self._http.send(request, stream=True)) as answer:
            if answer.is_error:
                answer.read()
            self._refuse_errors(answer)
            yield from answer.iter_bytes()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, httpx.UnsupportedProtocol) as error:
            raise ServerUnreachable(
                f"no server answers at {self.server} ({error}); set another address with "
                "--server or PACELINE_SERVER"
            ) from error

    def _refuse_errors(self, answer: httpx.Response) -> None:
        if not answer.is_error:
            return
        kind = answer.headers.get("content-type", "").partition(";")[0]
        # All errors of a Paceline server have this content type.
        if kind != "application/problem+json":
            raise ServerUnreachable(
                f"{self.server} is not a Paceline server "
                f"({answer.status_code} {answer.reason_phrase})"
            )
        reason = _reason(_json(answer))
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise PacelineError(
                f"the server {self.server} requires a token: set --token-file or PACELINE_TOKEN"
                f" ({reason})"
            )
        if answer.is_client_error:
            raise InputError(reason)
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise ServerUnreachable(f"the server {self.server} is unavailable: {reason}")
        # The server works, but a node has not answered the server's own request.
        if answer.status_code == httpx.codes.GATEWAY_TIMEOUT:
            raise PacelineError(reason)
        raise PacelineError(f"the server failed: {reason}")

    def _headers(self) -> dict[str, str]:
        # Read the token for each call: a server may start later, or restart with another token.
        token = self._token or tokens.kept(self.server)
        return {"Authorization": f"Bearer {token}"} if token else {}

    def change(
        self,
        method: str,
        run: str,
        what: str,
        body: Mapping[str, Any],
        revision: int | None = None,
    ) -> Any:
        """Change a run if it has a given revision; return the server's answer.

        `what` is the path below the run, such as ``policy``. `revision` None: the run's present
        revision. An InputError is also raised if the run has another revision, because another
        client has changed it.
        """
        if revision is None:
            revision = self.revision(run)
        return self.call(method, f"/runs/{run}/{what}", body, if_match=f'"{revision}"')

    def revision(self, run: str) -> int:
        """Return the present revision of a run; `run` is its whole id."""
        return int(self.call("GET", f"/runs/{run}")["revision"])

    def version(self) -> dict[str, Any]:
        """Return the server's answer to ``GET /version``: version, protocol, id and bus.

        Raise a PacelineError if the server's protocol version is not that of this client.
        """
        # Imported on use: `paceline.wire` loads numpy and redis, which `paceline up` does not need.
        from paceline.wire import PROTOCOL_VERSION

        try:
            answer = self.call("GET", "/version")
            protocol = answer["protocol"]
        except InputError as error:
            raise PacelineError(
                f"the server {self.server} rejected the request: {error}"
            ) from error
        except (KeyError, TypeError) as error:
            raise ServerUnreachable(f"{self.server} is not a Paceline server") from error
        if protocol != PROTOCOL_VERSION:
            raise PacelineError(
                f"the server {self.server} (paceline {answer.get('version')}) speaks protocol "
                f"version {protocol}, this paceline {PROTOCOL_VERSION}: "
                "install the same version on both"
            )
        return dict(answer)

    def session(self, path: str) -> dict[str, Any]:
        """Request credentials for the bus; `path` is ``/nodes/{node}`` or ``/runs/{run}``."""
        return dict(self.call("POST", f"{path}/session"))

    def run(self, given: str) -> str:
        """Return the whole id of a run; `given` is the id, or a prefix that no other run's id has.

        If several ids begin with the prefix, the InputError lists them.
        """
        runid.checked(given)
        try:
            return str(self.call("GET", f"/runs/{given}")["id"])
        # No run has exactly this id.
        except InputError:
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
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return answer.reason_phrase


def _reason(problem: Any) -> str:
    if not isinstance(problem, dict):
        return str(problem)
    return str(problem.get("detail") or problem.get("title") or problem)
