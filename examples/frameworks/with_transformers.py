"""Hugging Face's Trainer with Paceline; with --plain, Trainer alone. Only the import differs.

paceline run --nproc 2 examples/frameworks/with_transformers.py
"""

import argparse
import os

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from text import PAD, WORDS, Sentences, collate


def causal(items: list[dict[str, list[int] | int]]) -> dict[str, Tensor]:
    """A batch for a language model: each word but the first is to be predicted."""
    batch = collate(items)
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoints", default=os.environ.get("PACELINE_CHECKPOINTS"))
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint")
    options = parser.parse_args()
    if options.plain:
        from transformers import Trainer
    else:
        from paceline.transformers import Trainer

    torch.set_num_threads(1)
    set_seed(1)
    config = LlamaConfig(
        vocab_size=WORDS,
        pad_token_id=PAD,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=96,
    )
    arguments = TrainingArguments(
        options.checkpoints,
        use_cpu=True,
        per_device_train_batch_size=16,
        num_train_epochs=options.epochs,
        learning_rate=1e-2,
        logging_strategy="epoch",
        eval_strategy="epoch",
        save_strategy="epoch" if options.checkpoints else "no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        LlamaForCausalLM(config),
        arguments,
        data_collator=causal,
        train_dataset=Sentences(640),  # it has `sizes`
        eval_dataset=Sentences(200, seed=1),
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    if trainer.is_world_process_zero():
        losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
        print("held-out loss after each epoch", *(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
