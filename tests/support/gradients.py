"""Cases for ranks: gradients of uneven local batches against those of a single process."""

from __future__ import annotations

import math
import time
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.core.errors import PacelineError
from paceline.train import ddp
from paceline.train.plan_shard import LocalStep
from paceline.train.timing import CpuClock, RunningStep

WIDTH = 6
CLASSES = 3
Sample = tuple[Tensor, int]  # [length, WIDTH], class


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (self.net(x) * mask).sum(1) / mask.sum(1)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(WIDTH, 8, 3, padding=1)
        self.last = nn.Conv1d(8, CLASSES, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x.transpose(1, 2)))
        return (self.last(hidden).transpose(1, 2) * mask).sum(1) / mask.sum(1)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 8, batch_first=True)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (self.last(self.lstm(x)[0]) * mask).sum(1) / mask.sum(1)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.scale * (self.net(x) * mask).sum(1) / mask.sum(1)


class Unused(Mlp):
    """One layer is never used, another only by batches with an even class sum of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(2, 2)
        self.sometimes = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out = super().forward(x, mask)
        chosen = x[:, 0, 0] > 0
        if chosen.any():
            out = out + chosen[:, None] * self.sometimes(x[:, 0])
        return out


MODELS = {"mlp": Mlp, "conv": Conv, "lstm": Lstm, "norm": Norm, "unused": Unused}


def samples(count: int, seed: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    classes = torch.randint(0, CLASSES, (count,), generator=generator).tolist()
    return [
        (torch.randn(length, WIDTH, generator=generator), label)
        for length, label in zip(lengths, classes, strict=True)
    ]


def collate(batch: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, longest, WIDTH], mask [B, longest, 1], classes [B]."""
    x = nn.utils.rnn.pad_sequence([x for x, _ in batch], batch_first=True)
    lengths = torch.tensor([len(x) for x, _ in batch])
    mask = torch.arange(x.shape[1])[None, :] < lengths[:, None]
    return x, mask[..., None].float(), torch.tensor([label for _, label in batch])


def loss_of(model: nn.Module, batch: list[Sample], loss_mean: str) -> Tensor:
    """The mean over the batch's samples or over its size units (elements of x)."""
    x, mask, labels = collate(batch)
    each = cross_entropy(model(x, mask), labels, reduction="none")
    if loss_mean == "samples":
        return each.mean()
    size = mask.sum((1, 2))
    return (each * size).sum() / size.sum()


def weight(parts: list[list[Sample]], rank: int, loss_mean: str) -> float:
    def share(part: list[Sample]) -> float:
        return float(len(part) if loss_mean == "samples" else sum(len(x) for x, _ in part))

    return share(parts[rank]) / sum(share(part) for part in parts)


def running(parts: list[list[Sample]], rank: int, loss_mean: str = "samples") -> RunningStep:
    """The step in which each rank gets its part."""
    return running_with(len(parts[rank]), weight(parts, rank, loss_mean))


def running_with(count: int, weight: float) -> RunningStep:
    """A step in which this rank has so many samples, with a weight of its mean gradient."""
    plan = LocalStep(
        epoch=0,
        step=0,
        segment=0,
        indices=list(range(count)),
        load=0.0,
        squares=0.0,
        longest=0.0,
        weight=weight,
        ett_s=None,
        threads=0,
    )
    return RunningStep(plan, CpuClock(), 0.0, None)


def make(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[kind]()


def gradient(model: nn.Module) -> Tensor:
    """All gradients in one vector; what has none counts as 0."""
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
    )


def difference(got: Tensor, want: Tensor) -> float:
    """Relative error; infinite when anything is not a number."""
    error = float((got - want).norm() / want.norm().clamp_min(1e-12))
    return error if math.isfinite(error) else math.inf


def split(counts: list[int], seed: int) -> list[list[Sample]]:
    everything = iter(samples(sum(counts), seed))
    return [[next(everything) for _ in range(count)] for count in counts]


FILLER: Sample = (torch.full((1, WIDTH), float("nan")), 0)  # the worst filler


def compare(
    kind: str, counts: list[int], loss_mean: str, seed: int, options: dict[str, Any]
) -> list[float]:
    """Errors of three steps in a row (DDP rebuilds its buckets after the first)."""
    rank = dist.get_rank()
    current = ddp.CurrentStep(dist.get_world_size())
    reference = make(kind, seed)
    model = ddp.WeightedDDP(make(kind, seed), current, **options)
    errors = []
    for step in range(3):
        shifted = counts[step:] + counts[:step]
        parts = split(shifted, seed + step)
        current.enter(running(parts, rank, loss_mean))
        model.zero_grad()
        reference.zero_grad()
        loss_of(model, parts[rank] or [FILLER], loss_mean).backward()
        loss_of(reference, list(chain(*parts)), loss_mean).backward()
        errors.append(difference(gradient(model.module), gradient(reference)))
    return errors


def accumulate(
    kind: str, steps: list[list[int]], how: str, seed: int, options: dict[str, Any]
) -> list[float]:
    """Errors of two accumulations over steps with other weights, the last of which synchronises.

    Args:
        steps: counts [step][rank].
        how: "each": every step in a `no_sync` of its own; "all": one around all of them; "twice":
            two backward passes per step; "synced": no `no_sync` at all.
    """
    rank = dist.get_rank()
    current = ddp.CurrentStep(dist.get_world_size())
    reference = make(kind, seed)
    model = ddp.WeightedDDP(make(kind, seed), current, **options)
    errors = []
    for round_ in range(2):
        model.zero_grad(set_to_none=round_ == 0)
        reference.zero_grad()
        batches = [split(counts, seed + 10 * round_ + k) for k, counts in enumerate(steps)]
        for parts in batches:
            loss_of(reference, list(chain(*parts)), "samples").backward()
            if how == "twice":
                loss_of(reference, list(chain(*parts)), "samples").backward()
        _accumulate(model, current, batches, rank, how)
        errors.append(difference(gradient(model.module), gradient(reference)))
    return errors


def _accumulate(
    model: ddp.WeightedDDP,
    current: ddp.CurrentStep,
    batches: list[list[list[Sample]]],
    rank: int,
    how: str,
) -> None:
    def backward(parts: list[list[Sample]]) -> None:
        loss_of(model, parts[rank] or [FILLER], "samples").backward()

    def begin(parts: list[list[Sample]]) -> None:
        current.enter(running(parts, rank))

    *first, last = batches
    if how == "all":
        with model.no_sync():
            for parts in first:
                begin(parts)
                backward(parts)
    for parts in first if how != "all" else []:
        begin(parts)
        if how == "synced":
            backward(parts)
            continue
        with model.no_sync():
            backward(parts)
            if how == "twice":
                backward(parts)
    begin(last)
    if how == "twice":
        with model.no_sync():
            backward(last)
    backward(last)


def discard_late() -> float:
    """Error of a step before whose backward pass, but after its forward pass, an accumulation is
    discarded.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    current = ddp.CurrentStep(world)
    model, reference = ddp.WeightedDDP(make("mlp", 1), current), make("mlp", 1)
    first, second = (split([3, 1, 2, 4][:world], seed) for seed in range(2))
    current.enter(running(first, rank))
    with model.no_sync():
        loss_of(model, first[rank], "samples").backward()
    current.enter(running(second, rank))
    loss = loss_of(model, second[rank], "samples")
    model.zero_grad()
    loss.backward()
    loss_of(reference, list(chain(*second)), "samples").backward()
    return difference(gradient(model.module), gradient(reference))


def backward_outside() -> float:
    """Error of an accumulation whose first backward pass runs after the forward's `no_sync`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    current = ddp.CurrentStep(world)
    model, reference = ddp.WeightedDDP(make("mlp", 1), current), make("mlp", 1)
    first, second = (split([3, 1, 2, 4][:world], seed) for seed in range(2))
    current.enter(running(first, rank))
    with model.no_sync():
        loss = loss_of(model, first[rank], "samples")
    loss.backward()
    current.enter(running(second, rank))
    loss_of(model, second[rank], "samples").backward()
    for parts in (first, second):
        loss_of(reference, list(chain(*parts)), "samples").backward()
    return difference(gradient(model.module), gradient(reference))


def two_models(counts: list[int]) -> tuple[list[float], tuple[float, float, float]]:
    """Errors of two models that are trained in the same step, and what the step measured."""
    rank = dist.get_rank()
    current = ddp.CurrentStep(dist.get_world_size())
    parts = split(counts, 1)
    models = [ddp.WeightedDDP(make(kind, 1), current) for kind in ("mlp", "norm")]
    references = [make(kind, 1) for kind in ("mlp", "norm")]
    started = time.perf_counter()
    step = running(parts, rank)
    current.enter(step)
    for model, reference in zip(models, references, strict=True):
        loss_of(model, parts[rank] or [FILLER], "samples").backward()
        loss_of(reference, list(chain(*parts)), "samples").backward()
    step.body_done()
    whole_s = time.perf_counter() - started
    compute_s, sync_s, _ = step.read()
    errors = [
        difference(gradient(model.module), gradient(reference))
        for model, reference in zip(models, references, strict=True)
    ]
    return errors, (compute_s, sync_s, whole_s)


def buckets() -> tuple[int, bool]:
    """Buckets of a model of some MB once DDP has rebuilt them, and whether it sends buffers."""
    current = ddp.CurrentStep(dist.get_world_size())
    big = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)], nn.BatchNorm1d(512))
    model = ddp.WeightedDDP(big, current)
    for _ in range(3):
        model(torch.zeros(2, 512)).sum().backward()
    sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return len(str(sizes).split(",")), model.will_sync_module_buffers()


def no_sync_of_static_graph() -> str:
    model = ddp.WeightedDDP(
        make("mlp", 1), ddp.CurrentStep(dist.get_world_size()), static_graph=True
    )
    try:
        with model.no_sync():
            return ""
    except ValueError as error:
        return str(error)


class Hidden:
    """Holds a tensor where nobody finds it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Hiding(nn.Module):
    """A model whose output is `Hidden`.

    Args:
        decoy: it also gives a tensor that no loss is made of.
    """

    def __init__(self, model: nn.Module, decoy: bool) -> None:
        super().__init__()
        self.model, self.decoy = model, decoy

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Hidden, Tensor | None]:
        output = self.model(x, mask)
        return Hidden(output), output.sum() if self.decoy else None


class Showing(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden: Hidden = self.model(x, mask)[0]
        return hidden.tensor


def hidden_outputs(decoy: bool) -> float | str:
    """Error of three steps whose gradients add up, where nobody sees what the loss is made of.

    Args:
        decoy: another output is seen. Then the result is what is said of the second step.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    current = ddp.CurrentStep(world)
    model, reference = ddp.WeightedDDP(Hiding(make("mlp", 1), decoy), current), make("mlp", 1)
    for seed in range(3):
        parts = split([3, 0, 2, 4][:world], seed)
        current.enter(running(parts, rank))
        try:
            loss_of(Showing(model), parts[rank] or parts[0], "samples").backward()
        except PacelineError as error:
            return str(error)
        loss_of(reference, list(chain(*parts)), "samples").backward()
    return difference(gradient(model.module), gradient(reference))


def hooks(how: str, compiled: bool = False) -> tuple[int, float]:
    """How many of a model's parameters have hooks after three steps, and the gradient's error.

    Args:
        how: gradients become None "before" the forward pass, or "after" it, or "not".
        compiled: torch.compile gets the wrapped model.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    current = ddp.CurrentStep(world)
    model, reference = ddp.WeightedDDP(make("mlp", 1), current), make("mlp", 1)
    trained: Any = torch.compile(model, backend="eager") if compiled else model
    for seed in range(3):
        parts = split([3, 0, 2, 4][:world], seed)
        current.enter(running(parts, rank))
        for each in (trained, reference):
            of = list(chain(*parts)) if each is reference else parts[rank] or parts[0]
            if how == "before":
                each.zero_grad()
            loss = loss_of(each, of, "samples")
            if how == "after":
                each.zero_grad()
            loss.backward()
    hooked = sum(bool(parameter._backward_hooks) for parameter in model.parameters())
    return hooked, difference(gradient(model.module), gradient(reference))


def frozen_between() -> float:
    """Error of a step after one in which a frozen model passed gradients on to its inputs."""
    rank, world = dist.get_rank(), dist.get_world_size()
    current = ddp.CurrentStep(world)
    model, reference = ddp.WeightedDDP(make("mlp", 1), current), make("mlp", 1)
    for seed in range(3):
        parts = split([3, 0, 2, 4][:world], seed)
        current.enter(running(parts, rank))
        for each in (model, reference):
            of = list(chain(*parts)) if each is reference else parts[rank] or parts[0]
            if seed == 1:  # as the discriminator while the generator is trained
                each.requires_grad_(False)
                x, mask, _ = collate(of)
                each(x.requires_grad_(True), mask).sum().backward()
                each.requires_grad_(True)
            else:
                loss_of(each, of, "samples").backward()
    return difference(gradient(model.module), gradient(reference))
