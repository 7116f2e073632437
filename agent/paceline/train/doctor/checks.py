"""Checks that turn the record of a script into findings, in sentences.

`Examination` calls each check once, after the script's examined steps or its failure. A check may
load samples, but it never trains.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.core.batch_limits.budget import shown
from paceline.data import Stream
from paceline.node.starting.examining import Finding, Level
from paceline.train.batchnorm import is_shared
from paceline.train.doctor.watching import ScriptRecord, SeenSession
from paceline.train.nodedata import Loaded
from paceline.train.proof import PROVEN, WRONG

Floats = npt.NDArray[np.float64]

_ADAPTERS = {
    "lightning": "Lightning: pass strategy=paceline.lightning.PacelineStrategy() to its Trainer.",
    "transformers.trainer": "Hugging Face's Trainer: import Trainer from paceline.transformers.",
    "accelerate": "Accelerate: import Accelerator from paceline.accelerate.",
}
_FIVE_LINES = (
    "Before the loop write session = paceline.Session(data, sizes=…, global_batch=…), "
    "loader = session.loader(…) and model = session.wrap(model)."
)
# Number of samples whose sizes are compared with their extents, the numbers of their elements.
_COMPARED_SAMPLES = 16
# Minimum rank correlation of sizes and extents. If the sizes of 16 samples are unrelated to their
# extents, the correlation is smaller in 97 of 100 cases.
_FITTING = 0.5
_IMBALANCE_STEPS = 200
# Loggers whose warnings `warnings` leaves out: another check reports them, or no report is needed.
_LEFT_OUT = {"paceline.train.batch_limits.sizes", "paceline.train.wiring", "paceline.train.device"}
_UNWRAPPED = "paceline.train.unwrapped"


def sessions(seen: ScriptRecord) -> Iterator[Finding]:
    """Report whether the script makes a session."""
    made = [known for known in seen.sessions if known.session is not None]
    if not seen.sessions and not seen.failed:
        yield Finding("session", Level.PROBLEM, _without_session(seen), _fix_without_session())
    for number, known in enumerate(made):
        assert known.session is not None
        terms = known.session._loop.context.terms
        batch = f"global batch {terms.global_batch}"
        if terms.token_budget is not None:
            batch = f"token budget {shown(terms.token_budget)} (about {terms.global_batch} samples)"
        count, steps = "a stream", ""
        if terms.samples:
            count = f"{terms.samples:,} samples"
            steps = f", {known.session.steps_per_epoch:,} steps in an epoch"
        says = f"A Session is created at {known.where}: {count}, {batch}{steps}."
        if number:
            says += " Only the first session is reported; rank 0 plans this one by itself."
        yield Finding("session", Level.OK, says)


def _without_session(seen: ScriptRecord) -> str:
    says = "The script creates no paceline.Session, so it trains without Paceline."
    if seen.outside:
        says += f" Its optimiser stepped {max(seen.outside.values())} times."
    return says


def _fix_without_session() -> str:
    used = [words for module, words in _ADAPTERS.items() if module in sys.modules]
    return used[0] if used else _FIVE_LINES


def loader(seen: ScriptRecord) -> Iterator[Finding]:
    """Report whether the script trains on the session's loader."""
    if not any(known.session for known in seen.sessions):
        return
    # Compare with None: `bool(loader)` calls `len(loader)`, which fails for a stream's loader.
    if any(known.loader is not None for known in seen.sessions):
        yield Finding("loader", Level.OK, "The script's loop reads session.loader().")
    elif seen.outside:
        from_where = f", which it reads at {seen.other_loaders[-1]}," if seen.other_loaders else ""
        yield Finding(
            "loader",
            Level.PROBLEM,
            f"The script trains on batches of another DataLoader{from_where} and never reads "
            "session.loader().",
            "Put loader = session.loader(collate_fn=…, num_workers=…) in place of that DataLoader.",
        )


def models(seen: ScriptRecord) -> Iterator[Finding]:
    """Report whether the trained models are wrapped."""
    for known in seen.sessions:
        if known.session is None or known.loader is None:
            continue
        for calls in known.calls:
            parameters = sum(p.numel() for p in calls.model.parameters() if p.requires_grad)
            yield Finding(
                "model",
                Level.OK,
                f"{type(calls.model).__name__} is wrapped, with {parameters:,} trained parameters.",
            )
        # If the script failed, the failure explains the missing model.
        if not known.calls and not seen.failed:
            yield Finding(
                "model",
                Level.PROBLEM,
                "The script reads session.loader(), but passes no model to session.wrap(): "
                "gradients are not weighted for the ranks' different batches.",
                "Before the loop write model = session.wrap(model), in place of "
                "DistributedDataParallel.",
            )
    for record in seen.warnings:
        if record.name == _UNWRAPPED:
            yield Finding("model", Level.PROBLEM, record.getMessage())


def optimiser(seen: ScriptRecord) -> Iterator[Finding]:
    """Report whether an optimiser trains the wrapped models and suits relaxed policies."""
    for known in seen.sessions:
        if known.session is None or not known.calls or not known.steps:
            continue
        if not seen.inside:
            yield Finding(
                "optimizer",
                Level.NOTE,
                f"No torch.optim.Optimizer has stepped in {known.steps} steps.",
                "If gradients accumulate over more steps, increase --steps. Relaxed policies act "
                "in the optimiser's step.",
            )
            continue
        wrapped = {id(p) for calls in known.calls for p in calls.model.parameters()}
        if not wrapped & seen.stepped:
            yield Finding(
                "optimizer",
                Level.PROBLEM,
                "Optimisers step, but none of them has a parameter of a model that was passed to "
                "session.wrap(): the wrapped model is not trained.",
                "Create the optimiser from the parameters of the model that session.wrap() "
                "returned.",
            )
            continue
        why = known.session._loop.gate.suitability.refusal()
        if why is None:
            says = "The optimiser was found; relaxed policies can be used."
            yield Finding("optimizer", Level.OK, says)
        else:
            yield Finding(
                "optimizer",
                Level.NOTE,
                f"Under relaxed policies, gradients are still all-reduced: {why}.",
                "No action needed, unless you want such a policy; then call "
                "session.optimizer(optimizer).",
            )


def sizes(seen: ScriptRecord) -> Iterator[Finding]:
    """Report the source of the sizes, and how uneven they are."""
    for known in seen.sessions:
        if known.sizes is None or known.session is None:
            continue
        yield _of_sizes(known, known.sizes, max(2, known.session.world))


def _of_sizes(known: SeenSession, given: Floats, world: int) -> Finding:
    assert known.session is not None
    least, middle, most = float(given.min()), float(np.median(given)), float(given.max())
    if least < most:
        terms = known.session._loop.context.terms
        uneven, padded = _imbalance(given, terms.global_batch, world, terms.seed)
        return Finding(
            "sizes",
            Level.OK,
            f"Sizes are from {known.sizes_from}: {_plain(least)} to {_plain(most)}, median "
            f"{_plain(middle)}. If {world} equal ranks get the same number of samples, the rank "
            f"with the most work has {uneven:.2f} times the mean load of a step, or {padded:.2f} "
            "times with padded batches.",
            figures={
                "min": least, "median": middle, "max": most, "uneven": uneven, "padded": padded,
            },
        )  # fmt: skip
    numbers = np.unique(np.linspace(0, len(given) - 1, _COMPARED_SAMPLES).astype(int)).tolist()
    extents = [extent(load(known, number)) for number in numbers]
    if min(extents) == max(extents):
        says = (
            f"All samples count as equal, and the {len(numbers)} checked samples are equally large."
        )
        return Finding("sizes", Level.OK, says)
    none = "No sizes are given" if not known.sizes_from else f"{known.sizes_from} are all {least:g}"
    return Finding(
        "sizes",
        Level.PROBLEM,
        f"{none}, but samples differ: of {len(numbers)} checked samples, the largest has "
        f"{max(extents) / max(1, min(extents)):.1f} times as many elements as the smallest.",
        "Give Session(…, sizes=…) one number per sample, such as its frames or tokens, or give the "
        "data set a sizes attribute. Otherwise Paceline balances only the number of samples.",
    )


def fitting(seen: ScriptRecord) -> Iterator[Finding]:
    """Report whether samples with more elements have larger sizes."""
    for known in seen.sessions:
        given = known.sizes
        if given is None or isinstance(known.dataset, Stream) or given.min() == given.max():
            continue
        order = np.argsort(given, kind="stable")
        numbers = order[np.linspace(0, len(given) - 1, _COMPARED_SAMPLES).astype(int)].tolist()
        extents = np.array([extent(load(known, number)) for number in numbers])
        # If all checked samples have the same number of elements, their sizes may still differ:
        # they may count something within a sample, such as tokens without padding.
        if extents.min() == extents.max():
            continue
        by_extent, by_size = _places(extents), _places(given[numbers])
        correlation = float(np.corrcoef(by_extent, by_size)[0, 1])
        if correlation < _FITTING:
            yield Finding(
                "sizes",
                Level.NOTE,
                f"Sizes do not match the numbers of elements of samples: over {len(numbers)} "
                f"checked samples, the rank correlation of the two is {correlation:.2f}.",
                "Give sizes in the order of the data set: a number for sample 0, for sample 1 and "
                "so on. No action needed if a sample's cost has little to do with its number of "
                "elements.",
                {"correlation": correlation},
            )


def _places(values: npt.NDArray[Any]) -> Floats:
    """Return each value's dense rank: the number of distinct smaller values."""
    return np.unique(values, return_inverse=True)[1].astype(np.float64)


def _plain(number: float) -> str:
    return f"{number:,.0f}" if number == round(number) else f"{number:,.4g}"


def _imbalance(given: Floats, batch: int, world: int, seed: int) -> tuple[float, float]:
    """Return two ratios: the largest load of a rank divided by the ranks' mean load.

    Each ratio is the mean over steps in which `world` ranks get equal numbers of samples. The first
    ratio is for batches whose cost is the sum of their sizes, the second for padded batches.
    """
    order = np.random.default_rng(seed).permutation(len(given))
    ratios: list[tuple[float, float]] = []
    for start in range(0, min(len(order), batch * _IMBALANCE_STEPS), batch):
        step = given[order[start : start + batch]]
        parts = [part for rank in range(world) if len(part := step[rank::world])]
        sums, padded = [p.sum() for p in parts], [len(p) * p.max() for p in parts]
        ratios.append((max(sums) * world / sum(sums), max(padded) * world / sum(padded)))
    mean = np.mean(ratios, axis=0)
    return float(mean[0]), float(mean[1])


def load(known: SeenSession, index: int) -> Any:
    """Load a sample as the session's loader does. The data set may raise any error."""
    if known.loader is None:
        return known.dataset[index]
    with known.loader._epoch:
        return known.dataset[index]


def collated(known: SeenSession, samples: list[Any]) -> Any:
    """Collate samples as the session's loader does. The script's function may raise any error."""
    assert known.loader is not None
    with known.loader._epoch:
        made = known.loader._loader.collate_fn(samples)
    return made.batch if isinstance(made, Loaded) else made


def extent(sample: Any) -> int:
    """Count a sample's elements in tensors, arrays, texts and lists of numbers."""
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if isinstance(sample, np.ndarray):
        return int(sample.size)
    if isinstance(sample, str | bytes):
        return len(sample)
    if isinstance(sample, Mapping):
        return sum(map(extent, sample.values()))
    if isinstance(sample, list | tuple):
        return sum(map(extent, sample))
    return 1


def loss(seen: ScriptRecord) -> Iterator[Finding]:
    """Report whether the loss allows uneven local batches, as `paceline.train.proof` found."""
    for known in seen.sessions:
        answer = known.answer
        if answer is None:
            continue
        level = {PROVEN: Level.OK, WRONG: Level.PROBLEM}.get(answer.verdict, Level.NOTE)
        figures = {"seconds": answer.cost_s}
        if answer.difference is not None:
            figures["difference"] = answer.difference
        if answer.equal is not None:
            figures["equal"] = answer.equal
        yield Finding("loss", level, answer.why, answer.do, figures)


def batchnorm(seen: ScriptRecord) -> Iterator[Finding]:
    """Report whether BatchNorm layers normalise by the local batch or the global batch."""
    layers = _named(seen, lambda module: isinstance(module, _BatchNorm))
    apart = [name for name, layer in layers if not is_shared(layer)]  # type: ignore[arg-type]
    if apart:
        yield Finding(
            "batchnorm",
            Level.NOTE,
            "BatchNorm layers normalise by each rank's own batch, whose size the plan changes: "
            f"{_listed(apart)}. Training differs from single-process training, and between "
            "policies.",
            "session.wrap(model, batchnorm='sync') normalises by the whole global batch.",
        )
    elif layers:
        says = f"{len(layers)} BatchNorm layers normalise by the whole global batch."
        yield Finding("batchnorm", Level.OK, says)


def precision(seen: ScriptRecord) -> Iterator[Finding]:
    """Report the precision in which the model computes, and its effect on the updates."""
    models = [calls for known in seen.sessions for calls in known.calls]
    if not models:
        return
    low = precision_of(seen)
    if low is None:
        says = (
            "The model computes in full precision: updates equal those of a single process, up to "
            "summation order."
        )
        yield Finding("precision", Level.OK, says)
        return
    yield Finding(
        "precision",
        Level.NOTE,
        f"The model computes in {str(low).removeprefix('torch.')}, which rounds coarsely; the "
        "rounding depends on which samples a rank's batch has. “Exact” means here: each step has "
        "the same samples with the same weights, and parameters differ by rounding, as in plain "
        "DDP with another number of ranks.",
        "No action needed if that is acceptable. To compare step by step, train some steps in "
        "float32.",
    )


def precision_of(seen: ScriptRecord) -> torch.dtype | None:
    """Return the half precision in which a wrapped model computes; None if there is none."""
    for known in seen.sessions:
        for calls in known.calls:
            kinds = {p.dtype for p in calls.model.parameters()} & {torch.bfloat16, torch.float16}
            if calls.autocast is not None or kinds:
                return calls.autocast or kinds.pop()
    return None


def checkpoint(seen: ScriptRecord) -> Iterator[Finding]:
    """Report whether the script declares checkpoints."""
    made = [known for known in seen.sessions if known.session is not None]
    if not made:
        return
    if seen.failed and not any(known.loader is not None for known in made):
        # The script failed early and may declare a checkpoint further on.
        return
    declared = next((known.checkpoint for known in made if known.checkpoint), "")
    own = next((known.state for known in made if known.state), "")
    if declared:
        says = (
            f"Checkpoints are declared at {declared}. During this check, session.checkpoint saved "
            "to a temporary folder, which is deleted."
        )
        yield Finding("checkpoint", Level.OK, says)
    elif "paceline.train.adapting" in sys.modules:
        says = (
            "The framework's own checkpoints contain the training position. Any checkpoints of "
            "these steps are in the framework's usual folder."
        )
        yield Finding("checkpoint", Level.OK, says)
    elif own:
        says = (
            f"The script saves or loads the training position itself, at {own}. Any "
            "checkpoints of these steps are in the script's usual folder."
        )
        yield Finding("checkpoint", Level.OK, says)
    else:
        do = (
            "Call session.checkpoint(directory, model, optimizer, every_steps=…) after "
            "session.wrap."
        )
        if all(isinstance(known.dataset, Stream) for known in made):
            do = "After each epoch, save session.state_dict() with the model and optimiser states."
        yield Finding(
            "checkpoint",
            Level.NOTE,
            "The script declares no checkpoint: after a restart it begins at step 0.",
            do,
        )


def warnings(seen: ScriptRecord) -> Iterator[Finding]:
    """Report the warnings that Paceline itself logged, except those that other checks report."""
    for record in seen.warnings:
        if record.name not in _LEFT_OUT and record.name != _UNWRAPPED:
            yield Finding("warning", Level.NOTE, record.getMessage())


def _named(seen: ScriptRecord, fits: Callable[[nn.Module], bool]) -> list[tuple[str, nn.Module]]:
    return [
        (name or type(module).__name__, module)
        for known in seen.sessions
        for calls in known.calls
        for name, module in calls.model.named_modules()
        if fits(module)
    ]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
