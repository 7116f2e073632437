"""The ranks of one node under TorchElastic: logs, attempts, and which rank failed first."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    LogsSpecs,
    SignalException,
    Std,
    SubprocessContext,
)
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

from paceline.core import driver, reform
from paceline.node import logs, rundir
from paceline.node.elastic.rendezvous import Together
from paceline.node.elastic.roll import FirstFailure, Roll, RollRound
from paceline.node.rundir import EndedRanks, LauncherStatus
from paceline.wire import FAILED_ELSEWHERE

# Seconds between requesting that ranks end and killing them: after a failure, and on a stop. A stop
# may take longer, because the ranks may save a checkpoint first. Slurm and Kubernetes kill the
# launcher 30 s after a stop.
KILL_RANKS_AFTER_S, STOP_GRACE_S = 5, 25
# Seconds to wait for further failures before the first failure is determined. A rank that raises an
# exception may exit later than peers that fail because of this exception.
_LINGER_S = 0.5
_PROCESSES_POLL_S = 0.2
# Number of newest attempts whose logs are kept. Older logs are deleted, because the number of
# restarts is not limited.
_KEPT_ATTEMPTS = 10
_POLL_S = 0.05
# Maximum number of seconds for all ranks to end after the same step: when a node joins, and when a
# node leaves. The first limit is longer, because the ranks train while a joining node waits.
_JOIN_PATIENCE_S, _LEAVE_PATIENCE_S = 60.0, 20.0
# The launcher gives up after this many successive failed rounds of the rendezvous.
_FAILED_ROUNDS = 5
_log = logging.getLogger(__name__)


class _Logs(LogsSpecs):
    """Log files per rank, at the paths that `rundir.rank_log` returns.

    TorchElastic's own folders are not used: their names have the rank within the node, and
    TorchElastic's number of restarts, which differs between nodes.
    """

    attempt = 0

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory / "logs"), redirects=Std.ALL)
        self._directory = directory

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        made = LogsDest()
        older = [k for k in logs.attempts(self._directory) if k <= self.attempt - _KEPT_ATTEMPTS]
        for attempt in (self.attempt, *older):
            folder = self._directory / "logs" / f"attempt_{attempt}"
            shutil.rmtree(folder, ignore_errors=True)
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            out, err = (self._log(rank, stream) for stream in ("stdout", "stderr"))
            out.parent.mkdir(parents=True)
            made.stdouts[local_rank], made.stderrs[local_rank] = str(out), str(err)
            made.error_files[local_rank] = str(out.with_name("error.json"))
            env["TORCHELASTIC_ERROR_FILE"] = made.error_files[local_rank]
        return made

    def shorten(self) -> None:
        of_ranks = (self._directory / "logs" / f"attempt_{self.attempt}").glob("*/std*.log")
        for log in (self._directory / "launcher.log", *of_ranks):
            # A script may have removed the log.
            with suppress(OSError):
                logs.shorten(log)

    def _log(self, rank: int, stream: str) -> Path:
        return rundir.rank_log(self._directory, self.attempt, rank, stream)


class TooManyFailuresError(Exception):
    """An error because the run has used up its restarts."""


class RankAgent(LocalElasticAgent):
    """A TorchElastic agent that finds which rank failed first and why, and ends the other ranks.

    TorchElastic itself records failures only with a resolution of one second, and ends the other
    ranks before it reports. It counts restarts on each node separately, so two nodes may number the
    same attempt differently; therefore `roll` counts attempts and failures for all nodes. After
    more than `most_failures` failures the run has failed; None: TorchElastic counts the failures of
    this node.
    """

    def __init__(
        self, spec: WorkerSpec, directory: Path, roll: Roll, most_failures: int | None
    ) -> None:
        self._logs = _Logs(directory)
        super().__init__(spec, self._logs, shutdown_timeout=KILL_RANKS_AFTER_S)
        self._directory = directory
        self._roll = roll
        self._most_failures = most_failures
        # The first failure of this node's ranks in this rendezvous round.
        self._failure: FirstFailure | None = None
        # The failure, on any node, that ended the previous rendezvous round.
        self._cause: FirstFailure | None = None
        # The file that makes ranks end after the same step; see `paceline.core.reform`.
        self._reform = directory / "reform"
        self.status = LauncherStatus(roll.first)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        called = self._called(worker_group)
        if self._most_failures is not None and called.failures > self._most_failures:
            self._blame(called.cause)
            # The other launchers must read the roll's result before the rendezvous ends.
            self._exit_barrier()
            raise TooManyFailuresError
        self._failure, self._cause = None, called.cause
        self._logs.attempt = called.attempt
        os.environ["PACELINE_ATTEMPT"] = str(called.attempt)
        nproc = worker_group.spec.local_world_size
        placement = [node for node in called.nodes for _ in range(nproc)]
        os.environ["PACELINE_PLACEMENT"] = msgspec.json.encode(placement).decode()
        if isinstance(worker_group.spec.rdzv_handler, Together):
            self._reform.unlink(missing_ok=True)
            os.environ[reform.VARIABLE] = str(self._reform)

    def _blame(self, cause: FirstFailure | None) -> None:
        """Replace the status by the failure that ended the round, if another node reported it."""
        if cause is not None and cause.node != self._roll.node:
            message = f"{FAILED_ELSEWHERE}{cause.node}: {cause.message}"
            self.status = LauncherStatus(self.status.attempt, cause.exit_code, message)

    def _called(self, worker_group: WorkerGroup) -> RollRound:
        """Join rendezvous rounds until all launchers answer a roll call; return its result.

        A launcher may be lost before it answers; then another round follows. After too many rounds,
        raise a RendezvousTimeoutError.
        """
        for _ in range(_FAILED_ROUNDS):
            try:
                super()._rendezvous(worker_group)
                store: Any = worker_group.store
                index: Any = worker_group.group_rank
                count: Any = worker_group.group_world_size
                return self._roll.call(store, index, count, self._failure)
            # The store raises a RuntimeError if it is gone, or if a launcher does not answer.
            except RuntimeError as error:
                _log.warning("a round of the rendezvous failed: %s", str(error).partition("\n")[0])
                # This call raises an error if the store is gone.
                worker_group.spec.rdzv_handler.is_closed()
        raise RendezvousTimeoutError

    def _exit_barrier(self) -> None:
        """Wait until the ranks of all launchers that did not leave the run have ended.

        If the launcher that serves the rendezvous ended earlier, the others would end their ranks.
        """
        handler = self._worker_group.spec.rdzv_handler
        if not isinstance(handler, Together):
            return
        store: Any = self._store
        count: Any = self._worker_group.group_world_size
        try:
            store.add("done", 1)
            while store.add("done", 0) + handler.gone < count:
                time.sleep(_PROCESSES_POLL_S)
                handler.num_nodes_waiting()
        except (RuntimeError, RendezvousError):
            _log.info("the rendezvous ended: all ranks are done")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids = super()._start_workers(worker_group)
        why = self._cause.brief or None if self._cause is not None else None
        self.status = LauncherStatus(self._logs.attempt, message=why)
        keep(self._directory, self.status)
        return dict(pids)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        try:
            return super()._invoke_run(role)
        except SignalException as asked:
            if asked.sigval != signal.SIGINT:
                self._shutdown_timeout = STOP_GRACE_S
                raise
            self._end_before_leaving()
            raise SignalException("this node leaves the run", signal.SIGTERM) from None

    def _end_before_leaving(self) -> None:
        """End all ranks after the same step, because this node leaves the run."""
        handler = self._worker_group.spec.rdzv_handler
        # If the store is gone, the other launchers cannot be notified.
        with suppress(RuntimeError, RendezvousError):
            if isinstance(handler, Together):
                handler.announce_leaving()
                self._end_in_order(self._worker_group, _LEAVE_PATIENCE_S)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._end_in_order(worker_group, _JOIN_PATIENCE_S):
            super()._restart_workers(worker_group)

    def _end_in_order(self, worker_group: WorkerGroup, patience_s: float) -> bool:
        """Wait until the ranks have ended after the same step.

        Stop waiting if a node is lost, a rank fails, or `patience_s` seconds have passed.
        Return False if training is over, because all ranks of this node have finished.
        """
        handler = worker_group.spec.rdzv_handler
        codes, index = self._codes(worker_group), cast(int, worker_group.group_rank)
        if isinstance(handler, Together) and None in codes.values():
            # The file makes rank 0 plan no further segment. Rank 0 is on the node with index 0.
            if index == 0:
                self._reform.touch()
            deadline = time.monotonic() + patience_s
            # A launcher that is gone either was faster and has ended its ranks after the same step,
            # or was lost. In the first case, a rank of this node has ended with EXIT_CODE, too. In
            # the second, the ranks cannot reach the same step.
            while (
                None in codes.values()
                and not self._failed(codes)
                and (not handler.gone or reform.EXIT_CODE in codes.values())
            ):
                if time.monotonic() > deadline:
                    _log.warning(
                        "not all ranks have ended after the same step within %g s; stopping them",
                        patience_s,
                    )
                    break
                time.sleep(_POLL_S)
                # This call updates `handler.gone`.
                handler.num_nodes_waiting()
                codes = self._codes(worker_group)
        return any(code != 0 for code in codes.values())

    def _failed(self, codes: dict[int, int | None]) -> dict[int, int]:
        in_order = reform.EXIT_CODE if self._reform.exists() else 0
        return {rank: code for rank, code in codes.items() if code and code != in_order}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._logs.shorten()
        codes = self._codes(worker_group)
        if self._failed(codes):
            time.sleep(_LINGER_S)
            failure = self._first(self._failed(self._codes(worker_group)))
            self._failure = failure
            self.status = LauncherStatus(self.status.attempt, failure.exit_code, failure.message)
            self._shutdown()
        # Ranks have ended for a change of nodes. UNHEALTHY makes TorchElastic start another round.
        elif any(codes.values()):
            return RunResult(WorkerState.UNHEALTHY)
        elif None in codes.values():
            return RunResult(WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _codes(self, worker_group: WorkerGroup) -> dict[int, int | None]:
        assert isinstance(self._pcontext, SubprocessContext)
        return {
            worker_group.workers[local_rank].global_rank: handler.proc.poll()
            for local_rank, handler in self._pcontext.subprocess_handlers.items()
        }

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = KILL_RANKS_AFTER_S
    ) -> None:
        super()._shutdown(death_sig, timeout)
        if isinstance(self._pcontext, SubprocessContext):
            for pid in self._pcontext.pids().values():
                # Usually no process of the rank's process group is left.
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def _first(self, failed: dict[int, int]) -> FirstFailure:
        """Return the failure of the rank that failed first, with the last lines of its log.

        `failed` maps ranks to exit codes. The rank whose log has the earliest last write failed
        first: a rank that fails because a peer is gone writes to its log after the peer.
        """
        attempt = self.status.attempt
        written = {r: rundir.rank_log(self._directory, attempt, r, "stderr") for r in failed}
        at = {r: log.stat().st_mtime for r, log in written.items()}
        rank = min(failed, key=lambda r: at[r])
        code = failed[rank]
        words = last_words(rundir.tail(written[rank]))
        if code > 0:
            how = f"ended with code {code}"
        else:
            how = f"was killed by {signal.Signals(-code).name}{self._why_ended(rank)}"
        what = how
        if code > 0 and words:
            what = f"failed: {words} (exit code {code})"
        # A rank that raises an exception may abort during exit, because gloo's threads still run.
        # About one in six does. The exception is then the real cause.
        elif -code == signal.SIGABRT and words:
            what += f" after {words}"
        log = written[rank]
        who = "the driver" if os.environ.get(driver.VARIABLE) else f"rank {rank}"
        message = f"{who} {what}; log: {log}\n{rundir.last_lines(log)}".rstrip("\n")
        brief = f"{who} {how}; log: {log}"
        exit_code = code if code > 0 else 128 - code
        return FirstFailure(self._roll.node, at[rank], exit_code, message, brief)

    def _why_ended(self, rank: int) -> str:
        try:
            ended = rundir.read(self._directory / "ended.json", EndedRanks)
        except (OSError, msgspec.DecodeError):
            return ""
        if ended is None or ended.attempt != self.status.attempt or rank not in ended.ranks:
            return ""
        return f", because the run hung: {ended.reason}"


def last_words(stderr: str) -> str:
    """Return the exception in a Python program's output, ``Type: message``, else the last line."""
    *_, last = stderr.rpartition("Traceback (most recent call last):\n")
    lines = last.splitlines()
    if len(last) < len(stderr):
        for line in lines:
            if re.match(r"[A-Za-z_][\w.]*(:|$)", line):
                return line.strip()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def keep(directory: Path, status: LauncherStatus) -> None:
    """Write a launcher's status into the run's directory."""
    # A full disk must not end training, and the launcher's log may be on the same disk.
    with contextlib.suppress(OSError):
        rundir.write(directory / "launcher.json", status)
