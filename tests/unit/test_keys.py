"""Keys are derived: nothing is stored, and none tells another."""

from __future__ import annotations

from paceline_backend.server.keys import Keys

KEYS = Keys(bytes(32))
SEEDED = Keys(b"\2" * 32, {"a": "1", "b": "2", "ab": ""})


def test_every_key_is_its_own() -> None:
    made = [
        make(keys, name)
        for keys in (KEYS, Keys(b"\1" * 32), SEEDED)
        for name in ("a", "b", "ab")
        for make in (Keys.of_node, Keys.of_run, Keys.node_password, Keys.run_password)
    ]
    assert len({key if isinstance(key, str) else key.hex() for key in made}) == len(made)
    assert {len(key) for key in made} == {32, 64}


def test_they_are_the_same_after_a_restart_and_an_upgrade() -> None:
    """Running nodes and ranks have them: another derivation would lock them out."""
    assert KEYS.of_run("r").hex()[:16] == "f939a5575c7de740"
    assert Keys(bytes(32), {"n": "seed"}).node_password("n")[:16] == "99f30b43fb2de90f"
