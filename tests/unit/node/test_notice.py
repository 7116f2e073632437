"""A provider's notice that it takes the machine back, from a real HTTP server like its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from paceline.core.errors import InputError
from paceline.node.health.notice import PROVIDERS, Notices, Provider, provider_of
from support.waiting import until

EC2 = {"action": "terminate", "time": "2026-01-05T18:02:00Z"}
AZURE = {
    "EventType": "Preempt",
    "NotBefore": "Mon, 05 Jan 2026 18:02:00 GMT",
    "ResourceType": "VirtualMachine",
    "Resources": ["vm-7", "vm-3"],
}
OF_OTHERS = [AZURE | {"Resources": ["vm-7"]}, AZURE | {"EventType": "Reboot"}]


class Metadata:
    """What a metadata service answers: status and body, by path; and the tokens that it gave."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {"/name": (200, "vm-3\n")}
        self.headers: list[dict[str, str]] = []
        self.tokens = 0

    def answer(self, path: str, headers: dict[str, str]) -> tuple[int, str]:
        self.headers.append(headers)
        if "ec2" in path and headers.get("x-aws-ec2-metadata-token") != f"token {self.tokens}":
            return 401, "no token"
        return self.answers.get(path, (404, "not found"))


@pytest.fixture
def metadata() -> Iterator[tuple[Metadata, str]]:
    """A metadata service, and its address."""
    service = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def _send(self, status: int, body: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            self._send(*service.answer(self.path, headers))

        def do_PUT(self) -> None:
            service.tokens += 1
            self._send(200, f"token {service.tokens}")

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield service, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


Asking = Callable[[Provider], Notices]


@pytest.fixture
def asking() -> Iterator[Asking]:
    """Asks a provider often, until the test's end."""
    made: list[Notices] = []

    def ask(provider: Provider) -> Notices:
        made.append(Notices(provider, every_s=0.01))
        return made[-1]

    yield ask
    for notices in made:
        notices.close()


def at(name: str, base: str) -> Provider:
    """A known provider, at a service here."""
    provider = PROVIDERS[name]
    token = f"{base}/token" if provider.token_url else ""
    named = f"{base}/name" if provider.name_url else ""
    places = {"url": f"{base}/{name}", "token_url": token, "name_url": named}
    return replace(provider, **places)


@pytest.mark.parametrize(
    ("name", "stays", "goes", "words"),
    [
        ("ec2", (404, ""), (200, json.dumps(EC2)), "terminate at 2026-01-05T18:02:00Z"),
        ("gce", (200, "FALSE"), (200, "TRUE"), "preempted"),
        (
            "azure",
            (200, json.dumps({"Events": OF_OTHERS})),
            (200, json.dumps({"Events": [*OF_OTHERS, AZURE]})),
            "Preempt not before Mon, 05 Jan 2026 18:02:00 GMT",
        ),
    ],
)
def test_what_each_provider_says(
    metadata: tuple[Metadata, str],
    asking: Asking,
    name: str,
    stays: tuple[int, str],
    goes: tuple[int, str],
    words: str,
) -> None:
    service, base = metadata
    service.answers[f"/{name}"] = stays
    notices = asking(at(name, base))
    until(lambda: len(service.headers) >= 3, "three questions")
    assert notices.words() is None
    service.answers[f"/{name}"] = goes
    until(notices.words, "the notice")
    assert notices.words() == words
    for header, value in PROVIDERS[name].headers.items():
        assert service.headers[-1][header.lower()] == value


def test_a_token_that_has_expired_is_asked_for_again(
    metadata: tuple[Metadata, str], asking: Asking
) -> None:
    service, base = metadata
    service.answers["/ec2"] = (404, "")
    notices = asking(at("ec2", base))
    until(lambda: len(service.headers) >= 2, "a question")
    service.tokens += 1  # the service knows the old one no more
    service.answers["/ec2"] = (200, json.dumps(EC2))
    until(notices.words, "the notice")


@pytest.mark.parametrize("nonsense", [(500, "down"), (200, "<html>"), (200, "[]")])
def test_what_is_no_answer_is_told_once_and_takes_nothing_back(
    metadata: tuple[Metadata, str],
    asking: Asking,
    nonsense: tuple[int, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    service, base = metadata
    service.answers["/ec2"] = nonsense
    notices = asking(at("ec2", base))
    until(lambda: len(service.headers) >= 5, "five questions")
    assert notices.words() is None
    [warning] = [record for record in caplog.records if "cannot check" in record.message]
    assert f"{base}/ec2" in warning.message
    service.answers["/ec2"] = (200, json.dumps(EC2))
    until(notices.words, "the notice, all the same")


def test_an_address_of_ones_own(metadata: tuple[Metadata, str], asking: Asking) -> None:
    service, base = metadata
    notices = asking(provider_of(f"{base}/own"))
    until(lambda: len(service.headers) >= 2, "two questions")
    assert notices.words() is None
    service.answers["/own"] = (200, "maintenance\n at noon")
    until(notices.words, "the notice")
    assert notices.words() == "maintenance at noon"


def test_who_is_not_known_is_refused() -> None:
    with pytest.raises(InputError, match=r"--notice 'oracle' is not known: give ec2, gce, azure"):
        provider_of("oracle")
    with pytest.raises(InputError, match=r"--notice 'http://host:port/x' is not a valid URL: "):
        provider_of("http://host:port/x")
