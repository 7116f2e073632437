"""Client of Ray's HTTP API, with the address and the token in the server's environment.

A run's options cannot set another address, because the server would send Ray's token there.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from paceline_backend.backends.engine import EngineAwayError, EngineRefusedError

_ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_DASHBOARD_ADDRESS")
_DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_TIMEOUT_S = 5.0


def shown_address() -> str:
    """Return Ray's address without a password, for messages."""
    return re.sub(r"//[^/@]*@", "//", _address())


def line(words: str) -> str:
    """Shorten a text from Ray to one line for a message."""
    return " ".join(words.split())[:500]


def ask(
    method: str,
    path: str,
    *,
    body: object = None,
    timeout_s: float | None = None,
    missing_is_none: bool = False,
    may_refuse: bool = False,
) -> Any:
    """Send a request to Ray, and return the parsed JSON of its answer.

    Args:
        path: path with the query.
        body: body as bytes, or an object to encode as JSON. None: no body.
        timeout_s: timeout in seconds of connecting and of each read and write. Default: 5 s.
        missing_is_none: return None for status 404.
        may_refuse: true if Ray may permanently refuse the request, for which `EngineRefusedError`
            is raised. False: each error counts as an outage.

    Raises:
        EngineAwayError: Ray does not answer, or does not accept the token.
        EngineRefusedError: Ray refuses the request.
    """
    try:
        answer = httpx.request(
            method,
            f"{_address()}{path}",
            json=None if isinstance(body, bytes) else body,
            content=body if isinstance(body, bytes) else None,
            headers=_headers(),
            timeout=timeout_s or _TIMEOUT_S,
        )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        known = any(map(os.environ.get, _ADDRESSES))
        hint = "" if known else f"; set {_ADDRESSES[0]} for the server if Ray is elsewhere"
        why = f"{shown_address()}: {error or type(error).__name__}{hint}"
        raise EngineAwayError(why) from None
    if answer.status_code == 404 and missing_is_none:
        return None
    if not answer.is_success:
        raise _problem(answer, may_refuse)
    try:
        return answer.json() if answer.content else {}
    except ValueError:
        raise strange() from None


def strange() -> EngineAwayError:
    """Return the error for an answer that does not come from Ray."""
    return EngineAwayError(f"{shown_address()} is not Ray's API")


def _problem(answer: httpx.Response, may_refuse: bool) -> EngineAwayError | EngineRefusedError:
    # Ray answers bad requests with status 500, too, and names a ValueError or TypeError in the
    # text.
    status, address = answer.status_code, shown_address()
    if status in (401, 403):
        why = f"{address} requires Ray's token: set RAY_AUTH_TOKEN for the server ({status})"
        return EngineAwayError(why)
    lines = [text for text in answer.text.splitlines() if text.strip()] or [answer.reason_phrase]
    errors = [text for text in lines if text.startswith(("ValueError", "TypeError"))]
    words = line((errors or lines)[-1])
    if may_refuse and (errors or status == 400):
        return EngineRefusedError(words)
    return EngineAwayError(f"{address} answered {status}: {words}")


def _address() -> str:
    known = (os.environ.get(name) for name in _ADDRESSES)
    return next(filter(None, known), _DEFAULT_ADDRESS).rstrip("/")


def _headers() -> dict[str, str]:
    # Ray's own command line reads the token from the same places.
    token = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    if not token and os.environ.get("RAY_AUTH_MODE") != "disabled":
        with suppress(OSError):
            token = Path(path).read_text().strip()
    return {"Authorization": f"Bearer {token}"} if token else {}
