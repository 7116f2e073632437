"""Trains with Lightning, by itself and with Paceline.

python lightning_script.py DIRECTORY CASES: a case is "refusals", "example" or the options of
`train` as JSON. What came of the cases goes to a file of each rank.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from paceline.lightning import PacelineStrategy
from support.framework_cases import printed, refused

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "frameworks"))
import text

BATCH = 8


class Module(lightning.LightningModule):
    def __init__(self, held_out: Dataset[Any]) -> None:
        super().__init__()
        self.classifier = text.Classifier()
        self.held_out = held_out
        self.counts: list[int] = []
        self.losses: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        session = getattr(self.trainer.strategy, "session", None)
        self.counts.append(len(batch["labels"]) if session is None else session.batch.samples)
        return self._loss(batch)

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        self.log("held_out_loss", self._loss(batch), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["held_out_loss"]))
        self.rates.append(self.lr_schedulers().get_last_lr()[0])

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.held_out, batch_size=15, collate_fn=text.collate)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=50)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.classifier(batch["input_ids"], batch["attention_mask"])
        return cross_entropy(logits, batch["labels"])


class Manual(Module):
    automatic_optimization = False


def train(
    directory: str,
    plain: bool = False,
    count: int = 160,
    epochs: int = 2,
    save: str | None = None,
    save_every: int | None = None,
    resume: str | None = None,
    paceline: dict[str, Any] | None = None,
    manual: bool = False,
    shuffle: bool = True,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The loss of held-out sentences after each epoch, of all in the end, and steps' samples."""
    lightning.seed_everything(5, verbose=False)
    data = text.Sentences(count)
    strategy = PacelineStrategy(paceline=paceline, **(options or {}))
    callbacks = []
    if save is not None:
        callbacks.append(
            ModelCheckpoint(
                f"{directory}/{save}",
                filename="{step}",
                save_top_k=-1,
                every_n_train_steps=save_every,
                every_n_epochs=None if save_every else 1,
            )
        )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DDPStrategy() if plain else strategy,
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=save is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **{"gradient_clip_val": 0.5, **more},
    )
    module = (Manual if manual else Module)(text.Sentences(30, seed=1))
    loader = DataLoader(data, batch_size=BATCH, shuffle=shuffle, collate_fn=text.collate)
    path = None if resume is None else f"{directory}/{resume}"
    trainer.fit(module, loader, ckpt_path=path)
    batch = text.collate([data[k] for k in range(count)])
    with torch.no_grad():
        loss = float(module._loss(batch))
    return {
        "loss": loss,
        "evaluated": module.losses,
        "rates": module.rates,
        "steps": trainer.global_step,
        "counts": module.counts,
    }


def refusals(directory: str) -> list[str]:
    said: list[str] = []
    for options in (
        {"paceline": {"drop_last": True}},
        {"options": {"ddp_comm_hook": print}},
        {"options": {"model_averaging_period": 4}},
        {"manual": True, "gradient_clip_val": None},
        {"shuffle": False, "use_distributed_sampler": False},
        {"reload_dataloaders_every_n_epochs": 1},
        {"overfit_batches": 2},
        {"resume": "plain/step=10.ckpt"},
    ):
        with refused(said):
            train(directory, count=40, epochs=1, **options)
    return said


def example() -> list[str]:
    import with_lightning

    return printed(with_lightning.main)


def main() -> None:
    directory, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results: list[Any] = []
    for case in cases:
        if case == "refusals":
            results.append(refusals(directory))
        elif case == "example":
            results.append(example())
        else:
            results.append(train(directory, **json.loads(case)))
    Path(directory, f"{os.environ['RANK']}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
