"""Whether a rank without samples (B_i = 0) had better leave the all-reduce.

Real ranks train a perceptron with AdamW under DistributedDataParallel and a hook such as
Paceline's. The last rank has no samples, and the others share its part of the global batch.
Three arms:

- filler: as Paceline does; it computes one sample and reduces a gradient of zero.
- zeros: it computes nothing and reduces a gradient of zero.
- left: the others reduce in a smaller process group, which was made ahead. The rank does nothing
  until it returns. Then it gets parameters and the optimiser's state from rank 0.

Blocks of steps of the three arms follow each other in random order, in rounds; figures are medians
of rounds, and ratios are of blocks in the same round. A step's time is that between the ends of
the steps of a block, on the slowest of the other ranks, so what a rank does while others compute
costs only what it costs in training.

Nothing is emulated by sleeping: a cgroup's CPU quota makes the idle rank 5 or 20 times as slow as
each of the others. The idle rank has the last core for itself, and the others share the rest, so no
rank computes faster because another computes less. Where other programs use a core, ranks are not
pinned. A slow rank's quota is so small that this makes no difference to it; settings with an idle
rank as fast as the others are left out. Settings with a quota need cgroups that can be written.
"""

# No `from __future__ import annotations`: DDP checks the hook's annotations and takes no strings.

import contextlib
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from harness import Check, finish, parser
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline_backend.policies.presets.lbb import Line
from paceline_backend.policies.solve.minmax import minmax

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.ranks import Ranks

ARMS = ("filler", "zeros", "left")
WIDTHS = {10**5: 182, 10**6: 577, 10**7: 1825}  # parameters, about → width of three layers
LOCAL, ROWS = 8, 8  # samples of an equal share, rows that a sample has
BLOCK_S, PERIODS = 0.6, 6  # a block takes so long at least, and so many periods of the quota
LEAST, MOST = 2, 200  # steps of a block
WORK_S = 0.3  # what a rank does alone is timed for so long at least
TIMEOUT_S = 600.0
LOOK_S, BUSY = 0.5, 20.0  # how long cores are looked at; in use above so many percent
_QUOTA_US = 1000  # the least that Linux takes


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    parameters: int
    ranks: int
    slower: int  # the idle rank, so many times than each other

    def quota(self, cores: list[int]) -> float:
        """The share of a core that the idle rank gets; 1: no quota is needed.

        Args:
            cores: on which ranks are pinned; empty: they have about one core.
        """
        return min(1.0, max(1, len(cores) - 1) / (self.ranks - 1)) / self.slower


class Skipped(torch.autograd.Function):
    """Stands for a model's forward and backward pass: the gradients of its parameters are zero."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        """A loss of zero."""
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Zeros."""
        return tuple(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


class Network(nn.Module):
    """Three layers, and their loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
        )
        self.skips = False  # the pass

    def forward(self, inputs: Tensor) -> Tensor:
        """The loss of inputs, [rows, width]."""
        if self.skips:
            return Skipped.apply(*self.parameters())
        return self.layers(inputs).square().mean()


@dataclass
class Reduction:
    """The communication hook's state."""

    group: Any = None  # of the ranks that reduce; None: all
    weight: float = 1.0  # of this rank's gradient in the sum


def _summed(state: Reduction, bucket: dist.GradBucket) -> Future[Tensor]:
    buffer = bucket.buffer()
    share = buffer.mul_(state.weight) if state.weight else buffer.zero_()
    work = dist.all_reduce(share, group=state.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class Rank:
    """This rank, which trains in blocks."""

    def __init__(self, setting: Setting) -> None:
        world = self.world = dist.get_world_size()
        self.idle = dist.get_rank() == world - 1
        width = WIDTHS[setting.parameters]
        samples = 1 if self.idle else LOCAL * world // (world - 1)
        self.inputs = torch.randn(samples * ROWS, width)
        self.network = Network(width)
        self.model = DistributedDataParallel(self.network, bucket_cap_mb=25)
        self.reduction = Reduction(weight=0.0 if self.idle else 1 / (world - 1))
        self.model.register_comm_hook(self.reduction, _summed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.others = dist.new_group(list(range(world - 1)))
        self.pair = dist.new_group([0, world - 1])

    def step(self) -> None:
        """One step of training."""
        self.optimizer.zero_grad()
        self.model(self.inputs).backward()
        self.optimizer.step()

    def block(self, arm: str, steps: int) -> float:
        """Seconds that a step takes the slowest of the ranks that have samples."""
        self.reduction.group = self.others if arm == "left" else None
        self.network.skips = self.idle and arm == "zeros"
        ends = []
        dist.barrier()
        if not self.idle or arm != "left":
            for _ in range(steps + 1):
                self.step()
                ends.append(time.perf_counter())
        dist.barrier()
        return self.most(0.0 if self.idle else (ends[-1] - ends[0]) / steps)

    def returns(self) -> float:
        """The idle rank gets what it missed; s until all ranks may go on."""
        states = self.optimizer.state.values()
        state = [value for of in states for value in of.values() if isinstance(value, Tensor)]
        began = time.perf_counter()
        if dist.get_rank() in (0, self.world - 1):
            tensors = [*(p.data for p in self.model.parameters()), *self.model.buffers(), *state]
            works = [dist.broadcast(t, 0, self.pair, async_op=True) for t in tensors]
            for work in works:
                work.wait()
        dist.barrier()
        return self.most(time.perf_counter() - began)

    def makes_group(self) -> float:
        """Seconds that it takes to make a group of the others, and to reduce in it once."""
        dist.barrier()
        began = time.perf_counter()
        group = dist.new_group(list(range(self.world - 1)))
        if not self.idle:
            dist.all_reduce(torch.zeros(1), group=group)
        took_s = self.most(time.perf_counter() - began)
        if not self.idle:
            dist.destroy_process_group(group)
        return took_s

    def computes(self, samples: int) -> float:
        """Seconds of a forward and a backward pass of the others."""
        inputs = torch.randn(samples * ROWS, self.inputs.size(1))
        once_s = 0.0 if self.idle else self.takes(lambda: self.network(inputs).backward())
        return self.most(once_s)

    def idles(self, work: Callable[[], object]) -> float:
        """Seconds of something that the idle rank does alone."""
        return self.most(self.takes(work) if self.idle else 0.0)

    @staticmethod
    def takes(work: Callable[[], object]) -> float:
        """Seconds that something takes on this rank."""
        work()
        began, times = time.perf_counter(), 0
        while times < LEAST or time.perf_counter() < began + WORK_S:
            work()
            times += 1
        return (time.perf_counter() - began) / times

    @staticmethod
    def most(value: float) -> float:
        """The largest value of all ranks."""
        shared = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return float(shared)

    def differs(self) -> float:
        """The largest difference between the ranks' parameters."""
        flat = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
        most, least = flat.clone(), flat.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return float((most - least).max())


def settle(setting: Setting, cores: list[int], procs: str | None) -> None:
    """Puts this rank on its core, and the idle one under its quota."""
    idle = dist.get_rank() == setting.ranks - 1
    if cores:
        own = cores[-1] if idle else cores[dist.get_rank() % (len(cores) - 1)]
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), {own})
    if idle and procs is not None:
        Path(procs).write_text(str(os.getpid()))


def measure(
    setting: Setting, cores: list[int], procs: str | None, rounds: int, block_s: float
) -> dict[str, Any]:
    """A setting's figures, alike on all ranks; times in s.

    Args:
        setting: what is measured.
        cores: on which ranks are pinned; empty: they are not.
        procs: the file of a cgroup that takes processes; None: the idle rank needs none.
        rounds: how many.
        block_s: how long a block takes at least.
    """
    rank = Rank(setting)
    settle(setting, cores, procs)
    one_s, share_s = rank.computes(1), rank.computes(LOCAL)
    idle_one_s = rank.idles(lambda: rank.network(rank.inputs).backward())
    group_s = statistics.median(rank.makes_group() for _ in range(3))
    # Also warms up: DDP arranges its buckets, and AdamW makes its state.
    first = {arm: rank.block(arm, LEAST) for arm in ARMS}
    rank.returns()
    steps = {arm: min(MOST, max(LEAST, int(block_s / step_s))) for arm, step_s in first.items()}
    shuffled = random.Random(1)  # the same on all ranks
    times = []
    for _ in range(rounds):
        took: dict[str, float] = {}
        for arm in shuffled.sample(ARMS, len(ARMS)):
            took[arm] = rank.block(arm, steps[arm])
            if arm == "left":
                took["return"] = rank.returns()
        times.append(took)
    rank.block("filler", LEAST)  # what a returned optimiser lacks shows in its next steps
    difference = rank.differs()
    return {
        "one_sample_s": one_s,
        "share_s": share_s,
        "idle_one_sample_s": idle_one_s,
        "idle_update_s": rank.idles(rank.optimizer.step),
        "group_s": group_s,
        "steps": steps,
        "rounds": times,
        "difference": difference,
    }


def planned(ranks: int, one_s: float, share_s: float, idle_one_s: float) -> int:
    """Samples that `lbb` gives the idle rank by rough models of these times, in s."""
    slope = (share_s - one_s) / (LOCAL - 1)
    times = np.ones(ranks)
    times[-1] = idle_one_s / one_s
    line = Line(times * slope, times * max(one_s - slope, 0.0))
    return int(minmax(line, LOCAL * ranks, np.full(ranks, LOCAL * ranks))[-1])


def figures(setting: Setting, raw: dict[str, Any]) -> dict[str, Any]:
    """A row of the results."""
    rounds = raw["rounds"]

    def median(over: str, under: str | None = None) -> float:
        return statistics.median(
            took[over] / (took[under] if under is not None else 1.0) for took in rounds
        )

    def gain(arm: str) -> float:
        return statistics.median(took[arm] - took["left"] for took in rounds)

    one_s, idle_s = raw["one_sample_s"], raw["idle_one_sample_s"]
    return {
        **asdict(setting),
        "measured_slower": idle_s / one_s,
        "lbb_samples": planned(setting.ranks, one_s, raw["share_s"], idle_s),
        **{f"{arm}_s": median(arm) for arm in ARMS},
        "filler_over_left": median("filler", "left"),
        "zeros_over_left": median("zeros", "left"),
        "filler_over_zeros": median("filler", "zeros"),
        "return_s": median("return"),
        **{
            f"steps_to_pay_beside_{arm}": median("return") / gain(arm) if gain(arm) > 0 else None
            for arm in ARMS[:2]
        },
        **raw,
    }


@contextlib.contextmanager
def limited(share: float) -> Iterator[tuple[str | None, float]]:
    """A cgroup whose processes get a share of a core: its file of processes, and its period, s.

    Raises:
        OSError: there are no cgroups, or they cannot be written.
    """
    if share >= 1:
        yield None, 0.0
        return
    first = Path("/sys/fs/cgroup/cpu")  # of version 1
    group = (first if first.is_dir() else first.parent) / f"paceline-leaving-{os.getpid()}"
    group.mkdir()
    try:
        period_us = round(_QUOTA_US / share)
        if first.is_dir():
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(_QUOTA_US))
        else:
            (group / "cpu.max").write_text(f"{_QUOTA_US} {period_us}")
        yield str(group / "cgroup.procs"), period_us / 1e6
    finally:
        group.rmdir()


def free_cores() -> list[int]:
    """The cores of this process; empty: there is only one, or other programs use one."""
    busy = psutil.cpu_percent(LOOK_S, percpu=True)
    cores = sorted(os.sched_getaffinity(0))
    return cores if len(cores) > 1 and max(busy[core] for core in cores) < BUSY else []


def row_of(setting: Setting, rounds: int, block_s: float) -> dict[str, Any]:
    """Measures a setting; gives the setting alone if that is not possible here."""
    ranks, cores = Ranks(setting.ranks), free_cores()
    if setting.slower == 1 and not cores:
        print(f"{setting} is left out: other programs use its cores", file=sys.stderr)
        return asdict(setting)
    try:
        with limited(setting.quota(cores)) as (procs, period_s):
            least_s = max(block_s, PERIODS * period_s)
            try:
                raw = ranks.run(
                    measure, setting, cores, procs, rounds, least_s, timeout_s=TIMEOUT_S
                )
            finally:
                ranks.stop()  # before their cgroup goes
    except OSError as error:
        print(f"{setting} is left out, as it needs a cgroup: {error}", file=sys.stderr)
        return asdict(setting)
    return figures(setting, raw[0]) | {"pinned": bool(cores)}


def table_of(rows: list[dict[str, Any]]) -> str:
    """The figures for people."""
    lines = [
        f"{'':<32}{'a step, ms':^30}{'':<12}{'steps until it pays beside':>28}",
        f"{'parameters':>10}{'ranks':>7}{'slower':>8}{'lbb':>5}  {'filler':>10}{'zeros':>10}"
        f"{'left':>10}{'return, ms':>12}{'filler':>18}{'zeros':>10}",
    ]
    for row in rows:
        line = f"{row['parameters']:>10}{row['ranks']:>7}{row['slower']:>8}"
        if "rounds" not in row:
            lines.append(line + "  not measured")
            continue
        line += f"{row['lbb_samples']:>5}  "
        line += "".join(f"{1e3 * row[f'{arm}_s']:>10.2f}" for arm in ARMS)
        line += f"{1e3 * row['return_s']:>12.2f}"
        for arm, width in (("filler", 18), ("zeros", 10)):
            steps = row[f"steps_to_pay_beside_{arm}"]
            line += f"{'never' if steps is None else f'{steps:.1f}':>{width}}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """Runs the benchmark."""
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="how many")
    made.add_argument("--slower", type=int, nargs="+", default=[1, 5, 20], help="the idle rank")
    made.add_argument(
        "--parameters", type=int, nargs="+", choices=WIDTHS, default=[*WIDTHS], help="about"
    )
    options = made.parse_args()
    rounds, block_s = (3, 0.1) if options.quick else (5, BLOCK_S)
    settings = [
        Setting(parameters, ranks, slower)
        for ranks in (options.ranks[:1] if options.quick else options.ranks)
        for parameters in (options.parameters[:1] if options.quick else options.parameters)
        for slower in options.slower
    ]
    rows = [row_of(setting, rounds, block_s) for setting in settings]
    measured = [row for row in rows if "rounds" in row]
    checks = [
        Check(
            "settings whose ranks end with unequal parameters",
            sum(row["difference"] > 0 for row in measured),
            0,
            "<=",
        )
    ]
    config = {"local_batch": LOCAL, "rows": ROWS, "rounds": rounds, "block_s": block_s}
    finish(options, config, {"settings": rows}, checks, table_of(rows))


if __name__ == "__main__":
    main()
