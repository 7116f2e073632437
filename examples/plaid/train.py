"""Classifies PLAID's appliance recordings with Paceline; compare `train_ddp.py`.

paceline run --nproc 4 examples/plaid/train.py
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import paceline
from data import CLASSES, Plaid, collate
from model import SeriesNet, accuracy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--result", type=Path, help="write the accuracy here, as JSON")
    own = os.environ.get("PACELINE_CHECKPOINTS")  # of this run, under `paceline run`
    parser.add_argument("--checkpoints", default=own, help="folder; a killed run goes on from it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")

    train = Plaid(train=True)
    session = paceline.Session(train, sizes=train.sizes, global_batch=64, seed=0)
    loader = session.loader(collate_fn=collate)
    model = session.wrap(SeriesNet(CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if options.checkpoints:
        session.checkpoint(options.checkpoints, model, optimizer, every_steps=50)

    for _ in session.epochs(options.epochs):
        for series, lengths, labels in loader:
            loss = cross_entropy(model(series, lengths), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)

    if dist.get_rank() == 0:
        held_out = DataLoader(Plaid(train=False), batch_size=64, collate_fn=collate)
        share = accuracy(model.module, held_out)
        print(f"held-out accuracy {share:.3f}", flush=True)
        if options.result:
            options.result.write_text(json.dumps({"accuracy": share}))
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
