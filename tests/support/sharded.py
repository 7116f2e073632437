"""Runs whose data lives on nodes: their terms, and a virtual run that the planning code drives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline import policies
from paceline.planning.feedback import Window
from paceline.planning.history import History
from paceline.planning.offer import offer
from paceline.train.plan.homes import Homes
from paceline.wire import NOWHERE, Hello, Plan, Shards
from support.records import hello, record

Ints = npt.NDArray[np.int64]


def shards(
    nodes: Sequence[int], limits: Sequence[int], lengths: Ints, held: Ints | None = None
) -> Shards:
    """What nodes keep; `held`: the node that has each sample, or -1; None: no node has any."""
    where = np.full(len(lengths), -1) if held is None else held
    return Shards(
        list(nodes),
        list(limits),
        lengths.astype("<u4").tobytes(),
        np.where(where < 0, NOWHERE, where).astype("<u2").tobytes(),
    )


def sharded_hello(sizes: npt.NDArray[np.float64], of: Shards, batch: int, epochs: int) -> Hello:
    return hello(
        len(of.nodes),
        sizes=sizes.astype("<f8").tobytes(),
        global_batch=batch,
        epochs=epochs,
        shards=of,
    )


@dataclass
class VirtualRun:
    """Plans and trains on paper: a rank's step takes its load times its slowness.

    Args:
        slowness: of each rank, s per size unit; a list of them for each epoch.
    """

    hello: Hello
    slowness: list[list[float]]
    policy: str = "chronica"
    segments: list[Plan] = field(default_factory=list)
    strays: int = 0  # samples that were trained elsewhere than on the node that had them
    used: dict[int, list[int]] = field(default_factory=dict)  # samples by epoch

    def __post_init__(self) -> None:
        assert self.hello.shards is not None
        self.history = History(self.hello)
        self.window = Window(self.hello.world, 0)
        self.homes = Homes(self.hello.shards)
        self.made = policies.make(self.policy, {})

    def train(self) -> None:
        while not self.history.finished:
            self.advance()

    def advance(self) -> Plan:
        plan, shuffle = offer(self.history, self.window, self.made, 0)
        assert plan.defect(self.hello.world, self.hello.samples) is None
        if plan.shuffled and shuffle is not None:
            self.history.shuffled(plan, shuffle)
        self.take(plan)
        return plan

    def take(self, plan: Plan) -> None:
        sizes = self.hello.sizes_array()
        self.homes.enter(plan.epoch)
        before = self.homes.of.copy()
        self.homes.node_shards(plan)
        for k, step in enumerate(plan.assignment.parts):
            for rank, samples in enumerate(step):
                at = before[samples]
                self.strays += int(((at >= 0) & (at != self.homes.nodes[rank])).sum())
                self.used.setdefault(plan.epoch, []).extend(samples.tolist())
                load = float(sizes[samples].sum())
                slowness = self.slowness[min(plan.epoch, len(self.slowness) - 1)][rank]
                row = record(
                    plan.first_step + k,
                    rank,
                    samples=len(samples),
                    load=load,
                    compute_s=slowness * load + 1e-4,
                    step_s=0.2,
                    squares=float((sizes[samples] ** 2).sum()),
                    longest=float(sizes[samples].max(initial=0)),
                )
                self.window.add([row])
        self.history.adopt(plan)
        self.segments.append(plan)

    def held(self) -> Ints:
        """Bytes that each node holds, once the next epoch has begun."""
        assert self.hello.shards is not None
        self.homes.enter(self.history.epoch)
        lengths, count = self.hello.shards.lengths_array(), len(self.hello.shards.limits)
        at = self.homes.of
        return np.bincount(at[at >= 0], lengths[at >= 0], count).astype(np.int64)
