"""Which origins webhooks may be at."""

from __future__ import annotations

import pytest

from paceline.core.errors import PacelineError
from paceline_backend.requests.webhooks import AddressError, address_of, allowed_origin
from paceline_backend.server.origins import Origins

ALLOWED = Origins.of("https://hooks.example.com, https://*.chat.example,http://127.0.0.1:9093")


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.com/a?b=c",
        "https://HOOKS.example.com:443/",
        "https://hooks.example.com./",
        "https://a.chat.example/x",
        "https://a.b.chat.example/x",
        "http://127.0.0.1:9093/api",
    ],
)
def test_listed_origins_are_allowed(url: str) -> None:
    allowed_origin(url, ALLOWED)


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.com/",  # another scheme
        "https://hooks.example.com:8443/",  # another port
        "https://hooks.example.com.evil.example/",
        "https://evil.example/hooks.example.com",
        "https://chat.example/",  # the star stands for a label
        "https://evilchat.example/",
        "http://127.0.0.1:9092/",
        "http://localhost:9093/",
        "http://169.254.169.254/latest/meta-data",
        "https://hooks.example.com@evil.example/",
        "https://user:secret@hooks.example.com/",
        "https://hooks.example.com/#fragment",
        "file:///etc/passwd",
        "ftp://hooks.example.com/",
        "https://",
        "hooks.example.com",
        "https://hooks.example.com\\@evil.example/",
        "https://hooks.example.com/\r\nX: y",
        "https://höoks.example.com/",
        "https://hooks.example.com:99999/",
    ],
)
def test_nothing_else_is_allowed(url: str) -> None:
    with pytest.raises(AddressError):
        allowed_origin(url, ALLOWED)


def test_by_default_nothing_is_allowed() -> None:
    assert not Origins.of(None)
    with pytest.raises(AddressError, match=r"--webhook-to https://hooks\.example\.com:443"):
        allowed_origin("https://hooks.example.com/", Origins())


@pytest.mark.parametrize(
    "text",
    ["hooks.example.com", "https://a/path", "https://a?b", "https://*a.com", "https://a.*.b"],
)
def test_odd_lists_are_refused(text: str) -> None:
    with pytest.raises(PacelineError, match="--webhook-to"):
        Origins.of(text)


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "[fe80::1]", "[::ffff:169.254.169.254]", "0.0.0.0", "224.0.0.1"]
)
def test_addresses_of_odd_kinds_are_refused_even_when_listed(host: str) -> None:
    with pytest.raises(AddressError, match="which is"):
        address_of(f"http://{host}/", Origins([f"http://{host}"]))


def test_a_secret_path_is_in_no_message() -> None:
    with pytest.raises(AddressError) as error:
        allowed_origin("https://evil.example/T0/B0/secret", ALLOWED)
    assert "secret" not in str(error.value)
    with pytest.raises(AddressError) as error:
        allowed_origin("https://u:p@hooks.example.com/secret", ALLOWED)
    assert "secret" not in str(error.value)
