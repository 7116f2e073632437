"""Construction of a rank's parts when the loader's first iteration begins.

`loop.Loop` calls `agree_on_lookahead`, `describe` and `connect`, in this order. Before the first
iteration a session has no background threads, and the control plane has no `Hello` of the attempt.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from paceline.core.batch_limits.devices import summary
from paceline.core.epoch_report import new_file
from paceline.core.version import __version__
from paceline.node.spool import Spool
from paceline.train.checkpoint.position import Position
from paceline.train.context import RunContext
from paceline.train.environment import Environment
from paceline.train.long_phases import Activity, PhaseMonitor
from paceline.train.mesh import GroupTimes, SilentReporter
from paceline.train.plan.follower import Follower
from paceline.train.plan.leader import Leader
from paceline.train.plan.local import LocalPlanner
from paceline.train.plan.proposals import ControlStream, Proposals
from paceline.train.plan_shard import LocalStep
from paceline.train.profile import Limits, Profile
from paceline.train.report import Emitter, Reporter, RoundReporter
from paceline.train.sink import Sink
from paceline.train.startup import Startup
from paceline.train.sync.suitability import OnFallback
from paceline.train.times_queue import TimesQueue
from paceline.wire import MOST_WHY, TELEMETRY, Adopted, Fallback, Hello, RankDevice, run_telemetry

logger = logging.getLogger(__name__)

# Maximum number of seconds that a rank waits at its end until its last records are sent.
_HANDED_OVER_S = 1.0


@dataclass(frozen=True)
class Wiring:
    """Parts of a rank that exist from the loader's first iteration until the session is closed."""

    follower: Follower
    # None on other ranks than rank 0.
    leader: Leader | None
    # None if the ranks have no control plane.
    reporter: Reporter | SilentReporter | None
    rounds: RoundReporter | None
    # None on other ranks than rank 0, and without a control plane.
    on_fallback: OnFallback | None
    # Stack whose exit ends the background threads.
    exit_stack: ExitStack
    # True if rank 0 reports the epochs, for which it needs the last records of all ranks.
    reports_epochs: bool = False

    def hand_over(self) -> None:
        """Send this rank's last records to rank 0, before rank 0 can end the store."""
        if self.reports_epochs and isinstance(self.reporter, Reporter):
            self.reporter.reported().wait(_HANDED_OVER_S)

    def close(self, *, ran_out: bool, failed: Callable[[], bool]) -> None:
        """End the background threads within a few seconds; they deliver pending messages first.

        `ran_out` is True if the newest loop over the loader ran to its end. `failed` returns True
        if a rank has failed.
        """
        if self.leader is not None:
            self.leader.wait_for_readers(at_the_end=ran_out, failed=failed)
        if self.reporter is not None:
            self.reporter.flush()
        self.exit_stack.close()


def connect(
    context: RunContext,
    startup: Startup,
    start: Position,
    activity: Callable[[], Activity],
    uneven: Callable[[], bool],
    hello: Hello | None,
) -> Wiring:
    """Make a rank's parts, and announce the attempt to the control plane with `hello`.

    `uneven` returns True if ranks may have different numbers of iterations of the script's loop.
    """
    environment, data = context.environment, context.data
    by_size = context.terms.loss_mean == "size"
    rank, run, attempt = startup.rank, environment.run, environment.attempt
    emitter = leader = times = local = None
    reporter: Reporter | SilentReporter | None = None
    # The exit stack ends the threads if a later part cannot be made.
    with ExitStack() as exit_stack:
        # Rank 0 plans if there is no control plane, and while its controllers are away.
        plans = (context.policy or environment.bus) is not None
        may_plan = startup.world > 1 and plans
        reports = run is not None or may_plan
        if startup.speaks and reports:
            emitter = emitter_of(
                environment,
                rank,
                context.device.memory,
                PhaseMonitor(attempt, rank, activity),
                TimesQueue(startup.store, startup.world, startup.key) if may_plan else None,
            )
            exit_stack.callback(emitter.close)
            if hello is not None:
                emitter.send(hello)
            if data is not None and run is not None:
                data.send = emitter.send
        if startup.leads:
            proposals = Proposals(attempt)
            if (stream := _control_stream(environment, proposals)) is not None:
                exit_stack.callback(stream.close)
            if may_plan and hello is not None:
                local = _local_planner(context, startup, hello, proposals, alone=stream is None)
                exit_stack.callback(local.close)
            leader = Leader(
                context,
                startup,
                start,
                proposals=proposals if plans else None,
                announce=_announce(emitter, local),
                uneven=uneven,
            )
        follower = Follower(startup.store, rank, leader, *([] if data is None else [data.take]))
        exit_stack.callback(follower.close)
        if reports and startup.lanes is not None:
            times = GroupTimes(startup.lanes)
            exit_stack.callback(times.close)
        if emitter is not None:
            reporter = Reporter(emitter, attempt, rank, by_size, times)
        elif times is not None:
            reporter = SilentReporter(times)
        return Wiring(
            follower,
            leader,
            reporter,
            RoundReporter(emitter, attempt, rank) if emitter is not None else None,
            _on_fallback(emitter, attempt) if emitter is not None and rank == 0 else None,
            exit_stack.pop_all(),
            reports_epochs=may_plan and environment.data is not None,
        )


def _local_planner(
    context: RunContext, startup: Startup, hello: Hello, proposals: Proposals, *, alone: bool
) -> LocalPlanner:
    environment = context.environment
    policy, reports = environment.first_policy, None
    if alone:
        policy = context.policy
        if environment.data is not None:
            reports = new_file(environment.data, sys.argv[0])
    return LocalPlanner(
        startup.store, startup.key, hello, proposals, policy, alone=alone, reports=reports
    )


def agree_on_lookahead(startup: Startup, lookahead: int) -> None:
    """Check that this rank's loader fetches as many steps ahead as rank 0's; each rank calls it.

    Different numbers raise a ValueError whose message names the DataLoader's options.
    """
    rank = startup.process
    if startup.leads:
        for store in startup.stores or [startup.store]:
            store.set("lookahead", str(lookahead))
    elif (of_leader := int(startup.store.get("lookahead"))) != lookahead:
        # A rank that fetches further ahead than rank 0 would wait for steps that rank 0 has not
        # planned yet, while rank 0 waits for that rank in a reduction.
        raise ValueError(
            f"the loader fetches {lookahead} steps ahead on rank {rank} but {of_leader} on rank 0: "
            "give num_workers and prefetch_factor the same values on every rank"
        )


@dataclass
class Findings:
    """Values that a session collects, most of them before its first iteration.

    `lookahead` is the number of steps that the loader fetches before training reaches them.
    `devices` and `profiles` have one entry for each rank, or are empty. `typical` are the indices
    of samples of typical sizes, by ascending size; empty before profiling. `epochs` is the number
    of epochs that the script trains, and `gradient_bytes` is the size of one rank's gradients; None
    means unknown. `given_limits` are the limits that the ranks had before `replay.profile_first`
    profiled them; None: it did not.
    """

    lookahead: int = 0
    epochs: int | None = None
    devices: list[RankDevice] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)
    given_limits: Limits | None = None
    typical: list[int] = field(default_factory=list)
    gradient_bytes: int | None = None


def describe(
    context: RunContext, startup: Startup, start: Position, findings: Findings
) -> Hello | None:
    """Return the run's description for the control plane on rank 0; None on other ranks."""
    if startup.sizes is None:
        return None
    terms, device, limits = context.terms, context.device, context.limits
    return Hello(
        attempt=context.environment.attempt,
        world=startup.world,
        global_batch=terms.global_batch,
        seed=terms.seed,
        sizes=startup.sizes.astype("<f8").tobytes(),
        loss_mean=terms.loss_mean,
        drop_last=terms.drop_last,
        epochs=findings.epochs,
        lookahead=findings.lookahead,
        started_at=time.time(),
        paceline=__version__,
        torch=str(torch.__version__),
        device=summary(findings.devices or [device.described()]),
        epoch=start.epoch,
        step=start.step,
        used=b"" if start.used is None else start.used.astype("<u4").tobytes(),
        emulated=device.emulated,
        profiles=[profile.times for profile in findings.profiles],
        limits=limits.of_parts,
        placement=_placement(startup, context.environment),
        uneven_steps=context.uneven_steps,
        devices=findings.devices,
        grid=terms.shapes.samples,
        length_grid=float(terms.shapes.length),
        shards=None if context.data is None else context.data.shards,
        token_budget=terms.token_budget,
        token_limits=limits.tokens_of_parts,
        steps_per_epoch=None if terms.token_budget is None else context.epoch_steps.of(start.epoch),
        stream=not terms.samples,
        gradient_bytes=findings.gradient_bytes,
    )


def _placement(startup: Startup, environment: Environment) -> list[str]:
    """Return each rank's node; with a mesh, the node of each group's first rank; empty: unknown."""
    lanes = startup.lanes
    if lanes is None:
        return environment.placed(startup.world)
    of_all = environment.placed(sum(map(len, lanes.ranks)))
    return [of_all[rank] for rank in lanes.lane] if of_all else []


def warn_of_restarts(
    environment: Environment, start: Position, rank: int, *, saves: bool, streams: bool = False
) -> None:
    """Warn on rank 0 that a restart of a run without `Session.checkpoint` loses all progress.

    Do not warn if the script saves checkpoints (`saves`) or has loaded a state itself.
    """
    if rank > 0 or saves or start.used is not None:
        return
    if environment.attempt:
        cost = f"so attempt {environment.attempt} begins at step 0 again"
    elif environment.max_restarts or environment.run is not None:
        cost = "so a restart begins at step 0 again, as does `paceline resume`"
    else:
        return
    if streams:
        logger.warning(
            "session.checkpoint does not support a stream, %s: save session.state_dict() with the "
            "model after each loop over the loader, and load it at the script's start",
            cost,
        )
        return
    logger.warning(
        "the script declares no checkpoint, %s: call session.checkpoint(directory, model, "
        "optimizer, every_steps=…), or save and load the session's state yourself",
        cost,
    )


def emitter_of(
    environment: Environment,
    rank: int,
    memory: Callable[[], int],
    phases: PhaseMonitor,
    times: TimesQueue | None = None,
) -> Emitter:
    """Make the thread that sends the telemetry of a rank."""
    run = environment.run
    if run is None:
        return Emitter(None, memory, times)
    spool = None
    if environment.spool is not None:
        name = f"attempt{environment.attempt}-rank{rank}"
        spool = Spool(environment.spool, name, environment.spool_bytes)
    stream = TELEMETRY if environment.key is None else run_telemetry(run)
    return Emitter(Sink(run, environment.bus, spool, stream), memory, times, phases.look)


def _announce(
    emitter: Emitter | None, local: LocalPlanner | None
) -> Callable[[Adopted], None] | None:
    if local is None:
        return None if emitter is None else emitter.send

    def announce(adopted: Adopted) -> None:
        if emitter is not None:
            emitter.send(adopted)
        local.adopted(adopted)

    return announce


def _on_fallback(emitter: Emitter, attempt: int) -> OnFallback:
    def on_fallback(step: LocalStep, why: str) -> None:
        emitter.send(Fallback(attempt, step.segment, why[:MOST_WHY]))

    return on_fallback


def _control_stream(environment: Environment, proposals: Proposals) -> ControlStream | None:
    run, bus = environment.run, environment.bus
    if run is None or bus is None:
        return None
    first_attempt = environment.first_attempt
    return ControlStream(bus, run, proposals, environment.key, first_attempt=first_attempt)
