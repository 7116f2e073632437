"""Client of the API server."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Literal, Self

import httpx

from paceline_backend.backends.engine import EngineAwayError, EngineRefusedError
from paceline_backend.backends.kubernetes import access

_TIMEOUT_S = 10.0
_API_CONNECT_S = 5.0
# Statuses that count as an outage, in addition to 5xx.
_AWAY = (401, 408, 425, 429)
_PATCH = "application/merge-patch+json"

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]


class Api:
    """Connection to the API server, used as a context manager.

    Raises:
        EngineAwayError: the address of the API server is unknown.
    """

    def __init__(self) -> None:
        self._access = access.find()
        self._http = httpx.Client(
            base_url=self._access.server,
            verify=self._access.ssl,
            proxy=self._access.proxy,
            timeout=httpx.Timeout(_TIMEOUT_S, connect=_API_CONNECT_S),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def call(
        self,
        method: Method,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        unless: Collection[int] = (),
    ) -> Any:
        """Send a request, and return the answer's JSON, or None if its status is in `unless`.

        PATCH requests are merge patches.

        Raises:
            EngineAwayError: there is no answer, or the error may be temporary.
            EngineRefusedError: the API server refuses the request.
        """
        headers = {"content-type": _PATCH if method == "PATCH" else "application/json"}
        if token := self._access.token:
            headers["authorization"] = f"Bearer {token}"
        try:
            answer = self._http.request(
                method,
                path,
                params=params,
                content=None if body is None else json.dumps(body),
                headers=headers,
                extensions=self._access.extensions,
            )
        except httpx.HTTPError as error:
            raise EngineAwayError(f"{self._access.server}: {error!r}") from error
        if answer.status_code in unless:
            return None
        if answer.is_success:
            return _parsed(answer)
        said = f"{_message(answer)} (HTTP {answer.status_code})"
        if answer.status_code == 401:
            access.forget()
        away = answer.status_code in _AWAY or answer.status_code >= 500
        raise (EngineAwayError if away else EngineRefusedError)(said)


def _parsed(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        raise EngineAwayError(
            f"{answer.url}: answer is not JSON, so not from Kubernetes"
        ) from error


def _message(answer: httpx.Response) -> str:
    try:
        said = answer.json()["message"]
    except (ValueError, LookupError, TypeError):
        said = answer.text
    return " ".join(str(said).split())[:1000] or answer.reason_phrase
