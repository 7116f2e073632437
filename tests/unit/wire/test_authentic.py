"""Entries that the control plane wrote, and secrets that one node may read."""

from __future__ import annotations

import pytest

from paceline.wire import ForgedError, Kill, control, decode_signed, encode, signed
from paceline.wire.bus import as_user, at_address
from paceline.wire.sealing import SealError, Secrets, seal, unseal

KEY, OTHER = b"k" * 32, b"o" * 32
STREAM = control("r")


def entry() -> dict[bytes, bytes]:
    return signed(encode(Kill("because", 0), "r"), STREAM, KEY)


def test_what_was_signed_is_read() -> None:
    assert decode_signed(entry(), STREAM, KEY) == ("r", Kill("because", 0))


@pytest.mark.parametrize("name", [b"run", b"data", b"mac"])
def test_each_changed_field_is_noticed(name: bytes) -> None:
    forged = entry() | {name: entry()[name] + b"x"}
    with pytest.raises(ForgedError):
        decode_signed(forged, STREAM, KEY)


def test_bytes_may_not_move_from_field_to_field() -> None:
    fields = entry()
    moved = fields | {b"run": fields[b"run"] + fields[b"data"][:1], b"data": fields[b"data"][1:]}
    with pytest.raises(ForgedError):
        decode_signed(moved, STREAM, KEY)


def test_an_entry_belongs_to_its_stream_and_its_reader() -> None:
    with pytest.raises(ForgedError):
        decode_signed(entry(), control("another"), KEY)
    with pytest.raises(ForgedError):
        decode_signed(entry(), STREAM, OTHER)


def test_no_mac_is_no_proof_where_there_is_a_key() -> None:
    plain = encode(Kill("because", 0), "r")
    with pytest.raises(ForgedError, match="without a MAC"):
        decode_signed(plain, STREAM, KEY)
    assert decode_signed(plain, STREAM, None) == ("r", Kill("because", 0))


def test_only_its_node_opens_a_seal() -> None:
    secrets = Secrets({"A": "open-sesame"}, "redis://u:p@h:1/0", OTHER)
    sealed = seal(secrets, KEY)
    assert b"sesame" not in sealed
    assert seal(secrets, KEY) != sealed, "no launch looks like another"
    assert unseal(sealed, KEY) == secrets
    for bad in (sealed[:-4], b"", b"x" * 200):
        with pytest.raises(SealError):
            unseal(bad, KEY)
    with pytest.raises(SealError):
        unseal(sealed, OTHER)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host:6379/0", "redis://u:p@host:6379/0"),
        ("rediss://:old@[::1]:6379/2?x=1", "rediss://u:p@[::1]:6379/2?x=1"),
    ],
)
def test_another_user_of_the_same_bus(url: str, expected: str) -> None:
    assert as_user(url, "u", "p") == expected


def test_another_address_of_the_same_bus() -> None:
    moved = at_address("redis://u:p@127.0.0.1:6379/0", "rediss://bus.example:7000/1")
    assert moved == "rediss://u:p@bus.example:7000/1"
    assert at_address("redis://a:1/0", "redis://b:2/0") == "redis://b:2/0"
