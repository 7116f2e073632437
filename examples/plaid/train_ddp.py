"""Classifies PLAID's appliance recordings with plain DDP: the script before Paceline.

torchrun --nproc-per-node 4 examples/plaid/train_ddp.py
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from data import CLASSES, Plaid, collate
from model import SeriesNet, accuracy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--result", type=Path, help="write the accuracy here, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")

    train = Plaid(train=True)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(
        train, sampler=sampler, batch_size=64 // dist.get_world_size(), collate_fn=collate
    )
    model = DistributedDataParallel(SeriesNet(CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for series, lengths, labels in loader:
            loss = cross_entropy(model(series, lengths), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    if dist.get_rank() == 0:
        held_out = DataLoader(Plaid(train=False), batch_size=64, collate_fn=collate)
        share = accuracy(model.module, held_out)
        print(f"held-out accuracy {share:.3f}", flush=True)
        if options.result:
            options.result.write_text(json.dumps({"accuracy": share}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
