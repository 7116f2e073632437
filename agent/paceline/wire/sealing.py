"""What only a node and the control plane may read, although the bus keeps it on its disk."""

from __future__ import annotations

import base64
import hashlib

import msgspec
from cryptography.fernet import Fernet, InvalidToken


class Secrets(msgspec.Struct, frozen=True):
    """The sealed part of a launch."""

    env: dict[str, str]
    bus: str  # URL with the run's own user
    key: bytes  # of the run


class SealError(ValueError):
    """A seal that this node's key does not open."""


def seal(secrets: Secrets, key: bytes) -> bytes:
    """The secrets, encrypted for the node that has this key; never twice the same bytes."""
    return _fernet(key).encrypt(msgspec.msgpack.encode(secrets))


def unseal(sealed: bytes, key: bytes) -> Secrets:
    """What `seal` was given.

    Raises:
        SealError: it was sealed for another node, or is no seal.
    """
    try:
        return msgspec.msgpack.decode(_fernet(key).decrypt(sealed), type=Secrets)
    except (InvalidToken, msgspec.DecodeError) as error:
        raise SealError(
            "its secrets were not sealed for this node: restart the node's agent, which then asks "
            "for its key again, and start or resume the run"
        ) from error


def seal_answer(content: bytes, key: bytes) -> bytes:
    """What a node answers, encrypted for the control plane, which has the node's key, too."""
    return _fernet(key, b"answers").encrypt(content)


def unseal_answer(sealed: bytes, key: bytes) -> bytes:
    """What `seal_answer` was given.

    Raises:
        SealError: another node sealed it, or it is no seal.
    """
    try:
        return _fernet(key, b"answers").decrypt(sealed)
    except InvalidToken as error:
        raise SealError("the answer was not sealed with this node's key") from error


def _fernet(key: bytes, purpose: bytes = b"sealing") -> Fernet:
    # A key of its own: the node's key makes MACs, and no key should serve two purposes.
    derived = hashlib.blake2b(purpose, digest_size=32, key=key).digest()
    return Fernet(base64.urlsafe_b64encode(derived))
