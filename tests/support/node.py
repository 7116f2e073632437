"""What tests of the agent, the launcher and the command line share."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import redis

from paceline import wire
from paceline.node import session
from paceline.node.link import Link
from support.waiting import DEADLINE_S

T = TypeVar("T")

# Says where it is, then waits to be ended.
SLEEP = """
    import os, time
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
    time.sleep(600)
"""


def script(folder: Path, text: str, name: str = "train.py") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def family(pid: int) -> list[psutil.Process]:
    """The processes below one."""
    return psutil.Process(pid).children(recursive=True)


def command(process: psutil.Process) -> list[str]:
    """Its command line; empty for one that has ended, also if nobody has waited for it yet."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def ranks(processes: Iterable[psutil.Process], name: str = "train.py") -> dict[int, psutil.Process]:
    """Those of the processes that run a script, by rank."""
    by_rank = {}
    for process in processes:
        try:
            words = command(process)
            if len(words) > 2 and words[1] == "-u" and words[2].endswith(name):
                by_rank[int(process.environ()["RANK"])] = process
        except psutil.Error:
            continue
    return by_rank


def wait_gone(processes: Iterable[psutil.Process], timeout_s: float = DEADLINE_S) -> None:
    """Fails when one of the processes still runs at the deadline."""
    processes = list(processes)
    assert processes, "there was nothing to wait for"
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    left = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not left, f"still there: {left}"


NOBODY = "http://127.0.0.1:9"  # the discard port: nothing listens there

# Whatever runs on this machine's port 8000 is not for tests.
_MAIN = f"""
from paceline import cli
from paceline.commands import options
options.DEFAULT_SERVER = {NOBODY!r}
from paceline.node import client
client.CALL_TIMEOUT_S = {DEADLINE_S}
cli.main()
"""


def paceline(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """The command line as a process of its own, its output captured."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**env, **options.pop("env", {})},
        **options,
    )


def link_to(bus_url: str, node: str = "here") -> Link:
    """A connection as agents without a session have it."""
    return Link(session.without("", bus_url, node))


def telemetry(bus_url: str) -> list[tuple[str, wire.Message]]:
    """All (run, message) on the telemetry streams, each stream's in order."""
    with redis.Redis.from_url(bus_url) as bus:
        streams = [wire.TELEMETRY, *sorted(bus.scan_iter("paceline:*:telemetry"))]
        return [wire.decode(fields) for stream in streams for _, fields in bus.xrange(stream)]


def states(bus_url: str, run: str) -> list[wire.RunState]:
    """What was reported about a run, without signs of life: repetitions of the last."""
    reports = [m for r, m in telemetry(bus_url) if r == run and isinstance(m, wire.RunState)]
    return [m for m, before in zip(reports, [None, *reports], strict=False) if m != before]


def nodes(bus_url: str) -> list[wire.NodeState]:
    return [m for _, m in telemetry(bus_url) if isinstance(m, wire.NodeState)]
