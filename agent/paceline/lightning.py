"""Lightning with Paceline: a strategy for Lightning's Trainer.

A script changes one argument::

    from paceline.lightning import PacelineStrategy

    trainer = lightning.Trainer(strategy=PacelineStrategy(paceline={"sizes": lengths}))
    trainer.fit(module, loader)

The strategy is for ``import lightning``; the separate package ``pytorch_lightning`` has classes of
its own. This module needs ``paceline[lightning]``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from paceline.core.errors import MissingExtraError, PacelineError
from paceline.train.adapting import DrivenLoader, checked, loading_of, refuse, wrapped
from paceline.train.session import Session

try:
    import lightning.pytorch as pl
    from lightning.fabric.utilities.data import _auto_add_worker_init_fn
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as error:
    raise MissingExtraError("paceline.lightning", "lightning", error) from error

STATE = "paceline"


class PacelineStrategy(DDPStrategy):  # type: ignore[misc]
    """`DDPStrategy` that trains with Paceline.

    It trains as `DDPStrategy` does: ``accumulate_grad_batches``, gradient clipping, mixed
    precision, ``sync_batchnorm`` and limits on the number of batches work as usual. The global
    batch is the training DataLoader's batch size times the number of ranks. Checkpoints contain the
    session's position in the training, and ``fit(ckpt_path=…)`` resumes from that position.

    Args:
        paceline: the options sizes, loss_mean, limits, shapes, coast_steps and seed of
            `paceline.Session` (seed's default: the seed of Lightning's DistributedSampler), and the
            option batchnorm of `Session.wrap`.
        **options: options of `DDPStrategy`.

    Raises:
        PacelineError: an option changes how gradients or models are averaged.
        TypeError: an option in `paceline` is unknown, or Lightning sets it.
    """

    strategy_name = "paceline"

    def __init__(self, *, paceline: Mapping[str, Any] | None = None, **options: Any) -> None:
        for option in ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper"):
            if options.get(option) is not None:
                refuse(
                    f"PacelineStrategy({option}=…): Paceline reduces gradients in its own hook",
                    "leave it out",
                )
        if options.get("model_averaging_period") is not None:
            refuse(
                "PacelineStrategy(model_averaging_period=…)",
                "leave it out and choose the policy local-sgd",
            )
        super().__init__(**options)
        name = "PacelineStrategy(paceline=…)"
        self._session_options, self._batchnorm = checked(paceline or {}, name)
        # The trainer, while its `fit` is active.
        self._trainer: pl.Trainer | None = None
        self._driven: DrivenLoader | None = None
        # The session's state in the loaded checkpoint.
        self._loaded: dict[str, Any] | None = None

    @property
    def session(self) -> Session:
        """Return the session of the training; before `fit`, a PacelineError is raised."""
        if self._driven is None:
            raise PacelineError("there is no session yet: call trainer.fit(…)")
        return self._driven.session

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up as `DDPStrategy` does, but request the data before the model is wrapped."""
        if trainer.state.fn == TrainerFn.FITTING:
            assert self.lightning_module is not None
            _refuse_settings(trainer, self.lightning_module)
            self._trainer, self._driven = trainer, None
            trainer.fit_loop.setup_data()
            # The property raises an error if Lightning has loaded no training data.
            self.session  # noqa: B018
            trainer.callbacks.insert(0, _LightningEnds(self))
        super().setup(trainer)

    def process_dataloader(self, dataloader: object) -> object:
        """Replace the training DataLoader by Paceline's loader; return other loaders unchanged."""
        trainer = self._trainer
        if trainer is None or not trainer.training or trainer.state.fn != TrainerFn.FITTING:
            return dataloader
        if self._driven is not None:
            refuse(
                "the training has several DataLoaders, but Paceline supports one",
                "give fit one DataLoader, of a data set that has all samples",
            )
        driven = self._driven = self._train_on(dataloader)
        return driven

    def on_train_start(self) -> None:
        """Declare the script's optimiser to the session; if there are several, declare none."""
        if len(self.optimizers) == 1:
            scaler = getattr(self.precision_plugin, "scaler", None)
            self.session.optimizer(self.optimizers[0], scaler)

    def backward(
        self,
        closure_loss: torch.Tensor,
        optimizer: torch.optim.Optimizer | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Report the loss, and run the backward pass as `DDPStrategy` does."""
        if self._driven is not None and self._driven.running and self._trainer is not None:
            # Lightning has divided the loss by this number, but the session expects the whole loss.
            batches = self._trainer.accumulate_grad_batches
            self._driven.session.log(loss=closure_loss.detach() * batches)
        loss: torch.Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
        return loss

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Compute the gradients before the optimiser's step; Lightning computes them within it.

        Policies that relax synchronisation exchange the gradients at the beginning of the
        optimiser's step, so the gradients must exist by then.
        """
        plugin = self.precision_plugin
        is_default = type(plugin).optimizer_step is Precision.optimizer_step
        if not is_default or _needs_closure(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint as `DDPStrategy` does, with the session's state."""
        if self._driven is not None and self._trainer is not None:
            checkpoint[STATE] = self._driven.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint as `DDPStrategy` does, with the session's state."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            if STATE not in checkpoint:
                refuse(
                    "fit(ckpt_path=…): the checkpoint was saved without Paceline",
                    "continue without Paceline, or load only the model's state_dict and start a "
                    "new training",
                )
            self._loaded = checkpoint[STATE]
        return checkpoint

    def teardown(self) -> None:
        """Close the session, which delivers its pending messages, and end as `DDPStrategy` does."""
        if self._driven is not None and self._trainer is not None:
            self._driven.session.close()
            self._trainer.callbacks[:] = [
                callback
                for callback in self._trainer.callbacks
                if not isinstance(callback, _LightningEnds)
            ]
        self._trainer = None
        super().teardown()

    def _setup_model(self, model: nn.Module) -> nn.Module:
        devices = self.determine_ddp_device_ids()
        options = {**self._ddp_kwargs, **({} if devices is None else {"device_ids": devices})}
        return wrapped(self.session, model, self._batchnorm, options)

    def _train_on(self, dataloader: object) -> DrivenLoader:
        sampler = getattr(dataloader, "sampler", None)
        if (
            not isinstance(dataloader, DataLoader)
            or type(dataloader.batch_sampler) is not BatchSampler
            or type(sampler) is not DistributedSampler
            or not sampler.shuffle
        ):
            refuse(
                "the training DataLoader has a custom sampler, or none, but Paceline plans which "
                "samples a batch has",
                "create it with batch_size=… and shuffle=True; leave use_distributed_sampler on",
            )
        assert isinstance(dataloader, DataLoader) and isinstance(sampler, DistributedSampler)
        _auto_add_worker_init_fn(dataloader, self.global_rank)
        ranks, batch_sampler = sampler.num_replicas, dataloader.batch_sampler
        assert isinstance(batch_sampler, BatchSampler)
        session = Session(
            dataloader.dataset,
            global_batch=batch_sampler.batch_size * ranks,
            drop_last=batch_sampler.drop_last,
            **{"seed": sampler.seed, **self._session_options},
        )
        driven = DrivenLoader(session, lambda batch: batch, loading_of(dataloader))
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            driven.load_state_dict(loaded)
        return driven


class _LightningEnds(pl.Callback):  # type: ignore[misc]
    """Callback that ends the session's epoch after its last step.

    Lightning counts its steps and requests no batch after the last one, so the loader itself does
    not notice that the last step has ended.
    """

    def __init__(self, strategy: PacelineStrategy) -> None:
        self._strategy = strategy

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """End the epoch after its last step, before Lightning validates the model and saves it."""
        if self._strategy._driven is not None:
            self._strategy._driven.finish()


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _refuse_settings(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    if not module.automatic_optimization:
        refuse(
            f"{type(module).__name__}.automatic_optimization is False: with manual optimisation, "
            "Lightning itself controls when gradients are reduced",
            "leave it at True, or write the loop with paceline.Session",
        )
    if trainer.overfit_batches:
        refuse("Trainer(overfit_batches=…) trains in a fixed order", "leave it out")
    if trainer.reload_dataloaders_every_n_epochs:
        refuse(
            "Trainer(reload_dataloaders_every_n_epochs=…): Paceline plans one data set",
            "leave it out",
        )
