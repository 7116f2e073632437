"""TLS in front of a server that has none, and the certificates for it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import trustme

from support.waiting import DEADLINE_S


@dataclass(frozen=True)
class Certificates:
    """PEM files of a server on loopback, and of who signed it."""

    ca: Path
    cert: Path  # with the key


def certificates(directory: Path) -> Certificates:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(directory / "ca.pem"))
    issued = ca.issue_cert("127.0.0.1", "localhost")
    issued.private_key_and_cert_chain_pem.write_to_path(str(directory / "server.pem"))
    return Certificates(directory / "ca.pem", directory / "server.pem")


@contextmanager
def in_front_of(port: int, certificate: Path) -> Iterator[int]:
    """The port at which TLS leads to another port of this machine."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(copy(reader, back), copy(there, writer))

    loop = asyncio.new_event_loop()
    start = asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    server = loop.run_until_complete(start)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:

        def stop() -> None:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.call_soon(loop.stop)

        loop.call_soon_threadsafe(stop)
        thread.join(DEADLINE_S)
        server.close()
        loop.close()
