"""Load the history and feedback that planning needs from the database."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

from paceline.planning.feedback import COLUMNS, WINDOW, Window
from paceline.planning.history import AHEAD, History
from paceline_backend.store import Connection, records, runs, segments


def load(connection: Connection, run: int) -> tuple[History, Window] | None:
    """Return history and feedback of the latest attempt of a run; None before the run's Hello.

    `run` is the run's key in the database. If the attempt starts after step 0, the feedback also
    has steps of earlier attempts, and the policy can get back the state from its last plan in an
    earlier attempt. So the ranks' speeds are known from the start.
    """
    hello = runs.hello(connection, run)
    if hello is None:
        return None
    history = History(hello, segments.before(connection, run, hello))
    for segment in segments.adopted(connection, run, hello):
        history.adopt(segment)
    window = Window(hello.world, hello.attempt)
    rows = records.of_attempt(
        connection,
        run,
        hello,
        COLUMNS,
        # Read twice the window, because the newest steps may be incomplete, and other steps may
        # lack a record.
        newest=(history.step - 2 * WINDOW, history.step + AHEAD),
        older=history.feedback,
    )
    for step, of_step in groupby(rows, itemgetter(0)):
        of_ranks = {rank: values for _, rank, values in of_step if 0 <= rank < hello.world}
        window.put(step, of_ranks)
    return history, window
