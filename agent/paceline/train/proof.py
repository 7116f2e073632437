"""Check that the steps of a script can be balanced with its loss.

A balanced step is correct only if the weighted sum of the ranks' gradients is the gradient of the
whole global batch. Whether the two are equal depends on the loss, which the script computes in its
own loop. So the loop's body runs on a few samples that are split among the ranks in several ways,
called trials. Ranks are taken in pairs, and each pair has each sample twice in each trial:

- ``whole``: each rank has all samples once, so its gradient is that of a single process;
- ``uneven``: one rank of a pair has a quarter of the pair's samples, the other rank the rest;
- ``filler``: one rank of a pair has no samples, the other rank all of them.

Each rank's gradient is recorded before it is reduced. Rank 0 weights the ranks' gradients by each
setting of ``loss_mean`` and compares their sum with the gradient of ``whole``. If the two are equal
for the session's own setting, the loss is *proven*. If they are equal only for another setting, the
loss is *wrong*, and the result names that setting. If they are equal for no setting, two more
trials find the reason: ``equal`` has local batches of equal size, as plain DDP has, and ``again``
repeats ``whole``. If the loop draws random numbers or keeps a state, the loss is *not provable*.
Otherwise the loss is *wrong*.

During the trials, dropout and BatchNorm layers are frozen, each trial begins with the same random
numbers, and no optimiser steps. Afterwards gradients, random numbers and the state of modules are
restored. Rank 0 compares gradients by their sketches: a sketch is a few random sums of a gradient.
The largest local batch has at most 16 samples, and no more than a rank gets in an equal split of a
step, but at least four; `Session(shapes=…)` may require more. If the samples do not fit into
memory, the loss is not provable. The check itself calls no collective.

`Rehearsal.batches` yields a batch for each trial to its caller, which runs the loop's body.
`paceline.train.doctor` gives the batches to the script's own loop, because it ends the script after
the check. In a live run the loop must not have additional iterations, so `paceline.train.replay`
runs copies of the body's statements.
"""

from __future__ import annotations

import copy
import math
import random
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from paceline.core.errors import PacelineError
from paceline.core.terms import MEANS
from paceline.train.ddp import WeightedDDP
from paceline.train.fillers import kept_tensors
from paceline.train.plan_shard import LocalStep
from paceline.train.profile import out_of_memory
from paceline.train.timing import CpuClock, RunningStep

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from paceline.core.terms import Terms
    from paceline.train.profile import Limits
    from paceline.train.state import TrainingState

# Maximum number of samples of the smallest local batch, unless `Terms.shapes` requires more. With
# more samples, a wrong loss would not be easier to detect.
_QUARTER = 4
# Samples are chosen only from this fraction of the data set, its smallest samples, because larger
# samples could need more memory than a usual step.
_USUAL_FRACTION = 0.9
# Number of samples that are read to find samples of different classes.
_CLASS_SAMPLES = 32
# Number of sums in a sketch, enough to estimate the norm of a difference to within about 10 %.
_SUMS = 64
_SIGNS = 1 << 18
_SIGN_OFFSETS = 4096
# Maximum wait in seconds, in a trial, until another rank calls the same collective.
_COLLECTIVE_WAIT_S = 60.0
_SEED = 20_011

# Relative differences up to these bounds count as rounding errors: in double precision, in single
# precision on a CPU, on a GPU, and in half precision.
_FINE, _SINGLE, _GPU, _COARSE = 1e-8, 1e-4, 5e-3, 5e-2
_FIX = (
    "Mask padded positions, and let no packed sequence attend to another. With class weights or "
    "ignored labels, use loss_mean='ranks': divide the sum of the losses by the sum of the labels' "
    "weights over all ranks, and multiply by the number of ranks. A loss that compares the samples "
    "of a batch cannot be balanced."
)
# Types of modules' attributes that are restored after a trial, such as counts of calls.
_PLAIN = int | float | str | None
_HALVES = {torch.bfloat16, torch.float16}

Ints = npt.NDArray[np.int64]
Verdict = str
PROVEN, WRONG, UNKNOWN = "proven", "wrong", "unknown"


class Trial(msgspec.Struct, frozen=True):
    """Assignment of samples to W ranks."""

    name: str
    # Indices of each rank's samples, [W]; an empty list: the rank has a filler.
    parts: list[list[int]]
    # Weights of the ranks, [W], by setting of `loss_mean`.
    weights: dict[str, list[float]]


class Outcome(msgspec.Struct, frozen=True):
    """Result of a trial on one rank."""

    # The sketch of each wrapped model's gradient.
    sketches: list[list[float]]
    # The error or other reason why the loop's body did not reach its end; empty if it did.
    error: str = ""
    # True if the body drew random numbers.
    random: bool = False
    # False if the body cannot be run again on other samples; `error` has the reason.
    repeatable: bool = True
    # Relative difference up to which gradients count as equal.
    tolerance: float = _SINGLE


class ProofResult(msgspec.Struct, frozen=True):
    """Result of the check, the same on all ranks."""

    verdict: Verdict
    # Explanation of the verdict, in sentences for the user.
    why: str
    # The fix; empty: nothing needs to be fixed.
    do: str = ""
    # The `loss_mean` with which the weighted gradients sum to the gradient of ``whole``; empty:
    # none.
    setting: str = ""
    # Relative difference from the gradient of ``whole``, with the session's `loss_mean`.
    difference: float | None = None
    # Relative difference from the gradient of ``whole`` with local batches of equal size; None: it
    # was not measured.
    equal: float | None = None
    cost_s: float = 0.0


class _NextTrial(msgspec.Struct, frozen=True):
    trial: Trial | None = None
    answer: ProofResult | None = None


class NotProvableError(Exception):
    """Reason why a loss cannot be checked here, worded to follow "because "."""


class Arrangements:
    """Maker of trials, which assign a few samples to the ranks in different ways.

    `sizes` are the sizes λ of the data set's N samples, [N]. `samples` are the indices of the
    samples in the trials. Each half of `samples` is called a quarter: in each trial a pair of ranks
    has each sample twice, which makes four quarters. `limits` are the memory limits of the `world`
    ranks, in samples or in size units.
    """

    def __init__(
        self,
        sizes: npt.NDArray[np.float64],
        world: int,
        samples: list[int],
        limits: Sequence[float],
    ) -> None:
        self._sizes, self._world, self._limits = sizes, world, limits
        quarter = len(samples) // 2
        self._first, self._second = samples[:quarter], samples[quarter:]

    def trial(self, name: str) -> Trial:
        """Return the trial with this name, such as ``uneven``."""
        first, second = self._first, self._second
        whole = first + second
        pair = {
            "uneven": (first, second + whole),
            "filler": ([], whole + whole),
            "equal": (first + first, second + second),
        }.get(name, (whole, whole))
        # If the number of ranks is odd, the last rank has all samples once in each trial.
        parts = [whole] * self._world
        for rank, other in pairs(self._world):
            smaller, larger = sorted((rank, other), key=lambda rank: self._limits[rank])
            parts[smaller], parts[larger] = pair
        counts = np.array([len(part) for part in parts], dtype=float)
        loads = np.array([self._sizes[part].sum() for part in parts])
        weights = {
            "samples": counts / counts.sum(),
            "size": loads / loads.sum(),
            "ranks": (counts > 0) / self._world,
        }
        return Trial(name, parts, {setting: each.tolist() for setting, each in weights.items()})

    def fit(self, tokens: Sequence[float]) -> bool:
        """Return True if the total size of each rank's samples is within its limit in all trials.

        `tokens` are the limits of the ranks, in size units.
        """
        trials = [self.trial(name) for name in ("uneven", "filler", "equal", "whole")]
        return all(
            self._sizes[part].sum() <= most
            for trial in trials
            for part, most in zip(trial.parts, tokens, strict=True)
        )


def pairs(world: int) -> Iterator[tuple[int, int]]:
    """Yield the ranks in pairs; if the number of ranks is odd, the last rank is in no pair."""
    return zip(range(0, world, 2), range(1, world, 2), strict=False)


class Judge:
    """Evaluation of the trials on rank 0, which chooses the next trial or determines the result.

    `declared` is the session's `loss_mean`.
    """

    def __init__(self, arrangements: Arrangements, declared: str) -> None:
        self._arrangements, self._declared = arrangements, declared
        # For each model, the `Sketch` of its gradient on rank 0 in the trial ``whole``.
        self._whole: list[Tensor] = []
        # Relative differences of the gradient from that of ``whole``, by trial and by setting of
        # `loss_mean`.
        self._off: dict[str, dict[str, float]] = {}
        self._tolerance = _FINE
        self._random = False
        self._names = iter(("whole", "uneven", "filler", "equal", "again"))

    def begin(self) -> Trial:
        """Return the first trial."""
        return self._arrangements.trial(next(self._names))

    def then(self, trial: Trial, outcomes: Sequence[Outcome]) -> Trial | ProofResult:
        """Return the next trial or the final result, given the outcomes of a trial on all ranks."""
        if stuck := [each.error for each in outcomes if not each.repeatable]:
            return unknown(stuck[0])
        errors = [(rank, each.error) for rank, each in enumerate(outcomes) if each.error]
        if errors:
            return failed(trial, *errors[0])
        self._random |= any(each.random for each in outcomes)
        self._tolerance = max(self._tolerance, *(each.tolerance for each in outcomes))
        ranks = [[torch.tensor(s, dtype=torch.float64) for s in o.sketches] for o in outcomes]
        if any(not bool(sketch.isfinite().all()) for rank in ranks for sketch in rank):
            return unknown("its gradients are not finite")
        if trial.name == "whole":
            return self._of_whole(ranks)
        self._off[trial.name] = {
            setting: max(
                _relative(
                    sum((w * s for w, s in zip(weights, model, strict=True)), torch.zeros(())),
                    whole,
                )
                for whole, *model in zip(self._whole, *ranks, strict=True)
            )
            for setting, weights in trial.weights.items()
        }
        return self._next(trial.name)

    def _of_whole(self, ranks: list[list[Tensor]]) -> Trial | ProofResult:
        self._whole = ranks[0]
        if not all(sketch.any() for sketch in self._whole):
            return unknown("a wrapped model gets no gradient from the loop's body")
        apart = max(_relative(a, b) for rank in ranks for a, b in zip(rank, ranks[0], strict=True))
        if apart > self._tolerance:
            return unknown(
                "ranks compute different gradients of the same samples: the data set or the loop "
                "draws random numbers, or models differ between ranks"
            )
        return self._arrangements.trial(next(self._names))

    def _next(self, name: str) -> Trial | ProofResult:
        if name == "again":
            return self._wrong()
        if name == "filler" and (fitting := self._fitting()):
            return self._fits(fitting)
        return self._arrangements.trial(next(self._names))

    def _fitting(self) -> list[str]:
        """Return each `loss_mean` with which all other trials give the gradient of ``whole``.

        The session's own setting comes first, if it is among them.
        """
        settings = sorted(MEANS, key=lambda setting: setting != self._declared)
        trials = self._off["uneven"], self._off["filler"]
        return [s for s in settings if all(off[s] <= self._tolerance for off in trials)]

    def _fits(self, fitting: list[str]) -> ProofResult:
        off = max(self._off[trial][self._declared] for trial in ("uneven", "filler"))
        if fitting[0] == self._declared:
            return ProofResult(
                PROVEN,
                "The gradient of a batch is the same if one rank computes it, if two ranks compute "
                "uneven parts of it, and if one of two ranks has no samples: "
                f"loss_mean={self._declared!r} fits the loss.",
                setting=fitting[0],
                difference=off,
            )
        return ProofResult(
            WRONG,
            f"loss_mean={self._declared!r} does not fit the loss: in uneven parts the gradient "
            f"differs by {off:.1%} from the gradient of the whole batch. loss_mean={fitting[0]!r} "
            "reproduces it.",
            f"Write Session(…, loss_mean={fitting[0]!r}).",
            setting=fitting[0],
            difference=off,
        )

    def _wrong(self) -> ProofResult:
        if self._off["again"]["samples"] > self._tolerance:
            return unknown(
                "the loop computes a different gradient of the same samples when it is repeated: "
                "it draws random numbers, or the model or the loss keeps a state"
            )
        uneven, filler = self._off["uneven"], self._off["filler"]
        equal = self._off["equal"]["ranks"]
        if uneven[self._declared] <= self._tolerance:
            return ProofResult(
                WRONG,
                f"A rank without samples changes the gradient by {filler[self._declared]:.1%}: the "
                "loss counts its filler sample.",
                "Leave the filler out of what the loss counts over ranks: count 0 where "
                "session.batch.empty is true.",
                difference=filler[self._declared],
                equal=equal,
            )
        if self._random:
            return unknown("the loop draws random numbers for a batch as a whole")
        why = (
            "No loss_mean fits the loss: in uneven parts the gradient differs by "
            f"{uneven[self._declared]:.1%} from the gradient of the whole batch, because a "
            "sample's contribution depends on the rest of its rank's batch. "
        )
        if equal > self._tolerance:
            why += f"In equal parts, as under plain DDP, it differs by {equal:.1%}, too."
        else:
            why += "In equal parts it is exact."
        return ProofResult(
            WRONG,
            why,
            _FIX,
            difference=uneven[self._declared],
            equal=equal,
        )


def arranged(
    sizes: npt.NDArray[np.float64],
    world: int,
    terms: Terms,
    limits: Limits,
    sort: Callable[[Ints], Ints] = lambda samples: samples,
) -> Arrangements:
    """Choose the samples of the trial batches, so that each fits into the ranks' memory.

    The largest local batch has four quarters (see `Arrangements`). If an equal split of a step
    gives a rank no fewer samples than four quarters, samples of usual sizes are chosen. Otherwise
    smaller samples are chosen, so that the trials need no more memory than a step.

    `sizes` are the sizes λ of the data set's N samples, [N]. `sort` selects and sorts samples: one
    quarter is from the first half of its result, and the other quarter from the second half. A
    NotProvableError means that too few samples fit.
    """
    grid, fair = terms.shapes.samples, terms.global_batch // world
    most = max(fair, 4 * grid)
    room = [min(most, limit) for limit in limits.samples] or [most] * world
    # In all trials, one rank of a pair has at most four quarters, and the other rank at most two.
    fits = [min(max(room[a], room[b]) // 4, min(room[a], room[b]) // 2) for a, b in pairs(world)]
    if world % 2:
        fits.append(room[-1] // 2)
    quarter = min(max(grid, _QUARTER // grid * grid), min(fits) // grid * grid)
    if quarter < 1 or 2 * quarter > terms.samples:
        raise NotProvableError(
            f"local batches of {4 * grid} samples on one rank and {2 * grid} on another exceed the "
            "ranks' limits or the data set"
        )
    order = np.argsort(sizes, kind="stable")
    for share in (_USUAL_FRACTION * min(1.0, fair / (4 * quarter)), 0.0):
        usual = order[: max(2 * quarter, int(share * len(order)))]
        chosen = sort(usual)
        usual = chosen if len(chosen) >= 2 * quarter else usual
        places = np.linspace(0, len(usual) - 1, 2 * quarter).round().astype(int)
        made = Arrangements(sizes, world, usual[places].tolist(), limits.tokens or room)
        if not limits.tokens or made.fit(limits.tokens):
            return made
    raise NotProvableError(
        f"token_limits do not allow {4 * quarter} samples on one rank and {2 * quarter} on another"
    )


def failed(trial: Trial, rank: int, error: str) -> ProofResult:
    """Return the result for a loop's body that failed with `error` on a rank in a trial."""
    if trial.name not in ("uneven", "filler"):
        return unknown(f"the loop's body cannot be repeated: on rank {rank}, {error}")
    sizes = ", ".join(str(len(part)) for part in trial.parts)
    return ProofResult(
        WRONG,
        f"The loop fails with local batches of {sizes} samples: on rank {rank}, {error}.",
        "Let the loop accept batches of any size; sizes differ between ranks.",
    )


def unknown(why: str) -> ProofResult:
    """Return the result for a loss that cannot be checked, with `why` as the reason."""
    return ProofResult(
        UNKNOWN, f"Whether the loss can be balanced cannot be proven here, because {why}."
    )


def _whole_numbers(sample: Any) -> Iterator[int]:
    """Yield the whole numbers in a sample, such as its class.

    Tensors, arrays and lists of integers that have more than one element are skipped.
    """
    if isinstance(sample, list) and all(isinstance(each, int) for each in sample):
        sample = np.array(sample, dtype=object)
    if isinstance(sample, dict | tuple | list):
        for each in sample.values() if isinstance(sample, dict) else sample:
            yield from _whole_numbers(each)
    elif isinstance(sample, Tensor | np.ndarray | np.generic):
        value = sample.tolist() if math.prod(sample.shape) == 1 else None
        while isinstance(value, list):
            (value,) = value
        yield from _whole_numbers(value)
    elif isinstance(sample, int):
        yield sample


def _unprovable(error: Exception) -> str:
    """Return why an error makes the loss not provable; "" if the loss may have caused the error."""
    if isinstance(error, NotProvableError):
        return str(error)
    return "the samples of a trial do not fit into memory" if out_of_memory(error) else ""


def _relative(value: Tensor, whole: Tensor) -> float:
    return float((value - whole).norm() / whole.norm())


class Sketch:
    """Random sums of a gradient, with the same random signs on all ranks.

    A sketch is linear in the gradient, and its norm is about the gradient's norm. Each value of the
    gradient is added to one of the sums with a random sign.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        signs = torch.randint(
            0, 2, (_SIGNS + _SIGN_OFFSETS,), generator=generator, dtype=torch.int8
        )
        self._signs = {torch.device("cpu"): signs.mul_(2).sub_(1)}

    def of(self, model: nn.Module) -> Tensor:
        """Return the sketch of a model's gradient, on the CPU."""
        total = torch.zeros(_SUMS, dtype=torch.float64)
        for number, parameter in enumerate(model.parameters()):
            gradient = parameter.grad
            if gradient is None:
                continue
            values = gradient.detach()
            values = torch.view_as_real(values) if values.is_complex() else values
            for place, piece in enumerate(torch.split(values.reshape(-1), _SIGNS)):
                shift = (97 * number + 61 * place) % _SIGN_OFFSETS
                signed = piece.to(torch.promote_types(piece.dtype, torch.float32))
                signed = signed * self._on(piece.device)[shift : shift + len(piece)]
                padded = functional.pad(signed, (0, -len(signed) % _SUMS))
                total += padded.view(-1, _SUMS).sum(0, dtype=torch.float64).cpu()
        return total

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._signs:
            self._signs[device] = self._signs[torch.device("cpu")].to(device)
        return self._signs[device]


class _WithoutDropout(TorchFunctionMode):
    # For each function, the index of its argument for the dropout rate.
    _RATE: ClassVar = {
        functional.scaled_dot_product_attention: 4,
        functional.multi_head_attention_forward: 10,
    }
    _DROP: ClassVar = {
        functional.dropout,
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
        functional.alpha_dropout,
        functional.feature_alpha_dropout,
    }

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._DROP:
            return args[0] if args else kwargs["input"]
        if (place := self._RATE.get(func)) is not None:
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


class Loading(Protocol):
    """The members of the session's loader that this module uses."""

    answer: ProofResult | None

    def samples(self, indices: list[int]) -> list[Any]:
        """Read samples with the same random numbers on each rank, and return them."""

    def collated(self, samples: list[Any]) -> Any:
        """Return a batch of samples."""


# Collectives whose shapes must be equal on all ranks.
_SHAPED = {
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "allgather",
    "allreduce",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_single",
}


class Rehearsal:
    """Execution of the trials that check the script's loss, on this rank.

    During a trial, `CurrentStep.rehearsal` is this object, whose methods wrapped models and the
    gate call. `on_step` is called when an optimiser is about to step in a trial; the step has no
    effect. `on_backward` is called after each backward pass of the loop in a trial.
    """

    # Names of the methods of process groups that `_comparing` replaces in a trial.
    _intercepted: ClassVar[set[str]] = _SHAPED

    def __init__(
        self,
        state: TrainingState,
        loader: Loading,
        on_step: Callable[[], None] = lambda: None,
        on_backward: Callable[[], None] = lambda: None,
    ) -> None:
        self._state, self._loader = state, loader
        self._on_step, self._on_backward = on_step, on_backward
        self._models: list[Any] = list(state.gate.models)
        self._sketch = Sketch()
        # The sketch of each model's gradient in this trial.
        self._sums: list[Tensor] = []
        # The `id`s of models that have a gradient in this trial.
        self._trained = set[int]()
        # Depth of nested backward passes; activation checkpointing nests them.
        self._depth = 0
        self._samples: dict[int, Any] = {}
        # True if a forward pass ran in half precision.
        self._low = False
        # True if the loader's `collate_fn` drew random numbers.
        self._drew = False
        self._collectives = 0
        # The number of this check among the session's checks, and the number of the trial within
        # the check. Both are parts of keys in the store.
        self._proof, self._number = state.proofs, -1
        state.proofs += 1
        self._trial = Trial("", [], {})
        self.answer: ProofResult | None = None

    def batches(self) -> Generator[Any]:
        """Yield this rank's batch of each trial, until there is an `answer`; all ranks call it.

        The caller runs the loop's body on a batch, and then requests the next batch. If the body
        raises, the caller throws the exception into this generator.
        """
        began = time.perf_counter()
        store, startup = self._state.startup.store, self._state.startup
        judge: Judge | None = None
        order = _NextTrial()
        if startup.leads:
            try:
                judge = self._prepared()
                order = _NextTrial(judge.begin())
            except NotProvableError as error:
                order = _NextTrial(answer=unknown(str(error)))
        while True:
            self._number += 1
            if startup.leads:
                store.set(self._key("order"), msgspec.msgpack.encode(order))  # type: ignore[arg-type]
            else:
                with self._state.waiting_in_trials():
                    order = msgspec.msgpack.decode(store.get(self._key("order")), type=_NextTrial)
            if order.trial is None:
                self.answer = order.answer
                return
            self._trial = order.trial
            outcome = yield from self._tried(order.trial)
            self._put(outcome)
            if judge is not None:
                outcomes = [self._outcome(rank) for rank in range(startup.world)]
                following = judge.then(order.trial, outcomes)
                if isinstance(following, ProofResult):
                    cost_s = time.perf_counter() - began
                    order = _NextTrial(answer=msgspec.structs.replace(following, cost_s=cost_s))
                else:
                    order = _NextTrial(following)

    def failed(self, error: Exception, place: str) -> ProofResult:
        """Return the result for a loop's body that raised an error in the current trial.

        `place` is the position in the script, for the message.
        """
        if why := _unprovable(error):
            return unknown(why)
        said = f"{place}: {type(error).__name__}: {error}"
        return failed(self._trial, self._state.startup.rank, said)

    def _key(self, name: str) -> str:
        return f"proof/{self._proof}/{self._number}/{name}"

    def _put(self, outcome: Outcome) -> None:
        key = self._key(str(self._state.startup.rank))
        self._state.startup.store.set(key, msgspec.msgpack.encode(outcome))  # type: ignore[arg-type]

    def _outcome(self, rank: int) -> Outcome:
        with self._state.waiting_in_trials():
            stored = self._state.startup.store.get(self._key(str(rank)))
        return msgspec.msgpack.decode(stored, type=Outcome)

    def _prepared(self) -> Judge:
        context, startup = self._state.context, self._state.startup
        terms = context.terms
        modules = [module for model in self._models for module in model.modules()]
        for holds, why in (
            (startup.world == 1, "there is only one rank"),
            (context.reader is not None, "the data is a stream"),
            (context.data is not None, "each node stores only its own samples"),
            (not self._models, "no model is wrapped"),
            (
                not all(isinstance(model, WeightedDDP) for model in self._models),
                "the model is sharded by fully_shard, so that no rank has a complete gradient",
            ),
            (any(model.static_graph for model in self._models), "static_graph=True is set"),
            (
                any(isinstance(m, _BatchNorm) and m.running_mean is None for m in modules),
                "a BatchNorm layer keeps no running statistics",
            ),
        ):
            if holds:
                raise NotProvableError(why)
        assert startup.sizes is not None, "rank 0 has the sizes"
        arrangements = arranged(
            startup.sizes, startup.world, terms, context.limits, self._sorted_by_class
        )
        return Judge(arrangements, terms.loss_mean)

    def _sorted_by_class(self, samples: Ints) -> Ints:
        """Return some of the samples, sorted by class; without classes, return all unsorted.

        If all samples of a trial were of one class, the check would miss class weights in the loss.
        """
        places = np.linspace(0, len(samples) - 1, min(_CLASS_SAMPLES, len(samples))).round()
        some = samples[places.astype(int)]
        try:
            self._read(some.tolist())
        # Ignore errors, because only rank 0 reads samples here. If a sample of a trial cannot be
        # read, the trial's ranks report the error.
        except Exception:
            return samples
        whole_numbers = [list(_whole_numbers(self._samples[index])) for index in some.tolist()]
        if len({len(each) for each in whole_numbers}) > 1:
            return samples
        columns = np.array(whole_numbers, dtype=object).T
        kinds = [len(set(column)) for column in columns]
        classes = min((kind for kind in kinds if 1 < kind <= len(some) // 2), default=None)
        if classes is None:
            return samples
        column = columns[kinds.index(classes)].astype(float)
        by_class: Ints = some[np.argsort(column, kind="stable")]
        return by_class

    def _tried(self, trial: Trial) -> Generator[Any, None, Outcome]:
        rank = self._state.startup.rank
        self._sums = [torch.zeros(_SUMS, dtype=torch.float64) for _ in self._models]
        self._trained.clear()
        self._collectives, drew = 0, False
        try:
            batch = self._batch(trial.parts[rank] or self._state.fillers)
        except Exception as raised:
            return self._failed(raised, drew)
        with ExitStack() as held:
            for each in (self._random(), self._gradients(), self._step(trial)):
                held.enter_context(each)
            before = _random_state()
            try:
                yield batch
            except Exception as raised:
                return self._failed(raised, drew)
            except GeneratorExit:
                self._put(self._seen("the script left its loop", drew))
                raise
            drew = _random_state() != before
        return self._seen("", drew)

    def _failed(self, error: Exception, drew: bool) -> Outcome:
        why = _unprovable(error)
        seen = self._seen(why or f"{type(error).__name__}: {error}", drew)
        return msgspec.structs.replace(seen, repeatable=not why)

    def _seen(self, error: str, drew: bool) -> Outcome:
        parameters = [p for model in self._models for p in model.parameters()]
        kinds, tolerance = {p.dtype for p in parameters}, _SINGLE
        if self._low or kinds & _HALVES:
            tolerance = _COARSE
        elif any(p.device.type != "cpu" for p in parameters):
            tolerance = _GPU
        elif kinds <= {torch.float64, torch.complex128}:
            tolerance = _FINE
        sketches = [sums.tolist() for sums in self._sums]
        return Outcome(sketches, error, random=drew or self._drew, tolerance=tolerance)

    def _batch(self, indices: list[int]) -> Any:
        self._read([*indices, *self._state.fillers])
        with self._random():
            before = _random_state()
            batch = self._loader.collated([copy.deepcopy(self._samples[i]) for i in indices])
            self._drew |= _random_state() != before
        return batch

    def _read(self, indices: list[int]) -> None:
        missing = sorted(set(indices) - self._samples.keys())
        with self._random():
            if missing:
                read = self._loader.samples(missing)
                self._samples |= dict(zip(missing, read, strict=True))

    @contextmanager
    def _random(self) -> Iterator[None]:
        """Use the same random numbers in each trial; restore the generators afterwards."""
        kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        try:
            # Do not call torch.manual_seed: it would also seed devices that are not initialised
            # yet.
            torch.default_generator.manual_seed(_SEED)
            if cuda is not None:
                torch.cuda.manual_seed_all(_SEED)
            np.random.seed(_SEED)
            random.seed(_SEED)
            yield
        finally:
            torch.set_rng_state(kept[0])
            np.random.set_state(kept[1])
            random.setstate(kept[2])
            if cuda is not None:
                torch.cuda.set_rng_state_all(cuda)

    @contextmanager
    def _gradients(self) -> Iterator[None]:
        """Begin without gradients and do not reduce them; restore gradients and modules on exit."""
        parameters = [p for model in self._models for p in model.parameters()]
        kept = [parameter.grad for parameter in parameters]
        known, restores = set[int](), list[Callable[[], None]]()

        def keep(module: nn.Module) -> None:
            new = [m for m in module.modules() if id(m) not in known]
            known.update(map(id, new))
            restores.append(_kept_attributes(new))
            restores.append(kept_tensors([of for m in new for of in (m._buffers, vars(m))]))

        # Save the state of modules outside of the wrapped models, too, such as a teacher model.
        def keep_others(module: nn.Module, _inputs: Any) -> None:
            if id(module) not in known:
                keep(module)

        for model in self._models:
            keep(model)
        backward = torch.autograd.backward
        for parameter in parameters:
            parameter.grad = None
        for model in self._models:
            model.reduce(False)
        torch.autograd.backward = self._noting(backward)
        hook = register_module_forward_pre_hook(keep_others)
        try:
            with _eager():
                yield
        finally:
            hook.remove()
            torch.autograd.backward = backward
            self._depth = 0
            for restore in restores:
                restore()
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient

    def _noting(self, backward: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> None:
            # The gradients of a nested pass are recorded when the outer pass ends.
            if self._depth:
                backward(*args, **kwargs)
                return
            before = self._before_backward()
            self._depth += 1
            try:
                backward(*args, **kwargs)
            finally:
                self._depth -= 1
            self._after_backward(before)
            for model in self._models:
                if any(parameter.grad is not None for parameter in model.parameters()):
                    self._trained.add(id(model))
            self._on_backward()

        return noting

    def _before_backward(self) -> list[Tensor]:
        return [self._sketch.of(model) for model in self._models]

    def _after_backward(self, before: list[Tensor]) -> None:
        for sums, model, already in zip(self._sums, self._models, before, strict=True):
            sums += self._sketch.of(model) - already

    @contextmanager
    def _step(self, trial: Trial) -> Iterator[None]:
        """Make the trial the session's current step, so that the script can call the session."""
        state, rank = self._state, self._state.startup.rank
        current, indices = state.current, trial.parts[rank]
        weight = trial.weights[state.context.terms.loss_mean][rank]
        load = float(len(indices))
        step = LocalStep(
            epoch=state.progress.epoch,
            step=state.progress.step + 1,
            segment=-1,
            indices=indices,
            load=load,
            squares=load,
            longest=float(bool(indices)),
            weight=weight if indices else 0.0,
            ett_s=None,
            threads=0,
        )
        outer = current.running
        current.enter(RunningStep(step, CpuClock(), 0.0, None))
        current.rehearsal = self
        try:
            with self._collectives_compared():
                yield
        finally:
            current.rehearsal = None
            current.enter(outer)

    # Methods that wrapped models and the gate call in a trial.

    @contextmanager
    def forward(self, model: nn.Module) -> Iterator[None]:
        """Freeze dropout and BatchNorm layers of a wrapped model for a forward pass.

        The layers stay frozen until the end of the trial, when `_gradients` restores them.
        """
        self._low |= any(
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) in _HALVES
            for kind in ("cuda", "cpu")
        )
        for module in model.modules():
            if module.training and isinstance(module, _BatchNorm | _DropoutNd):
                module.training = False
            elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
                module.dropout = 0.0
        with _WithoutDropout():
            yield

    def stepping(self, optimiser: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> None:
        """Remove gradients before an optimiser's step, so that the step changes nothing.

        A step with a closure raises a NotProvableError, because the closure computes gradients.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        self._on_step()
        if closure is not None:
            raise NotProvableError("an optimiser steps with a closure")
        for group in optimiser.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @property
    def complete(self) -> bool:
        """Return True if each wrapped model has a gradient in this trial."""
        return len(self._trained) == len(self._models)

    @contextmanager
    def _collectives_compared(self) -> Iterator[None]:
        """In this context, raise a PacelineError before a collective that differs between ranks.

        Without this check, some collectives would abort the process if shapes differ, and ranks
        would wait forever for a rank that does not call the collective.
        """
        kept = {
            name: vars(dist.ProcessGroup)[name]
            for name in self._intercepted & vars(dist.ProcessGroup).keys()
        }
        for name, method in kept.items():
            setattr(dist.ProcessGroup, name, self._comparing(name, method))
        try:
            yield
        finally:
            for name, method in kept.items():
                setattr(dist.ProcessGroup, name, method)

    def _comparing(self, name: str, method: Any) -> Any:
        def comparing(group: Any, *args: Any, **kwargs: Any) -> Any:
            if group.size() == self._state.startup.world:
                self._compare(name, _shapes((args, kwargs)))
            return method(group, *args, **kwargs)

        return comparing

    def _compare(self, name: str, shapes: str) -> None:
        startup, number = self._state.startup, self._collectives
        self._collectives += 1
        keys = [self._key(f"collective/{number}/{rank}") for rank in range(startup.world)]
        startup.store.set(keys[startup.rank], f"{name.strip('_')} of {shapes}")
        with self._state.waiting_in_trials():
            words = [
                _awaited(startup.store, key, self._key(str(rank))) for rank, key in enumerate(keys)
            ]
        if len(set(words)) > 1:
            said = ", ".join(f"{word} on rank {rank}" for rank, word in enumerate(words))
            raise PacelineError(f"the ranks call different collectives in the loop: {said}")


def _awaited(store: Store, key: str, ended: str) -> str:
    """Return another rank's description of its next collective, stored under `key`.

    The key `ended` exists once that rank has ended its part of the trial. Return "none" if the rank
    calls no further collective, or none in time.
    """
    until = time.monotonic() + _COLLECTIVE_WAIT_S
    while not store.check([key]):
        if store.check([ended]) or time.monotonic() > until:
            return store.get(key).decode() if store.check([key]) else "none"
        time.sleep(0.001)
    return store.get(key).decode()


def _shapes(value: Any) -> str:
    if isinstance(value, Tensor):
        return "×".join(map(str, value.shape)) or "1"
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return ", ".join(words for words in map(_shapes, value) if words)
    return ""


def _kept_attributes(modules: Sequence[nn.Module]) -> Callable[[], None]:
    kept = [(m, {k: v for k, v in vars(m).items() if isinstance(v, _PLAIN)}) for m in modules]
    lists = [(v, list(v)) for m in modules for v in vars(m).values() if isinstance(v, list)]

    def restore() -> None:
        for module, attributes in kept:
            vars(module).update(attributes)
        for changed, before in lists:
            changed[:] = before

    return restore


@contextmanager
def _eager() -> Iterator[None]:
    """Run compiled models eagerly, because freezing layers would cause recompilations."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _random_state() -> tuple[object, ...]:
    kind, key, *rest = np.random.get_state()
    state = (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        kind,
        np.asarray(key).tobytes(),
        *rest,
    )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return *state, torch.cuda.get_rng_state().numpy().tobytes()
    return state
