"""What the examples train: a made-up language of sentences of 3 to 80 words, and small networks."""

import torch
from torch import Tensor, nn

WORDS, CLASSES, PAD = 100, 5, 0


class Sentences(torch.utils.data.Dataset[dict[str, list[int] | int]]):
    """Sentences whose class is that of most of their words."""

    def __init__(self, count: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randn(count, generator=draw).mul(0.7).add(2.7).exp().clamp(3, 80).int()
        self.items: list[dict[str, list[int] | int]] = []
        for length in lengths.tolist():
            label = int(torch.randint(CLASSES, (), generator=draw))
            words = torch.randint(1, WORDS, (length,), generator=draw)
            typical = torch.rand(length, generator=draw) < 0.5
            words[typical] = words[typical] // CLASSES * CLASSES + label
            self.items.append({"input_ids": words.clamp(1, WORDS - 1).tolist(), "labels": label})
        self.sizes = lengths.tolist()  # words: what a sentence costs, relative to the others

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, list[int] | int]:
        return self.items[index]


def collate(items: list[dict[str, list[int] | int]]) -> dict[str, Tensor]:
    """Pads sentences to the longest one."""
    words = [torch.tensor(item["input_ids"]) for item in items]
    padded = nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=PAD)
    return {
        "input_ids": padded,
        "attention_mask": (padded != PAD).long(),
        "labels": torch.tensor([item["labels"] for item in items]),
    }


class Classifier(nn.Module):
    """Classifies sentences by the mean of what it makes of their words; padding changes nothing."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width, padding_idx=PAD)
        self.word = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.out = nn.Linear(width, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        seen = attention_mask.unsqueeze(-1)
        made = self.word(self.embedding(input_ids)) * seen
        return self.out(made.sum(1) / seen.sum(1))
