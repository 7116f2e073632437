"""Profile of a run that begins under LBB, without a call of `Session.profile` in the script.

`Loader` calls `replay.profile_first` before its first iteration. Each rank then computes 2, 4, 8, …
samples in copies of the statements of the script's loop, as `paceline.train.proof` does, and times
them (paper LBB, Alg. 1). The samples are the data set's own, of typical sizes, and each rank
computes alone: a loop that calls a collective before its gradients has no profile.

Afterwards model, buffers, gradients and random numbers are as before, and no optimiser has stepped.
The largest batch is twice an equal share of a step (`paceline.core.trials`), so the samples of all
passes together are 12 to 18 equal shares. A rank spends at most about `MOST_S` seconds on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.terms import MEANS
from paceline.train.compiling import is_compiled
from paceline.train.ddp import WeightedDDP
from paceline.train.profile import Hold
from paceline.train.proof import NotProvableError, Rehearsal, Trial

if TYPE_CHECKING:
    from paceline.train.context import RunContext

# Longest time of a rank's profile, in seconds.
MOST_S = 60.0
# Methods of a process group in which ranks wait for each other.
_COMMUNICATING = {
    *("_allgather_base", "_reduce_scatter_base", "allgather", "allreduce", "alltoall", "barrier"),
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "alltoall_base"),
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce_coalesced"),
    *("broadcast", "gather", "merge_remote_group", "monitored_barrier", "recv", "recv_anysource"),
    *("reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("reduce_scatter_tensor_coalesced", "scatter", "send", "split_group"),
}
# Namespaces of the operators that run in place of these methods if C++ code calls a collective.
_OPERATORS = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}


def reason(context: RunContext, lanes: object, models: list[Any]) -> str:
    """Return why the ranks cannot have a profile, worded to follow "because "; "" if they can.

    `lanes` are the groups of a mesh; None: each rank computes its own batches.
    """
    reasons = (
        (not context.prove, "prove=False is set, so the loop's body is not run before training"),
        (lanes is not None, "ranks of a mesh compute each batch together"),
        (context.terms.token_budget is not None, "with token_budget batches have no fixed count"),
        (context.reader is not None, "the data is a stream, whose samples have no index"),
        (context.data is not None, "each node stores only its own samples"),
        (context.terms.shapes.samples > 1, "shapes allows only some numbers of samples"),
        (0 in context.limits.samples, "limits leave a rank without samples"),
        (not models, "no model is wrapped"),
        (
            not all(isinstance(model, WeightedDDP) for model in models),
            "ranks of a sharded model compute each batch together",
        ),
        (any(map(is_compiled, models)), "a compiled model compiles for each number of samples"),
        (
            any(getattr(model, "static_graph", False) for model in models),
            "static_graph=True is set",
        ),
        (
            any(getattr(model, "broadcast_buffers", False) for model in models),
            "ranks exchange buffers in each forward pass",
        ),
    )
    return next((why for holds, why in reasons if holds), "")


class TimedTrials(Rehearsal):
    """Execution of the loop's body on trial batches of this rank, with timing.

    Unlike in the check of the loss, dropout and BatchNorm layers compute as in training. Each rank
    has its own number of passes, so a pass must not wait for another rank.
    """

    _intercepted: ClassVar = _COMMUNICATING
    _ended = 0.0
    _is_first = True

    def time(self, indices: list[int], run: Callable[[Any], object], hold: Hold) -> float:
        """Return the seconds in which `run` computes the gradients of a batch of these samples.

        `hold` waits until the emulated device, if there is one, would be done.

        Raises:
            NotProvableError: the gradients cannot be computed alone.
        """
        rank, world = self._state.startup.rank, self._state.startup.world
        weights = dict.fromkeys(MEANS, [1 / world] * world)
        trial = Trial("profile", [indices if k == rank else [] for k in range(world)], weights)
        self._trained.clear()
        batch = self._batch(indices)
        with ExitStack() as held:
            for each in (self._random(), self._gradients(), self._step(trial)):
                held.enter_context(each)
            hook = register_module_forward_pre_hook(_refuse_ddp)
            held.callback(hook.remove)
            # Only the first pass, which is not timed, because this mode makes each operator slower.
            if self._is_first:
                held.enter_context(_NoCollectives())  # type: ignore[no-untyped-call]
                self._is_first = False
            self._state.context.device.finish()
            began = time.perf_counter()
            run(batch)
            # What the body does after the gradients does not count.
            after_s = time.perf_counter() - self._ended
            hold(len(indices), began + after_s)
            return time.perf_counter() - began - after_s

    @contextmanager
    def forward(self, model: nn.Module) -> Iterator[None]:
        """Leave the layers of a wrapped model as they are in training."""
        yield

    def _before_backward(self) -> list[Tensor]:
        return []

    def _after_backward(self, before: list[Tensor]) -> None:
        self._state.context.device.finish()
        self._ended = time.perf_counter()

    def _comparing(self, name: str, method: Any) -> Any:
        def refusing(group: Any, *args: Any, **kwargs: Any) -> Any:
            if group.size() > 1:
                raise _waits(name)
            return method(group, *args, **kwargs)

        return refusing


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that refuses collectives which are called from C++, such as functional collectives."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in _OPERATORS and _ranks_of(args) > 1:
            raise _waits(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _ranks_of(args: tuple[Any, ...]) -> int:
    """Return the number of ranks of the process group in an operator's arguments; 0: no group."""
    for each in args:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return dist.ProcessGroup.unbox(each).size()
    # Functional collectives name their group in the last argument.
    if args and isinstance(args[-1], str):
        group: Any = dist.distributed_c10d._resolve_process_group(args[-1])  # type: ignore[attr-defined,arg-type]
        return int(group.size())
    return 0


def _waits(name: str) -> NotProvableError:
    return NotProvableError(f"ranks wait for each other before the gradients, in {name.strip('_')}")


def _refuse_ddp(module: nn.Module, _inputs: Any) -> None:
    if isinstance(module, DistributedDataParallel) and not isinstance(module, WeightedDDP):
        raise NotProvableError(
            "a model that session.wrap has not wrapped reduces its own gradients (a plain "
            "DistributedDataParallel)"
        )
