"""Ending of ranks that block a run, after saving the stacks that show where in the code they hang.

First each rank's stacks and the reason are appended to its log, then the ranks are killed. The
launcher handles their end like any other failure of ranks: it restarts all ranks, or gives up.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from paceline.node import logs, rundir
from paceline.node.health import stacks
from paceline.node.rundir import EndedRanks, LauncherStatus
from paceline.wire import EndRanks
from paceline.wire.asking import Dump, Dumps

# Seconds that ranks get to write their stacks. A rank that can write them needs far less.
_STACKS_S = 2.0
_log = logging.getLogger(__name__)


class Ending:
    """The execution of one order to end ranks of a node. No method waits: poll `done`.

    `launcher` is the launcher's PID. `dumps` has an entry for each rank that was asked for its
    stacks.
    """

    def __init__(self, directory: Path, launcher: int, order: EndRanks, dumps: list[Dump]) -> None:
        self._directory = directory
        self._launcher = launcher
        self._order = order
        self._dumps = {dump.rank: dump for dump in dumps}
        self._at = time.monotonic() + _STACKS_S

    @classmethod
    def begin(cls, directory: Path, run: str, launcher: int, order: EndRanks) -> Ending | None:
        """Request the ranks' stacks; return None if the order is outdated or was executed."""
        try:
            status = rundir.read(directory / "launcher.json", LauncherStatus)
            ended = rundir.read(directory / "ended.json", EndedRanks)
            if status is None or status.attempt != order.attempt:
                _log.error(
                    "run %s: ignoring an order to end ranks: attempt %d is over", run, order.attempt
                )
                return None
            if ended is not None and ended.attempt == order.attempt:
                return None
            rundir.write(
                directory / "ended.json", EndedRanks(order.attempt, order.ranks, order.reason)
            )
            asked = stacks.dump(directory, run)
        except (OSError, msgspec.DecodeError) as error:
            _log.error("run %s: cannot end hung ranks: %s", run, error)
            return None
        _log.warning("run %s: ending ranks %s: %s", run, order.ranks, order.reason)
        return cls(directory, launcher, order, asked.ranks if isinstance(asked, Dumps) else [])

    def done(self) -> bool:
        """End the ranks once they have had time to write stacks; return True when this is done."""
        if time.monotonic() < self._at:
            return False
        with ExitStack() as handles:
            alive = {}
            for rank, process in ranks_of(self._launcher, self._order.attempt).items():
                if rank in self._order.ranks:
                    with suppress(OSError):
                        alive[rank] = os.pidfd_open(process)
                        handles.callback(os.close, alive[rank])
            # Search again: a PID may have been reused before its handle was opened.
            alive = {
                r: alive[r] for r in ranks_of(self._launcher, self._order.attempt) if r in alive
            }
            for rank in alive:
                with suppress(OSError):
                    self._keep(rank)
            for handle in alive.values():
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        if not alive:
            _log.error("ranks %s no longer run on this node", self._order.ranks)
        return True

    def _keep(self, rank: int) -> None:
        """Append a rank's stacks and the reason to its log.

        Call this just before the rank is killed, because the rank might overwrite the text.
        """
        attempt = self._order.attempt
        dump = self._dumps.get(rank)
        if dump is None or dump.why:
            text = f"no stacks: {dump.why if dump is not None else 'they were not requested'}\n"
        else:
            [stack] = stacks.read(self._directory, attempt, [(rank, dump.offset)]).stacks
            text = stack.text or f"no stacks: {stack.why or 'the rank wrote none'}\n"
        path = rundir.rank_log(self._directory, attempt, rank, "stderr")
        handle = logs.opened(self._directory, path)
        try:
            with Path(f"/proc/self/fd/{handle}").open("ab") as log:
                words = f"\npaceline ends this rank because the run hangs: {self._order.reason}\n"
                log.write(f"{words}{text}".encode(errors="replace"))
        finally:
            os.close(handle)


def ranks_of(launcher: int, attempt: int) -> dict[int, int]:
    """Return the PIDs of a launcher's ranks in an attempt, by rank."""
    processes, of_attempt = {}, f"PACELINE_ATTEMPT={attempt}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The command's name, in parentheses, may contain any characters.
            parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            if int(parent) != launcher:
                continue
            variables = (folder / "environ").read_bytes().split(b"\0")
            if of_attempt not in variables:
                continue
            ranks = [v[5:] for v in variables if v.startswith(b"RANK=") and v[5:].isdigit()]
        except (OSError, IndexError, ValueError):
            continue
        processes.update({int(rank): int(folder.name) for rank in ranks[:1]})
    return processes
