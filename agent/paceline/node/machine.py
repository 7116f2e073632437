"""Describes this machine, for an agent's registration."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time

import psutil

from paceline.core.version import __version__
from paceline.wire import NodeState


def default_name() -> str:
    """The node's name unless ``--node`` gives one."""
    return socket.gethostname()


def describe(name: str) -> NodeState:
    """Cores that this process may use, memory in bytes, names of GPUs; without importing torch."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux: a container may have fewer cores
    cores = len(affinity(0)) if affinity else psutil.cpu_count() or 1
    return NodeState(
        node=name,
        hostname=socket.gethostname(),
        cores=cores,
        memory_bytes=psutil.virtual_memory().total,
        gpus=gpus(),
        at=time.time(),
        paceline=__version__,
    )


def address_towards(address: str) -> str:
    """This machine's address on the way to another.

    Args:
        address: a number, no name.

    Raises:
        OSError: there is no way to it, or it is a name.
    """
    flags = socket.AI_NUMERICHOST  # a name might take long to be looked up
    ways = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM, flags=flags)
    family, kind, _, _, place = ways[0]
    with socket.socket(family, kind) as probe:  # connecting a datagram socket sends nothing
        probe.connect(place)
        return str(probe.getsockname()[0])


def gpus() -> list[str]:
    """Names of the NVIDIA GPUs; none without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    answer = subprocess.run(
        [tool, "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,  # fails without a loaded driver: then there is no GPU to use
    )
    if answer.returncode != 0:
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
