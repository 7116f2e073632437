"""Tells the language of telephone prompts; `train_ddp.py` with Paceline.

examples/speech/fetch.sh
paceline run --nproc 2 examples/speech/train.py
"""

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import paceline
from data import BANDS, LANGUAGES, Speech, collate, folder
from model import SpeechNet, accuracy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=folder())
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=256, help="samples of a rank in a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, help="write accuracy and times here, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    dist.init_process_group("gloo")

    train = Speech(options.data, train=True)
    session = paceline.Session(
        train,
        sizes=train.sizes,
        global_batch=options.batch * dist.get_world_size(),
        seed=options.seed,
    )
    loader = session.loader(collate_fn=collate)
    model = session.wrap(SpeechNet(BANDS, len(LANGUAGES)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    dist.barrier()
    ended = [time.perf_counter()]
    for _ in session.epochs(options.epochs):
        for spectrograms, lengths, languages in loader:
            loss = cross_entropy(model(spectrograms, lengths), languages)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        ended.append(time.perf_counter())

    if dist.get_rank() == 0:
        epochs_s = [b - a for a, b in pairwise(ended)]
        held_out = DataLoader(Speech(options.data, train=False), batch_size=64, collate_fn=collate)
        share = accuracy(model.module, held_out)
        print(f"held-out accuracy {share:.3f}, {sum(epochs_s):.1f} s", flush=True)
        if options.result:
            options.result.write_text(json.dumps({"accuracy": share, "epochs_s": epochs_s}))
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
