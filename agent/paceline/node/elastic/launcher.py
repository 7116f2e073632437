"""``python -m paceline.node.elastic.launcher``: one run's ranks on one node, under TorchElastic."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    SignalException,
    Std,
    SubprocessContext,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    registry,
)

from paceline.node import rundir
from paceline.node.elastic import rank
from paceline.node.rundir import LauncherStatus

GRACE_S = 5  # between asking ranks to end and killing them
_MONITOR_S = 0.1
# A rank that raised may take longer to exit than its peers take to fail because of it.
_LINGER_S = 0.5
# Measured: recovery in 8 s instead of 46 s. Fewer attempts split the world when a node joined.
_RENDEZVOUS = {
    "last_call_timeout": 1,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 5,
    "is_host": False,
}


class _Logs(DefaultLogsSpecs):
    """Log files per rank, at paths that are known in advance."""

    def _make_log_dir(self, log_dir: str | None, rdzv_run_id: str) -> str:
        assert log_dir is not None
        return log_dir


class _Agent(LocalElasticAgent):
    """Reports each attempt, finds which rank failed first and why, then ends the other ranks.

    TorchElastic itself has the times of failures in whole seconds only, and ends the other ranks
    before it reports.
    """

    def __init__(self, spec: WorkerSpec, directory: Path) -> None:
        logs = _Logs(str(directory / "logs"), redirects=Std.ALL)
        super().__init__(spec, logs, exit_barrier_timeout=10, shutdown_timeout=GRACE_S)
        self._directory = directory
        self.status = LauncherStatus(0)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids = super()._start_workers(worker_group)
        self.status = LauncherStatus(worker_group.spec.max_restarts - self._remaining_restarts)
        rundir.write(self._directory / "launcher.json", self.status)
        return dict(pids)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self._codes(worker_group)
        if any(codes.values()):
            time.sleep(_LINGER_S)
            codes = self._codes(worker_group)
            self.status = self._failure({rank: code for rank, code in codes.items() if code})
            self._shutdown()
        elif None in codes.values():
            return RunResult(WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _codes(self, worker_group: WorkerGroup) -> dict[int, int | None]:
        """Each rank's exit code, None while it runs."""
        assert isinstance(self._pcontext, SubprocessContext)
        return {
            worker_group.workers[local_rank].global_rank: handler.proc.poll()
            for local_rank, handler in self._pcontext.subprocess_handlers.items()
        }

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = GRACE_S) -> None:
        super()._shutdown(death_sig, timeout)
        if isinstance(self._pcontext, SubprocessContext):
            for pid in self._pcontext.pids().values():
                with suppress(ProcessLookupError):  # normal case: no process of the group is left
                    os.killpg(pid, signal.SIGKILL)

    def _failure(self, failed: dict[int, int]) -> LauncherStatus:
        """The status for the rank that failed first: why, with the last lines of its log.

        A rank that fails because a peer is gone writes to its log after the peer's last line.

        Args:
            failed: rank → exit code.
        """
        attempt = self.status.attempt
        logs = {r: rundir.rank_log(self._directory, attempt, r, "stderr") for r in failed}
        rank = min(failed, key=lambda r: logs[r].stat().st_mtime_ns)
        code = failed[rank]
        words = last_words(rundir.tail(logs[rank]))
        if code > 0:
            what = f"failed: {words} (exit code {code})" if words else f"ended with code {code}"
        else:
            what = f"was killed by {signal.Signals(-code).name}"
            # One in six ranks that raise aborts during exit, because gloo's threads still run.
            if -code == signal.SIGABRT and words:
                what += f" after {words}"
        message = f"rank {rank} {what}; log: {logs[rank]}\n{rundir.last_lines(logs[rank])}"
        return LauncherStatus(attempt, code if code > 0 else 128 - code, message.rstrip("\n"))


def last_words(stderr: str) -> str:
    """The exception that ended a Python program, ``Type: message``, or the last line."""
    *_, last = stderr.rpartition("Traceback (most recent call last):\n")
    lines = last.splitlines()
    if len(last) < len(stderr):
        for line in lines:
            if re.match(r"[A-Za-z_][\w.]*(:|$)", line):
                return line.strip()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def launch(
    run: str, directory: Path, store: str, nproc: int, max_restarts: int, command: list[str]
) -> LauncherStatus:
    """Runs the ranks to their end.

    Args:
        run: names the rendezvous.
        directory: the run's, see `paceline.node.rundir`.
        store: ``host:port`` of the rendezvous.
        nproc: ranks on this node.
        max_restarts: how often all ranks are started again after one failed.
        command: the script and its arguments.
    """
    handler = registry.get_rendezvous_handler(
        RendezvousParameters("c10d", store, run, 1, 1, local_addr="127.0.0.1", **_RENDEZVOUS)
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=nproc,
        rdzv_handler=handler,
        entrypoint=sys.executable,
        args=("-P", rank.__file__, str(os.getpid()), *command),
        max_restarts=max_restarts,
        monitor_interval=_MONITOR_S,
        local_addr="127.0.0.1",
    )
    metrics.initialize_metrics()
    agent = _Agent(spec, directory)
    try:
        result = agent.run()
        events.record(agent.get_event_succeeded())
    except RendezvousConnectionError:
        return LauncherStatus(agent.status.attempt, 3, "the run's rendezvous process is gone")
    finally:
        handler.shutdown()
    if result.is_failed():
        return agent.status
    return LauncherStatus(agent.status.attempt, 0)


def main() -> None:
    """Launches; leaves the outcome in ``launcher.json`` and as exit code."""
    parser = argparse.ArgumentParser(prog="python -m paceline.node.elastic.launcher")
    parser.add_argument("--run", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--store", required=True, help="host:port of the rendezvous")
    parser.add_argument("--nproc", type=int, required=True)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="script args…")
    o = parser.parse_args()
    # Otherwise the ranks would use the store's port, too, and restarted ranks crash in a loop.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    try:
        status = launch(o.run, o.directory, o.store, o.nproc, o.max_restarts, o.command)
    except SignalException as stop:
        sys.exit(128 + stop.sigval)
    rundir.write(o.directory / "launcher.json", status)
    sys.exit(status.exit_code)


if __name__ == "__main__":
    main()
