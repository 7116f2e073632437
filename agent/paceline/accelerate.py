"""Hugging Face Accelerate with Paceline: an `Accelerator` whose training loader follows the plan.

A script changes one import::

    from paceline.accelerate import Accelerator

    accelerator = Accelerator(paceline={"sizes": lengths})
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)

`prepare` replaces the DataLoader with ``shuffle=True`` by a training loader that follows the plan,
and prepares other DataLoaders as Accelerate does. This module needs ``paceline[accelerate]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline.core.errors import MissingExtraError, PacelineError
from paceline.train.adapting import (
    DrivenLoader,
    checked,
    is_shuffled,
    options_of,
    ranks_seed,
    refuse,
    wrapped,
)
from paceline.train.session import Session

try:
    import accelerate
    from accelerate.state import GradientState
    from accelerate.utils import DistributedType, gather_object, recursively_apply, send_to_device
except ModuleNotFoundError as error:
    raise MissingExtraError("paceline.accelerate", "accelerate", error) from error

_KINDS = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}
_NO_LOADER = (
    "a trainable model was prepared, but no training data: give accelerator.prepare(…) the "
    "DataLoader with shuffle=True in the same call as the model, or before it"
)


class Loader(DrivenLoader):
    """Training loader that `Accelerator.prepare` returns; its session is `session`."""

    def __init__(
        self, session: Session, device: torch.device | None, options: Mapping[str, Any]
    ) -> None:
        def place(batch: Any) -> Any:
            return batch if device is None else send_to_device(batch, device)

        super().__init__(session, place, options)
        self.gradient_state = GradientState()
        self.end_of_dataloader = False
        # In Accelerate's loaders, the number of samples in a last batch that is filled up with
        # repeated samples. Paceline repeats no samples.
        self.remainder = 0

    def __iter__(self) -> Iterator[Any]:
        self.end_of_dataloader = False
        self.gradient_state._add_dataloader(self)
        try:
            for batch in super().__iter__():
                self.end_of_dataloader = self.in_last_step
                yield batch
        finally:
            self.gradient_state._remove_dataloader(self)

    def set_epoch(self, epoch: int) -> None:
        """Set the first epoch's number, unless training has begun or a checkpoint was loaded."""
        if self.session._loop.is_fresh:
            self.session._loop.set_epoch(epoch)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """`accelerate.Accelerator` that trains with Paceline.

    It trains as Accelerate does with DistributedDataParallel: `backward`, `accumulate`,
    `clip_grad_norm_`, mixed precision, `save_state` and `load_state` work as usual. The global
    batch is the DataLoader's batch size times the number of processes, or with
    ``split_batches=True`` the batch size alone. In the training loop ranks have batches of
    different sizes, which `gather` and `gather_for_metrics` accept.

    Args:
        *args: positional arguments of `accelerate.Accelerator`.
        paceline: the options sizes, loss_mean, limits, shapes, coast_steps and seed of
            `paceline.Session` (seed's default: the seed of Accelerate's seedable sampler), and the
            option batchnorm of `Session.wrap`.
        **kwargs: keyword arguments of `accelerate.Accelerator`.

    Raises:
        PacelineError: Paceline does not support a setting of Accelerate.
        TypeError: an option in `paceline` is unknown, or Accelerate sets it.
    """

    def __init__(
        self, *args: Any, paceline: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._session_options, self._batchnorm = checked(paceline or {}, "Accelerator(paceline=…)")
        self._driven: Loader | None = None
        refuse_settings(self)

    @property
    def session(self) -> Session:
        """Return the training loader's session; raise a PacelineError if there is none yet."""
        if self._driven is None:
            raise PacelineError(_NO_LOADER)
        return self._driven.session

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare objects as Accelerate does; the shuffled DataLoader becomes the training loader.

        Raises:
            PacelineError: there are two shuffled DataLoaders, or a model to train but no shuffled
                DataLoader.
            ValueError: Paceline cannot train this model correctly, or cannot replace the sampler of
                the DataLoader.
        """
        placed = device_placement or [None] * len(args)
        objects = [
            self._train_on(given, place) if is_shuffled(given) else given
            for given, place in zip(args, placed, strict=False)
        ]
        return super().prepare(*objects, device_placement=device_placement)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a DataLoader as Accelerate does; a shuffled one becomes the training loader."""
        if is_shuffled(data_loader):
            return self._train_on(data_loader, kwargs.get("device_placement"))
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model as Accelerate does, but use `Session.wrap` if it will be trained."""
        trained = any(parameter.requires_grad for parameter in model.parameters())
        if evaluation_mode or not trained or getattr(model, "_is_accelerate_prepared", False):
            return self._plain_model(model, device_placement, evaluation_mode)
        session = self.session
        plain = self._plain_model(model, device_placement, True)
        return wrap_prepared(self, session, plain, self._batchnorm)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Report the loss, and run the backward pass as Accelerate does."""
        if self._driven is not None and self._driven.running and loss.ndim == 0:
            self._driven.session.log(loss=loss)
        super().backward(loss, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """Gather as Accelerate does; in the training loop, ranks' first dimensions may differ.

        A rank without samples trains a filler sample. The result includes the filler's rows;
        `gather_for_metrics` leaves them out.
        """
        if not self._in_training:
            return super().gather(tensor)
        return self._gather_ragged(tensor, drop=False)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as Accelerate does; in the training loop, return each sample of a step once."""
        if not self._in_training or self._driven is None:
            return super().gather_for_metrics(input_data, use_gather_object)
        empty = self._driven.session.batch.empty
        if use_gather_object or not _is_tensors(input_data):
            with self._driven.waiting():
                return gather_object([] if empty else input_data)
        return self._gather_ragged(input_data, drop=empty)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Skip batches of another loader; raise a PacelineError for the training loader."""
        if isinstance(dataloader, DrivenLoader):
            raise PacelineError(
                "skip_first_batches: after accelerator.load_state(…) the training loader "
                "automatically continues with the remaining samples of its epoch: iterate over it "
                "as it is"
            )
        return super().skip_first_batches(dataloader, num_batches)

    def join_uneven_inputs(self, *_: Any, **__: Any) -> NoReturn:
        """Raise a PacelineError: with Paceline's loader, all ranks have equally many batches."""
        raise PacelineError(
            "join_uneven_inputs: Paceline's loader ends on all ranks together: leave the call out"
        )

    def free_memory(self, *objects: Any) -> Any:
        """Free memory as Accelerate does; afterwards another training loader may be prepared."""
        if self._driven is not None:
            self._driven.session.close()
            self._custom_objects.remove(self._driven)
            self._driven = None
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Close the session, which delivers its pending messages, and end as Accelerate does."""
        if self._driven is not None:
            self._driven.session.close()
        super().end_training()

    @property
    def _in_training(self) -> bool:
        """Return True in a step of the training loop, outside of any nested loop over a loader."""
        return (
            self._driven is not None
            and self.num_processes > 1
            and self.gradient_state.active_dataloader is self._driven
            and self._driven.running
        )

    def _plain_model(
        self, model: nn.Module, device_placement: bool | None, evaluation_mode: bool
    ) -> nn.Module:
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return prepared

    def _train_on(self, loader: DataLoader[Any], device_placement: bool | None) -> Loader:
        if self._driven is not None:
            raise PacelineError(
                "a second DataLoader with shuffle=True was prepared, but an Accelerator supports "
                "only one: evaluate with shuffle=False, and create another Accelerator for other "
                "training"
            )
        options = options_of(loader)
        batch_size = loader.batch_size or 0
        seed = self.dataloader_config.data_seed
        session = Session(
            loader.dataset,
            global_batch=batch_size if self.split_batches else batch_size * self.num_processes,
            drop_last=loader.drop_last,
            **{
                "seed": ranks_seed(torch.initial_seed() % 2**63 if seed is None else seed),
                **self._session_options,
            },
        )
        places = self.device_placement if device_placement is None else device_placement
        driven = self._driven = Loader(session, self.device if places else None, options)
        driven.begins = self._declare
        self._dataloaders.append(driven)
        self.register_for_checkpointing(driven)
        return driven

    def _declare(self) -> None:
        if len(self._optimizers) == 1 and self._driven is not None:
            self._driven.session.optimizer(self._optimizers[0].optimizer, self.scaler)

    def _gather_ragged(self, data: Any, *, drop: bool) -> Any:
        """Gather tensors whose first dimensions differ between ranks.

        `drop` is True if this rank has only a filler sample, whose rows are left out.
        """
        gather = super().gather

        def gathered(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.ndim == 0:
                every: torch.Tensor = gather(tensor)
                return every
            rows = tensor[:0] if drop else tensor
            counts = gather(torch.tensor([len(rows)], device=tensor.device)).tolist()
            padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
            padded[: len(rows)] = rows
            parts = gather(padded).chunk(len(counts))
            return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])

        assert self._driven is not None
        with self._driven.waiting():
            return recursively_apply(gathered, data, error_on_other_type=True)


def wrap_prepared(
    accelerator: accelerate.Accelerator, session: Session, model: nn.Module, batchnorm: str | None
) -> nn.Module:
    """Call `Session.wrap` for a model to train, which Accelerate has prepared as if for evaluation.

    So Accelerate has moved the model to its device and put its forward pass under autocast, but has
    not wrapped it in DistributedDataParallel.
    """
    handler = accelerator.ddp_handler
    options: dict[str, Any] = handler.to_kwargs() if handler is not None else {}
    if accelerator.device.type == "cuda" and accelerator.num_processes > 1:
        index = accelerator.local_process_index
        options |= {"device_ids": [index], "output_device": index}
    made = wrapped(session, model, batchnorm, options)
    made._is_accelerate_prepared = True  # type: ignore[assignment]
    return made


def refuse_settings(accelerator: accelerate.Accelerator) -> None:
    """Raise a PacelineError for settings of Accelerate that Paceline does not support."""
    kind, config = accelerator.distributed_type, accelerator.dataloader_config
    if kind not in _KINDS:
        refuse(
            f"Accelerate is set to {kind.value}, but Paceline needs whole models on all ranks",
            "leave its plugin out, so that Accelerate uses DistributedDataParallel",
        )
    parallel = accelerator.parallelism_config
    if parallel is not None and parallel.total_size != parallel.dp_replicate_size:
        refuse(
            "parallelism_config splits the model over ranks",
            "leave it out, because Paceline trains a whole model on each rank",
        )
    if accelerator.mixed_precision == "fp8":
        refuse("mixed_precision='fp8' converts the model itself", "use 'bf16', 'fp16' or 'no'")
    if config.dispatch_batches:
        refuse("dispatch_batches=True makes rank 0 read all batches", "leave it out")
    if config.use_stateful_dataloader:
        refuse(
            "use_stateful_dataloader=True",
            "leave it out, because save_state saves the training position",
        )
    hook = getattr(accelerator.ddp_handler, "comm_hook", None)
    if hook is not None and hook.value != "no":
        refuse(
            f"DistributedDataParallelKwargs(comm_hook={hook.value}): Paceline reduces gradients in "
            "its own hook",
            "leave it out",
        )


def _is_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
