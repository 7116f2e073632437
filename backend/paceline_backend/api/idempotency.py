"""`Idempotency-Key`: a client can repeat a POST without making its change twice.

`Repeats` is ASGI middleware around all routes, behind the guard. `Repeats` executes the first
request with a key and stores the response. A later request with the same key from the same
requester gets the stored response, and no route runs. If the first request was refused or failed
before it committed anything, the client may repeat it with the same key. If it failed after a
commit, it is never executed again: the response asks the client to read what has changed. Requests
without the header pass unchanged.
"""

from __future__ import annotations

import base64
import hashlib
import logging
from http import HTTPStatus

import msgspec
from cryptography.fernet import Fernet, InvalidToken
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline_backend.api.errors import problem_response
from paceline_backend.api.identity import Identity, identity_of
from paceline_backend.store import Store, StoreError, meta, repeats
from paceline_backend.store.database import Commits, counting_commits

log = logging.getLogger(__name__)

HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"
LONGEST_KEY = 200  # characters
_AWAY = HTTPStatus.SERVICE_UNAVAILABLE
_INVALID = HTTPStatus.UNPROCESSABLE_ENTITY
_KEPT_HEADERS = frozenset({b"content-type", b"etag", b"location"})


class _KeptAnswer(msgspec.Struct, array_like=True):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Repeats:
    """ASGI middleware that responds to a repeated POST of the API with the stored response."""

    def __init__(self, app: ASGIApp, store: Store) -> None:
        self.app = app
        self.store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Execute a request, or replay the response to an earlier one with the same key."""
        posted = scope["type"] == "http" and scope["method"] == "POST"
        key = Headers(scope=scope).get(HEADER) if posted else None
        if key is None or not scope["path"].startswith("/api/v1/"):
            await self.app(scope, receive, send)
            return
        if not (0 < len(key) <= LONGEST_KEY and key.isascii() and key.isprintable()):
            message = f"give 1 to {LONGEST_KEY} printable ASCII characters"
            await _refusal(_INVALID, message)(scope, receive, send)
            return
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        identity = key_id(identity_of(HTTPConnection(scope)), key)
        try:
            asked = _digest(scope, body)
            earlier = await run_in_threadpool(repeats.begin, self.store, identity, asked)
            seal = await run_in_threadpool(self._seal, key)
        except StoreError as error:
            answer: Response = problem_response(_AWAY, f"{error}; try again")
        else:
            if earlier is None:
                await _Execution(self, identity, seal, body).run(scope, receive, send)
                return
            answer = _earlier(earlier, asked, seal)
        await answer(scope, receive, send)

    def _seal(self, key: str) -> Fernet:
        """Return the cipher for the stored response to a request with this idempotency key.

        The cipher's key is derived from the idempotency key, which is not stored. So a reader of
        the database alone cannot decrypt the secrets that a response may contain.
        """
        master = meta.secret(self.store)
        derived = hashlib.blake2b(
            key.encode(), key=master, person=b"paceline repeats", digest_size=32
        )
        return Fernet(base64.urlsafe_b64encode(derived.digest()))


class _Execution:
    def __init__(self, repeated: Repeats, identity: str, seal: Fernet, body: bytes) -> None:
        self._app = repeated.app
        self._store = repeated.store
        self._identity = identity
        self._seal = seal
        self._body: bytes | None = body
        self._messages: list[Message] = []

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receiving() -> Message:
            if self._body is None:
                return await receive()
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}

        async def sending(message: Message) -> None:
            self._messages.append(message)

        with counting_commits() as commits:
            try:
                await self._app(scope, receiving, sending)
            except BaseException:
                if not commits.count:
                    await run_in_threadpool(self._release)
                raise
        await run_in_threadpool(self._settle, commits)
        for message in self._messages:
            await send(message)

    def _settle(self, commits: Commits) -> None:
        start = next(m for m in self._messages if m["type"] == "http.response.start")
        status: int = start["status"]
        if status >= HTTPStatus.BAD_REQUEST and not commits.count:
            self._release()
            return
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            # The request may have committed only a part of its changes. So the key stays in use.
            return
        headers = [(n, v) for n, v in start["headers"] if n.lower() in _KEPT_HEADERS]
        body = b"".join(message.get("body", b"") for message in self._messages)
        kept = msgspec.msgpack.encode(_KeptAnswer(status, headers, body))
        try:
            repeats.finish(self._store, self._identity, self._seal.encrypt(kept))
        except StoreError as error:
            log.warning("cannot store the response for replay: %s", error)

    def _release(self) -> None:
        try:
            repeats.release(self._store, self._identity)
        except StoreError as error:
            log.warning(
                "cannot release an idempotency key; its request cannot be repeated: %s", error
            )


def key_id(requester: Identity, key: str) -> str:
    """Return a digest of a key and its requester, so that two requesters may use the same key."""
    who = f"token {requester.token}" if requester.token else f"user {requester.name}"
    return hashlib.sha256(f"{who}\n{key}".encode()).hexdigest()


def _digest(scope: Scope, body: bytes) -> str:
    """Return a digest of a request without `If-Match`, which may differ in a repeated request."""
    place = f"{scope['path']}?{scope['query_string'].decode('latin-1')}\n"
    return hashlib.sha256(place.encode() + body).hexdigest()


def _earlier(earlier: repeats.Earlier, asked: str, seal: Fernet) -> Response:
    if earlier.request != asked:
        message = "another request was already sent with this key: use a new key for each request"
        return _refusal(_INVALID, message)
    try:
        kept = None if earlier.answer is None else seal.decrypt(earlier.answer)
    except InvalidToken:
        # The response cannot be decrypted, because the server's secret has changed since.
        kept = None
    if kept is None:
        return _refusal(
            HTTPStatus.CONFLICT,
            "the first request with this key is still running, or it ended without a response: "
            "check what it changed before you repeat it with another key",
        )
    answer = msgspec.msgpack.decode(kept, type=_KeptAnswer)
    response = Response(answer.body, answer.status)
    response.raw_headers += answer.headers
    response.headers[REPLAYED] = "true"
    return response


def _refusal(status: HTTPStatus, message: str) -> Response:
    errors = [{"field": HEADER, "message": message}]
    return problem_response(status, f"{HEADER}: {message}", errors=errors)
