"""Cases for ranks: BatchNorm layers against those of one process, over the same global batch."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline
from paceline.train import ddp
from paceline.train.batchnorm import adapt
from support import gradients
from support.sessions import Numbered

CHANNELS = 3
LAYERS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@dataclass(frozen=True)
class Setting:
    """A network with two BatchNorm layers, and what it is given."""

    dimensions: int = 2  # of space; 0: [n, C]
    momentum: float | None = 0.1
    affine: bool = True
    tracked: bool = True
    offset: float = 0.0  # of what the first BatchNorm layer gets: its mean is far from 0
    existing: bool = False  # the script's layers are SyncBatchNorm
    autocast: bool = False
    double: bool = False


class Net(nn.Module):
    """Two BatchNorm layers with something between them, so that both passes go through each."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        made = CONVOLUTIONS.get(setting.dimensions)
        self.first: nn.Module = nn.Linear(CHANNELS, 4) if made is None else made(CHANNELS, 4, 2)
        self.last: nn.Module = nn.Linear(4, 2) if made is None else made(4, 2, 1)
        kind: Any = LAYERS[max(setting.dimensions, 1)]
        self.norms = nn.ModuleList(
            kind(
                channels,
                momentum=setting.momentum,
                affine=setting.affine,
                track_running_stats=setting.tracked,
            )
            for channels in (4, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norms[0](self.first(x)))
        return torch.sigmoid(self.norms[1](self.last(hidden)))


def network(setting: Setting, seed: int) -> Net:
    torch.manual_seed(seed)
    model = Net(setting)
    for norm in model.norms:
        for parameter in norm.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
    nn.init.constant_(model.first.bias, setting.offset)  # type: ignore[arg-type]
    return model.double() if setting.double else model


def inputs(setting: Setting, counts: list[int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(counts), CHANNELS, *range(4, 4 + setting.dimensions))
    x = torch.randn(shape, generator=generator)
    x = x.double() if setting.double else x
    return list(x.split(counts))


def losses(model: nn.Module, x: Tensor, setting: Setting) -> Tensor:
    """Of each sample; those of one sign weigh more, so that gradients differ between ranks."""
    with torch.autocast("cpu", torch.bfloat16, enabled=setting.autocast):
        out = model(x)
    target = torch.where(x.flatten(1)[:, 0] > 0, 1.0, 0.2)
    return (out.flatten(1).to(x.dtype) - target[:, None]).square().mean(1)


def error(got: Tensor, want: Tensor, scale: float | None = None) -> float:
    """The largest difference, relative to `scale`, or else to the largest value."""
    got, want = got.detach().double(), want.detach().double()
    worst = float((got - want).abs().max()) / (scale or float(want.abs().max()) or 1.0)
    return worst if math.isfinite(worst) else math.inf


def _synchronised(setting: Setting, seed: int, current: ddp.CurrentStep) -> ddp.WeightedDDP:
    model: nn.Module = network(setting, seed)
    if setting.existing:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    adapt(model, "local" if setting.existing else "sync", current)
    return ddp.WeightedDDP(model, current)


def compare(
    setting: Setting, steps: list[list[int]], loss_mean: str, seed: int
) -> dict[str, float]:
    """The largest errors of outputs, gradients of inputs and of parameters, and statistics.

    Args:
        steps: counts [step][rank].
        loss_mean: what losses are means over; a sample's size is 1, 2, 3, 1, …
    """
    rank = dist.get_rank()
    current = ddp.CurrentStep(dist.get_world_size())
    model, reference = _synchronised(setting, seed, current), network(setting, seed)
    worst: dict[str, float] = {}
    for number, counts in enumerate(steps):
        parts = inputs(setting, counts, seed + number)
        sizes = [float(1 + k % 3) if loss_mean == "size" else 1.0 for k in range(sum(counts))]
        of_rank = torch.tensor(sizes, dtype=parts[0].dtype).split(counts)
        weight = float(of_rank[rank].sum() / sum(sizes))
        current.enter(gradients.running_with(counts[rank], weight))
        mine = (
            parts[rank] if counts[rank] else torch.full_like(inputs(setting, [1], 0)[0], math.nan)
        )
        x = mine.clone().requires_grad_()
        whole = torch.cat(parts).requires_grad_()
        model.zero_grad()
        reference.zero_grad()
        mean = torch.ones(1) if not counts[rank] else of_rank[rank] / of_rank[rank].sum()
        (losses(model, x, setting) * mean).sum().backward()
        (losses(reference, whole, setting) * torch.cat(of_rank) / sum(sizes)).sum().backward()
        errors = _errors(model.module, reference)
        assert whole.grad is not None and x.grad is not None
        if counts[rank]:
            wanted = whole.grad.split(counts)[rank]
            errors["inputs"] = error(x.grad * weight, wanted, float(whole.grad.abs().max()))
        for name, value in errors.items():
            worst[name] = max(worst.get(name, 0.0), value)
    model.eval()
    reference.eval()
    probe = inputs(setting, [3], seed + 99)[0]
    worst["evaluated"] = error(losses(model, probe, setting), losses(reference, probe, setting))
    return worst


def _errors(model: nn.Module, reference: nn.Module) -> dict[str, float]:
    own, other = dict(model.named_parameters()), dict(reference.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in other.values() if p.grad is not None)
    errors = {}
    for name, wanted in other.items():
        got = own[name].grad
        assert got is not None and wanted.grad is not None
        errors[name] = error(got, wanted.grad, largest)
    kept = dict(model.named_buffers())
    return errors | {name: error(kept[name], value) for name, value in reference.named_buffers()}


def of_one_value(existing: bool) -> str:
    """What is said where a global batch has one value per channel, on this rank."""
    setting = Setting(dimensions=0, existing=existing)
    current = ddp.CurrentStep(dist.get_world_size())
    model = _synchronised(setting, 1, current)
    mine = dist.get_rank() == 0
    current.enter(gradients.running_with(int(mine), float(mine)))
    try:
        model(torch.ones(1, CHANNELS))
    except ValueError as error:
        return str(error)
    return ""


def pretended(counts: list[int]) -> dict[str, Any]:
    """What local layers do with a batch, by the running statistics before and after."""
    count = counts[dist.get_rank()]
    current = ddp.CurrentStep(dist.get_world_size())
    model = nn.BatchNorm1d(CHANNELS)
    model.running_mean.fill_(2.0)  # type: ignore[union-attr,operator]
    adapt(model, "local", current)
    wrapped = ddp.WeightedDDP(model, current)
    current.enter(gradients.running_with(count, count / sum(counts)))
    x = torch.arange(max(count, 1) * CHANNELS, dtype=torch.float).view(-1, CHANNELS)
    out = wrapped(x)
    out.square().sum().backward()
    mode = model.training
    model.eval()
    return {
        "moved": bool((model.running_mean != 2.0).any()),
        "counted": int(model.num_batches_tracked),  # type: ignore[arg-type]
        "as evaluated": torch.equal(out, model(x)),
        "trains": mode,
    }


def copies() -> list[str]:
    """The classes of a layer, of its copy, and of what is left of it in a file."""
    model = _synchronised(Setting(), 1, ddp.CurrentStep(dist.get_world_size())).module
    layer: nn.Module = model.norms[0]  # type: ignore[index,assignment]
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copied, loaded = copy.deepcopy(layer), torch.load(file, weights_only=False)
    for other in (copied, loaded):
        torch.testing.assert_close(other.state_dict(), layer.state_dict())
    return [type(each).__name__ for each in (layer, copied, loaded)]


def waits(delay_s: float) -> tuple[float, float]:
    """Compute and waiting time of a step; rank 0 is late before the last BatchNorm layer."""
    current = ddp.CurrentStep(dist.get_world_size())
    setting = Setting(dimensions=0)
    model = _synchronised(setting, 1, current)
    late = dist.get_rank() == 0
    model.module.last.register_forward_hook(  # type: ignore[operator,union-attr]
        lambda *_: time.sleep(delay_s if late else 0.0)
    )
    step = gradients.running_with(4, 1 / dist.get_world_size())
    current.enter(step)
    losses(model, inputs(setting, [4], 1)[0], setting).mean().backward()
    step.body_done()
    compute_s, sync_s, _ = step.read()
    return compute_s, sync_s


# Whole loops


@dataclass
class Seen:
    model: dict[str, Tensor]
    after: list[Tensor]  # the running means of this rank, after each step
    samples: list[int]  # of each step, on this rank
    saved: dict[str, Tensor]  # the model's state in the newest checkpoint


def small() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def train(
    how: str, count: int, batch: int, leave_at: int | None = None, folder: str | None = None
) -> Seen:
    """An epoch of training.

    Args:
        how: "sync" or "local".
        leave_at: the step in which all ranks leave the loop.
        folder: of checkpoints, each second step.
    """
    after, samples = [], []
    with contextlib.closing(paceline.Session(Numbered(count), global_batch=batch)) as run:
        plain = small()
        model = run.wrap(plain, batchnorm=how)
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        if folder is not None:
            run.checkpoint(folder, model, optimiser, every_steps=2)
        for _, x, y in run.loader():
            optimiser.zero_grad()
            (model(x) - y).square().mean().backward()
            optimiser.step()
            after.append(plain[1].running_mean.clone())  # type: ignore[union-attr,operator]
            samples.append(run.batch.samples)
            if run.step == leave_at:
                break
        state = copy.deepcopy(plain.state_dict())
    saved = copy.deepcopy(state)
    if folder is not None:
        with contextlib.closing(paceline.Session(Numbered(count), global_batch=batch)) as run:
            again = small()
            model = run.wrap(again, batchnorm=how)
            run.checkpoint(
                folder, model, torch.optim.SGD(model.parameters(), 0.1), every_steps=1000
            )
            saved = copy.deepcopy(again.state_dict())
    return Seen(state, after, samples, saved)


def profiled() -> bool:
    """Whether profiling leaves the running statistics alone."""
    with contextlib.closing(paceline.Session(Numbered(8), global_batch=8)) as run:
        plain = small()
        model = run.wrap(plain, batchnorm="sync")
        before = copy.deepcopy(plain.state_dict())
        run.profile(lambda n: model(torch.ones(n, 4)).sum().backward())
        return all(torch.equal(before[name], value) for name, value in plain.state_dict().items())


def refused_microbatches() -> str:
    options: dict[str, Any] = {"global_batch": 4, "limits": 2, "micro_batches": True}
    with contextlib.closing(paceline.Session(Numbered(8), **options)) as run:
        run.wrap(small(), batchnorm="local")
        try:
            run.wrap(small(), batchnorm="sync")
        except ValueError as error:
            return str(error)
    return ""
