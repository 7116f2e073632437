"""Refuses the script's own gathers of tensors whose shapes differ between ranks.

`all_gather` and `reduce_scatter` need tensors of the same shape on all ranks. A contrastive loss
gathers each rank's embeddings, whose number is the rank's number of samples. Gloo ends the process
with SIGABRT if shapes differ, and no Python code can catch that. In steps with uneven local
batches, this module gathers each rank's shape first and raises a Python error on every rank if the
shapes differ.

The check has no overhead in steps with equal local batches, or for single numbers. Collectives of
DDP and of FSDP are not checked: DDP calls them in C++, and FSDP gathers flat buffers
(`_allgather_base`), which this module does not check if a model is sharded. Functional collectives
are not checked either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.core.errors import PacelineError
from paceline.train.collectives import listen, own
from paceline.train.ddp import CurrentStep
from paceline.train.feature import Feature
from paceline.train.fsdp.model import is_sharded
from paceline.train.state import TrainingState
from paceline.wire import ALLREDUCE

_DIMENSIONS = 15
_REFUSED = (
    "{name} in step {step}: {shapes}. The plan gives ranks local batches of different sizes in "
    "this step, but {name} needs the same shape on all ranks. Gather the ranks' batch sizes first, "
    "pad each tensor to the largest, and cut the gathered tensors; or let ranks get equal local "
    "batches, with the policy bsp and without limits"
)
_NAMES = {
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
_LISTS = ("allgather", "reduce_scatter")


class GatherCheck(Feature):
    """Feature that refuses the script's own gathers if shapes differ; see `refuse_uneven`."""

    def __init__(self, state: TrainingState) -> None:
        models = state.gate.models
        self._end = refuse_uneven(state.current, lambda: any(map(is_sharded, models)))

    def close(self) -> None:
        self._end()


def refuse_uneven(current: CurrentStep, any_sharded: Callable[[], bool]) -> Callable[[], None]:
    """Check the shapes of the script's own gathers; return a function that ends the check.

    `any_sharded` returns True if the session has wrapped a model that `fully_shard` has sharded.
    """
    thread = threading.get_ident()

    def refuse(name: str, group: dist.ProcessGroup, args: Sequence[Any]) -> None:
        running = current.running
        if running is None or not running.in_body or current.reduces:
            return
        step = running.step
        if step.even and step.synchroniser == ALLREDUCE:
            return
        if threading.get_ident() != thread or (name not in _LISTS and any_sharded()):
            return
        mine, others = _tensors(name, args)
        if mine is None or mine.dim() == 0 or mine.dim() > _DIMENSIONS:
            return
        shapes = _gathered(mine, group)
        if group.name() == "gloo" or not others:
            fits = len(set(shapes)) == 1
        # NCCL accepts lists of tensors of different shapes if all ranks expect the same shapes.
        else:
            fits = all(tuple(t.shape) == shape for t, shape in zip(others, shapes, strict=False))
        if not fits:
            words = ", ".join(f"{shape} on rank {rank}" for rank, shape in enumerate(shapes[:8]))
            said = f"the ranks' tensors have different shapes, {words}"
            raise PacelineError(_REFUSED.format(name=_NAMES[name], step=step.step, shapes=said))

    return listen(refuse, _NAMES)


def _tensors(name: str, args: Sequence[Any]) -> tuple[torch.Tensor | None, Sequence[torch.Tensor]]:
    """Return this rank's tensor in a collective, and the collective's tensors for all ranks.

    If the collective has several tensors per rank, it is not checked: return None and an empty
    list. If it has a single tensor for all ranks together, the list is empty, too.
    """
    outputs, inputs = args[0], args[1]
    if name not in _LISTS:
        return (inputs if "gather" in name else outputs), []
    if len(outputs) != 1 or len(inputs) != 1:
        return None, []
    return (inputs[0], outputs[0]) if name == "allgather" else (outputs[0], inputs[0])


def _gathered(mine: torch.Tensor, group: dist.ProcessGroup) -> list[tuple[int, ...]]:
    words = [mine.dim(), *mine.shape, *[0] * (_DIMENSIONS - mine.dim())]
    shape = torch.tensor(words, device=mine.device)
    gathered = [torch.empty_like(shape) for _ in range(group.size())]
    with own():
        group.allgather([gathered], [shape]).wait()
    rows = [row.tolist() for row in gathered]
    return [tuple(row[1 : 1 + row[0]]) for row in rows]
