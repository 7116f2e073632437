"""A checkpoint's contents: the state of a script's objects, and torch's random numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.train.ddp import SingleProcess, WeightedDDP
from paceline.train.fsdp.kinds import is_dtensor, is_sharded

# Maps a key to a tensor, or to a value that can be pickled.
State = dict[str, Any]


@dataclass(frozen=True)
class Contents:
    """Objects that a script trains with. `model` is the model without the session's wrapper.

    The state is flat, so that each tensor of the model and of the optimiser is an entry of its own
    in the checkpoint, with the key ``model/NAME`` or ``optimizer/PARAMETER/NAME``. The entry
    ``optimizer`` has the other values of the optimiser, and ``scheduler`` and ``scaler`` are one
    entry each.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    scaler: torch.amp.GradScaler | None

    def state(self) -> State:
        """Return the state of all objects."""
        state: State = {f"model/{name}": v for name, v in self.model.state_dict().items()}
        state |= _split(self.optimizer.state_dict())
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        return state

    def shards(self) -> State:
        """Return this rank's parts of the sharded tensors; empty if the model is not sharded."""
        if not is_sharded(self.model):
            return {}
        return {key: value for key, value in self.state().items() if is_dtensor(value)}

    def layout(self) -> dict[str, torch.Tensor]:
        """Return, by key, how each entry is split over the ranks: a tensor with the same split.

        The tensors of an optimiser's state may not exist yet, so those of one parameter have a
        common key, ``optimizer/PARAMETER``, and are split like the parameter.
        """
        return dict(self._layout()) if is_sharded(self.model) else {}

    def _layout(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self.model.state_dict().items():
            if is_dtensor(value):
                yield f"model/{name}", value
        given = (p for group in self.optimizer.param_groups for p in group["params"])
        for number, parameter in enumerate(given):
            if is_dtensor(parameter):
                yield f"optimizer/{number}", parameter

    def load(self, state: State) -> None:
        """Load a state into the objects.

        Raises:
            RuntimeError, ValueError: the state is from a model or an optimiser with other
                parameters.
        """
        prefix = "model/"
        model = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(_joined(state))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])

    @staticmethod
    def of(
        model: Any,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        scaler: torch.amp.GradScaler | None,
    ) -> Contents:
        """Check the arguments of `Session.checkpoint`; the TypeError names a wrong argument."""
        kinds: list[tuple[str, Any, Any]] = [
            ("model", model, nn.Module),
            ("optimizer", optimizer, torch.optim.Optimizer),
            ("scheduler", scheduler, torch.optim.lr_scheduler.LRScheduler | None),
            ("scaler", scaler, torch.amp.GradScaler | None),
        ]
        for name, value, kind in kinds:
            if not isinstance(value, kind):
                raise TypeError(f"{name} is a {type(value).__name__}: give torch's own {name}")
        if hasattr(optimizer, "consolidate_state_dict"):
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}, whose state is split over the ranks: "
                "give torch's own optimizer; to split its state, shard the model with fully_shard, "
                "whose checkpoints have every rank's part; or save it yourself with "
                "session.state_dict(), after optimizer.consolidate_state_dict()"
            )
        module = model.module if isinstance(model, WeightedDDP | SingleProcess) else model
        return Contents(module, optimizer, scheduler, scaler)

    @property
    def given(self) -> dict[str, bool]:
        """Return for each optional object, by name, whether the script has given it."""
        return {"scheduler": self.scheduler is not None, "scaler": self.scaler is not None}


def _split(optimizer: State) -> State:
    """Give each tensor of an optimiser's state a key of its own; keep the rest as one entry."""
    tensors: State = {}
    rest: State = {}
    for parameter, values in optimizer["state"].items():
        rest[parameter] = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer/{parameter}/{name}"] = value
            else:
                rest[parameter][name] = value
    return {**tensors, "optimizer": {**optimizer, "state": rest}}


def _joined(state: State) -> State:
    optimizer: State = state["optimizer"]
    for key, value in state.items():
        if key.startswith("optimizer/"):
            _, parameter, name = key.split("/", 2)
            optimizer["state"][int(parameter)][name] = value
    return optimizer


def copied(state: State) -> State:
    """Return a copy of a state on the CPU, so that training does not change it."""
    return {
        key: value.detach().to("cpu", copy=True)
        if isinstance(value, torch.Tensor)
        else copy.deepcopy(value)
        for key, value in state.items()
    }


def random_state(rank: int) -> State:
    """Return the states of torch's random numbers on this rank's CPU and CUDA device."""
    state: State = {f"random/{rank}/cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state[f"random/{rank}/cuda"] = torch.cuda.get_rng_state()
    return state


def of_rank(key: str, rank: int) -> bool:
    """Return whether a rank reads an entry: every entry except other ranks' random numbers."""
    return not key.startswith("random/") or key.startswith(f"random/{rank}/")


def set_random_state(state: State, rank: int) -> None:
    """Restore the random numbers from a state, if the rank existed when the state was saved."""
    if (cpu := state.get(f"random/{rank}/cpu")) is not None:
        torch.set_rng_state(cpu)
    if (cuda := state.get(f"random/{rank}/cuda")) is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(cuda)
