"""How an agent or `paceline run` takes part on the bus: with which URL, stream and key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import redis

from paceline.node.client import Client, ServerUnreachable
from paceline.wire import TELEMETRY, commands, control, node_telemetry, run_telemetry
from paceline.wire.bus import at_address, connect, is_loopback


@dataclass(frozen=True)
class Session:
    """What a control plane gives to a node or a run.

    An agent that got a URL of the bus with a password has no key. It reports on TELEMETRY, and
    nothing that it reads carries a MAC.
    """

    control: str  # identifies the control plane: its id, or its bus's address
    bus: str = field(repr=False)  # URL
    reports: str  # the stream to write to
    obeys: str  # the stream to read commands from
    key: bytes | None = field(repr=False)


def of_node(client: Client, node: str, address: str | None = None) -> Session:
    """The session of a node's agent.

    Args:
        client: of the server.
        node: its name.
        address: URL of the bus as this node reaches it; None: as the server does.

    Raises:
        PacelineError: as `Client.call`.
    """
    info = client.version()  # refuses a server of another protocol
    if address is None:
        check_bus(client, info)
    answer = client.session(f"/nodes/{node}")
    key = bytes.fromhex(answer["key"])
    bus = _reached(answer["bus"], address)
    return Session(answer["id"], bus, node_telemetry(node), commands(node), key)


def of_run(client: Client, run: str) -> Session:
    """The session of a run in the foreground.

    Args:
        client: of the server.
        run: registered there.

    Raises:
        PacelineError: as `Client.call`.
    """
    info = client.version()
    check_bus(client, info)
    answer = client.session(f"/runs/{run}")
    key = bytes.fromhex(answer["key"])
    return Session(info["id"], answer["bus"], run_telemetry(run), control(run), key)


def check_bus(client: Client, info: Mapping[str, Any]) -> None:
    """Refuses a bus that listens on another machine's loopback.

    Args:
        client: of the server.
        info: what `Client.version` says.

    Raises:
        ServerUnreachable: its bus is out of reach.
    """
    bus, server = urlsplit(info["bus"]).hostname, urlsplit(client.server).hostname
    if not is_loopback(bus or "") or is_loopback(server or ""):
        return
    try:  # the server's address may also be another name of this machine
        with connect(info["bus"]) as tried:
            tried.ping()
    except redis.AuthenticationError:  # our account shows no password, and a bus answers
        return
    except redis.RedisError as error:
        raise ServerUnreachable(
            f"the bus of the server {client.server} listens on that machine only: start the server "
            "with --trust-network if the network is trusted, or with a --bus that nodes reach"
        ) from error


def without(control_plane: str, bus: str, node: str) -> Session:
    """Return what an agent has that no server gives a session: a URL, and no key.

    Args:
        control_plane: identifies it.
        bus: URL, with a user who may do everything that agents and ranks do.
        node: this machine's name.
    """
    return Session(control_plane, bus, TELEMETRY, commands(node), None)


def _reached(bus: str, address: str | None) -> str:
    return bus if address is None else at_address(bus, address)
