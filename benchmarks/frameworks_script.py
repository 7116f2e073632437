"""A rank of `frameworks.py`: Hugging Face's Trainer trains a tiny language model in some ways.

frameworks_script.py FOLDER WAY…: FOLDER/work.json has the options. What each step had, and when it
ended, goes to a file of each rank and way.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from held import Held
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, set_seed

from paceline.transformers import PacelineMixin

WORDS, PAD = 100, 0
JUDGED = 64  # texts of which the final loss is computed
PLANNED = "paceline"  # the way that needs a control plane
STRATEGIES = {"sampler": "random", "group_by_length": "group_by_length", PLANNED: "random"}

transformers.utils.logging.set_verbosity_error()


@dataclass(frozen=True)
class Work:
    """What every way trains.

    Args:
        lengths: tokens of each text.
        batch: samples of a rank in a step.
        epochs: how often each text is trained.
        seed: of model, texts and order.
    """

    lengths: list[int]
    batch: int
    epochs: int
    seed: int = 0


class Texts(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Random texts in which each word follows from the one before in half of the cases."""

    def __init__(self, work: Work) -> None:
        draw = torch.Generator().manual_seed(work.seed)
        self.items: list[dict[str, list[int]]] = []
        for length in work.lengths:
            words = torch.randint(1, WORDS, (length,), generator=draw)
            follows = torch.rand(length, generator=draw) < 0.5
            follows[0] = False
            words[follows] = (words.roll(1)[follows] * 7) % (WORDS - 1) + 1
            self.items.append({"input_ids": words.tolist()})

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.items[index]


def collate(items: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Pads texts to the longest one, as `DataCollatorForLanguageModeling` does."""
    words = [torch.tensor(item["input_ids"]) for item in items]
    padded = nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=PAD)
    real = padded != PAD
    return {
        "input_ids": padded,
        "attention_mask": real.long(),
        "labels": padded.masked_fill(~real, -100),
    }


def lengths_of(batch: dict[str, Tensor]) -> list[int]:
    """Tokens of each text of a padded batch."""
    lengths: list[int] = batch["attention_mask"].sum(1).tolist()
    return lengths


class Planned(PacelineMixin, transformers.Trainer):  # type: ignore[misc]
    """Trainer with Paceline, which emulates the device; keeps what this rank had in each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.had: list[list[int]] = []

    def get_batch_samples(self, *args: Any) -> tuple[list[Any], Any]:
        """Trainer's."""
        batches, items = super().get_batch_samples(*args)
        if batches:
            self.had.append([] if self.session.batch.empty else lengths_of(batches[0]))
        return batches, items


class Plain(transformers.Trainer):  # type: ignore[misc]
    """Trainer itself, on an emulated device; keeps what this rank had in each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.had: list[list[int]] = []
        self._device = Held()
        self._held: nn.Module | None = None  # the model whose gradients the device holds back

    def get_batch_samples(self, *args: Any) -> tuple[list[Any], Any]:
        """Trainer's; then the emulated device begins, as it does under Paceline."""
        batches, items = super().get_batch_samples(*args)
        if batches:
            self.had.append(lengths_of(batches[0]))
            self._device.begin(len(self.had), self.had[-1])
        return batches, items

    def training_step(self, model: nn.Module, *args: Any) -> Tensor:
        """Trainer's."""
        if model is not self._held:
            self._held = model
            model.register_comm_hook(None, self._device.before(allreduce_hook))
        made: Tensor = super().training_step(model, *args)
        return made


class Ends(TrainerCallback):  # type: ignore[misc]
    """Notes when each step ended, in s of a clock that all ranks share."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """After the optimiser's step."""
        self.at.append(time.perf_counter())


def train(folder: Path, way: str, work: Work) -> dict[str, Any]:
    """Trains in one way; what this rank had, when steps ended, and the final loss."""
    set_seed(work.seed)
    data = Texts(work)
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    size = {"vocab_size": WORDS, "n_positions": max(work.lengths), "bos_token_id": PAD}
    config = GPT2Config(**size, **still, n_embd=32, n_layer=2, n_head=2, eos_token_id=PAD)
    arguments = TrainingArguments(
        str(folder / "output"),
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        per_device_train_batch_size=work.batch,
        num_train_epochs=work.epochs,
        train_sampling_strategy=STRATEGIES[way],
        learning_rate=1e-3,
        seed=work.seed,
        logging_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    ends = Ends()
    made = Planned if way == PLANNED else Plain
    more = {"paceline": {"sizes": work.lengths}} if way == PLANNED else {}
    trainer = made(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=data,
        data_collator=collate,
        callbacks=[ends],
        **more,
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    return {"had": trainer.had, "ended": ends.at, "loss": loss_of(trainer.model, data)}


def loss_of(model: nn.Module, data: Texts) -> float:
    """The mean loss of the first texts."""
    with torch.no_grad():
        return float(model.eval()(**collate(data.items[:JUDGED])).loss)


def main(folder: Path, ways: list[str]) -> None:
    """Trains in all ways, one after the other."""
    torch.set_num_threads(1)
    work = Work(**json.loads((folder / "work.json").read_text()))
    for way in ways:
        made, rank = train(folder, way, work), dist.get_rank()
        part = folder / f"{way}-{rank}.part"
        part.write_text(json.dumps(made))
        part.rename(folder / f"{way}-{rank}.json")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
