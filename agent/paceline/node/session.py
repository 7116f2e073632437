"""Sessions on the bus: the URL, streams and key with which an agent or a run uses the bus.

Functions that call the server raise `PacelineError` as `Client.call` does.
"""

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
class BusSession:
    """Access of a node or a run to the bus, as the control plane grants it.

    An agent whose operator gave a URL of the bus with a password calls no server, and has no key.
    Such an agent reports on the stream TELEMETRY, and does not check the MACs of entries that it
    reads.
    """

    # The control plane's id, or the address of its bus.
    control: str
    # URL of the bus.
    bus: str = field(repr=False)
    # The stream to which reports are written.
    reports: str
    # The stream from which commands are read.
    obeys: str
    # Key for the MACs of commands and answers, and for encrypting answers and the secrets of a
    # launch. Reports have no MAC. None: MACs are not checked, and questions are not answered.
    key: bytes | None = field(repr=False)


def of_node(client: Client, node: str, address: str | None = None) -> BusSession:
    """Request the session of a node's agent.

    `address` is the URL of the bus as this node reaches it; None: the URL that the server returns.
    """
    # This call raises an error if the server has another protocol version.
    info = client.version()
    if address is None:
        check_bus(client, info)
    answer = client.session(f"/nodes/{node}")
    key = bytes.fromhex(answer["key"])
    bus = _reached(answer["bus"], address)
    return BusSession(answer["id"], bus, node_telemetry(node), commands(node), key)


def of_run(client: Client, run: str) -> BusSession:
    """Request the session of a foreground run, which must already be registered with the server."""
    info = client.version()
    check_bus(client, info)
    answer = client.session(f"/runs/{run}")
    key = bytes.fromhex(answer["key"])
    return BusSession(info["id"], answer["bus"], run_telemetry(run), control(run), key)


def check_bus(client: Client, info: Mapping[str, Any]) -> None:
    """Raise ServerUnreachable for a bus that listens on another machine's loopback interface.

    `info` is the result of `Client.version`.
    """
    bus, server = urlsplit(info["bus"]).hostname, urlsplit(client.server).hostname
    if not is_loopback(bus or "") or is_loopback(server or ""):
        return
    # The server's address may also be another name of this machine.
    try:
        with connect(info["bus"]) as tried:
            tried.ping()
    # The bus answers. It rejects the connection only because the URL in `info` has no password.
    except redis.AuthenticationError:
        return
    except redis.RedisError as error:
        raise ServerUnreachable(
            f"the bus of the server {client.server} listens on that machine only: start the server "
            "with --trust-network if the network is trusted, or with a --bus that nodes can reach"
        ) from error


def without(control_plane: str, bus: str, node: str) -> BusSession:
    """Return the session of an agent that has only the URL `bus`, and calls no server.

    `control_plane` identifies the control plane. The user in the URL must have all rights of agents
    and ranks.
    """
    return BusSession(control_plane, bus, TELEMETRY, commands(node), None)


def _reached(bus: str, address: str | None) -> str:
    return bus if address is None else at_address(bus, address)
