"""Cases for ranks: training whose segments have one synchroniser after the other."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline
from paceline.train.plan.leader import Leader
from paceline.train.plan_shard import LocalStep
from paceline.train.sync.base import Round
from paceline.train.sync.partial import PartialSync
from paceline.train.sync.suitability import Suitability
from paceline.wire import ALLREDUCE, Plan
from paceline.wire.synchronisation import Synchronisation

SAMPLES, BATCH, WIDTH = 192, 12, 5
STEPS = SAMPLES // BATCH  # of an epoch


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, WIDTH, generator=generator)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


@contextmanager
def planned(
    chain: list[Synchronisation],
    shares: list[float] | None = None,
    steps: int = 4,
    first: Synchronisation = ALLREDUCE,
) -> Iterator[None]:
    """Coasted segments of a few steps, each with the next synchroniser after the first one's."""
    coasted = Leader._coasted

    def next_one(leader: Leader) -> Plan:
        leader._coast_steps = steps
        made = coasted(leader)
        what = chain[(leader.seq - 1) % len(chain)] if leader.seq else first
        return msgspec.structs.replace(made, synchroniser=what, shares=shares or [])

    with (
        mock.patch("paceline.train.plan.leader.MOST_COASTED", steps),
        mock.patch("paceline.train.plan.leader.ALONE_S", 0.0),  # no segment is longer
        mock.patch.object(Leader, "_coasted", next_one),
    ):
        yield


@dataclass
class Script:
    optimiser: str = "SGD"
    optimisers: int = 1
    declare: str = ""  # to session.optimizer: nothing, "optimiser", or "both": the scaler, too
    models: int = 1  # that are wrapped: one for each half of the network, or the whole
    late: bool = False  # a new optimiser for the second epoch
    schedule: bool = False  # of learning rate and momentum, in each step
    accumulate: int = 1  # steps until the optimiser steps
    clip: bool = False
    scaler: bool = False
    fused: bool = False
    overflow: tuple[int, int] | None = None  # step, rank
    backoff: float = 0.5  # of the scale, then
    scalers: int = 1  # that are enabled, of which one is used
    closure: bool = False
    no_closure: bool = False  # the optimiser steps with None in a closure's place
    closure_from: int = 2**31  # step from which the optimiser steps with one
    temper: bool = False  # another optimiser, of another parameter, that steps with a closure
    criterion: bool = False  # the loss has a parameter, which no wrapped model has
    at_once: bool = False  # the first segment has the chain's first synchroniser
    frozen: bool = False  # the first layer
    workers: int = 0  # of data loading
    uneven: bool = False  # steps
    segment: int = 4  # steps
    gather: bool = False  # a collective in the loop's body
    spare_at: int = -1  # step from which there is another optimiser of the model, that never steps
    slow: dict[int, float] = field(default_factory=dict)  # rank → seconds each step takes longer
    shares: list[float] = field(default_factory=list)
    # Step, "break" or "raise", rank or -1: all. A rank alone leaves at its first step from there.
    leave: tuple[int, str, int] | None = None
    fail: tuple[int, int] | None = None  # step, rank: raises before the body's collective
    still_s: float = 30.0  # `agreement._NO_PROGRESS_S`
    late_once: tuple[int, int, float] = (-1, 0, 0.0)  # step, rank, seconds
    kill: tuple[int, int] | None = None  # step, rank

    def leaves(self, session: paceline.Session) -> bool:
        if self.leave is None:
            return False
        step, _, who = self.leave
        if who == -1:
            return session.batch.step == step
        # Where ranks share batches, others may take over all of this rank's part of that step.
        return who == session.rank and session.batch.step >= step


class BoomError(Exception):
    """What a script raises."""


def train(chain: list[Synchronisation], given: dict[str, Any] | None = None) -> dict[str, Any]:
    """Two epochs; what this rank's replica is then, and what came of the rounds."""
    script = Script(**(given or {}))
    torch.manual_seed(0)
    reported: list[tuple[int, Round]] = []
    outcome: dict[str, Any] = {"samples": 0, "weight": 0.0, "error": None, "used": [[], []]}
    outcome["contributors"] = []  # to rounds before any rank was through with the segment
    farewell_s = 2.0
    if script.leave is not None:  # a rank may begin late here
        # After one rank left alone, another rank may wait for a plan until rank 0 has ended.
        farewell_s = 20.0 if script.leave[2] == -1 else 4.0
    first = chain[0] if script.at_once else ALLREDUCE
    with (
        ExitStack() as undiscovered,
        planned(chain, script.shares, script.segment, first),
        mock.patch("paceline.train.plan.leader._FAREWELL_S", farewell_s),
        mock.patch("paceline.train.sync.agreement._NO_PROGRESS_S", script.still_s),
    ):
        session = paceline.Session(Data(), global_batch=BATCH, seed=3, uneven_steps=script.uneven)
        network = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
        network[0].requires_grad_(not script.frozen)
        model = _wrapped(session, network, script)

        def report(step: LocalStep, finished: Round) -> None:
            reported.append((step.segment, finished))
            relaxed = session._loop.gate.relaxed
            if not isinstance(relaxed, PartialSync):
                return
            if max(relaxed._rounds._progress.clocks) < script.segment:
                outcome["contributors"].append(finished.contributors)

        session._loop.gate.on_round = report
        made = _optimisers(network, script)
        scheduler = _scheduler(made[0]) if script.schedule else None
        scaler, *unused = (
            torch.amp.GradScaler(
                "cpu", init_scale=256.0, backoff_factor=script.backoff, enabled=script.scaler
            )
            for _ in range(script.scalers)
        )
        if script.declare:
            both = script.declare == "both"
            assert session.optimizer(made[0], scaler if both else None) is made[0]
            undiscovered.enter_context(_undiscovered(both=both))
        temper = nn.Parameter(torch.zeros(1))
        tempering = torch.optim.LBFGS([temper], max_iter=2)
        more = {"prefetch_factor": 2} if script.workers else {}
        spare: list[torch.optim.Optimizer] = []
        loader = session.loader(num_workers=script.workers, **more)
        try:
            for epoch in range(2):
                if epoch and script.late:
                    made = _optimisers(network, script)
                for x, y in loader:
                    _step(session, model, made, scaler, script, x, y)
                    if script.temper:
                        tempering.step(lambda: _towards_one(tempering, temper))
                    if session.batch.step == script.spare_at:
                        spare.append(torch.optim.SGD(network.parameters(), 0.1))
                    outcome["samples"] += session.batch.samples
                    outcome["weight"] += session.batch.weight
                    outcome["used"][epoch] += session._loop.running().step.indices
                    if scheduler is not None:
                        scheduler.step()
                    if script.leaves(session):
                        if script.leave[1] == "break":
                            break
                        raise BoomError
        except (paceline.PacelineError, BoomError, RuntimeError) as error:
            outcome["error"] = str(error) or type(error).__name__
        del unused
        outcome["last"], outcome["scale"] = session.step, scaler.get_scale()
        session.close()
    state = [*network.state_dict().values()]
    for optimiser in made:
        for of_parameter in optimiser.state.values():
            state += [value for _, value in sorted(of_parameter.items()) if torch.is_tensor(value)]
    return outcome | {
        "replica": [tensor.tolist() for tensor in state],
        "gradients": sum(sum(finished.staleness) for _, finished in reported),
        "dropped": sum(finished.dropped for _, finished in reported),
        "segments": sorted({segment for segment, _ in reported}),
    }


def impatient(what: Synchronisation, given: dict[str, Any]) -> list[int]:
    """Segments that are said to be all-reduced, where six steps are a long wait for the first."""
    reported: list[int] = []

    def tell(suitability: Suitability, step: LocalStep) -> None:
        suitability.on_fallback = lambda step, why: reported.append(step.segment)
        real(suitability, step)

    real = Suitability.tell
    with (
        mock.patch.object(Suitability, "tell", tell),
        mock.patch("paceline.train.sync.suitability._PATIENCE", 6),
    ):
        train([what], given)
    return reported


def _settled(count: Callable[[], int]) -> int:
    """A number that has stayed for half a second: a joined thread may not be gone yet."""
    seen = [count()]
    while len(seen) < 50 or len(set(seen[-50:])) > 1:
        time.sleep(0.01)
        seen.append(count())
    return seen[-1]


def threads_after(chain: list[Synchronisation]) -> int:
    """This process's, also PyTorch's, where garbage collection ended none of them."""
    gc.collect()
    gc.disable()
    try:
        train(chain)
        return _settled(psutil.Process().num_threads)
    finally:
        gc.enable()


def survive(what: Synchronisation, given: dict[str, Any], directory: str) -> None:
    """One rank fails; what each is told, in a file, before its process ends as a script's would."""
    outcome = train([what], given)
    Path(directory, str(dist.get_rank())).write_text(outcome["error"])
    os._exit(1)


def _wrapped(session: paceline.Session, network: nn.Sequential, script: Script) -> nn.Module:
    if script.models == 1:
        return session.wrap(network)
    return nn.Sequential(session.wrap(network[:2]), session.wrap(network[2:]))


@contextmanager
def _undiscovered(*, both: bool) -> Iterator[None]:
    """What a script declares is not searched for among the garbage collector's objects."""
    refused = mock.Mock(side_effect=AssertionError("searched for what was declared"))
    with (
        mock.patch("paceline.train.sync.discovery.optimisers", refused),
        mock.patch("paceline.train.sync.discovery.scalers", refused) if both else ExitStack(),
    ):
        yield


def _optimisers(network: nn.Sequential, script: Script) -> list[torch.optim.Optimizer]:
    groups = [list(network[0].parameters()), list(network[2].parameters())]
    parts = groups if script.optimisers == 2 else [[{"params": group} for group in groups]]
    if script.criterion:
        groups[0].append(nn.Parameter(torch.zeros(1)))
    if script.optimiser == "LBFGS":  # takes no groups
        return [torch.optim.LBFGS(network.parameters(), 0.01, max_iter=2)]
    if script.optimiser == "SGD":
        return [torch.optim.SGD(p, 0.01, momentum=0.5, fused=script.fused) for p in parts]
    return [torch.optim.AdamW(p, 0.01, fused=script.fused) for p in parts]


def _scheduler(optimiser: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.05, total_steps=2 * STEPS)


def _step(
    session: paceline.Session,
    model: nn.Module,
    made: list[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    script: Script,
    x: Tensor,
    y: Tensor,
) -> None:
    def backward() -> Tensor:
        loss = ((model(x) - y) ** 2).mean() / script.accumulate
        if script.overflow == (step, session.rank):
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        return loss

    step = session.batch.step
    if script.late_once[:2] == (step, session.rank):
        time.sleep(script.late_once[2])
    if script.kill == (step, session.rank):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(script.slow.get(session.rank, 0.0))
    if step % script.accumulate == 0:
        for optimiser in made:
            optimiser.zero_grad()
    if script.closure or step >= script.closure_from:
        made[0].step(backward)  # type: ignore[arg-type]
        return
    backward()
    if script.fail == (step, session.rank):
        raise BoomError
    if script.gather and step % 3 == 0:
        dist.all_reduce(torch.ones(1))
    if (step + 1) % script.accumulate == 0:
        for optimiser in made:
            if script.clip:
                scaler.unscale_(optimiser)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimiser, *([None] if script.no_closure else []))
        scaler.update()


def _towards_one(optimiser: torch.optim.Optimizer, parameter: nn.Parameter) -> Tensor:
    optimiser.zero_grad()
    loss = (parameter - 1).square().sum()
    loss.backward()
    return loss


class _Ones(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(1)


def counted(what: Synchronisation, slow_s: float, segment: int) -> dict[str, Any]:
    """Three epochs whose gradients are all 1, so that the parameter counts the steps applied."""
    dropped = turns = 0
    with planned([what], steps=segment):
        session = paceline.Session(_Ones(), global_batch=BATCH, seed=3, uneven_steps=True)
        model = session.wrap(nn.Linear(1, 1, bias=False))
        nn.init.zeros_(next(model.parameters()))
        optimiser = torch.optim.SGD(model.parameters(), 1.0)

        def report(step: LocalStep, finished: Round) -> None:
            nonlocal dropped
            dropped += finished.dropped

        session._loop.gate.on_round = report
        loader = session.loader()
        for _ in range(3):
            for x in loader:
                time.sleep(slow_s if session.rank == session.world - 1 else 0.001)
                optimiser.zero_grad()
                model(x).mean().backward()
                optimiser.step()
                turns += 1
        session.close()
    steps = -float(next(model.parameters()).detach())
    return {"steps": steps, "dropped": dropped / BATCH, "turns": turns}
