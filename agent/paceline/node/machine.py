"""Describes this machine, for an agent's registration."""

from __future__ import annotations

import math
import os
import platform
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from paceline.core.version import __version__
from paceline.wire import NodeState


def default_name() -> str:
    """The node's name unless ``--node`` gives one."""
    return socket.gethostname()


def describe(name: str) -> NodeState:
    """Cores that this process may use, memory in bytes, names of GPUs; without importing torch."""
    return NodeState(
        node=name,
        hostname=socket.gethostname(),
        cores=cores(),
        memory_bytes=psutil.virtual_memory().total,
        gpus=gpus(),
        at=time.time(),
        paceline=__version__,
    )


def cores(own: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use, at least 1.

    A container has those of its affinity, and as much time of them as its quota gives (version 2 of
    Linux's control groups).

    Args:
        own: the file that says in which control groups this process is.
        groups: the folder of all control groups.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    number = len(affinity(0)) if affinity else psutil.cpu_count() or 1
    with suppress(OSError, ValueError):
        [path] = [line[3:] for line in own.read_text().splitlines() if line.startswith("0::")]
        group = groups / path.lstrip("/")
        while group.is_relative_to(groups):  # those above bind, too
            with suppress(OSError, ValueError):  # the uppermost has no limit; "max" is none
                limit_us, period_us = map(int, (group / "cpu.max").read_text().split())
                number = min(number, math.ceil(limit_us / period_us))
            group = group.parent
    return max(1, number)


def processor(described: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's model, or at least its architecture.

    Args:
        described: the file in which Linux describes its processors.
    """
    with suppress(OSError, UnicodeDecodeError):
        for line in described.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.machine() or "cpu"


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
