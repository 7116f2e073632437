"""A loop as torchtitan's, with Paceline and without; what came of it goes to a file of each rank.

python torchtitan_script.py DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "frameworks"))
from like_torchtitan import Config, Trainer

STEPS = 50  # of two batches: two and a half epochs
SAVED_AT = 30  # step, in the middle of an epoch
UNEVEN = {"limits": [5, 12]}  # without a control plane, that leaves each rank another size


def outcome(trainer: Trainer, norms: list[float]) -> dict[str, Any]:
    rates = trainer.schedule.get_last_lr()
    made = {"norms": norms, "loss": trainer.loss(), "rates": rates}
    if not trainer.config.plain:
        trainer.session.close()
    return made


def trained(plain: bool = False, **options: Any) -> dict[str, Any]:
    trainer = Trainer(Config(steps=STEPS, plain=plain), **options)
    return outcome(trainer, trainer.train())


def resumed(folder: str) -> dict[str, Any]:
    first = Trainer(Config(steps=STEPS, folder=folder, interval=SAVED_AT), **UNEVEN)
    norms = first.train(SAVED_AT)
    first.session.close()
    second = Trainer(Config(steps=STEPS), **UNEVEN)
    second.load(f"{folder}/{SAVED_AT}")
    return outcome(second, norms + second.train())


def main() -> None:
    [directory] = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = [trained(plain=True), trained(), trained(**UNEVEN), resumed(f"{directory}/saved")]
    Path(directory, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
