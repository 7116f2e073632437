"""Tells the language of telephone prompts with plain DDP: the script before Paceline.

examples/speech/fetch.sh
torchrun --nproc-per-node 2 examples/speech/train_ddp.py
"""

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from data import BANDS, LANGUAGES, LengthGrouped, SortedCut, Speech, collate, folder
from model import SpeechNet, accuracy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=folder())
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=256, help="samples of a rank in a step")
    parser.add_argument("--seed", type=int, default=0)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--grouped", action="store_true", help="batches of similar lengths")
    ways.add_argument("--cut", action="store_true", help="global batches sorted and cut by length")
    parser.add_argument("--result", type=Path, help="write accuracy and times here, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    dist.init_process_group("gloo")

    train = Speech(options.data, train=True)
    world, rank = dist.get_world_size(), dist.get_rank()
    if options.cut:
        sampler = SortedCut(train.sizes, world, rank, options.batch, options.seed)
        loader = DataLoader(train, batch_sampler=sampler, collate_fn=collate)
    else:
        if options.grouped:
            sampler = LengthGrouped(train.sizes, world, rank, options.batch, options.seed)
        else:
            sampler = DistributedSampler(train, seed=options.seed)
        loader = DataLoader(train, sampler=sampler, batch_size=options.batch, collate_fn=collate)
    model = DistributedDataParallel(SpeechNet(BANDS, len(LANGUAGES)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    dist.barrier()
    ended = [time.perf_counter()]
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for step, (spectrograms, lengths, languages) in enumerate(loader):
            loss = cross_entropy(model(spectrograms, lengths), languages)
            if options.cut:  # DDP takes the mean over ranks, which have different counts
                loss = loss * len(languages) * world / sampler.global_size(step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ended.append(time.perf_counter())

    if dist.get_rank() == 0:
        epochs_s = [b - a for a, b in pairwise(ended)]
        held_out = DataLoader(Speech(options.data, train=False), batch_size=64, collate_fn=collate)
        share = accuracy(model.module, held_out)
        print(f"held-out accuracy {share:.3f}, {sum(epochs_s):.1f} s", flush=True)
        if options.result:
            options.result.write_text(json.dumps({"accuracy": share, "epochs_s": epochs_s}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
