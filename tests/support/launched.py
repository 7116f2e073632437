"""Training under a launcher of its own, without a server."""

from __future__ import annotations

from pathlib import Path

from paceline.node.rundir import Record
from paceline.node.supervisor import Supervisor
from paceline.wire import Launch
from support.waiting import until

WORLD = 2
Line = tuple[int, int, int, list[int]]  # attempt, epoch, step, samples


def launched(script: str, directory: Path, arguments: list[str], restarts: int) -> tuple[int, str]:
    """Runs a script to its end on two ranks: the exit code, and what the launcher says of it."""
    directory.mkdir()
    launch = Launch(script, arguments, WORLD, {}, max_restarts=restarts)
    supervisor = Supervisor(launch, directory, Record("r0", "here", "the test", ""), None)
    supervisor.start()

    def settled() -> bool:
        supervisor.poll()
        return supervisor.settled

    try:
        until(settled, "the run to settle", 400)
        assert supervisor.last is not None
        assert supervisor.last.exit_code is not None
        return supervisor.last.exit_code, str(supervisor.last.message)
    finally:
        supervisor.close()


def not_trained_again(lines: list[Line]) -> list[Line]:
    """Without the steps that a later attempt trained again."""
    begins: dict[int, int] = {}
    for attempt, _, step, _ in lines:
        begins[attempt] = min(step, begins.get(attempt, step))
    return [
        line
        for line in lines
        if all(line[2] < begin for attempt, begin in begins.items() if attempt > line[0])
    ]
