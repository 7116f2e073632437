"""Accelerate with Paceline; with --plain, Accelerate alone. The import is the only difference.

paceline run --nproc 2 examples/frameworks/with_accelerate.py
"""

import argparse

import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from text import Classifier, Sentences, collate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    if options.plain:
        from accelerate import Accelerator
    else:
        from paceline.accelerate import Accelerator

    torch.set_num_threads(1)
    set_seed(1)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
    )
    train, held_out = Sentences(640), Sentences(200, seed=1)
    loader = DataLoader(train, batch_size=16, shuffle=True, collate_fn=collate)
    test = DataLoader(held_out, batch_size=50, collate_fn=collate)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1.0, 0.1, total_iters=options.epochs * len(loader)
    )
    model, optimizer, loader, test, schedule = accelerator.prepare(
        model, optimizer, loader, test, schedule
    )

    for _ in range(options.epochs):
        model.train()
        for batch in loader:
            labels = batch.pop("labels")
            loss = cross_entropy(model(**batch), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

        model.eval()
        hits = []
        for batch in test:
            labels = batch.pop("labels")
            with torch.no_grad():
                right = model(**batch).argmax(-1) == labels
            hits.append(accelerator.gather_for_metrics(right))
        accuracy = torch.cat(hits).float().mean()
        accelerator.print(f"held-out accuracy {accuracy:.4f} of {len(torch.cat(hits))}")
    weights = torch.cat([p.flatten() for p in model.parameters()])
    accelerator.print(f"sum of weights {weights.abs().sum():.5f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
