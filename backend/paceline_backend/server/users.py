"""Users of the bus, which restrict each node and each run to its own streams.

The users form the access control list (ACL) of the bus. A bus forgets its users when it restarts,
so the worker creates missing users again. If the bus does not let the control plane create users,
nodes and runs get no credentials. If the server was started with ``--share-bus-password``, nodes
and runs then get the control plane's own URL of the bus instead.

Functions that take a client raise `redis.RedisError` while the bus is unavailable.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from paceline.wire import answers, commands, control, node_telemetry, run_telemetry
from paceline.wire.bus import as_user
from paceline_backend.server import floods
from paceline_backend.server.keys import Keys

log = logging.getLogger(__name__)

_NODE, _RUN = "paceline-node-", "paceline-run-"
# All commands that agents, ranks and simulations send. XLEN reveals only the length of a stream.
_COMMANDS = ("xadd", "xread", "xrevrange", "xlen", "ping", "hello", "auth")
_CONNECTING = ("client|setname",)
# Clients send this command when they connect. Redis 7.0 does not have it.
_SET_INFO = "client|setinfo"

# Rights on the bus that `make` and `forget` need, as messages show them.
RIGHTS = "ACL SETUSER, ACL GETUSER, ACL USERS, ACL DELUSER and CLIENT KILL"
# Environment variable; "1": nodes and runs may get the control plane's own URL of the bus.
SHARE = "PACELINE_SHARE_BUS_PASSWORD"


@dataclass(frozen=True)
class User:
    """A user of the bus.

    `writes` are patterns of the streams that it may write; `reads` is the stream that it may read.
    """

    name: str
    password: str = field(repr=False)
    writes: tuple[str, ...]
    reads: str

    @property
    def digest(self) -> str:
        """SHA-256 of the password, as the bus stores it."""
        return hashlib.sha256(self.password.encode()).hexdigest()

    def url(self, bus_url: str) -> str:
        """Return the URL of this bus for this user."""
        return as_user(bus_url, self.name, self.password)

    def rules(self, database: int = 0, *, off: bool = False, info: bool = True) -> list[str]:
        """Return the arguments of ``ACL SETUSER``, which replace any earlier definition.

        Args:
            database: number of the bus's database. The user may call SELECT only if the number is
                not 0. Without SELECT, the user cannot reach other databases, where no guard checks
                for floods.
            off: True if the user may not log in.
            info: True if the bus has the command CLIENT SETINFO.
        """
        selecting = ("select",) if database else ()
        describing = (_SET_INFO,) if info else ()
        commands = (*_COMMANDS, *_CONNECTING, *describing, *selecting)
        allowed = [f"+{command}" for command in commands]
        streams = [*(f"%W~{pattern}" for pattern in self.writes), f"%R~{self.reads}"]
        state = "off" if off else "on"
        return [self.name, "reset", state, f"#{self.digest}", "-@all", *allowed, *streams]


def name_of_node(node: str) -> str:
    """Return the name of a node's user."""
    return f"{_NODE}{node}"


def of_node(keys: Keys, node: str) -> User:
    """Return the user of a node's agent."""
    password = keys.node_password(node)
    writes = (node_telemetry(node), answers(node, "*"))
    return User(name_of_node(node), password, writes, commands(node))


def name_of_run(run: str) -> str:
    """Return the name of a run's user."""
    return f"{_RUN}{run}"


def of_run(keys: Keys, run: str) -> User:
    """Return the user of a run's ranks."""
    password = keys.run_password(run)
    return User(name_of_run(run), password, (run_telemetry(run),), control(run))


def shared() -> bool:
    """Return whether nodes and runs get the server's own URL of a bus that refuses new users."""
    return os.environ.get(SHARE) == "1"


def make(client: redis.Redis, users: Iterable[User]) -> str | None:
    """Create or update users. A user that was switched off stays off.

    A user whose password changes loses its connections, so that the old password gives no access.
    Return None, or the reason why this bus does not have the users.
    """
    wanted = {user.name: user for user in users}
    pending, off = list(wanted.values()), _off(client)
    while pending:
        reason = _make(client, pending, off)
        if reason is not None:
            return reason
        now_off = _off(client)
        # A guard has switched these users on or off meanwhile, and `_make` may have undone that.
        changed = off ^ now_off
        pending, off = [wanted[name] for name in sorted(changed & wanted.keys())], now_off
    return None


def _with_other_passwords(client: redis.Redis, users: Sequence[User]) -> set[str]:
    pipeline = client.pipeline(transaction=False)
    for user in users:
        pipeline.acl_getuser(user.name)
    known = zip(users, pipeline.execute(), strict=True)
    return {user.name for user, row in known if row and user.digest not in row["passwords"]}


def _off(client: redis.Redis) -> set[str]:
    names: Any = client.hkeys(floods.OFF)
    return {name.decode() for name in names}


def _make(
    client: redis.Redis, users: Sequence[User], off: set[str], *, info: bool = True
) -> str | None:
    # Use one transaction: if the bus refuses to queue a command, or goes away before the last one,
    # it executes none of the commands.
    pipeline: Any = client.pipeline(transaction=True)
    database = int(client.get_connection_kwargs().get("db") or 0)
    try:
        changing = _with_other_passwords(client, users)
        for user in users:
            rules = user.rules(database, off=user.name in off, info=info)
            pipeline.execute_command("ACL", "SETUSER", *rules)
            if user.name in changing:
                pipeline.execute_command("CLIENT", "KILL", "USER", user.name)
        answers = pipeline.execute(raise_on_error=False)
    except redis.ResponseError as error:
        answers = [error]
    for answer in answers:
        # Only these two types mean that the bus refuses users. Their subclasses, such as the error
        # for a full memory, are raised: an outage must not lead to shared credentials with more
        # rights.
        if type(answer) in (redis.ResponseError, redis.exceptions.NoPermissionError):
            if info and f"+{_SET_INFO}" in str(answer):
                return _make(client, users, off, info=False)
            # Leave the command out of the message, because it has digests of passwords.
            return str(answer).rpartition("caused error: ")[2]
        if isinstance(answer, Exception):
            raise answer
    return None


def names(client: redis.Redis) -> set[str]:
    """Return the names of the bus's users that belong to nodes and runs."""
    known: Any = client.execute_command("ACL", "USERS")  # type: ignore[no-untyped-call]
    texts = {name.decode(errors="replace") for name in known}
    return {name for name in texts if name.startswith((_NODE, _RUN))}


def runs(names: Iterable[str]) -> set[str]:
    """Return the runs whose users have these names; names of other users are skipped."""
    return {name.removeprefix(_RUN) for name in names if name.startswith(_RUN)}


def nodes(names: Iterable[str]) -> set[str]:
    """Return the nodes whose users have these names; names of other users are skipped."""
    return {name.removeprefix(_NODE) for name in names if name.startswith(_NODE)}


def forget(client: redis.Redis, names: Iterable[str]) -> None:
    """Delete users and close their connections."""
    if listed := sorted(names):
        client.execute_command("ACL", "DELUSER", *listed)  # type: ignore[no-untyped-call]
