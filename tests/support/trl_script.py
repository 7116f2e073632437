"""Trains with TRL's SFTTrainer, by itself and with Paceline; what it logs goes to a file of a rank.

python trl_script.py DIRECTORY CASES: a case is the options of `train` as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from paceline.transformers import PacelineMixin

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "frameworks"))
import text

_WORDS = {"<pad>": 0, "<eos>": 1, **{f"w{k}": k + 2 for k in range(text.WORDS)}}


class PacelineSFTTrainer(PacelineMixin, SFTTrainer):
    pass


def train(
    folder: str, plain: bool = False, paceline: dict[str, Any] | None = None, **options: Any
) -> list[list[float]]:
    """Of each step the loss, the norm of gradients and the accuracy that SFTTrainer logs."""
    set_seed(3)
    tokenizer = Tokenizer(models.WordLevel(_WORDS, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    rows = [{"text": " ".join(f"w{k}" for k in item["input_ids"])} for item in text.Sentences(96)]
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(
        vocab_size=len(_WORDS), num_attention_heads=2, max_position_embeddings=128, **small
    )
    args = SFTConfig(
        folder,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=8,
        num_train_epochs=2,
        learning_rate=1e-2,
        max_length=128,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        activation_checkpointing=False,
        **options,
    )
    made = SFTTrainer if plain else PacelineSFTTrainer
    trainer = made(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
        ),
        **({} if plain else {"paceline": paceline}),
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    names = ("loss", "grad_norm", "mean_token_accuracy")
    return [[log[name] for name in names] for log in trainer.state.log_history if "loss" in log]


def main() -> None:
    directory, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    results = [train(f"{directory}/output", **json.loads(case)) for case in cases]
    Path(directory, f"{os.environ['RANK']}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
