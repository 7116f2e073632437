"""``python -m paceline.node.elastic.launcher``: runs one run's ranks on one node.

A `Supervisor` starts this process, which starts the ranks through TorchElastic. The launcher
reports the outcome in ``launcher.json`` and as its exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousTimeoutError,
)

from paceline.core import driver
from paceline.node import rundir
from paceline.node.elastic import rank
from paceline.node.elastic.ranks import RankAgent, TooManyFailuresError, keep
from paceline.node.elastic.rendezvous import (
    LOOPBACK,
    NODES_WAIT_S,
    Alone,
    RunRendezvous,
    Together,
    together,
    use_interface,
)
from paceline.node.elastic.roll import Roll
from paceline.node.rundir import LauncherStatus
from paceline.wire import RENDEZVOUS_GONE

_LAUNCHER_POLL_S = 0.1
# Restart limit for TorchElastic if `Roll` counts the failures: a number that is never reached.
_UNBOUNDED = 2**31 - 1


@dataclass(frozen=True)
class NodeLaunch:
    """A launch of a run's ranks on this node, as the supervisor's command line describes it."""

    run: str
    directory: Path
    node: str
    # Number of ranks on this node.
    nproc: int
    max_restarts: int
    command: list[str]
    first_attempt: int = 0
    # The run's rendezvous; None: this is the only node of the run.
    place: RunRendezvous | None = None


def launch(order: NodeLaunch) -> LauncherStatus:
    """Run the ranks of this node until they end; return the launcher's final status."""
    place = order.place
    ended = LauncherStatus(order.first_attempt, 0)
    try:
        store: Store = HashStore() if place is None else place.open()
        handler: RendezvousHandler = Alone(order.run)
        if place is not None:
            key = bytes.fromhex(os.environ["PACELINE_KEY"])
            handler = together(order.run, store, key, place.nodes, place.address)
        spec = WorkerSpec(
            role="rank",
            local_world_size=order.nproc,
            rdzv_handler=handler,
            entrypoint=sys.executable,
            args=("-P", rank.__file__, str(os.getpid()), *order.command),
            max_restarts=order.max_restarts if place is None else _UNBOUNDED,
            monitor_interval=_LAUNCHER_POLL_S,
            local_addr=LOOPBACK if place is None else place.address,
        )
        metrics.initialize_metrics()
        roll = Roll(store, order.node, order.first_attempt)
        most_failures = None if place is None else order.max_restarts
        agent = RankAgent(spec, order.directory, roll, most_failures)
        if place is not None:
            rundir.note_arrival(order.directory)
        return _outcome(agent)
    except RendezvousConnectionError:
        assert place is not None
        where = "{}:{}".format(*place.store)
        return msgspec.structs.replace(
            ended,
            exit_code=1,
            message=f"{RENDEZVOUS_GONE}{where} is gone: its node has left the run",
        )


def _outcome(agent: RankAgent) -> LauncherStatus:
    """Run an agent until its ranks end; return the launcher's final status.

    Raise a RendezvousConnectionError if the rendezvous is gone. If a signal ends this launcher,
    raise a SignalException; the other launchers continue.
    """
    handler = agent.get_worker_group().spec.rdzv_handler
    try:
        result: RunResult | None = agent.run()
        events.record(agent.get_event_succeeded())
    except SignalException:
        if isinstance(handler, Together):
            # If the store is gone, the other launchers cannot be notified.
            with contextlib.suppress(RendezvousError, RuntimeError):
                handler.leave()
        raise
    # Another launcher has closed the rendezvous, because the run has ended.
    except RendezvousClosedError:
        return _ended_by_others(agent)
    except RendezvousTimeoutError:
        few = f"too few nodes joined the rendezvous within {NODES_WAIT_S:g} s"
        return LauncherStatus(agent.status.attempt, 1, few)
    except TooManyFailuresError:
        handler.shutdown()
        return agent.status
    handler.shutdown()
    if result is not None and result.is_failed():
        return agent.status
    return LauncherStatus(agent.status.attempt, 0)


def _ended_by_others(agent: RankAgent) -> LauncherStatus:
    return agent.status if agent.status.exit_code else LauncherStatus(agent.status.attempt, 0)


def main() -> None:
    """Launch the ranks; report the outcome in ``launcher.json`` and as exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline.node.elastic.launcher", allow_abbrev=False
    )
    parser.add_argument("--run", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--nproc", type=int, required=True)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--first-attempt", type=int, default=0)
    parser.add_argument("--nodes", type=int, nargs=2, help="minimum and maximum number of nodes")
    parser.add_argument("--address", help="address of this node, for other nodes")
    parser.add_argument("--store", help="address:port of the rendezvous")
    parser.add_argument(
        "--door", type=int, help="descriptor of the listening socket of the rendezvous"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="script and its arguments")
    o = parser.parse_args()
    place = problem = None
    if o.nodes is not None:
        host, _, port = o.store.rpartition(":")
        place = RunRendezvous(tuple(o.nodes), o.address, (host, int(port)), o.door)
        problem = use_interface(o.address)
    try:
        status = LauncherStatus(o.first_attempt, 1, problem)
        nproc, max_restarts = o.nproc, o.max_restarts
        if os.environ.get(driver.VARIABLE):
            os.environ[driver.RESTARTS] = str(max_restarts)
            nproc, max_restarts = 1, 0
        if problem is None:
            order = NodeLaunch(
                o.run, o.directory, o.node, nproc, max_restarts, o.command, o.first_attempt, place
            )
            status = launch(order)
    except SignalException as stop:
        sys.exit(128 + stop.sigval)
    keep(o.directory, msgspec.structs.replace(status, ended_at=time.time()))
    sys.exit(status.exit_code)


if __name__ == "__main__":
    main()
