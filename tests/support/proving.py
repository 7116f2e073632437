"""Cases for ranks: training loops whose loss is proven, or is not what it is said to be."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn as dnn
from torch import Tensor, nn
from torch.nn import functional as f
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, default_collate

import paceline
from paceline.core.errors import PacelineError
from paceline.train.proof import ProofResult

POINTS, CLASSES, COUNT = 5, 2, 48
Loss = Callable[[nn.Module, Any, paceline.Session], Tensor]


class Points(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Points with a class each, and which of them count; more of them in later samples."""

    def __init__(self, sized: bool = False) -> None:
        self.reads = 0
        if sized:
            self.sizes = [1 + i % 4 for i in range(COUNT)]

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        self.reads += 1
        g = torch.Generator().manual_seed(i)
        labels = torch.randint(0, CLASSES, (POINTS,), generator=g)
        counts = torch.rand(POINTS, generator=g) < 0.1 + 0.8 * (i % 2)
        return torch.randn(POINTS, 4, generator=g), labels, counts


def entropy(model: nn.Module, batch: Any, **options: Any) -> Tensor:
    return f.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), **options)


def over_ranks(value: float) -> Tensor:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total


def own(batch: Any, session: paceline.Session) -> float:
    return 0.0 if session.batch.empty else float(len(batch[0]))


def divided(model: nn.Module, batch: Any, session: paceline.Session) -> Tensor:
    count = over_ranks(POINTS * own(batch, session))
    return entropy(model, batch, reduction="sum") * 2 / count


def filler_counted(model: nn.Module, batch: Any, session: paceline.Session) -> Tensor:
    return entropy(model, batch, reduction="sum") * 2 / over_ranks(POINTS * float(len(batch[0])))


def masked(model: nn.Module, batch: Any, session: paceline.Session) -> Tensor:
    labels = batch[1].clone()
    labels[~batch[2]] = -100
    outputs = model(batch[0]).flatten(0, 1)
    total = f.cross_entropy(outputs, labels.flatten(), reduction="sum", ignore_index=-100)
    return total / batch[2].sum().clamp(min=1)


def in_batch(model: nn.Module, batch: Any, session: paceline.Session) -> Tensor:
    z = model(batch[0]).mean(1)
    return f.cross_entropy(z @ z.T, torch.arange(len(z)))


def gathered(model: nn.Module, batch: Any, session: paceline.Session) -> Tensor:
    z = torch.cat(dnn.all_gather(model(batch[0]).mean(1)))
    return f.cross_entropy(z @ z.T, torch.arange(len(z)))


def fixed(model: nn.Module, batch: Any, session: paceline.Session) -> Tensor:
    return model(batch[0]).view(4, -1).square().mean()


def noisy(model: nn.Module, batch: Any, session: paceline.Session) -> Tensor:
    return entropy(model, (batch[0] + torch.randn_like(batch[0]), *batch[1:]))


def out_of_memory(model: nn.Module, batch: Any, session: paceline.Session) -> Tensor:
    if len(batch[0]) == 8:  # in a trial; training has parts of 7 and 9
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    return entropy(model, batch)


def mixed(samples: list[Any]) -> Any:
    """A `collate_fn` that draws random numbers."""
    batch = default_collate(samples)
    return 0.7 * batch[0] + 0.3 * batch[0][torch.randperm(len(samples))], *batch[1:]


class WithLoss(nn.Module):
    """A model that divides its loss by a count over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, *batch: Tensor) -> Tensor:
        count = over_ranks(POINTS * float(len(batch[0])))
        return entropy(self.inner, batch, reduction="sum") * 2 / count


class Rare(Points):
    """Points whose class counts ten times, for a few of them."""

    def __getitem__(self, i: int) -> Any:
        return super().__getitem__(i)[0], i, int(i in (5, 29))


def rare_class(model: nn.Module, batch: Any, session: paceline.Session) -> Tensor:
    outputs = model(batch[0]).mean(1)
    return f.cross_entropy(outputs, batch[2], weight=torch.tensor([1.0, 9.0]).to(outputs.dtype))


LOSSES: dict[str, Loss] = {
    "mean": lambda m, b, s: entropy(m, b),
    "sum": lambda m, b, s: entropy(m, b, reduction="sum") * 2,
    "classes": lambda m, b, s: entropy(m, b, weight=torch.tensor([1.0, 9.0]).to(b[0].dtype)),
    "divided": divided,
    "filler counted": filler_counted,
    "masked": masked,
    "rare class": rare_class,
    "in batch": in_batch,
    "gathered": gathered,
    "fixed": fixed,
    "noisy": noisy,
    "out of memory": out_of_memory,
    "mixed": lambda m, b, s: entropy(m, b),
    "in model": lambda m, b, s: m(*b),
    "no statistics": lambda m, b, s: entropy(m, b),
}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, CLASSES)


def proven(asked: list[tuple[str, str | None]]) -> list[ProofResult]:
    """What the proof says of losses with settings, before the first step of a loop."""
    return [_proven(name, LOSSES[name], setting) for name, setting in asked]


def _proven(name: str, loss_of: Loss, setting: str | None) -> ProofResult:
    torch.set_default_dtype(torch.float64)
    try:
        data = Rare() if name == "rare class" else Points()
        session = paceline.Session(data, global_batch=16, limits=[7, 16], loss_mean=setting)
        options: dict[str, Any] = {"collate_fn": mixed} if name == "mixed" else {}
        loader, made = session.loader(**options), net()
        if name == "in model":
            made = WithLoss()
        elif name == "no statistics":
            made = nn.Sequential(made, nn.BatchNorm1d(POINTS, track_running_stats=False))
        model = session.wrap(made, batchnorm="sync")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        turns = 0
        with contextlib.suppress(PacelineError):
            for batch in loader:
                optimizer.zero_grad()
                loss = loss_of(model, batch, session)
                loss.backward()
                optimizer.step()
                turns += 1
                break
        answer = loader.answer
        session.close()
        assert answer is not None
        return answer
    finally:
        torch.set_default_dtype(torch.float32)


# Loops that train rightly, in the ways that scripts write them.


class Deep(nn.Module):
    """A network with whatever a healthy loop needs in it."""

    def __init__(self, *parts: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.parts = parts
        self.inner = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8) if "norm" in parts else nn.Identity()
        self.dropout = nn.Dropout(0.5 if "dropout" in parts else 0.0)
        self.head = nn.Linear(8, CLASSES)
        self.other = nn.Linear(4, CLASSES) if "unused" in parts else None
        if "encoder" in parts:
            self.encoder = nn.TransformerEncoderLayer(8, 2, 8, 0.5, batch_first=True)
            self.lstm = nn.LSTM(8, 4, 2, batch_first=True, dropout=0.5, bidirectional=True)
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.inner(x).transpose(1, 2)).transpose(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if "checkpointed" in self.parts:
            reentrant = "reentrant" in self.parts
            made: Tensor = checkpoint(self.hidden, x.requires_grad_(), use_reentrant=reentrant)
        else:
            made = self.hidden(x)
        if "functional" in self.parts:
            made = f.dropout(made, 0.5, self.training)
        if "encoder" in self.parts:
            made = made + self.lstm(self.encoder(made))[0]
        self.mean = 0.9 * self.mean + 0.1 * made.detach().mean((0, 1))
        return self.head(self.dropout(made))


HEALTHY: dict[str, tuple[str, ...]] = {
    "plain": (),
    "dropout": ("dropout", "functional"),
    "encoder": ("encoder",),
    "teacher": ("teacher",),
    "bf16": ("autocast",),
    "scaler": ("scaler",),
    "checkpointed": ("checkpointed",),
    "reentrant": ("checkpointed", "reentrant"),
    "compiled": ("compiled",),
    "local norm": ("norm", "local"),
    "shared norm": ("norm", "sync"),
    "accumulates": ("accumulates",),
    "no_sync": ("no_sync",),
    "clips": ("clips",),
    "enumerates": ("enumerates",),
    "function": ("function",),
    "two": ("two",),
    "unused": ("unused",),
    "two losses": ("two losses",),
    "skips": ("skips",),
    "closure": ("closure",),
    "counts": ("counts",),
    "meters": ("meters",),
}


def healthy(names: list[str]) -> list[dict[str, Any]]:
    """Of healthy loops: the answer, and what the proof must not have changed."""
    return [_healthy(set(HEALTHY[name])) for name in names]


def drawn(prove: bool, workers: int) -> list[float]:
    """Losses with dropout: random numbers are the same with a proof and without one."""
    torch.manual_seed(5)
    session = paceline.Session(Points(), global_batch=16, limits=[7, 16], prove=prove)
    loader, losses = session.loader(num_workers=workers), list[float]()
    model = session.wrap(Deep("dropout"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in loader:
        optimizer.zero_grad()
        loss = entropy(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert (loader.answer is not None) is prove
    session.close()
    return losses


def _healthy(parts: set[str]) -> dict[str, Any]:
    data = Points()
    session = paceline.Session(data, global_batch=16, limits=[7, 16])
    loader = session.loader()
    made = Deep(*parts)
    batchnorm = next((how for how in ("sync", "local") if how in parts), None)
    options = {"find_unused_parameters": True} if "unused" in parts else {}
    model: Any = session.wrap(made, batchnorm=batchnorm, **options)
    second: Any = session.wrap(nn.Linear(CLASSES, 1)) if "two" in parts else None
    if "compiled" in parts:
        model = torch.compile(model, backend="eager")
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    other = torch.optim.SGD(second.parameters(), 0.1) if second is not None else None
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in parts)
    teacher, meter = nn.BatchNorm1d(POINTS), Counter[int]()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    seen = dict[str, Any]()
    total, losses = 0.0, list[float]()

    def train(batch: Any) -> float:
        optimizer.zero_grad()
        loss = entropy(model, batch)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def begins() -> None:
        if not seen:
            seen["kept"] = all(torch.equal(before[n], v) for n, v in made.state_dict().items())
            seen["kept"] &= not meter and not teacher.num_batches_tracked
            seen["gradients"] = any(p.grad is not None for p in made.parameters())
            seen["calls"], seen["training"] = made.calls, made.dropout.training

    if "function" in parts:
        for batch in loader:
            begins()
            losses.append(train(batch))
            break
    elif "enumerates" in parts:
        for number, batch in enumerate(loader):
            loss = entropy(model, batch) / 2
            loss.backward()
            total += loss.item()
            if (number + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
                break
    elif "no_sync" in parts:
        for number, batch in enumerate(loader):
            with model.no_sync() if number == 0 else contextlib.nullcontext():
                (entropy(model, batch) / 2).backward()
            if number == 1:
                optimizer.step()
                break
    elif "two" in parts:
        for batch in loader:
            outputs = model(batch[0])
            guess = second(outputs.detach())
            guess.square().mean().backward()
            other.step()  # type: ignore[union-attr]
            other.zero_grad()  # type: ignore[union-attr]
            loss = f.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())
            loss.backward()
            optimizer.step()
            break
    elif "two losses" in parts:
        for batch in loader:
            optimizer.zero_grad()
            entropy(model, batch).backward()
            model(batch[0]).square().mean().backward()
            optimizer.step()
            break
    elif "closure" in parts:
        for batch in loader:

            def closure(batch: Any = batch) -> float:
                optimizer.zero_grad()
                loss = entropy(model, batch)
                loss.backward()
                return loss.item()

            begins()
            optimizer.step(closure)
            break
    else:
        for batch in loader:
            begins()
            optimizer.zero_grad()
            if "meters" in parts:
                meter.update({len(batch): 1})
                if not losses:
                    print("first")
            if "teacher" in parts:
                teacher(batch[0])
            enabled = "autocast" in parts
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = entropy(model, batch)
            if "skips" in parts and not torch.isfinite(loss):
                continue
            scaler.scale(loss).backward()
            if "clips" in parts:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if "counts" in parts:
                losses.append(loss.item())
            scaler.step(optimizer)
            scaler.update()
            session.log(loss=loss)
            break
    answer = loader.answer
    session.close()
    assert answer is not None
    return {"verdict": answer.verdict, "why": answer.why, **seen, "losses": len(losses)}


class Counting(nn.Module):
    """A model that counts its samples and keeps their mean: of its own rank, or of all ranks."""

    def __init__(self, over: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.over = over
        self.linear = nn.Linear(4, CLASSES)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            count, total = torch.tensor(float(len(x))), x.sum((0, 1)) / POINTS
            if self.over == "ranks":
                dist.all_reduce(count)
                dist.all_reduce(total)
            elif self.over == "gather":
                counts = [torch.zeros(()) for _ in range(2)]
                dist.all_gather(counts, count)
                count = torch.stack(counts).sum()
            self.count += count
            self.mean = self.mean + (total / count - self.mean) * 0.1
        made: Tensor = self.linear(x - self.mean)
        return made


def counted(over: str) -> tuple[float, list[float], list[int]]:
    """Two epochs of 48 samples, where the first rank has none: its count, mean and parts."""
    session = paceline.Session(Points(), global_batch=16, limits=[0, 16], prove=False)
    made, parts = Counting(over), list[int]()
    loader, model = session.loader(), session.wrap(made)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in session.epochs(2):
        for batch in loader:
            parts.append(session.batch.samples)
            optimizer.zero_grad()
            entropy(model, batch).backward()
            optimizer.step()
    session.close()
    return float(made.count), made.mean.tolist(), parts  # type: ignore[arg-type, operator]
