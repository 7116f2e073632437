"""A switch that holds each frame for a while: latency where the kernel has none to emulate.

python switch.py SECONDS INTERFACE…: what comes in at an interface goes out at all others.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from collections import deque

_ALL_PROTOCOLS = 3
_OUTGOING = 4  # kind of a packet that this machine sent
_BUFFER = 16 << 20


def main() -> None:
    delay_s = float(sys.argv[1])
    ports = []
    for name in sys.argv[2:]:
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
        port.bind((name, 0))
        port.setblocking(False)
        port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        ports.append(port)
    print("ready", flush=True)
    held: deque[tuple[float, bytes, socket.socket]] = deque()  # due, frame, where it came in
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else 1.0
        for port in select.select(ports, [], [], wait_s)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame, address = port.recvfrom(70_000)
                    if address[2] != _OUTGOING:
                        held.append((time.monotonic() + delay_s, frame, port))
        while held and held[0][0] <= time.monotonic():
            _, frame, source = held.popleft()
            for port in ports:
                if port is not source:
                    with contextlib.suppress(OSError):  # a node that is gone, or a full queue
                        port.send(frame)


if __name__ == "__main__":
    main()
