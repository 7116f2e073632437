"""Trains with Hugging Face's Trainer, by itself and with Paceline.

python transformers_script.py DIRECTORY CASES: a case is "refusals", "example" or the options of
`train` as JSON. What came of the cases goes to a file of each rank.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import BertConfig, LlamaConfig, TrainerCallback, TrainingArguments, set_seed

from paceline import PacelineError
from paceline.transformers import Trainer
from support.framework_cases import printed, refused

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "frameworks"))
import text

transformers.utils.logging.set_verbosity_error()


def causal(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = text.collate(items)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


class FirstBlank:
    """Collates; on rank 0 no label of the first batch counts."""

    def __init__(self) -> None:
        self.begun = False

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = causal(items)
        if not self.begun and torch.distributed.get_rank() == 0:
            batch["labels"].fill_(-100)
        self.begun = True
        return batch


def network(kind: str) -> torch.nn.Module:
    """A tiny language model, or a classifier whose loss takes no heed of `num_items_in_batch`."""
    small = {"vocab_size": text.WORDS, "hidden_size": 16, "intermediate_size": 32}
    small |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 96}
    small |= {"pad_token_id": text.PAD}
    if kind == "causal":
        return transformers.LlamaForCausalLM(LlamaConfig(**small))
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**small, **still, num_labels=text.CLASSES)
    return transformers.BertForSequenceClassification(config)


class Counts(TrainerCallback):
    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        with contextlib.suppress(PacelineError):
            self.counts.append(self.trainer.session.batch.samples)


def train(
    folder: str,
    kind: str = "causal",
    plain: bool = False,
    count: int = 160,
    epochs: float = 2,
    resume: str | None = None,
    paceline: dict[str, Any] | None = None,
    blank: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """The loss of all sentences in the end, what was logged, and what each step had."""
    set_seed(3)
    data = text.Sentences(count)
    model, collate = network(kind), causal if kind == "causal" else text.collate
    given = {"save_strategy": "no", "logging_steps": 1, "max_grad_norm": 0.5} | options
    args = TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=8,
        num_train_epochs=epochs,
        learning_rate=1e-2,
        seed=3,
        disable_tqdm=True,
        report_to="none",
        **given,
    )
    counts = Counts()
    more = {} if plain else {"paceline": paceline}
    made = transformers.Trainer if plain else Trainer
    trainer = made(
        model,
        args,
        train_dataset=data,
        eval_dataset=text.Sentences(30, seed=1),
        data_collator=FirstBlank() if blank else collate,
        callbacks=[counts],
        **more,
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    counts.trainer = None if plain else trainer
    if plain:
        counts.on_step_end = lambda *_, **__: None  # type: ignore[method-assign]
    trainer.train(resume_from_checkpoint=resume)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    batch = collate([data[k] for k in range(count)])
    with torch.no_grad():
        loss = float(model.eval()(**batch).loss)
    return {
        "loss": loss,
        "logged": [[log["loss"], log["grad_norm"], log["learning_rate"]] for log in logs],
        "evaluated": trainer.evaluate()["eval_loss"],
        "steps": trainer.state.global_step,
        "counts": counts.counts,
        "normalised": None if plain else [trainer._loss.by_items, trainer._loss.times],
        "without_labels": None if plain else asked_without_labels(trainer, batch),
    }


def asked_without_labels(trainer: Any, batch: dict[str, Tensor]) -> bool:
    """Whether a batch without a label that counts decides how the loss is normalised."""
    blank = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    return trainer._normalisation(trainer.model, blank) is not None


def refusals(folder: str) -> list[str]:
    said: list[str] = []
    for options in (
        {"auto_find_batch_size": True},
        {"train_sampling_strategy": "group_by_length"},
        {"ignore_data_skip": True},
        {"paceline": {"uneven_steps": True}},
        {"accelerator_config": {"dispatch_batches": True}},
        {"paceline": {"loss_mean": "size"}, "gradient_accumulation_steps": 2},
        {"resume": f"{folder}/plain/checkpoint-3"},
    ):
        with refused(said):
            train(f"{folder}/refused", count=40, epochs=1, **options)
    return said


def example() -> list[str]:
    import with_transformers

    return printed(with_transformers.main)


def main() -> None:
    directory, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    results: list[Any] = []
    for case in cases:
        if case == "refusals":
            results.append(refusals(directory))
        elif case == "example":
            results.append(example())
        else:
            options = json.loads(case)
            folder = f"{directory}/{options.pop('folder', 'output')}"
            if "resume" in options:
                options["resume"] = f"{directory}/{options['resume']}"
            results.append(train(folder, **options))
    rank = torch.distributed.get_rank()
    Path(directory, f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
