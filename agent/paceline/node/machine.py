"""A description of this machine, for an agent's registration."""

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
    """Return the host's name: the node's name unless ``--node`` gives another."""
    return socket.gethostname()


def describe(name: str) -> NodeState:
    """Return a description of this machine: its usable cores, memory in bytes, and GPUs."""
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
    """Return the number of cores that this process may use, at least 1.

    In a container, the affinity and the CPU quota limit the number. `own` is the file with the
    control group of this process (Linux's cgroup v2), and `groups` the folder of all groups.
    """
    # Only Linux has `sched_getaffinity`.
    affinity = getattr(os, "sched_getaffinity", None)
    number = len(affinity(0)) if affinity else psutil.cpu_count() or 1
    with suppress(OSError, ValueError):
        [path] = [line[3:] for line in own.read_text().splitlines() if line.startswith("0::")]
        group = groups / path.lstrip("/")
        # Limits of parent groups apply, too.
        while group.is_relative_to(groups):
            # The root group has no limit, and "max" means no limit.
            with suppress(OSError, ValueError):
                limit_us, period_us = map(int, (group / "cpu.max").read_text().split())
                number = min(number, math.ceil(limit_us / period_us))
            group = group.parent
    return max(1, number)


def processor(described: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's model name from the file `described`, else the name of its architecture."""
    with suppress(OSError, UnicodeDecodeError):
        for line in described.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.machine() or "cpu"


def address_towards(address: str) -> str:
    """Return this machine's own address on its route to another machine's IP address.

    Raise an OSError if there is no route to the address, or if the address is a name.
    """
    # Names are rejected, because a DNS lookup might take long.
    flags = socket.AI_NUMERICHOST
    ways = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM, flags=flags)
    family, kind, _, _, place = ways[0]
    # Connecting a datagram socket sends nothing.
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def gpus() -> list[str]:
    """Return the names of the NVIDIA GPUs; an empty list if there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    answer = subprocess.run(
        [tool, "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
        # The tool fails if no driver is loaded; then no GPU can be used.
        check=False,
    )
    if answer.returncode != 0:
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
