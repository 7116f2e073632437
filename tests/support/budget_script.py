"""A script in steps of a token budget, on packed sequences; each rank writes what it trained.

Arguments: a folder for ``<rank>.json``, with [epoch, step, tokens, mine] of each step, where `mine`
are the samples of the rank's batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import paceline

SAMPLES, BUDGET, EPOCHS = 300, 1_500, 10


def lengths() -> list[int]:
    """Of each sample, lognormal."""
    generator = torch.Generator().manual_seed(3)
    drawn = (torch.randn(SAMPLES, generator=generator).mul(0.8).exp() * 40).round()
    return [int(length) for length in drawn.clamp(1, 200)]


class Texts(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample i: as many tokens as its length, and i beside each of them."""

    def __init__(self) -> None:
        self.sizes = lengths()

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = self.sizes[index]
        return torch.full((length,), index % 7), torch.full((length,), index)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    session = paceline.Session(Texts(), token_budget=BUDGET, seed=1)
    loader = session.loader(collate_fn=paceline.packed)
    model = session.wrap(torch.nn.Embedding(7, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for _ in session.epochs(EPOCHS):
        for batch in loader:
            tokens, indices = batch.values
            loss = (model(tokens)[:, 0] - batch.position_ids % 2).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            of = session.batch
            mine = [] if of.empty else indices[batch.cu_seqlens[:-1].long()].tolist()
            seen.append([of.epoch, of.step, 0 if of.empty else len(tokens), mine])
    assert len(seen) == session.total_steps(EPOCHS)
    (folder / f"{session.rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
