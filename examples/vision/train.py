"""Tells the digit of clips of uneven length, by a residual network with BatchNorm.

paceline run --nproc 2 examples/vision/train.py
torchrun --nproc-per-node 2 examples/vision/train.py    # without a control plane, as plain DDP
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset

import paceline
from data import CLASSES, Clips, collate
from model import ClipNet, accuracy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="clips in a step, of all ranks")
    parser.add_argument("--result", type=Path, help="write the accuracies here, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")

    train = Clips(train=True)
    session = paceline.Session(train, sizes=train.sizes, global_batch=options.batch, seed=0)
    loader = session.loader(collate_fn=collate)
    # Local batches differ in size, so BatchNorm normalises by the global batch, as one process.
    model = session.wrap(ClipNet(CLASSES), batchnorm="sync")
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=5e-3))

    held_out = Clips(train=False)
    own = Subset(held_out, range(dist.get_rank(), len(held_out), dist.get_world_size()))
    shares = []
    for _ in session.epochs(options.epochs):
        for frames, lengths, digits in loader:
            loss = cross_entropy(model(frames, lengths), digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        share = accuracy(model.module, DataLoader(own, batch_size=64, collate_fn=collate))
        session.evaluated(samples=len(own), accuracy=share)  # each rank's part of the clips
        shares.append(share)

    if dist.get_rank() == 0:
        print(f"accuracy of rank 0's held-out clips {shares[-1]:.3f}", flush=True)
        if options.result:
            options.result.write_text(json.dumps({"accuracy": shares}))
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
