"""Hugging Face Trainer with Paceline: a `Trainer`, and a mixin for its subclasses.

A script changes one import::

    from paceline.transformers import Trainer

    trainer = Trainer(model, args, train_dataset=train, paceline={"sizes": lengths})
    trainer.train()

or, for a subclass such as TRL's::

    class PacelineSFTTrainer(PacelineMixin, SFTTrainer): ...

This module needs ``paceline[transformers]``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import RandomSampler

from paceline.core.errors import MissingExtraError, PacelineError
from paceline.train.adapting import DrivenLoader, checked, loading_of, ranks_seed, refuse
from paceline.train.session import Session

try:
    import transformers
    import transformers.trainer
    from accelerate.utils import send_to_device
    from transformers import TrainerCallback

    from paceline.accelerate import refuse_settings, wrap_prepared
except ModuleNotFoundError as error:
    raise MissingExtraError("paceline.transformers", "transformers", error) from error

STATE = "paceline_session.pt"


class _Chunks:
    """Collate function that divides a local batch into the batches of gradient accumulation."""

    def __init__(self, collate: Callable[[list[Any]], Any], number: int) -> None:
        self._collate, self._number = collate, number

    def __call__(self, items: list[Any]) -> list[Any]:
        chunks, start = [], 0
        for count in counts_of(len(items), self._number):
            # If a rank has fewer samples than batches, its first sample is also the only one of
            # each remaining batch, with weight 0.
            chunks.append(self._collate(items[start : start + count] or items[:1]))
            start += count
        return chunks


def counts_of(samples: int, chunks: int) -> list[int]:
    """Divide a number of samples by a number of batches; the parts differ by at most one."""
    each, rest = divmod(samples, chunks)
    return [each + (place < rest) for place in range(chunks)]


class Loader(DrivenLoader):
    """Loader of Trainer's loop. Each item is the list of a step's batches."""

    accumulates = 1

    def __len__(self) -> int:
        return super().__len__() * self.accumulates


@dataclass
class _Turn:
    """State of the step that Trainer's loop is in.

    Args:
        counts: number of samples of each of the step's batches on this rank; all 0 if the rank has
            only a filler sample.
        items: for each of the step's batches, the number of its labels that count in the loss;
            None: the number is unknown.
        all_items: number of the step's labels that count in the loss: of all ranks if Trainer
            averages over ranks, else of this rank.
        weight: this rank's weight in the update.
    """

    counts: list[int]
    items: list[torch.Tensor] | None
    all_items: torch.Tensor | None
    weight: float
    # Index of the current batch.
    place: int = 0
    loss: torch.Tensor | float = 0.0


@dataclass(frozen=True)
class _Loss:
    """Normalisation of the script's loss. It is measured, because it depends on the script's code.

    With `by_items` the loss is a sum over labels, divided by ``num_items_in_batch``; without it,
    the loss is a mean over the batch, whatever ``num_items_in_batch`` is. Trainer multiplies the
    loss by `times`, because DistributedDataParallel averages the gradients over ranks.
    """

    by_items: bool
    times: float


class PacelineMixin:
    """Mixin for `transformers.Trainer`, or a subclass of it, that trains with Paceline.

    In the list of base classes, the mixin must precede the trainer. It trains as Trainer does with
    DistributedDataParallel. The global batch is ``per_device_train_batch_size`` times the
    number of processes, times ``gradient_accumulation_steps``. Each rank divides its local batch of
    a step into ``gradient_accumulation_steps`` batches. ``num_items_in_batch`` counts the labels of
    the local batches of all ranks. Checkpoints contain the session's position in the training, and
    training resumes from that position.

    Args:
        *args: positional arguments of the trainer.
        paceline: the options sizes, limits, shapes, coast_steps, loss_mean and seed of
            `paceline.Session`, and the option batchnorm of `Session.wrap`. Defaults: for sizes, the
            column `length_column_name` or ``train_dataset.sizes``; for seed, Trainer's seed. If
            gradients are accumulated, limits and shapes apply to a rank's whole local batch of a
            step.
        **kwargs: keyword arguments of the trainer.

    Raises:
        PacelineError: a training argument is not supported, because it shards the model, or
            chooses the samples of a batch.
        TypeError: an option in `paceline` is unknown, or Trainer sets it.
    """

    def __init__(
        self, *args: Any, paceline: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._session_options, self._batchnorm = checked(paceline or {}, "Trainer(paceline=…)")
        self._driven: Loader | None = None
        self._turn: _Turn | None = None
        self._loss: _Loss | None = None
        self._trainer.add_callback(_Ends(self))
        _refuse_arguments(self._trainer.args, self._trainer.accelerator)

    @property
    def _trainer(self) -> Any:
        """Return this object, typed as the trainer that the mixin extends."""
        return self

    @property
    def session(self) -> Session:
        """Return the newest training's session; raise a PacelineError before the first `train`."""
        return self._loader.session

    def get_train_dataloader(self) -> Loader:
        """Return the training loader of a new session."""
        trainer = self._trainer
        given = super().get_train_dataloader()  # type: ignore[misc]
        if trainer.accelerator._dataloaders and trainer.accelerator._dataloaders[-1] is given:
            trainer.accelerator._dataloaders.pop()
        sampler = given.get_sampler() if hasattr(given, "get_sampler") else given.sampler
        if not isinstance(sampler, RandomSampler) or sampler.replacement:
            refuse(
                f"the training loader samples with a {type(sampler).__name__}, but Paceline plans "
                "which samples a batch has",
                "leave train_sampling_strategy at 'random', use no iterable data set, and do not "
                "override get_train_dataloader",
            )
        accumulates = trainer.args.gradient_accumulation_steps
        if accumulates > 1 and self._session_options.get("loss_mean", "samples") != "samples":
            refuse(
                "loss_mean='size' and gradient_accumulation_steps > 1: Trainer weights the batches "
                "of a step by their number of samples",
                "leave loss_mean out, as Trainer counts labels, or do not accumulate gradients",
            )
        ranks = 1 if trainer.accelerator.split_batches else trainer.args.world_size
        options = {
            "seed": ranks_seed(getattr(sampler, "initial_seed", torch.initial_seed()) % 2**63),
            "sizes": self._sizes(),
            **self._session_options,
        }
        if self._driven is not None:
            self._driven.session.close()
        session = Session(
            given.dataset,
            global_batch=trainer._train_batch_size * ranks * accumulates,
            drop_last=trainer.args.dataloader_drop_last,
            **options,
        )
        loading = loading_of(given)
        loading["collate_fn"] = _Chunks(loading["collate_fn"], accumulates)
        accelerator = trainer.accelerator

        def place(chunks: list[Any]) -> Any:
            return send_to_device(chunks, accelerator.device, non_blocking=accelerator.non_blocking)

        driven = self._driven = Loader(session, place, loading)
        driven.accumulates = accumulates
        driven.begins = self._declare
        self._loss = None
        return driven

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """Return a step's batches on this rank, and the step's number of labels.

        Labels of all ranks are counted if Trainer averages over ranks, else labels of this rank.
        """
        trainer, loader = self._trainer, self._loader
        chunks = next(epoch_iterator, None)
        if chunks is None:
            if loader.session.stopped:
                trainer.control.should_training_stop = True
            return [], None
        batch = loader.session.batch
        counts = counts_of(batch.samples, loader.accumulates)
        items = self._items(chunks, counts, device)
        every = sum(items, torch.zeros((), device=device)) if items is not None else None
        if every is not None and trainer.args.average_tokens_across_devices:
            with loader.waiting():
                every = trainer.accelerator.gather(every).sum()
        self._turn = _Turn(counts, items, every, batch.weight)
        return chunks, every

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Run forward and backward pass of a batch; return its loss, to be averaged over ranks."""
        turn = self._turn
        if turn is None:
            raise PacelineError(
                "training_step: call trainer.train() instead, whose loop provides the batches"
            )
        if turn.items is not None and self._loss is None:
            self._loss = self._normalisation(model, inputs)
        items = None if turn.items is None else turn.items[turn.place].clamp(min=1)
        made: torch.Tensor = super().training_step(model, inputs, items)  # type: ignore[misc]
        turn.place += 1
        turn.loss = turn.loss + made
        self._loader.session.log(loss=turn.loss)
        if not any(turn.counts):
            return torch.zeros_like(made)
        return made * (turn.weight * self._loader.session.world)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return Trainer's loss; in training, it is scaled as `Session.wrap` expects."""
        compute = super().compute_loss  # type: ignore[misc]
        if self._turn is None or not model.training:
            return compute(model, inputs, return_outputs, num_items_in_batch)
        with self._averaging(False):
            made = compute(model, inputs, return_outputs, num_items_in_batch)
        factor = self._factor(self._turn)
        return (made[0] * factor, made[1]) if return_outputs else made * factor

    def _factor(self, turn: _Turn) -> torch.Tensor | float:
        """Return the factor by which a batch's mean loss is multiplied.

        The update is Σ_j w_j Σ_c ∇X_jc over ranks j with weights w_j and their batches c. X_jc is
        the mean loss of batch c on rank j, times this factor. If all local batches are equally
        large, the update is that of Trainer: the mean over ranks.
        """
        trainer, accumulates = self._trainer, self._loader.accumulates
        samples, place = sum(turn.counts), turn.place
        if not samples:
            # Any factor will do, because the gradient of a filler sample is discarded.
            return 1.0
        if turn.items is None or turn.all_items is None or self._loss is None:
            return accumulates * turn.counts[place] / samples
        share = turn.items[place] / turn.all_items.clamp(min=1)
        if trainer.args.average_tokens_across_devices:
            even = 1 / trainer.args.world_size if self._loss.by_items else accumulates
            return share * (even * self._loss.times / turn.weight)
        return share if self._loss.by_items else accumulates * turn.counts[place] / samples

    def _normalisation(self, model: nn.Module, inputs: dict[str, Any]) -> _Loss | None:
        """Compute the loss three times before the first step, to determine its normalisation.

        A signature does not show the normalisation, because many models accept
        ``num_items_in_batch`` and ignore it.
        Return None if this batch's loss is 0 or not finite, for example because none of its labels
        count: such a batch does not show the normalisation.
        """
        trainer = self._trainer
        placed = trainer._prepare_inputs(inputs)

        def ask(items: float, averaging: bool) -> float:
            number = torch.tensor(items, device=trainer.args.device)
            compute = super(PacelineMixin, self).compute_loss  # type: ignore[misc]
            with self._averaging(averaging):
                return float(compute(plain, dict(placed), num_items_in_batch=number))

        plain = trainer.accelerator.unwrap_model(model)
        modes = [(module, module.training) for module in plain.modules()]
        plain.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng():
                loss = ask(1.0, False)
                if loss == 0 or not math.isfinite(loss):
                    return None
                half, times = ask(2.0, False), ask(1.0, True)
        finally:
            for module, training in modes:
                module.training = training
        by_items = abs(half) < 0.99 * abs(loss)
        return _Loss(by_items, round(times / loss))

    @contextlib.contextmanager
    def _averaging(self, averages: bool) -> Iterator[None]:
        """Switch off the argument `average_tokens_across_devices` in a block, unless `averages`.

        With this argument, Trainer sums the numbers of labels over ranks, and multiplies the loss
        by the number of ranks to compensate for DistributedDataParallel's mean.
        """
        args = self._trainer.args
        before = args.average_tokens_across_devices
        args.average_tokens_across_devices = averages and before
        try:
            yield
        finally:
            args.average_tokens_across_devices = before

    def _items(
        self, chunks: list[Any], counts: list[int], device: torch.device
    ) -> list[torch.Tensor] | None:
        """Return the number of labels of each batch that count in the loss; None: it is unknown."""
        with self._averaging(False):
            items = [self._trainer._get_num_items_in_batch([chunk], device) for chunk in chunks]
        if any(item is None for item in items):
            return None
        return [
            torch.as_tensor(item, device=device) if count else torch.zeros((), device=device)
            for item, count in zip(items, counts, strict=True)
        ]

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        if not training or self._driven is None:
            return super()._wrap_model(model, training, dataloader)  # type: ignore[misc]
        accelerator = self._trainer.accelerator
        plain = accelerator.prepare_model(self._trainer.model, evaluation_mode=True)
        return wrap_prepared(accelerator, self._driven.session, plain, self._batchnorm)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self._driven is not None and self._trainer.args.should_save:
            torch.save(self._driven.state_dict(), Path(output_dir, STATE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is None or self._driven is None:
            return
        saved = Path(checkpoint, STATE)
        if not saved.exists():
            refuse(
                f"{checkpoint} has no {STATE}: it was saved without Paceline, or with "
                "save_only_model=True",
                "continue without Paceline, or start a new training from its model",
            )
        self._driven.load_state_dict(torch.load(saved, weights_only=True))

    @property
    def _loader(self) -> Loader:
        if self._driven is None:
            raise PacelineError("there is no session yet: call trainer.train()")
        return self._driven

    def _declare(self) -> None:
        trainer = self._trainer
        self._loader.session.optimizer(trainer.optimizer.optimizer, trainer.accelerator.scaler)

    def _sizes(self) -> Any:
        data, column = self._trainer.train_dataset, self._trainer.args.length_column_name
        if column in (getattr(data, "column_names", None) or ()):
            return list(data[column])
        return getattr(data, "sizes", "auto")


class Trainer(PacelineMixin, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` that trains with Paceline; see `PacelineMixin`."""


class _Ends(TrainerCallback):  # type: ignore[misc]
    """Callback that ends the loader's epoch with Trainer's, and closes the session at the end."""

    def __init__(self, mixin: PacelineMixin) -> None:
        self._mixin = mixin

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """End the loader's epoch before Trainer evaluates the model and saves it."""
        self._mixin._loader.finish()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._mixin._turn = None
        self._mixin._loader.session.close()


def _refuse_arguments(args: transformers.TrainingArguments, accelerator: Any) -> None:
    refuse_settings(accelerator)
    if args.n_gpu > 1:
        refuse(
            "several GPUs in one process (DataParallel)",
            "start one process per GPU, with paceline run or torchrun",
        )
    if args.auto_find_batch_size:
        refuse(
            "auto_find_batch_size=True changes the global batch",
            "leave it out; paceline={'limits': …} limits the samples of a rank",
        )
    if args.train_sampling_strategy != "random":
        refuse(
            f"train_sampling_strategy={args.train_sampling_strategy!r}: Paceline plans which "
            "samples a batch has",
            "leave it at 'random' and give paceline={'sizes': …}",
        )
    if args.ignore_data_skip:
        refuse(
            "ignore_data_skip=True",
            "leave it out: Paceline's loader skips batches without reading them",
        )


_skip_first_batches = transformers.trainer.skip_first_batches


def _skip(loader: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace Accelerate's `skip_first_batches` in Trainer's module.

    Paceline's loader resumes automatically, so it is returned unchanged.
    """
    if isinstance(loader, Loader):
        return loader
    return _skip_first_batches(loader, *args, **kwargs)


transformers.trainer.skip_first_batches = _skip
