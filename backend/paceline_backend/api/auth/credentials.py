"""Check of tokens, cookies and login links against the configuration and the database.

Every public method except `touch` raises `StoreError` if it needs the database and the database is
unavailable.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Mapping
from types import MappingProxyType

from itsdangerous import BadData, URLSafeTimedSerializer

from paceline_backend.api.auth.failures import FailedLogins
from paceline_backend.store import Connection, Store, StoreError, audit, meta, tokens
from paceline_backend.store.audit import Requester
from paceline_backend.store.nodes import admission
from paceline_backend.store.tokens import Holder

log = logging.getLogger(__name__)

COOKIE = "paceline"
_SALT = "paceline session"
# Minimum length, in characters, of a token that cannot be found by guessing.
_UNGUESSABLE = 20
# The time of a token's last use is stored at most once in this interval.
_NOTED_S = 60.0  # seconds


class CredentialCheck:
    """Check of the credentials that clients send.

    `configured` is the token for admins from the server's configuration, and `further` has the
    tokens from the configuration for other roles. None: the configuration has no such token.
    """

    def __init__(
        self,
        store: Store,
        configured: str | None,
        further: Mapping[tokens.Scope, str | None] = MappingProxyType({}),
    ) -> None:
        self._store = store
        self.failures = FailedLogins(store)
        given = {"admin": configured, **further}
        self._configured = {text: _configured(text, role) for role, text in given.items() if text}
        self._by_id = {holder.id: holder for holder in self._configured.values()}
        with store.write() as connection:
            admission.configure(connection, list(self._by_id))
        self._serializer = URLSafeTimedSerializer(_cookie_key(meta.secret(store)), salt=_SALT)
        self._touching = False

    def of_token(self, text: bytes, *, throttled: bool = False) -> Holder | None:
        """Return the holder of a token; None: the token is unknown.

        If the token has expired or was revoked, the holder's `refused` states that. `throttled`
        means that the client's address has sent too many wrong tokens. The text is then not
        compared with configured tokens that are short enough to be guessed. It is still compared
        with longer tokens, because the client may share its address with an attacker.
        """
        for configured, holder in self._configured.items():
            guessable = len(configured) < _UNGUESSABLE
            compared = not (throttled and guessable)
            if compared and hmac.compare_digest(text, configured.encode()):
                return holder
        words = text.decode(errors="replace")
        if tokens.parsed(words) is None:
            return None
        with self._store.read() as connection:
            return tokens.checked(connection, words)

    def of_cookie(self, value: str) -> Holder | None:
        """Return the holder of a login cookie; None: the cookie is invalid, too old or revoked."""
        try:
            identity = self._serializer.loads(value, max_age=int(tokens.BROWSER_S))
        except BadData:
            return None
        with self._store.read() as connection:
            return tokens.of_cookie(connection, str(identity), self._by_id)

    def holds(self, identity: str) -> bool:
        """Return whether the credential with this ID is still valid.

        The empty ID belongs to a user whom a trusted proxy names, and is always valid.
        """
        if not identity or identity in self._by_id:
            return True
        with self._store.read() as connection:
            return tokens.is_valid(connection, identity, self._by_id)

    def enter_by_link(self, code: str, address: str) -> str | None:
        """Consume a login link; return a cookie for the browser, or None if the link is invalid."""
        if tokens.parsed(code) is None:
            return None
        with self._store.write() as connection:
            browser = tokens.use_link(connection, code)
            if browser is None:
                return None
            _record(connection, "login", browser, address, {"link": browser.id})
        return self._cookie(browser)

    def enter(self, holder: Holder, address: str) -> str:
        """Log a browser in with a token. The returned cookie contains no part of the token."""
        with self._store.write() as connection:
            browser = tokens.enter(connection, holder)
            _record(connection, "login", browser, address, {"browser": browser.id})
        return self._cookie(browser)

    def leave(self, browser: Holder, address: str) -> None:
        """Log out a browser, and the browsers that it logged in by means of login links."""
        with self._store.write() as connection:
            tokens.revoke(connection, browser.id)
            _record(connection, "logout", browser, address, {"browser": browser.id})

    def _cookie(self, browser: Holder) -> str:
        return str(self._serializer.dumps(browser.id))

    def touch(self, holder: Holder) -> None:
        """Record that a credential is in use. Best effort: database errors are only logged."""
        if not holder.id or holder.id in self._by_id or self._touching:
            return
        if holder.used_at is not None and time.time() - holder.used_at < _NOTED_S:
            return
        self._touching = True
        try:
            tokens.touch(self._store, holder.id)
        except StoreError as error:
            log.debug("cannot record the use of a token: %s", error)
        finally:
            self._touching = False


def _record(
    connection: Connection,
    action: str,
    browser: Holder,
    address: str,
    details: Mapping[str, str],
) -> None:
    by = Requester(browser.name, browser.scope, address)
    audit.record(connection, by, action, details=details)


def _configured(text: str, role: tokens.Scope) -> Holder:
    """Return the holder of a token from the configuration.

    Its ID depends on the token: if the configuration gets another token, the browsers that logged
    in with the previous one are logged out.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()
    name = "configured" if role == "admin" else f"configured {role}"
    return Holder(f"configured-{digest[:16]}", name, role)


def _cookie_key(master: bytes) -> bytes:
    return hashlib.blake2b(key=master, person=b"paceline cookie").digest()
