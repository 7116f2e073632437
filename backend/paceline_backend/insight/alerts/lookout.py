"""Values that the alert rules check, for each rule and each active run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline_backend.insight import hangs
from paceline_backend.insight.alerts.rules import Rule
from paceline_backend.store import Connection, Store, reads
from paceline_backend.store.fleet import progress, verdicts
from paceline_backend.store.fleet.progress import Running, RunProgress
from paceline_backend.store.fleet.verdicts import Kept

# Number of the last complete steps over which SE and waste are averaged.
MEAN_STEPS = 50
# Number of the newest segments that the rule `run-coasts` checks.
_SEGMENTS = 8
# The value of the rule `records-lost` is 0 again this many seconds after the last loss.
_LOSS_SHOWN_S = 60.0
# Minimum duration of a hang, passed to `hangs.look`. It is nearly 0, because the rule `run-hangs`
# has a threshold of its own.
_ANY_S = 1e-3


@dataclass(frozen=True)
class Condition:
    """Value that a rule checks, in the rule's unit, and a sentence that describes the value.

    `run` is a public id; if it is empty, the condition concerns the control plane.
    """

    rule: str
    run: str
    value: float
    words: str


@dataclass(frozen=True)
class _Seen:
    run: Running
    progress: RunProgress | None
    verdict: Kept | None


class Lookout:
    """Reader of the values that the rules check."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def look(self, rules: Mapping[str, Rule], at: float) -> tuple[list[Condition], set[str]]:
        """Return the known values of all enabled rules, and the public ids of the active runs.

        A rule whose value is unknown is left out, for example if a run has no verdict yet. `at` is
        the current time of the database's clock.
        """
        wanted = {name for name, rule in rules.items() if rule.enabled}
        with self._store.read() as connection:
            running, known = progress.running(connection), progress.known(connection)
            kept = verdicts.newest(connection, [run.id for run in running])
            conditions = [
                condition
                for run in running
                for condition in _of_run(
                    connection, _Seen(run, known.get(run.key), kept.get(run.id)), wanted, at
                )
            ]
        conditions = [each for each in conditions if each.rule in wanted]
        if "disk-low" in wanted:
            conditions += self._disk()
        return conditions, {run.id for run in running}

    def _disk(self) -> Iterator[Condition]:
        free = self._store.free_share()
        if free is None:
            return
        words = f"{100 * free:.1f} % of the file system with the database is free."
        yield Condition("disk-low", "", free, words)


def _of_run(
    connection: Connection, seen: _Seen, wanted: set[str], at: float
) -> Iterator[Condition]:
    run = seen.run
    yield from _of_verdict(seen)
    yield from _of_progress(seen, at)
    if wanted & {"run-waste", "run-straggler-effect"} and run.step >= 0:
        yield from _of_steps(connection, run)
    if "run-coasts" in wanted and run.backend != "simulated":
        yield from _of_segments(connection, run)
    if "run-hangs" in wanted:
        hang = hangs.look(connection, run.key, _ANY_S)
        since_s = hang.since_s if hang.hung and not hang.scripted else 0.0
        yield Condition("run-hangs", run.id, since_s, hang.words or "Its ranks make progress.")


def _of_verdict(seen: _Seen) -> Iterator[Condition]:
    kept = seen.verdict
    if kept is None:
        return
    facts = kept.body
    going = [cause for cause in facts["causes"] if cause["until"] is None]
    words = " ".join(cause["words"] for cause in going) or facts["words"]
    share = min(sum(cause["share"] for cause in going), facts["cost_s"] / facts["wall_s"])
    yield Condition("run-held-up", kept.run, float(share), words)
    slow = [cause for cause in going if cause["ranks"] and cause["factor"] is not None]
    words = " ".join(cause["words"] for cause in slow) or "No rank is slow."
    factor = max((c["factor"] for c in going if c["factor"] is not None), default=1.0)
    yield Condition("rank-slow", kept.run, factor, words)


def _of_progress(seen: _Seen, at: float) -> Iterator[Condition]:
    known, run = seen.progress, seen.run
    if known is None:
        return
    idle_s = max(at - known.step_at, 0.0) if run.step == known.step else 0.0
    step = (
        "No step has been completed since the run started"
        if run.step < 0
        else f"Step {run.step:,} was the last"
    )
    yield Condition("run-stands", run.id, idle_s, f"{step}, {idle_s:,.0f} s ago.")
    lost = known.lost if known.lost_at is not None and at - known.lost_at < _LOSS_SHOWN_S else 0
    words = f"{known.lost:,} records were lost because a spool was full."
    yield Condition("records-lost", run.id, float(lost), words)
    if known.inexact is not None:
        words = f"Epochs with samples that were used twice or skipped: {known.inexact}."
        yield Condition("coverage-inexact", run.id, float(known.inexact), words)


def _of_steps(connection: Connection, run: Running) -> Iterator[Condition]:
    span = (max(0, run.step - MEAN_STEPS + 1), run.step)
    columns = reads.step_columns(connection, run.key, span, MEAN_STEPS)
    for rule, name, words in (
        ("run-waste", "waste", "Ranks spend {:.0%} of their time waiting, over the last {} steps."),
        ("run-straggler-effect", "se", "The straggler effect (SE) is {:.2f}, over {} steps."),
    ):
        known = [value for value in columns[name] if value is not None]
        if known:
            value = sum(known) / len(known)
            text = words.format(value, len(known)).replace("%", " %")
            yield Condition(rule, run.id, value, text)


def _of_segments(connection: Connection, run: Running) -> Iterator[Condition]:
    rows = reads.segment_rows(connection, run.key, (None, None), _SEGMENTS)
    if len(rows) == _SEGMENTS:
        share = sum(row["source"] == "coast" for row in rows) / len(rows)
        words = f"The leader planned {share:.0%} of the last {len(rows)} segments itself."
        yield Condition("run-coasts", run.id, share, words.replace("%", " %"))
