"""Lightning with Paceline; with --plain, Lightning alone. The strategy is the only difference.

paceline run --nproc 2 examples/frameworks/with_lightning.py
"""

import argparse
import logging
import os
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from text import Classifier, Sentences, collate


class Sorter(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = Classifier()

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        self.log("held_out_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.classifier(batch["input_ids"], batch["attention_mask"])
        return cross_entropy(logits, batch["labels"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    if options.plain:
        strategy = DDPStrategy()
    else:
        from paceline.lightning import PacelineStrategy

        strategy = PacelineStrategy()

    torch.set_num_threads(1)
    lightning.seed_everything(1, verbose=False)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    loader = DataLoader(Sentences(640), batch_size=16, shuffle=True, collate_fn=collate)
    held_out = DataLoader(Sentences(200, seed=1), batch_size=50, collate_fn=collate)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=strategy,
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Sorter(), loader, held_out)
    if trainer.is_global_zero:
        print(f"held-out loss {trainer.callback_metrics['held_out_loss']:.4f}")


if __name__ == "__main__":
    main()
