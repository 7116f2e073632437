"""Odd training scripts, each written as for one process, and what ranks make of them.

`compare` trains a script on uneven ranks with `session.wrap`, and again in one process over the
global batches. A script is a function of its models that returns a turn of its loop; the turn
yields what shall be equal.
"""

# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as f
from torch.utils.checkpoint import checkpoint

import paceline

WIDTH = 4
SAMPLES = 25  # of four steps: the last one has a single sample, so a rank has none
BATCH = 8


class Points(torch.utils.data.Dataset[Any]):
    """Each sample: its index, numbers, and what they make."""

    def __init__(self, samples: int = SAMPLES) -> None:
        random = torch.Generator().manual_seed(7)
        self.x = torch.randn(samples, WIDTH, generator=random)
        self.y = torch.randn(samples, 1, generator=random)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.y[index]


@dataclass
class Rows:
    x: Tensor
    y: Tensor
    empty: bool = False
    turn: int = 0


Turn = Callable[[Rows], Iterator[Tensor | None]]


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1))


def loss_of(model: nn.Module, rows: Rows) -> Tensor:
    return f.mse_loss(model(rows.x), rows.y)


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    parameters = {id(p): p for model in models for p in model.parameters()}
    return torch.optim.SGD(parameters.values(), lr=0.1)


def grads(*models: nn.Module) -> Iterator[Tensor | None]:
    for model in models:
        for parameter in model.parameters():
            yield parameter.grad


def unsynced(model: nn.Module) -> Any:
    return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()  # type: ignore[operator]


def bare(model: nn.Module) -> nn.Module:
    """The model in session.wrap's."""
    return getattr(model, "module", model)


def stepping(passes: Callable[..., None]) -> Callable[..., Turn]:
    """A script with the usual turn around some passes: gradients of 0 before, a step after."""

    @functools.wraps(passes)
    def script(*models: nn.Module) -> Turn:
        optimizer = sgd(*models)

        def turn(rows: Rows) -> Iterator[Tensor | None]:
            optimizer.zero_grad()
            passes(*models, rows)
            yield from grads(*models)
            optimizer.step()

        return turn

    return script


# Which parameters train


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(WIDTH, 5)
        self.high = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Any:
        return self.high(torch.tanh(self.low(x)))


def frozen_low() -> nn.Module:
    model = Halves()
    model.low.requires_grad_(False)
    return model


def simple(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Turn:
    optimizer = optimizer or sgd(model)

    def turn(rows: Rows) -> Iterator[Tensor | None]:
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        yield from grads(model)
        optimizer.step()

    return turn


@stepping
def unfreezes_later(model: nn.Module, rows: Rows) -> None:
    if rows.turn == 1:
        bare(model).low.requires_grad_(True)
    loss_of(model, rows).backward()


@stepping
def freezes_later(model: nn.Module, rows: Rows) -> None:
    if rows.turn == 1:
        bare(model).low.requires_grad_(False)
    loss_of(model, rows).backward()


@stepping
def freezes_by_turns(model: nn.Module, rows: Rows) -> None:
    bare(model).low.requires_grad_(rows.turn % 2 == 1)
    loss_of(model, rows).backward()


class Twice(nn.Module):
    """One layer that is passed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.answer = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, 5, dtype=torch.complex64))
        self.answer = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.answer((x.to(torch.complex64) @ self.matrix).abs())


class Mixed(nn.Module):
    """Parameters of float32 and of float64."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(WIDTH, 5)
        self.high = nn.Linear(5, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(torch.tanh(self.low(x)).double()).float()


class Counting(nn.Module):
    """A buffer that the forward pass changes alike on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = plain()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) / self.calls


# Backward passes


@stepping
def two_forwards_one_backward(model: nn.Module, rows: Rows) -> None:
    (loss_of(model, rows) + model(-rows.x).square().mean()).backward()


@stepping
def two_losses_at_once(model: nn.Module, rows: Rows) -> None:
    out = model(rows.x)
    torch.autograd.backward([f.mse_loss(out, rows.y), out.square().mean()])


@stepping
def retained(model: nn.Module, rows: Rows) -> None:
    out = model(rows.x)
    f.mse_loss(out, rows.y).backward(retain_graph=True)
    out.square().mean().backward()


@stepping
def retained_in_no_sync(model: nn.Module, rows: Rows) -> None:
    with unsynced(model):
        out = model(rows.x)
        f.mse_loss(out, rows.y).backward(retain_graph=True)
        out.square().mean().backward()
    loss_of(model, rows).backward()


@stepping
def penalty_after(model: nn.Module, rows: Rows) -> None:
    loss_of(model, rows).backward()
    (0.1 * sum(p.square().sum() for p in model.parameters())).backward()  # type: ignore[union-attr]


@stepping
def penalty_before_forward(model: nn.Module, rows: Rows) -> None:
    (0.1 * sum(p.square().sum() for p in model.parameters())).backward()  # type: ignore[union-attr]
    loss_of(model, rows).backward()


@stepping
def penalty_between(model: nn.Module, rows: Rows) -> None:
    loss = loss_of(model, rows)
    (0.1 * sum(p.square().sum() for p in model.parameters())).backward()  # type: ignore[union-attr]
    loss.backward()


@stepping
def penalty_in_the_loss(model: nn.Module, rows: Rows) -> None:
    loss = loss_of(model, rows)
    (loss + 0.1 * sum(p.square().sum() for p in model.parameters())).backward()


@stepping
def put_before_backward(model: nn.Module, rows: Rows) -> None:
    """Puts the same decay into `.grad` on each rank, between forward and backward."""
    loss = loss_of(model, rows)
    for parameter in model.parameters():
        parameter.grad = 0.1 * parameter.detach().clone()
    loss.backward()


@stepping
def put_after_backward(model: nn.Module, rows: Rows) -> None:
    loss_of(model, rows).backward()
    for parameter in model.parameters():
        parameter.grad += 0.1 * parameter.detach()


@stepping
def input_gradient_penalty(model: nn.Module, rows: Rows) -> None:
    """A second derivative, as WGAN-GP's."""
    x = rows.x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (f.mse_loss(out, rows.y) + slope.square().sum(1).mean()).backward()


@stepping
def gradients_by_autograd_grad(model: nn.Module, rows: Rows) -> None:
    """`torch.autograd.grad` of parameters, put into `.grad` by hand."""
    parameters = list(model.parameters())
    for parameter, grad in zip(
        parameters, torch.autograd.grad(loss_of(model, rows), parameters), strict=True
    ):
        parameter.grad = grad


@stepping
def backward_of_some(model: nn.Module, rows: Rows) -> None:
    """`backward(inputs=…)`: gradients of the last layer only."""
    loss_of(model, rows).backward(inputs=list(bare(model).high.parameters()))


def lbfgs(model: nn.Module) -> Turn:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def turn(rows: Rows) -> Iterator[Tensor | None]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rows)
            if dist.get_world_size() > 1 and hasattr(model, "no_sync"):  # as the tutorial of LBFGS
                loss.backward()
                return mean_over_ranks(loss.detach(), rows)
            loss.backward()
            return loss

        optimizer.step(closure)
        yield from grads(model)

    return turn


def mean_over_ranks(value: Tensor, rows: Rows) -> Tensor:
    n = torch.tensor(0.0 if rows.empty else float(len(rows.x)))
    both = torch.stack([value * n, n])
    dist.all_reduce(both)
    return both[0] / both[1]


# Hooks


def doubling_hooks(model: nn.Module) -> Turn:
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: 2 * grad)
    return simple(model)


def post_hooks(model: nn.Module) -> Turn:
    """Hooks after accumulation that scale `.grad` in place."""

    def double(parameter: Tensor) -> None:
        parameter.grad *= 2

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(double)
    return simple(model)


def steps_in_backward(model: nn.Module) -> Turn:
    """An optimiser for each parameter, which steps in the backward pass."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)

    def turn(rows: Rows) -> Iterator[Tensor | None]:
        loss_of(model, rows).backward()
        yield from (parameter.detach() for parameter in model.parameters())

    return turn


# Evaluation and others' passes within the loop


def evaluates_in_the_loop(model: nn.Module) -> Turn:
    optimizer, held_out = sgd(model), Points(6)

    def turn(rows: Rows) -> Iterator[Tensor | None]:
        optimizer.zero_grad()
        loss = loss_of(model, rows)
        model.eval()
        with torch.no_grad():
            model(held_out.x)
        model.train()
        loss.backward()
        with torch.inference_mode():
            model(held_out.x)
        yield from grads(model)
        optimizer.step()

    return turn


def evaluates_on_one_rank(model: nn.Module) -> Turn:
    optimizer, held_out = sgd(model), Points(6)

    def turn(rows: Rows) -> Iterator[Tensor | None]:
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        yield from grads(model)
        optimizer.step()
        if dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                bare(model)(held_out.x)
            model.train()

    return turn


@stepping
def passes_by(model: nn.Module, rows: Rows) -> None:
    """Calls the model within the wrapped one."""
    f.mse_loss(bare(model)(rows.x), rows.y).backward()


def leaves_out_steps(model: nn.Module) -> Turn:
    """All ranks leave out the second step, before their forward pass."""
    optimizer = sgd(model)

    def turn(rows: Rows) -> Iterator[Tensor | None]:
        if rows.turn == 1:
            return
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        yield from grads(model)
        optimizer.step()

    return turn


def forward_without_backward(model: nn.Module) -> Turn:
    """All ranks drop the second step's loss after the forward pass."""
    optimizer = sgd(model)

    def turn(rows: Rows) -> Iterator[Tensor | None]:
        loss = loss_of(model, rows)
        if rows.turn == 1:
            return
        optimizer.zero_grad()
        loss.backward()
        yield from grads(model)
        optimizer.step()

    return turn


@stepping
def filler_is_nan(model: nn.Module, rows: Rows) -> None:
    """What a filler makes is no number."""
    (loss_of(model, rows) * (math.nan if rows.empty else 1.0)).backward()


# Several models


def gan(generator: nn.Module, discriminator: nn.Module) -> Turn:
    generating, discriminating = sgd(generator), sgd(discriminator)

    def turn(rows: Rows) -> Iterator[Tensor | None]:
        made = generator(rows.x)
        discriminating.zero_grad()
        real = f.softplus(-discriminator(rows.x)).mean()
        fake = f.softplus(discriminator(made.detach())).mean()
        (real + fake).backward()
        yield from grads(discriminator)
        discriminating.step()
        generating.zero_grad()
        discriminator.requires_grad_(False)
        f.softplus(-discriminator(made)).mean().backward()
        discriminator.requires_grad_(True)
        yield from grads(generator)
        generating.step()

    return turn


@stepping
def encoder_and_decoder(encoder: nn.Module, decoder: nn.Module, rows: Rows) -> None:
    """Two models under one loss, with one optimiser."""
    f.mse_loss(decoder(encoder(rows.x)), rows.x).backward()


def sharing() -> list[nn.Module]:
    common = nn.Linear(WIDTH, WIDTH)
    return [nn.Sequential(common, nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]


def pair() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH))]


# What the forward pass takes and returns


@dataclass
class Out:
    answer: Tensor
    hidden: Tensor | None = None


Pair = namedtuple("Pair", ["answer", "hidden"])


class Returning(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = plain(), kind

    def forward(self, x: Tensor) -> Any:
        out = self.inner(x)
        return {
            "dict": {"answer": out, "hidden": None, "more": [{"twice": 2 * out}]},
            "dataclass": Out(out, hidden=None),
            "tuple": (out, None, 3, "word"),
            "namedtuple": Pair(out, None),
            "list": [None, out],
        }[self.kind]


def answer_in(out: Any) -> Tensor:
    if isinstance(out, dict):
        return out["answer"] + out["more"][0]["twice"]
    if isinstance(out, Out | Pair):
        return out.answer
    return next(part for part in out if isinstance(part, Tensor))


@stepping
def structured(model: nn.Module, rows: Rows) -> None:
    f.mse_loss(answer_in(model(rows.x)), rows.y).backward()


@stepping
def keyword_arguments(model: nn.Module, rows: Rows) -> None:
    f.mse_loss(model(x=rows.x), rows.y).backward()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), plain()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)


class Branches(nn.Module):
    """Passes one of two branches, by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, first: bool) -> Tensor:
        return self.first(x) if first else self.second(x)


@stepping
def by_steps(model: nn.Module, rows: Rows) -> None:
    f.mse_loss(model(rows.x, rows.turn % 2 == 0), rows.y).backward()


class ByRow(nn.Module):
    """A row passes one of two branches. A branch that no row of a batch passes is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), 1)
        for layer, chosen in ((self.first, x[:, 0] > 0.9), (self.second, x[:, 0] <= 0.9)):
            if bool(chosen.any()):
                out = out.masked_scatter(chosen[:, None], layer(x[chosen]))
        return out


def compiled_first() -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(plain(), backend="aot_eager")  # type: ignore[return-value]


def compiles_wrapped(model: nn.Module) -> Turn:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = sgd(model)

    def turn(rows: Rows) -> Iterator[Tensor | None]:
        optimizer.zero_grad()
        f.mse_loss(compiled(rows.x), rows.y).backward()
        yield from grads(model)
        optimizer.step()

    return turn


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = plain()

    def forward(self, *, x: Tensor) -> Any:
        return self.inner(x)


def with_keywords() -> nn.Module:
    return Named()


# The comparison


def compare(
    build: Callable[[], nn.Module | list[nn.Module]],
    script: Callable[..., Turn],
    wrap: dict[str, Any] | None = None,
    early: bool = False,
) -> dict[str, Any]:
    """How far ranks are from one process.

    Returns:
        off: the largest difference, relative to each tensor's largest value; samples: this rank's,
        by step; warnings: what Paceline logged.
    """
    torch.manual_seed(3)
    made = build()
    models = made if isinstance(made, list) else [made]
    twins = copy.deepcopy(models)
    data = Points()
    with logged() as warnings:
        session = paceline.Session(data, global_batch=BATCH, limits=[2, 6])
        try:
            loader = session.loader()
            optimizer = sgd(*models) if early else None
            wrapped = [session.wrap(model, **(wrap or {})) for model in models]
            turn = simple(wrapped[0], optimizer) if early else script(*wrapped)
            seen, batches, samples = [], [], []
            for indices, *_ in loader:
                rows = rows_of(data, indices.tolist())
                rows.empty, rows.turn = session.batch.empty, len(seen)
                own = [] if rows.empty else indices.tolist()
                gathered: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(gathered, own)
                batches.append([index for part in gathered for index in part])
                samples.append(len(own))
                seen.append([None if t is None else t.detach().clone() for t in turn(rows)])
        finally:
            session.close()
    alone, worst = script(*twins), 0.0
    for number, (indices, of_ranks) in enumerate(zip(batches, seen, strict=True)):
        rows = rows_of(data, indices)
        rows.turn = number
        expected = [None if t is None else t.detach().clone() for t in alone(rows)]
        worst = max(worst, difference(of_ranks, expected))
    parameters = [p.detach() for model in wrapped for p in model.parameters()]
    expected_parameters = [p.detach() for twin in twins for p in twin.parameters()]
    worst = max(worst, difference(parameters, expected_parameters))
    return {"off": worst, "samples": samples, "warnings": warnings}


def error_of(build: Callable[[], nn.Module], script: Callable[..., Turn]) -> str:
    """What `compare` ends with."""
    try:
        compare(build, script)
    except (RuntimeError, paceline.PacelineError) as error:
        return str(error)
    return ""


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler, logger = Handler(logging.WARNING), logging.getLogger("paceline")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def rows_of(data: Points, indices: list[int]) -> Rows:
    return Rows(data.x[indices], data.y[indices])


def difference(these: Sequence[Tensor | None], those: Sequence[Tensor | None]) -> float:
    assert len(these) == len(those), f"{len(these)} tensors against {len(those)}"
    worst = 0.0
    for number, (this, that) in enumerate(zip(these, those, strict=True)):
        assert (this is None) == (that is None), f"tensor {number}: {this} against {that}"
        if this is not None and that is not None:
            off = float((this - that).abs().max()) / max(float(that.abs().max()), 1e-3)
            worst = max(worst, off if math.isfinite(off) else math.inf)
    return worst
