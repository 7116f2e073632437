"""Encryption between the control plane and one node, because the bus may write entries to disk."""

from __future__ import annotations

import base64
import hashlib

import msgspec
from cryptography.fernet import Fernet, InvalidToken


class Secrets(msgspec.Struct, frozen=True):
    """The encrypted part of a launch."""

    env: dict[str, str]
    # URL of the bus with the run's own user.
    bus: str
    # The run's key.
    key: bytes


class SealError(ValueError):
    """Failure to decrypt with this node's key."""


def seal(secrets: Secrets, key: bytes) -> bytes:
    """Encrypt secrets for the node that has this key; no two calls return the same bytes."""
    return _fernet(key).encrypt(msgspec.msgpack.encode(secrets))


def unseal(sealed: bytes, key: bytes) -> Secrets:
    """Decrypt the result of `seal`; raise a SealError if it is not for the node with this key."""
    try:
        return msgspec.msgpack.decode(_fernet(key).decrypt(sealed), type=Secrets)
    except (InvalidToken, msgspec.DecodeError) as error:
        raise SealError(
            "the run's secrets were not encrypted with this node's key: restart the node's agent, "
            "which then requests the key again, and start or resume the run"
        ) from error


def seal_answer(content: bytes, key: bytes) -> bytes:
    """Encrypt a node's answer for the control plane, which has the node's key, too."""
    return _fernet(key, b"answers").encrypt(content)


def unseal_answer(sealed: bytes, key: bytes) -> bytes:
    """Decrypt the result of `seal_answer`; raise a SealError if another key encrypted it."""
    try:
        return _fernet(key, b"answers").decrypt(sealed)
    except InvalidToken as error:
        raise SealError("the answer was not encrypted with this node's key") from error


def _fernet(key: bytes, purpose: bytes = b"sealing") -> Fernet:
    # Derive a key for each purpose: the node's key itself already makes MACs, and a key should
    # serve only one purpose.
    derived = hashlib.blake2b(purpose, digest_size=32, key=key).digest()
    return Fernet(base64.urlsafe_b64encode(derived))
