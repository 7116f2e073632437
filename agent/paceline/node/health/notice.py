"""A cloud provider's notices that it reclaims this machine.

Providers announce the end of a spot or preemptible machine 30 to 120 seconds in advance, at a URL
that only the machine itself can reach. The URLs belong to the metadata services of Amazon EC2
(spot/instance-action, IMDSv2), Google Compute Engine (instance/preempted) and Azure (scheduled
events).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from paceline.core.errors import InputError

# Seconds between two requests for a notice, as Amazon advises.
NOTICE_INTERVAL_S = 5.0
_TIMEOUT_S = 2.0
# Lifetime in seconds of the requested token of EC2's metadata service: the allowed maximum.
_TOKEN_S = 21_600
# Maximum number of characters of an answer that appear in messages.
_MOST_WORDS = 200
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Provider:
    """A provider's API for notices.

    Args:
        url: URL of the notice.
        read: function that takes an answer and this machine's name at the provider, and returns
            the notice in words; it returns None if there is no notice.
        headers: headers of all requests.
        token_url: URL that issues a token for the request; empty: no token is needed.
        name_url: URL that returns this machine's name, if notices may be for other machines; empty:
            all notices are for this machine.
    """

    url: str
    read: Callable[[httpx.Response, str], str | None]
    headers: Mapping[str, str] = field(default_factory=dict)
    token_url: str = ""
    name_url: str = ""


def _read_ec2(answer: httpx.Response, _name: str) -> str | None:
    if answer.status_code == httpx.codes.NOT_FOUND:
        return None
    notice = _object(answer)
    return f"{notice.get('action', 'interruption')} at {notice.get('time', 'an unknown time')}"


def _read_google(answer: httpx.Response, _name: str) -> str | None:
    answer.raise_for_status()
    return "preempted" if answer.text.strip().upper() == "TRUE" else None


def _read_azure(answer: httpx.Response, name: str) -> str | None:
    """Read a notice of Azure; ignore events for other machines of the same scale set."""
    events = _object(answer).get("Events", [])
    for event in events if isinstance(events, list) else []:
        if not isinstance(event, dict) or name not in (event.get("Resources") or ()):
            continue
        if event.get("EventType") in ("Preempt", "Terminate"):
            return f"{event['EventType']} not before {event.get('NotBefore') or 'now'}"
    return None


def _read_plain(answer: httpx.Response, _name: str) -> str | None:
    """Read a notice from a user's own URL, which returns status 404 until there is a notice."""
    if answer.status_code == httpx.codes.NOT_FOUND:
        return None
    answer.raise_for_status()
    return " ".join(answer.text.split())[:_MOST_WORDS] or "no reason given"


def _object(answer: httpx.Response) -> dict[str, Any]:
    answer.raise_for_status()
    body = answer.json()
    if not isinstance(body, dict):
        raise ValueError(f"expected a JSON object, got {str(body)[:_MOST_WORDS]}")
    return body


# Address of the metadata services of Amazon and Azure.
_INSIDE = "http://169.254.169.254"
PROVIDERS: dict[str, Provider] = {
    "ec2": Provider(
        f"{_INSIDE}/latest/meta-data/spot/instance-action",
        _read_ec2,
        token_url=f"{_INSIDE}/latest/api/token",
    ),
    "gce": Provider(
        "http://metadata.google.internal/computeMetadata/v1/instance/preempted",
        _read_google,
        {"Metadata-Flavor": "Google"},
    ),
    "azure": Provider(
        f"{_INSIDE}/metadata/scheduledevents?api-version=2020-07-01",
        _read_azure,
        {"Metadata": "true"},
        name_url=f"{_INSIDE}/metadata/instance/compute/name?api-version=2021-02-01&format=text",
    ),
}


def provider_of(name: str) -> Provider:
    """Return a known provider by its name, or make a provider for a user's own URL."""
    if name in PROVIDERS:
        return PROVIDERS[name]
    if name.startswith(("http://", "https://")):
        try:
            return Provider(str(httpx.URL(name)), _read_plain)
        except httpx.InvalidURL as error:
            raise InputError(f"--notice {name!r} is not a valid URL: {error}") from None
    known = ", ".join(PROVIDERS)
    raise InputError(f"--notice {name!r} is not known: give {known}, or an http:// URL")


class Notices:
    """A thread that polls a provider for the notice that it reclaims this machine."""

    def __init__(self, provider: Provider, every_s: float = NOTICE_INTERVAL_S) -> None:
        self._provider = provider
        self._every_s = every_s
        self._words: str | None = None
        self._token = self._name = ""
        self._closed = threading.Event()
        self._answers = True
        threading.Thread(target=self._work, name="paceline-notices", daemon=True).start()

    def words(self) -> str | None:
        """Return the notice in words; None if there was no notice so far."""
        return self._words

    def close(self) -> None:
        """Stop polling."""
        self._closed.set()

    def _work(self) -> None:
        # A proxy cannot reach the metadata service of this machine.
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
            while self._words is None:
                self._ask(client)
                if self._closed.wait(self._every_s):
                    return

    def _ask(self, client: httpx.Client) -> None:
        try:
            answer = client.get(self._provider.url, headers=self._headers(client))
            if answer.status_code == httpx.codes.UNAUTHORIZED and self._token:
                # The token has expired.
                self._token = ""
                answer = client.get(self._provider.url, headers=self._headers(client))
            self._words = self._provider.read(answer, self._named(client))
        except (httpx.HTTPError, ValueError) as error:
            if self._answers:
                _log.warning(
                    "cannot check whether the provider reclaims this machine: %s does not "
                    "answer: %s. Retrying every %g s.",
                    *(self._provider.url, error, self._every_s),
                )
            self._answers = False
        else:
            self._answers = True

    def _named(self, client: httpx.Client) -> str:
        if self._provider.name_url and not self._name:
            answer = client.get(self._provider.name_url, headers=self._headers(client))
            answer.raise_for_status()
            self._name = answer.text.strip()
        return self._name

    def _headers(self, client: httpx.Client) -> dict[str, str]:
        headers = dict(self._provider.headers)
        if self._provider.token_url:
            if not self._token:
                lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
                answer = client.put(self._provider.token_url, headers=lifetime)
                answer.raise_for_status()
                self._token = answer.text
            headers["X-aws-ec2-metadata-token"] = self._token
        return headers
