"""Trains with Accelerate, by itself and with Paceline; what came of it goes to a file of each rank.

python accelerate_script.py DIRECTORY CASES: a case is "refusals", "example" or the options of
`train` as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from paceline.accelerate import Accelerator
from support.framework_cases import printed, refused

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "frameworks"))
import text

BATCH = 8


class Numbered(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.sentences = text.Sentences(count)
        self.sizes = self.sentences.sizes

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.sentences[index], "number": index}


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    numbers = torch.tensor([item["number"] for item in items])
    return {**text.collate(items), "number": numbers}


def fresh(plain: bool, **options: Any) -> Any:
    """An accelerator as in a new process, whose process group goes on."""
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    paceline = options.pop("paceline", None)
    if not plain:
        options["paceline"] = paceline
    kind = accelerate.Accelerator if plain else Accelerator
    config = options.pop("dataloader_config", DataLoaderConfiguration(use_seedable_sampler=True))
    return kind(cpu=True, dataloader_config=config, **options)


def parts(count: int, accelerator: Any) -> tuple[Any, ...]:
    set_seed(3)
    data = Numbered(count)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, collate_fn=collate)
    model = text.Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
    return data, *accelerator.prepare(model, optimizer, loader, schedule)


def train(
    plain: bool = False,
    count: int = 160,
    epochs: int = 2,
    save_at: int = -1,
    load: bool = False,
    folder: str = "",
    **options: Any,
) -> dict[str, Any]:
    """The loss of all samples before each epoch and at the end, and what each step had."""
    accelerator = fresh(plain, **options)
    data, model, optimizer, loader, schedule = parts(count, accelerator)
    result: dict[str, Any] = {"losses": [], "steps": [], "gathered": [], "counts": []}
    if load:
        accelerator.load_state(folder)
    first = loader.session.state_dict()["epoch"] if load else 0
    for _ in range(first, epochs):
        for batch in loader:
            labels, number = batch.pop("labels"), batch.pop("number")
            with accelerator.accumulate(model):
                logits = model(**batch)
                accelerator.backward(cross_entropy(logits, labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            got = accelerator.gather_for_metrics((number, logits.detach()))
            result["gathered"].append([sorted(got[0].tolist()), list(got[1].shape)])
            result["counts"].append(len(number))
            if len(result["counts"]) == save_at:
                accelerator.save_state(folder)
                accelerator.wait_for_everyone()
        result["losses"].append(_loss(accelerator.unwrap_model(model), data))
    result["rates"] = schedule.get_last_lr()
    if not plain:
        accelerator.session.close()
    return result


def _loss(model: torch.nn.Module, data: Numbered) -> float:
    batch = collate([data[k] for k in range(len(data))])
    labels, _ = batch.pop("labels"), batch.pop("number")
    with torch.no_grad():
        return float(cross_entropy(model(**batch), labels))


def refusals() -> list[str]:
    said: list[str] = []
    comm = accelerate.utils.DDPCommunicationHookType.FP16
    for options in (
        {"paceline": {"micro_batches": True}},
        {"paceline": {"size": 3}},
        {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)},
        {"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook=comm)]},
    ):
        with refused(said):
            fresh(False, **options)
    accelerator = fresh(False)
    with refused(said):
        accelerator.prepare(text.Classifier())
    _, _, _, loader, _ = parts(64, accelerator)
    with refused(said):
        accelerator.skip_first_batches(loader, 2)
    with refused(said):
        accelerator.join_uneven_inputs([])
    with refused(said):
        parts(64, accelerator)
    own = DataLoader(Numbered(64), sampler=torch.utils.data.RandomSampler(range(64), True, 10))
    with refused(said):
        fresh(False).prepare(own)
    return said


def example() -> list[str]:
    import with_accelerate

    def begin_anew() -> None:
        for state in (AcceleratorState, GradientState):
            state._reset_state()
        with mock.patch.object(PartialState, "destroy_process_group"):  # the script goes on
            with_accelerate.main()

    return printed(begin_anew)


def main() -> None:
    directory, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    rank = PartialState(cpu=True).process_index
    results = []
    for case in cases:
        named = {"refusals": refusals, "example": example}.get(case)
        results.append(named() if named is not None else train(**json.loads(case)))
    Path(directory, f"{rank}.json").write_text(json.dumps(results))
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
